"""Which program attends over which keys: decided on the device, from the sequences' own lengths.

The keys of a sequence are cut into units: tiles, or splits of a fixed size. All sequences' units stand in one line,

    sequence 0: u0 u1 u2 u3 | sequence 1: u0 | sequence 2: u0 u1 | ...

which is cut into equal shares, whatever the lengths. Each share has one program for every head, so that programs side
by side read the same tokens at the same time: in a pool, their heads lie side by side. Where a share ends in the middle
of a sequence its programs leave a piece, a partial state, for the merge; a sequence within one share needs none. With
splits of a fixed size every unit is a piece, so that no result depends on where the shares happen to end.

A "head" here is one tile of rows: as many of a kv head's query heads and tokens as fit one tile.
"""

import triton
import triton.language as tl

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

# Not specialized: they change from step to step, and each kind of value would compile anew.
NUMBERS = ["batch", "num_blocks", "capacity", "window", "shares", "most", "fault_base", "mask_width"]


@triton.jit
def visible_range(last, window, TOKENS: tl.constexpr):
    """The keys [first, end) that some token of a sequence sees, where `last` is the position of the newest."""
    first = tl.zeros_like(last)
    if window is not None:
        first = tl.maximum(last - (TOKENS - 1) - (window - 1), 0)
    return first, last + 1


@triton.jit
def sighted_range(firsts, ends, index, batch, last, TOKENS: tl.constexpr):
    """The same where tokens have an interval each: from the first token's first key to the end of the last token's.

    No keys are (0, 0).
    """
    first = tl.maximum(tl.load(firsts + index * TOKENS, mask=index < batch, other=0), 0)
    end = tl.minimum(tl.load(ends + index * TOKENS + (TOKENS - 1), mask=index < batch, other=0), last + 1)
    some = first < end
    return tl.where(some, first, 0).to(tl.int32), tl.where(some, end, 0).to(tl.int32)


@triton.jit
def sound(position, capacity):
    """A position in 32 bits. One past the capacity is as if skipped, -1: nothing is read for it; the merge reports."""
    return tl.where(position < capacity, tl.maximum(position, -1), -1).to(tl.int32)


