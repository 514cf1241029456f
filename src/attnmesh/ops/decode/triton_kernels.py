"""The two decode kernels: `split_kernel` attends over partitions of the keys, `merge_kernel` merges the partial states.

In the split kernel, the query heads of one kv head and their T tokens are the columns of one tile, so that each key is
read once for all of them. Keys are the rows: the tensor cores then pad the few queries to 8, not to 16. Where two kv
heads have at most 8 queries together, one program reads both, which are adjacent in a pool (HEADS = 2; GROUP then
counts the query heads of both): each product has all queries, and products with the other head are dropped.

The merge kernel merges the splits of every head in the order of their keys. It starts while the split kernel runs, and
meanwhile checks for positions beyond the cache and table entries outside the pool. (The split kernel reads no such
memory; rows with an error become NaN in the merge.)

The keys of a sequence are cut into units: tiles, or splits of a fixed size. The units of all sequences form one list,

    sequence 0: u0 u1 u2 u3 | sequence 1: u0 | sequence 2: u0 u1 | ...

which is cut into equal partitions, whatever the lengths (the stream-K decomposition). Each partition has one program
per head, so that neighboring programs read the same tokens at the same time: in a pool, the heads of a token are
adjacent. Where a partition ends within a sequence, its programs write a partial state, a split, for the merge kernel; a
sequence within one partition needs no merge. With a fixed split size every unit is a split, so that no result depends
on where partitions end.

A "head" here is one tile of rows: the query heads and tokens of one kv head, or of two, that fit in a tile.

Address arithmetic per key costs as much as the attention itself, so it is hoisted out of the loop where possible:
offsets within a block repeat from tile to tile when tiles and blocks divide one another, and are 32 bits wide unless
the pool needs more.
"""

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.dense.triton_tiles import tanh

# They change from step to step, and specialization would recompile for each kind of value.
NOT_SPECIALIZED = ["batch", "num_blocks", "capacity", "window", "partitions", "max_splits", "error_base", "mask_width"]
# The rows of a tile: whether they exist, their sequences, query heads and tokens.
Rows = namedtuple("Rows", "exist sequence head token")
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_CHAIN = tl.constexpr(128)  # products of float32 that are summed one after another
_NO_SLOT = tl.constexpr(2**31 - 1)  # beyond any slot
# Two 16-bit words in, their lower and upper values out: four bytes become four fp16 values.
_FP8_HALVES = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# An int8 with its sign flipped is the last byte of 1024 + 128 + itself in fp16.
_INT8_HALVES = tl.constexpr("""{
    .reg .b32 flipped, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 flipped, $2, 0x80808080;
    prmt.b32 low, flipped, 0x64646464, 0x4240;
    prmt.b32 high, flipped, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, low, offset;
    sub.rn.f16x2 $1, high, offset;
}""")
# The same times powers of two, $3 and then $4: one of them alone may be beyond fp16 where the product is not.
_BFP_FP16_HALVES = tl.constexpr("""{
    .reg .b32 flipped, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 flipped, $2, 0x80808080;
    prmt.b32 low, flipped, 0x64646464, 0x4240;
    prmt.b32 high, flipped, 0x64646464, 0x4341;
    sub.rn.f16x2 low, low, offset;
    sub.rn.f16x2 high, high, offset;
    mul.rn.f16x2 low, low, $3;
    mul.rn.f16x2 high, high, $3;
    mul.rn.f16x2 $0, low, $4;
    mul.rn.f16x2 $1, high, $4;
}""")
# The lower seven bits of an int8 are the last ones of 128 + themselves in bf16, its sign is that of 128 + 128.
# (fma alone: bf16 has no other arithmetic before sm_90.)
_BFP_BF16_HALVES = tl.constexpr("""{
    .reg .b32 low, high, bits, sign, minus_one, minus_zero;
    mov.b32 minus_one, 0xbf80bf80;
    mov.b32 minus_zero, 0x80008000;
    prmt.b32 low, $2, 0x43434343, 0x4240;
    prmt.b32 high, $2, 0x43434343, 0x4341;
    and.b32 bits, low, 0xff7fff7f;
    and.b32 sign, low, 0xff80ff80;
    fma.rn.bf16x2 low, sign, minus_one, bits;
    fma.rn.bf16x2 $0, low, $3, minus_zero;
    and.b32 bits, high, 0xff7fff7f;
    and.b32 sign, high, 0xff80ff80;
    fma.rn.bf16x2 high, sign, minus_one, bits;
    fma.rn.bf16x2 $1, high, $3, minus_zero;
}""")


