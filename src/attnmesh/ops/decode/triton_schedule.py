"""Scheduling of the decode kernels on the device: which program attends over which keys, and which keys are visible.

The keys of a sequence are cut into units: tiles, or splits of a fixed size. The units of all sequences form one list,

    sequence 0: u0 u1 u2 u3 | sequence 1: u0 | sequence 2: u0 u1 | ...

which is cut into equal partitions, whatever the lengths (the stream-K decomposition). Each partition has one program
per head, so that neighboring programs read the same tokens at the same time: in a pool, the heads of a token are
adjacent. Where a partition ends within a sequence, its programs write a partial state, a split, for the merge kernel; a
sequence within one partition needs no merge. With a fixed split size every unit is a split, so that no result depends
on where partitions end.

A "head" here is one tile of rows: the query heads and tokens of one kv head, or of two, that fit in a tile.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import triton
import triton.language as tl

# They change from step to step, and specialization would recompile for each kind of value.
NOT_SPECIALIZED = ["batch", "num_blocks", "capacity", "window", "partitions", "max_splits", "error_base", "mask_width"]


@triton.jit
def implicit_range(last, window, TOKENS: tl.constexpr):
    """The keys [first, end) visible to some token of a sequence; `last` is the position of its last token."""
    first = tl.zeros_like(last)
    if window is not None:
        first = tl.maximum(last - (TOKENS - 1) - (window - 1), 0)
    return first, last + 1


@triton.jit
def explicit_range(firsts, ends, index, batch, last, TOKENS: tl.constexpr):
    """The keys [first, end) of explicit key ranges: first key of the first token, end of the last; (0, 0) if empty."""
    first = tl.maximum(tl.load(firsts + index * TOKENS, mask=index < batch, other=0), 0)
    end = tl.minimum(tl.load(ends + index * TOKENS + (TOKENS - 1), mask=index < batch, other=0), last + 1)
    some = first < end
    return tl.where(some, first, 0).to(tl.int32), tl.where(some, end, 0).to(tl.int32)


@triton.jit
def valid_position(position, capacity):
    """A position in 32 bits, or -1 (skipped) if it is beyond the capacity: nothing is read; the merge records it."""
    return tl.where(position < capacity, tl.maximum(position, -1), -1).to(tl.int32)


@triton.jit
def work_units(
    cur_pos, range_first, range_end, batch, window, capacity, unit,
    TOKENS: tl.constexpr, SHARED: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """The first key, the end of the keys, the first unit and the number of units of every sequence in the list.

    Sequences that share a cache (and have no window) are one entry.
    """
    index = tl.arange(0, BATCH)
    last = valid_position(tl.load(cur_pos + index, mask=index < batch, other=-1), capacity)
    if range_first is not None:
        first, end = explicit_range(range_first, range_end, index, batch, last, TOKENS)
    else:
        first, end = implicit_range(last, window, TOKENS)
    end = tl.maximum(end, 0)
    if SHARED:
        index = tl.arange(0, 1)
        first, end = tl.zeros_like(index), tl.max(end, 0) + tl.zeros_like(index)
    first_unit = first // unit
    count = tl.where(end > 0, tl.cdiv(end, unit) - first_unit, 0)
    return index, first, end, first_unit, count


@triton.jit
def partition_units(count, partitions, max_splits):
    """The length of the list, and the number of its partitions, so that no sequence has more than `max_splits` splits.

    Partition i is [i * total // partitions, (i + 1) * total // partitions). None is empty: the merge kernel relies on
    their number.
    """
    total = tl.sum(count, 0).to(tl.int64)
    min_units = 1  # units per partition
    if max_splits is not None:
        longest = tl.max(count, 0)
        if longest == total:  # alone in the list: each partition is a split
            min_units = tl.maximum(tl.cdiv(longest, max_splits), 1)
        else:  # a sequence that begins within a partition of n units has at most 1 + ceil((units - 1) / n) splits
            min_units = tl.maximum(tl.cdiv(longest - 1, max_splits - 1), 1)
    return total, tl.minimum(partitions, tl.maximum(total // min_units, 1))


@triton.jit
def select(vector, index, wanted):
    """One element of a vector."""
    return tl.sum(tl.where(index == wanted, vector, 0), 0)


@triton.jit
def units_before(count, index, wanted):
    """The index of the first unit of a sequence in the list."""
    return tl.sum(tl.where(index < wanted, count, 0), 0).to(tl.int64)


@triton.jit
def row_tiles(batch, TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr):
    """The number of rows of a kv head, and of tiles that they need."""
    row_count = GROUP * TOKENS
    if SHARED:
        row_count *= batch
    return row_count, tl.cdiv(row_count, ROWS)


@triton.jit
def locate_rows(rows, row_count, head, sequence, TOKENS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr):
    """Whether the rows of a kv head exist, and their sequence, query head and token.

    Rows are ordered by (sequence, if all share one cache), query head of the group, token.
    """
    is_row = rows < row_count
    row_sequence = tl.zeros_like(rows) + sequence
    if SHARED:
        row_sequence = tl.where(is_row, rows // (GROUP * TOKENS), 0)
    return is_row, row_sequence, head * GROUP + rows // TOKENS % GROUP, rows % TOKENS


@triton.jit
def row_offsets(strides, row_sequence, row_head, row_token):
    """The offsets of rows in a tensor [sequences, query heads, tokens, ...]."""
    return row_sequence.to(tl.int64) * strides[0] + row_head.to(tl.int64) * strides[1] + row_token * strides[2]


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_key_range(range_first, range_end, row_sequence, row_token, row_last, TOKENS: tl.constexpr):
    """The first and the last visible key of each row, up to `row_last`, in 32 bits."""
    at = row_sequence * TOKENS + row_token
    end = tl.maximum(tl.load(range_end + at, mask=row_last >= 0, other=0), 0)
    end = tl.minimum(end, row_last + 1).to(tl.int32)
    first = tl.maximum(tl.load(range_first + at, mask=row_last >= 0, other=0), 0)
    return tl.minimum(first, end).to(tl.int32), end - 1


@triton.jit
def visible_keys(
    scores, keys, row_last, row_first, own, row_sequence, row_head, row_token, window,
    mask, mask_strides, mask_width, tree, tree_strides, TOKENS: tl.constexpr,
):  # fmt: skip
    """The scores (base 2) with the bias of a mask added, and which of `keys` are visible to each row: [keys, rows].

    `row_last` is the position of the last token of a row's sequence (-1: skipped), `own` the position of the row
    itself, or the last key in its key range, which begins at `row_first`.
    """
    if mask is not None:
        visible = (keys < mask_width)[:, None] & (keys[:, None] <= row_last[None, :])
        mask_rows = row_offsets(mask_strides, row_sequence, row_head, row_token)
        mask_at = mask + mask_rows[None, :] + keys.to(tl.int64)[:, None] * mask_strides[3]
        if mask.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(mask_at, mask=visible, other=0) != 0)
        else:
            bias = tl.load(mask_at, mask=visible, other=float("-inf")).to(tl.float32)
            visible = visible & (bias != float("-inf"))
            scores += bias * _LOG2_E
    elif tree is not None:
        new = keys[:, None] - (row_last - (TOKENS - 1))[None, :]  # the index of a key among the new tokens
        is_new = (new >= 0) & (new < TOKENS) & (row_last >= 0)[None, :]
        tree_rows = row_sequence.to(tl.int64) * tree_strides[0] + row_token * tree_strides[1]
        selected = tl.load(tree + tree_rows[None, :] + new * tree_strides[2], mask=is_new, other=0) != 0
        visible = (row_last >= 0)[None, :] & ((new < 0) | (is_new & selected))
    else:
        visible = keys[:, None] <= own[None, :]
    if window is not None:
        visible = visible & (keys[:, None] > (own - window)[None, :])
    if row_first is not None:
        visible = visible & (keys[:, None] >= row_first[None, :])
    return scores, visible