@triton.jit
def line_of(
    cur_pos, sight_first, sight_end, batch, window, capacity, unit,
    TOKENS: tl.constexpr, SHARED: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Of every sequence in the line: its first key, the end of its keys, its first unit and how many it has.

    Sequences that share a cache (and have no window) are one.
    """
    index = tl.arange(0, BATCH)
    last = sound(tl.load(cur_pos + index, mask=index < batch, other=-1), capacity)
    if sight_first is not None:
        first, end = sighted_range(sight_first, sight_end, index, batch, last, TOKENS)
    else:
        first, end = visible_range(last, window, TOKENS)
    end = tl.maximum(end, 0)
    if SHARED:
        index = tl.arange(0, 1)
        first, end = tl.zeros_like(index), tl.max(end, 0) + tl.zeros_like(index)
    first_unit = first // unit
    count = tl.where(end > 0, tl.cdiv(end, unit) - first_unit, 0)
    return index, first, end, first_unit, count


@triton.jit
def cut(count, shares, most):
    """How long the line is, and in how many shares it is cut so that no sequence has over `most` pieces.

    Share s is [s * total // shares, (s + 1) * total // shares). None is empty: the merge counts them.
    """
    total = tl.sum(count, 0).to(tl.int64)
    least = 1  # units a share
    if most is not None:
        longest = tl.max(count, 0)
        if longest == total:  # alone in the line: each share is a piece
            least = tl.maximum(tl.cdiv(longest, most), 1)
        else:  # one that begins anywhere in a share of n units has at most 1 + ceil((units - 1) / n) pieces
            least = tl.maximum(tl.cdiv(longest - 1, most - 1), 1)
    return total, tl.minimum(shares, tl.maximum(total // least, 1))


@triton.jit
def picked(vector, index, wanted):
    """One element of a vector."""
    return tl.sum(tl.where(index == wanted, vector, 0), 0)


@triton.jit
def before(count, index, wanted):
    """Where in the line a sequence begins."""
    return tl.sum(tl.where(index < wanted, count, 0), 0).to(tl.int64)


@triton.jit
def row_tiles(batch, TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr):
    """How many rows a kv head has, and how many tiles they take."""
    row_count = GROUP * TOKENS
    if SHARED:
        row_count *= batch
    return row_count, tl.cdiv(row_count, ROWS)


@triton.jit
def rows_of(rows, row_count, head, sequence, TOKENS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr):
    """Of a kv head's rows: which are there, whose they are, and their query head and token.

    A row is a query head of the group and a token; before these, a sequence if all share one cache.
    """
    real = rows < row_count
    row_sequence = tl.zeros_like(rows) + sequence
    if SHARED:
        row_sequence = tl.where(real, rows // (GROUP * TOKENS), 0)
    return real, row_sequence, head * GROUP + rows // TOKENS % GROUP, rows % TOKENS


@triton.jit
def at_rows(strides, row_sequence, row_head, row_token):
    """Where rows lie in a tensor [sequences, query heads, tokens, ...]."""
    return row_sequence.to(tl.int64) * strides[0] + row_head.to(tl.int64) * strides[1] + row_token * strides[2]


# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def interval_of(sight_first, sight_end, row_sequence, row_token, row_last, TOKENS: tl.constexpr):
    """The first and the last key of each row's interval, as far as it lies up to `row_last`, in 32 bits."""
    at = row_sequence * TOKENS + row_token
    end = tl.maximum(tl.load(sight_end + at, mask=row_last >= 0, other=0), 0)
    end = tl.minimum(end, row_last + 1).to(tl.int32)
    first = tl.maximum(tl.load(sight_first + at, mask=row_last >= 0, other=0), 0)
    return tl.minimum(first, end).to(tl.int32), end - 1


@triton.jit
def seen(
    scores, keys, row_last, row_first, own, row_sequence, row_head, row_token, window,
    mask, mask_strides, mask_width, tree, tree_strides, TOKENS: tl.constexpr,
):  # fmt: skip
    """Which of `keys` each row sees, [keys, rows], and the scores (base 2) with what a mask adds to them.

    `row_last` is the position of a row's newest token (-1: none), `own` that of the row itself, or the last key in its
    interval, which `row_first` begins.
    """
    if mask is not None:
        visible = (keys < mask_width)[:, None] & (keys[:, None] <= row_last[None, :])
        mask_rows = at_rows(mask_strides, row_sequence, row_head, row_token)
        mask_at = mask + mask_rows[None, :] + keys.to(tl.int64)[:, None] * mask_strides[3]
        if mask.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(mask_at, mask=visible, other=0) != 0)
        else:
            bias = tl.load(mask_at, mask=visible, other=float("-inf")).to(tl.float32)
            visible = visible & (bias != float("-inf"))
            scores += bias * _LOG2_E
    elif tree is not None:
        new = keys[:, None] - (row_last - (TOKENS - 1))[None, :]  # which of the new tokens a key is
        among = (new >= 0) & (new < TOKENS) & (row_last >= 0)[None, :]
        tree_rows = row_sequence.to(tl.int64) * tree_strides[0] + row_token * tree_strides[1]
        named = tl.load(tree + tree_rows[None, :] + new * tree_strides[2], mask=among, other=0) != 0
        visible = (row_last >= 0)[None, :] & ((new < 0) | (among & named))
    else:
        visible = keys[:, None] <= own[None, :]
    if window is not None:
        visible = visible & (keys[:, None] > (own - window)[None, :])
    if row_first is not None:
        visible = visible & (keys[:, None] >= row_first[None, :])
    return scores, visible