@triton.jit
def load_blocks(table_row, key, stop, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, KEYS: tl.constexpr):
    """The blocks of the keys [key, key + KEYS): one if a block contains the tile, else one per key.

    Keys from `stop` on are not looked up. A contiguous cache is one block.
    """
    if BLOCK_SIZE == 0:
        blocks = 0
    elif ALIGNED and BLOCK_SIZE >= KEYS:
        blocks = tl.load(table_row + key // BLOCK_SIZE, mask=key < stop, other=0)
    elif ALIGNED:
        near = tl.arange(0, KEYS)
        blocks = tl.load(table_row + key // BLOCK_SIZE + near // BLOCK_SIZE, mask=key + near < stop, other=0)
    else:
        keys = key + tl.arange(0, KEYS)
        blocks = tl.load(table_row + keys // BLOCK_SIZE, mask=keys < stop, other=0)
    return blocks


@triton.jit
def offsets_in_block(key, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, KEYS: tl.constexpr):
    """The offsets of the keys [key, key + KEYS) in their blocks."""
    near = tl.arange(0, KEYS)
    if BLOCK_SIZE == 0:
        block_offsets = key + near
    elif ALIGNED and BLOCK_SIZE >= KEYS:
        block_offsets = key % BLOCK_SIZE + near
    elif ALIGNED:
        block_offsets = near % BLOCK_SIZE  # the same in every tile
    else:
        block_offsets = (key + near) % BLOCK_SIZE
    return block_offsets


@triton.jit
def head_pointer(base, strides, head, sequence, PER_SEQUENCE: tl.constexpr):
    """The beginning of a head in a pool or shared cache, or in the cache of this sequence if PER_SEQUENCE."""
    start = base + head.to(tl.int64) * strides[2]
    if PER_SEQUENCE:
        start += sequence.to(tl.int64) * strides[0]
    return start


@triton.jit
def key_offsets(blocks, block_offsets, strides, WIDE: tl.constexpr):
    """The offset of each key from the beginning of its head."""
    if WIDE:
        blocks = tl.cast(blocks, tl.int64)
        block_offsets = block_offsets.to(tl.int64)
    return blocks * strides[0] + block_offsets * strides[1]


@triton.jit
def load_keys(head, offsets, valid, COLUMN: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr = 0):
    """Columns [COLUMN, COLUMN + WIDTH) of a tile of keys, [keys, WIDTH], or [WIDTH, keys] with AXIS 1.

    (Loading and then transposing would not be pipelined.)
    """
    columns = tl.expand_dims(COLUMN + tl.arange(0, WIDTH), AXIS)
    pointers = head + (tl.expand_dims(offsets, 1 - AXIS) + columns)
    mask = tl.expand_dims(valid, 1 - AXIS)
    if COLUMN + WIDTH > D:
        mask = mask & (columns < D)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_scales(
    scales, strides, offsets, valid, COLUMN: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The scales of a tile, one per GROUP values (of bfp8 exponents), broadcast to its values, [keys, WIDTH]."""
    groups = COLUMN // GROUP + tl.arange(0, WIDTH // GROUP)
    inside = valid[:, None] & (groups < D // GROUP)[None, :]
    steps = tl.load(scales + (offsets[:, None] + groups[None, :] * strides[3]), mask=inside, other=0)
    if steps.dtype == tl.int8:
        steps = ((steps.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)  # 2 ** exponent, exactly
    return tl.broadcast_to(steps[:, :, None], (KEYS, WIDTH // GROUP, GROUP)).reshape(KEYS, WIDTH)


@triton.jit
def load_exponents(scales, offsets, valid, shifts, D: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """The exponents of a bfp8 tile, [keys, WIDTH // 64, 4], or [WIDTH // 64, 4, keys] with AXIS 1.

    Four are read at a time: fewer bytes could not be read ahead of their use. `shifts` tell them apart. (They come from
    memory because the compiler would not convert a tile of numbers that it computes to the layout of a product.)
    """
    words = tl.expand_dims(tl.arange(0, WIDTH // 64), AXIS)
    inside = tl.expand_dims(valid, 1 - AXIS) & (words < D // 64)
    exponents = tl.load(scales + (tl.expand_dims(offsets, 1 - AXIS) + words), mask=inside, other=0)
    of_words = shifts[None, None, :] if AXIS == 0 else shifts[None, :, None]
    return (tl.expand_dims(exponents, 2 - AXIS) << of_words) >> 24


@triton.jit
def power_of_two(exponent, dtype: tl.constexpr):
    """2 ** exponent in bf16, exactly, or in fp16, limited to its normal numbers."""
    if dtype == tl.bfloat16:
        bits = (exponent + 127) << 7
    else:
        bits = (tl.minimum(tl.maximum(exponent, -14), 15) + 15) << 10
    return bits.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def unpack_bfp_pairs(words, exponents, COMPILED: tl.constexpr, dtype: tl.constexpr):
    """The lower and the upper value in each 16-bit word of a bfp8 tile, rounded to `dtype`."""
    first = power_of_two(exponents, dtype)
    rest = power_of_two(exponents - tl.minimum(tl.maximum(exponents, -14), 15), dtype)
    if not COMPILED:
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        low, high = low.to(tl.int8, bitcast=True).to(dtype), high.to(tl.int8, bitcast=True).to(dtype)
        low, high = low * first, high * first
        if dtype == tl.float16:
            low, high = low * rest, high * rest
    elif dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _BFP_FP16_HALVES, "=r,=r,r,r,r", [words, first, rest], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _BFP_BF16_HALVES, "=r,=r,r,r", [words, first], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def unpack_pairs(words, STORAGE: tl.constexpr, COMPILED: tl.constexpr):
    """The lower and the upper value in each 16-bit word of an fp8 or int8 tile, exactly, in fp16.

    Words move from shared memory to the registers of the tensor cores as fp16 values do; bytes would move one by one.
    """
    if not COMPILED:  # the interpreter does not run inline assembly
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        if STORAGE == "fp8":
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        else:
            low, high = low.to(tl.int8, bitcast=True), high.to(tl.int8, bitcast=True)
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        code: tl.constexpr = _FP8_HALVES if STORAGE == "fp8" else _INT8_HALVES
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def normalize_to_fp16(q):
    """Queries [D, rows] in fp16, scaled by powers of two so that the maximum of a row is in 1..2, and the powers."""
    wide = q.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # of rows that are zero, tiny or not finite
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (wide * down[None, :]).to(tl.float16), (exponent << 23).to(tl.float32, bitcast=True)


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
    if range_first is not None:  # from the first token's first key to the last token's end
        first = tl.maximum(tl.load(range_first + index * TOKENS, mask=index < batch, other=0), 0)
        end = tl.minimum(tl.load(range_end + index * TOKENS + (TOKENS - 1), mask=index < batch, other=0), last + 1)
        some = first < end
        first, end = tl.where(some, first, 0).to(tl.int32), tl.where(some, end, 0).to(tl.int32)
    else:
        first = tl.zeros_like(last)
        if window is not None:
            first = tl.maximum(last - (TOKENS - 1) - (window - 1), 0)
        end = last + 1
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
def locate_rows(index, row_count, head, sequence, TOKENS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr):
    """Some rows of a kv head, ordered by (sequence, if all share one cache), query head of the group, token."""
    is_row = index < row_count
    row_sequence = tl.zeros_like(index) + sequence
    if SHARED:
        row_sequence = tl.where(is_row, index // (GROUP * TOKENS), 0)
    return Rows(is_row, row_sequence, head * GROUP + index // TOKENS % GROUP, index % TOKENS)


@triton.jit
def row_offsets(strides, rows):
    """The offsets of rows in a tensor [sequences, query heads, tokens, ...]."""
    return rows.sequence.to(tl.int64) * strides[0] + rows.head.to(tl.int64) * strides[1] + rows.token * strides[2]


@triton.jit
def visible_keys(
    scores, keys, rows, row_last, row_first, own, window, mask, mask_strides, mask_width, tree, tree_strides,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The scores (base 2) with the bias of a mask added, and which of `keys` are visible to each row: [keys, rows].

    `row_last` is the position of the last token of a row's sequence (-1: skipped), `own` the position of the row
    itself, or the last key in its key range, which begins at `row_first`.
    """
    if mask is not None:
        visible = (keys < mask_width)[:, None] & (keys[:, None] <= row_last[None, :])
        mask_at = mask + row_offsets(mask_strides, rows)[None, :] + keys.to(tl.int64)[:, None] * mask_strides[3]
        if mask.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(mask_at, mask=visible, other=0) != 0)
        else:
            bias = tl.load(mask_at, mask=visible, other=float("-inf")).to(tl.float32)
            visible = visible & (bias != float("-inf"))
            scores += bias * _LOG2_E
    elif tree is not None:
        new = keys[:, None] - (row_last - (TOKENS - 1))[None, :]  # the index of a key among the new tokens
        is_new = (new >= 0) & (new < TOKENS) & (row_last >= 0)[None, :]
        tree_rows = rows.sequence.to(tl.int64) * tree_strides[0] + rows.token * tree_strides[1]
        selected = tl.load(tree + tree_rows[None, :] + new * tree_strides[2], mask=is_new, other=0) != 0
        visible = (row_last >= 0)[None, :] & ((new < 0) | (is_new & selected))
    else:
        visible = keys[:, None] <= own[None, :]
    if window is not None:
        visible = visible & (keys[:, None] > (own - window)[None, :])
    if row_first is not None:
        visible = visible & (keys[:, None] >= row_first[None, :])
    return scores, visible


@triton.jit
def finish_state(total, row_max, sinks, rows, row_last):
    """The factor of the sums of values, and the lse in natural log, of a state in base 2, with the sinks if any."""
    sink = tl.full(row_max.shape, float("-inf"), tl.float32)
    if sinks is not None:
        attends = rows.exist & (row_last >= 0)
        sink = tl.load(sinks + rows.head, mask=attends, other=float("-inf")).to(tl.float32) * _LOG2_E
    new_row_max = tl.maximum(row_max, sink)
    shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    acc_scale = tl.exp2(row_max - shift)
    total = total * acc_scale + tl.exp2(tl.where(sink == float("inf"), 0.0, sink - shift))
    weight = acc_scale / tl.where(total == 0.0, 1.0, total)
    return weight, (shift + tl.log2(total)) * _LN_2


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def merge_kernel(
    part_out, part_lse, table, table_stride, cur_pos, range_first, range_end, sinks,
    out, out_strides, lse, lse_strides, errors, error_base,
    batch, kv_heads, num_blocks, capacity, window, partitions, max_splits,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    SPLITS: tl.constexpr, SOME_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, FIXED: tl.constexpr, SHARED: tl.constexpr,
    BATCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per head of each sequence (even a skipped one), and per tile of its rows and columns."""
    index, firsts, ends, _, counts = work_units(
        cur_pos, range_first, range_end, batch, window, capacity, UNIT, TOKENS, SHARED, BATCH
    )
    row_count, tiles = row_tiles(batch, TOKENS, GROUP, ROWS, SHARED)
    heads = kv_heads * tiles
    sequence = tl.program_id(0) // heads
    head_tile = tl.program_id(0) % heads
    units = select(counts, index, sequence)
    begin = units_before(counts, index, sequence)
    if FIXED:
        first = begin
        splits = units
    else:
        total, partitions = partition_units(counts, partitions, max_splits)
        total = tl.maximum(total, 1)
        first = ((begin + 1) * partitions - 1) // total  # the partition that contains begin
        splits = (((begin + units) * partitions - 1) // total - first + 1).to(tl.int32)

    within = tl.program_id(1) * SOME_ROWS + tl.arange(0, SOME_ROWS)
    index_of_row = head_tile % tiles * ROWS + within
    rows = locate_rows(index_of_row, row_count, head_tile // tiles, sequence, TOKENS, GROUP, SHARED)
    row_last = tl.load(cur_pos + rows.sequence, mask=rows.exist, other=-1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)

    invalid = row_last >= capacity
    invalid_sequence = tl.max(tl.where(invalid, rows.sequence, -1), 0)
    if invalid_sequence >= 0:
        record_error(errors, error_base + invalid_sequence, -1 - tl.load(cur_pos + invalid_sequence).to(tl.int64))
    if BLOCK_SIZE > 0:
        table_row = table
        if not SHARED:
            table_row += sequence.to(tl.int64) * table_stride
        slot = _first_invalid_slot(
            table_row, select(firsts, index, sequence), select(ends, index, sequence), num_blocks, BLOCK_SIZE
        )
        if (slot != _NO_SLOT) & (invalid_sequence < 0):  # a position beyond the cache has no slots
            entry = tl.load(table_row + slot).to(tl.int64) & 0xFFFFFFFF
            record_error(errors, error_base + sequence, (tl.cast(slot + 1, tl.int64) << 32) | entry)
        # Of the sequences that share a table, the sequences that reach the slot.
        invalid = invalid | ((row_last >= 0) & (slot <= row_last // BLOCK_SIZE))

    whole_head = (splits == 1) & (units > 0)  # written by the split kernel
    any_invalid = tl.max(invalid.to(tl.int32), 0) > 0
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    # Programs with nothing to merge return without waiting; one always waits, or this kernel could finish first.
    if EARLY and ((not whole_head) | any_invalid | is_first):
        gdc_wait()
    if (not whole_head) | any_invalid:
        acc = tl.zeros((SOME_ROWS, COLUMNS), tl.float32)
        denominator = tl.zeros((SOME_ROWS,), tl.float32)
        row_max = tl.full((SOME_ROWS,), float("-inf"), tl.float32)
        if units > 0:  # sequences without an error share these rows with one that has one
            for at in range(0, splits, SPLITS):
                split = at + tl.arange(0, SPLITS)
                if FIXED:
                    slots = first + split
                else:
                    # The first split of a partition begins within a sequence, the last split at its beginning.
                    slots = 2 * (first + split) + (split == 0)
                # [rows, columns, splits]: the compiler divides the rows among warps, and splits are summed by a thread.
                where = within[:, None] + (slots * heads + head_tile)[None, :] * ROWS
                some = rows.exist[:, None] & (split < splits)[None, :]
                lses = tl.load(part_lse + where, mask=some, other=float("-inf"))
                outs = tl.load(
                    part_out + where[:, None, :] * DV + columns[None, :, None],
                    mask=some[:, None, :] & (columns < DV)[None, :, None], other=0.0,
                )  # fmt: skip
                new_row_max = tl.maximum(row_max, tl.max(lses, 1))
                shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
                weights = tl.exp2(lses - shift[:, None])
                acc_scale = tl.exp2(row_max - shift)
                denominator = denominator * acc_scale + tl.sum(weights, 1)
                acc = acc * acc_scale[:, None] + tl.sum(weights[:, None, :] * outs, 2)
                row_max = new_row_max
        weight, natural_lse = finish_state(denominator, row_max, sinks, rows, row_last)
        result = tl.where(invalid[:, None], float("nan"), acc * weight[:, None])
        natural_lse = tl.where(invalid, float("nan"), natural_lse)
        # Of a head that the split kernel has written, only invalid rows are overwritten.
        writes = rows.exist & (invalid | (not whole_head))
        out_rows = row_offsets(out_strides, rows)
        inside = writes[:, None] & (columns < DV)[None, :]
        tl.store(out + out_rows[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=inside)
        if tl.program_id(2) == 0:
            tl.store(lse + row_offsets(lse_strides, rows), natural_lse, mask=writes)


@triton.jit
def _dot_in_parts(keys, queries):
    """keys @ queries of float32, in parts of _CHAIN columns that are added up: a chain of all has twice the error."""
    PARTS: tl.constexpr = keys.shape[1] // _CHAIN
    keys = keys.reshape(keys.shape[0], PARTS, _CHAIN).permute(1, 0, 2)
    queries = queries.reshape(PARTS, _CHAIN, queries.shape[1])
    return tl.sum(tl.dot(keys, queries, input_precision="ieee"), 0)


@triton.jit
def _first_invalid_slot(table_row, first, end, num_blocks, BLOCK_SIZE: tl.constexpr):
    """The first slot that a sequence reads whose entry is not a block of the pool."""
    worst = tl.full((512,), _NO_SLOT, tl.int32)
    stop = tl.cdiv(end, BLOCK_SIZE)
    for begin in range(first // BLOCK_SIZE, stop, 512):
        slots = begin + tl.arange(0, 512)
        blocks = tl.load(table_row + slots, mask=slots < stop, other=0)
        wrong = (blocks < 0) | (blocks >= num_blocks)
        worst = tl.minimum(worst, tl.where(wrong, slots, _NO_SLOT))
    return tl.min(worst, 0)


@triton.jit
def record_error(errors, sequence, word):
    """Writes the word of a sequence, (slot + 1) << 32 | entry or -1 - position, then the flag, to host memory."""
    tl.store(errors + 1 + sequence, word)
    tl.store(errors, tl.full((), 1, tl.int64))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def split_kernel(
    q, q_strides, k, v, k_strides, k_scales, k_scale_strides, v_strides, v_scales, v_scale_strides, scale_shifts,
    table, table_stride, cur_pos, range_first, range_end, mask, mask_strides, mask_width, tree, tree_strides, sinks,
    out, out_strides, lse, lse_strides, part_out, part_lse,
    batch, kv_heads, num_blocks, capacity, window, partitions, max_splits, scale_log2, softcap_log2,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    STORAGE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    FIXED: tl.constexpr, SHARED: tl.constexpr, BATCH: tl.constexpr, V_IN_K: tl.constexpr, PAIRED: tl.constexpr,
    COMPILED: tl.constexpr, EARLY: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Attends over this program's partition of the units; writes complete heads to out, and splits to the buffers."""
    if EARLY:
        gdc_launch_dependents()  # the merge kernel may start: it waits for the end of this kernel itself
    index, firsts, ends, first_units, counts = work_units(
        cur_pos, range_first, range_end, batch, window, capacity, UNIT, TOKENS, SHARED, BATCH
    )
    BOUNDED: tl.constexpr = (window is not None) or (range_first is not None)  # keys may begin at any position
    row_count, tiles = row_tiles(batch, TOKENS, GROUP, ROWS, SHARED)
    heads = kv_heads * tiles
    head_tile = tl.program_id(0) % heads
    head = head_tile // tiles
    partition = (tl.program_id(0) // heads).to(tl.int64)
    total, partitions = partition_units(counts, partitions, max_splits)
    GAPS: tl.constexpr = (mask is not None) | (tree is not None)
    at = partition * total // partitions
    stop = tl.minimum((partition + 1) * total // partitions, total)

    while at < stop:
        # The sequence of this unit, and the range of its units in this partition.
        sequence = tl.sum((tl.cumsum(counts, 0) <= at).to(tl.int32), 0)
        units = select(counts, index, sequence)
        unit_begin = (at - units_before(counts, index, sequence)).to(tl.int32)
        unit_end = unit_begin + 1
        if not FIXED:
            unit_end = tl.minimum(units, unit_begin + (stop - at)).to(tl.int32)
        first_unit = select(first_units, index, sequence)
        key_begin = (first_unit + unit_begin) * UNIT
        key_stop = tl.minimum((first_unit + unit_end) * UNIT, select(ends, index, sequence))
        first = key_begin
        if BOUNDED:  # keys may begin within a unit: the tiles before are skipped
            first = tl.maximum(select(firsts, index, sequence), key_begin)
            key_begin += (first - key_begin) // KEYS * KEYS

        index_of_row = head_tile % tiles * ROWS + tl.arange(0, ROWS)
        rows = locate_rows(index_of_row, row_count, head, sequence, TOKENS, GROUP, SHARED)
        row_last = valid_position(tl.load(cur_pos + rows.sequence, mask=rows.exist, other=-1), capacity)
        # The last key visible to each row; -1 for rows that do not exist.
        row_first = range_first
        if range_first is not None:
            of_row = rows.sequence * TOKENS + rows.token
            row_end = tl.maximum(tl.load(range_end + of_row, mask=row_last >= 0, other=0), 0)
            row_end = tl.minimum(row_end, row_last + 1).to(tl.int32)
            row_first = tl.maximum(tl.load(range_first + of_row, mask=row_last >= 0, other=0), 0)
            row_first, own = tl.minimum(row_first, row_end).to(tl.int32), row_end - 1
        else:
            own = tl.where(row_last >= 0, row_last - (TOKENS - 1) + rows.token, -1)

        q_rows = q + row_offsets(q_strides, rows)
        main = tl.arange(0, MAIN)
        q_main = tl.load(q_rows[None, :] + main[:, None], mask=rows.exist[None, :] & (main < D)[:, None], other=0.0)
        q_tail = q_main
        if TAIL > 0:
            tail = MAIN + tl.arange(0, TAIL)
            real = rows.exist[None, :] & (tail < D)[:, None]
            q_tail = tl.load(q_rows[None, :] + tail[:, None], mask=real, other=0.0)

        score_scale = scale_log2
        value_scale = 1.0
        if STORAGE == "fp8":
            score_scale *= tl.load(k_scales + head * k_scale_strides[0])
            value_scale = tl.load(v_scales + head * v_scale_strides[0])

        if PAIRED:
            if STORAGE == "bfp8":
                shifts = tl.load(scale_shifts + tl.arange(0, 4))
            else:
                q_main, row_scale = normalize_to_fp16(q_main)
                score_scale *= row_scale[None, :]
            q_main, q_odd = tl.split(tl.permute(tl.reshape(q_main, (MAIN // 2, 2, ROWS)), (0, 2, 1)))
        # The carry: `acc / sum(denominator)` is the output so far, `row_max + log2(sum(denominator))` its base-2 lse.
        acc = tl.zeros((BLOCK_DV // 2 if PAIRED else BLOCK_DV, ROWS), tl.float32)
        acc_odd, acc_second = acc, acc
        denominator = tl.zeros((KEYS, ROWS), tl.float32)  # summed over the keys once, at the end
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)

        table_row = table
        if (BLOCK_SIZE > 0) and (not SHARED):
            table_row += sequence.to(tl.int64) * table_stride
        PER_SEQUENCE: tl.constexpr = (BLOCK_SIZE == 0) and (not SHARED)
        k_head = head_pointer(k, k_strides, head * HEADS, sequence, PER_SEQUENCE)
        v_head = head_pointer(v, v_strides, head * HEADS, sequence, PER_SEQUENCE)
        of_second = (index_of_row // TOKENS % GROUP >= GROUP // HEADS)[None, :]
        k_scale_head, v_scale_head = k_scales, v_scales
        if (STORAGE == "int8") | (STORAGE == "bfp8") | (STORAGE == "fp8_ds_mla"):
            k_scale_head = head_pointer(k_scales, k_scale_strides, head, sequence, PER_SEQUENCE)
        if (STORAGE == "int8") | (STORAGE == "bfp8"):
            v_scale_head = head_pointer(v_scales, v_scale_strides, head, sequence, PER_SEQUENCE)

        blocks = load_blocks(table_row, key_begin, key_stop, BLOCK_SIZE, ALIGNED, KEYS)
        for key in range(key_begin, key_stop, KEYS):
            keys = key + tl.arange(0, KEYS)
            block_offsets = offsets_in_block(key, BLOCK_SIZE, ALIGNED, KEYS)
            valid = keys < key_stop  # and in the pool: no other memory is read
            if BOUNDED:
                valid = valid & (keys >= first)
            if BLOCK_SIZE > 0:
                in_pool = tl.cast(blocks, tl.uint32, bitcast=True) < tl.cast(num_blocks, tl.uint32, bitcast=True)
                valid = valid & in_pool
            k_offsets = key_offsets(blocks, block_offsets, k_strides, WIDE)
            v_offsets = key_offsets(blocks, block_offsets, v_strides, WIDE)
            if STORAGE == "bfp8":
                k_powers = key_offsets(blocks, block_offsets, k_scale_strides, WIDE)
            if PAIRED:
                words = load_keys(k_head, k_offsets, valid, 0, D // 2, MAIN // 2)
                if STORAGE == "bfp8":
                    powers = load_exponents(k_scale_head, k_powers, valid, shifts, D, MAIN, 0)
                    powers = tl.broadcast_to(powers[:, :, :, None], (KEYS, MAIN // 64, 4, 8)).reshape(KEYS, MAIN // 2)
                    k_main, k_odd = unpack_bfp_pairs(words, powers, COMPILED, q_main.dtype)
                else:
                    k_main, k_odd = unpack_pairs(words, STORAGE, COMPILED)
            else:
                k_main = load_keys(k_head, k_offsets, valid, 0, D, MAIN)
                if STORAGE == "bfp8":
                    steps = load_scales(k_scale_head, k_scale_strides, k_powers, valid, 0, D, KEYS, MAIN, 16)
                    k_main = k_main.to(tl.float32) * steps
            if STORAGE == "fp8_ds_mla":
                at_scale = key_offsets(blocks, block_offsets, k_scale_strides, WIDE)
                steps = load_scales(k_scale_head, k_scale_strides, at_scale, valid, 0, MAIN, KEYS, MAIN, 128)
                k_main = k_main.to(tl.float32) * steps
            k_main = k_main.to(q_main.dtype)
            if q_main.dtype == tl.float32 and MAIN > _CHAIN:
                scores = _dot_in_parts(k_main, q_main)
            else:
                scores = tl.dot(k_main, q_main, input_precision="ieee")
            if HEADS == 2:
                k_second = load_keys(k_head + k_strides[2], k_offsets, valid, 0, D, MAIN)
                scores = tl.where(of_second, tl.dot(k_second, q_main), scores)
            if PAIRED:
                scores = tl.dot(k_odd, q_odd, scores)
            if TAIL > 0:
                if STORAGE == "fp8_ds_mla":  # v is the rope part
                    k_tail = load_keys(v_head, v_offsets, valid, 0, D - MAIN, TAIL)
                else:
                    k_tail = load_keys(k_head, k_offsets, valid, MAIN, D, TAIL)
                if STORAGE == "bfp8":
                    steps = load_scales(k_scale_head, k_scale_strides, k_powers, valid, MAIN, D, KEYS, TAIL, 16)
                    k_tail = k_tail.to(tl.float32) * steps
                scores = tl.dot(k_tail.to(q_main.dtype), q_tail, scores, input_precision="ieee")
            scores *= score_scale
            if STORAGE == "int8":
                at_scale = key_offsets(blocks, block_offsets, k_scale_strides, WIDE)
                scores *= tl.load(k_scale_head + at_scale, mask=valid, other=0.0)[:, None]
            if softcap_log2 is not None:
                scores = softcap_log2 * tanh(scores / softcap_log2, q_main.dtype == tl.float32)

            scores, visible = visible_keys(
                scores, keys, rows, row_last, row_first, own, window, mask, mask_strides, mask_width, tree,
                tree_strides, TOKENS,
            )  # fmt: skip
            if UNIT % KEYS != 0:  # a split may end within a tile
                visible = visible & (keys < key_stop)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            used = valid
            if GAPS:  # keys visible to no row may hold anything, and 0 * NaN is NaN
                used = used & (tl.max(visible.to(tl.int32), 1) > 0)

            # The scale of a value is multiplied into its weight. The maximum includes the exponent of the scale,
            # so that the weight neither overflows nor underflows fp16.
            maxima = scores
            if STORAGE == "int8":
                at_scale = key_offsets(blocks, block_offsets, v_scale_strides, WIDE)
                token_scale = tl.load(v_scale_head + at_scale, mask=used, other=0.0)
                exponent = ((token_scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
                # At least -100: even the sum of a billion weights of values that are almost 0 is finite.
                maxima += tl.maximum(exponent, -100).to(tl.float32)[:, None]
            new_row_max = tl.maximum(row_max, tl.max(maxima, 0))
            shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
            weights = tl.exp2(scores - shift[None, :])
            acc_scale = tl.exp2(row_max - shift)
            denominator = denominator * acc_scale[None, :] + weights
            if STORAGE == "int8":
                weights *= token_scale[:, None]
            weights = weights.to(q_main.dtype)
            if V_IN_K:
                v_tile = tl.trans(k_main)
                if GAPS:
                    v_tile = tl.where(used[None, :], v_tile, 0.0)
            elif PAIRED:
                words = load_keys(v_head, v_offsets, used, 0, DV // 2, BLOCK_DV // 2, 1)
                if STORAGE == "bfp8":
                    v_powers = key_offsets(blocks, block_offsets, v_scale_strides, WIDE)
                    powers = load_exponents(v_scale_head, v_powers, used, shifts, DV, BLOCK_DV, 1)
                    powers = tl.broadcast_to(powers[:, :, None, :], (BLOCK_DV // 64, 4, 8, KEYS))
                    v_tile, v_odd = unpack_bfp_pairs(words, powers.reshape(BLOCK_DV // 2, KEYS), COMPILED, q_main.dtype)
                else:
                    v_tile, v_odd = unpack_pairs(words, STORAGE, COMPILED)
                acc_odd = tl.dot(v_odd, weights, acc_odd * acc_scale[None, :])
            else:
                v_tile = load_keys(v_head, v_offsets, used, 0, DV, BLOCK_DV, 1)
                if STORAGE == "bfp8":
                    v_powers = key_offsets(blocks, block_offsets, v_scale_strides, WIDE)
                    steps = load_scales(v_scale_head, v_scale_strides, v_powers, used, 0, DV, KEYS, BLOCK_DV, 16)
                    v_tile = v_tile.to(tl.float32) * tl.trans(steps)
                v_tile = v_tile.to(q_main.dtype)
            acc = tl.dot(v_tile, weights, acc * acc_scale[None, :], input_precision="ieee")
            if HEADS == 2:
                v_second = load_keys(v_head + v_strides[2], v_offsets, used, 0, DV, BLOCK_DV, 1)
                acc_second = tl.dot(v_second, weights, acc_second * acc_scale[None, :])
            row_max = new_row_max
            # Read one tile ahead, so that no load waits for its address.
            blocks = load_blocks(table_row, key + KEYS, key_stop, BLOCK_SIZE, ALIGNED, KEYS)

        if PAIRED:
            acc = tl.reshape(tl.permute(tl.join(acc, acc_odd), (0, 2, 1)), (BLOCK_DV, ROWS))
        if HEADS == 2:
            acc = tl.where(of_second, acc_second, acc)
        acc *= value_scale
        row_sums = tl.sum(denominator, 0)
        columns = tl.arange(0, BLOCK_DV)
        writes = rows.exist[None, :] & (columns < DV)[:, None]
        if (unit_begin == 0) & (unit_end == units):
            weight, natural_lse = finish_state(row_sums, row_max, sinks, rows, row_last)
            result = acc * weight[None, :]
            out_rows = row_offsets(out_strides, rows)
            tl.store(out + out_rows[None, :] + columns[:, None], result.to(out.dtype.element_ty), mask=writes)
            tl.store(lse + row_offsets(lse_strides, rows), natural_lse, mask=rows.exist)
        else:
            slot = at
            if not FIXED:
                slot = 2 * partition + (unit_begin == 0)
            splits = (slot * heads + head_tile) * ROWS + tl.arange(0, ROWS)
            normal = acc / tl.where(row_sums == 0.0, 1.0, row_sums)[None, :]
            tl.store(part_out + splits[None, :] * DV + columns[:, None], normal, mask=writes)
            tl.store(part_lse + splits, row_max + tl.log2(row_sums), mask=rows.exist)
        at += unit_end - unit_begin
