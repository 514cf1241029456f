"""What the Gluon kernels of decode have in common: launches, copies of keys, rows of queries, offsets of results.

The schedule is that of the kernels in Triton: which units of which sequences a program attends over. All warps of a
program find the beginning of its partition in the list of units once. Then the program goes from sequence to sequence.
An item is the units of one sequence in the partition or, with a fixed split size, one unit.
"""

# mypy: disable-error-code="assignment"
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.triton import Launches, Schedule, rope_of, v_in_k
from attnmesh.ops.gluon_descriptor import descriptor
from attnmesh.ops.gluon_exponents import row_exponents
from attnmesh.ops.storage import LATENT_GROUP, Quantized, values_of

KEYS = 64  # per tile
D_V, D_TAIL = 512, 64
BLOCK_SIZES = (16, 32, 64, 128, 256)
LOG2_E = 1.4426950408889634
NOT_SPECIALIZED = ["batch", "capacity", "window", "partitions", "max_splits", "scale_log2", "table_stride"]
_KEYS, _QUARTER = gl.constexpr(KEYS), gl.constexpr(D_V // 4)
_LOG2_E, _LN_2 = gl.constexpr(LOG2_E), gl.constexpr(0.6931471805599453)
# Weights may grow to 2**RESCALE_THRESHOLD before the sums are rescaled. The shift of huge scores adds 8 to the exponent
# (see `gluon_exponents`): fp16 ends at 2**16.
RESCALE_THRESHOLD = gl.constexpr(7.0)
# Until all warps of a group are there; Triton 3.7 has renamed it.
group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Of rows of queries or keys that four warps read or write, 16 bytes to a lane.
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # of the matrix instructions, 16 bits, in shared memory
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # in shared memory

# The inputs that decide which keys a sequence attends to.
Sources = namedtuple("Sources", "cur_pos range_first range_end batch capacity window")
# Where a program is in the list of units: a sequence, the unit of the sequence, its index in the list, and the end.
Position = namedtuple("Position", "sequence unit at stop")


class Item(NamedTuple):
    """Units of one sequence: tiles of 64 keys, of which [first, stop) belong to the item; without any, `tiles` is 0."""

    sequence: Any
    table_row: Any  # the blocks of the sequence
    at: Any  # in the list of units
    last: Any  # position of the last token of the sequence
    first: Any
    stop: Any
    inner: Any  # keys [inner, edge) are visible to all rows
    edge: Any
    begin: Any  # of the first tile
    tiles: Any
    units: Any
    starts: Any  # at the first unit of the sequence
    ends: Any  # with its last unit


@gluon.jit
def _first_position(sources, work, partitions, max_splits, SHAPE: gl.constexpr, BATCH: gl.constexpr):
    """The position of the first unit of a program's partition."""
    index = gl.arange(0, BATCH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    _, first, end = _key_range(sources, index, SHAPE.tokens)
    count = _count_units(first, end, SHAPE.unit)
    partition = work.partition.to(gl.int64)
    # As `triton_kernels.partition_units`.
    total = gl.sum(count, 0).to(gl.int64)
    min_units = total * 0 + 1
    if max_splits is not None:
        longest = gl.max(count, 0)
        alone = gl.maximum((longest + max_splits - 1) // max_splits, 1)
        among = gl.maximum((longest + max_splits - 3) // (max_splits - 1), 1)
        min_units = gl.where(longest == total, alone, among)
    partitions = gl.minimum(partitions, gl.maximum(total // min_units, 1))
    at = partition * total // partitions
    stop = gl.minimum((partition + 1) * total // partitions, total)
    before = gl.associative_scan(count, 0, add)
    sequence = gl.sum((before <= at).to(gl.int32), 0).to(gl.int32)
    unit = at - gl.sum(gl.where(index < sequence, count, 0), 0)
    return Position(sequence, unit.to(gl.int32), at, stop)


@gluon.jit
def add(a, b):
    """How a scan combines numbers."""
    return a + b


@gluon.jit
def _key_range(sources, index, TOKENS: gl.constexpr):
    """The last position of sequences, -1 if skipped or invalid, and the keys [first, end) that some token sees."""
    is_sequence = index < sources.batch
    last = gl.load(sources.cur_pos + index, mask=is_sequence, other=-1)
    last = gl.where(last < sources.capacity, gl.maximum(last, -1), -1).to(gl.int32)
    if sources.range_first is not None:
        first = gl.maximum(gl.load(sources.range_first + index * TOKENS, mask=is_sequence, other=0), 0)
        end = gl.load(sources.range_end + (index * TOKENS + (TOKENS - 1)), mask=is_sequence, other=0)
        end = gl.minimum(end, last + 1)
        some = first < end
        first, end = gl.where(some, first, 0).to(gl.int32), gl.where(some, end, 0).to(gl.int32)
    else:
        first, end = last * 0, last + 1
        if sources.window is not None:
            first = gl.maximum(last - (TOKENS - 1) - (sources.window - 1), 0).to(gl.int32)
    return last, first, end


@gluon.jit
def _count_units(first, end, UNIT: gl.constexpr):
    return gl.where(end > 0, (end + (UNIT - 1)) // UNIT - first // UNIT, 0)


@gluon.jit
def item_at(program, position, SHAPE: gl.constexpr):
    """The item that begins at a position."""
    sources = program.sources
    last, first, end = _key_range(sources, position.sequence, SHAPE.tokens)
    units = _count_units(first, end, SHAPE.unit)
    if SHAPE.fixed:
        unit_end = gl.minimum(position.unit + 1, units)
    else:
        unit_end = gl.minimum(units, position.unit + (position.stop - position.at)).to(gl.int32)
    first_unit = first // SHAPE.unit
    stop = gl.minimum((first_unit + unit_end) * SHAPE.unit, end)
    # Keys that all tokens see: the first token has the first end, the last token the last beginning.
    if sources.range_first is not None:
        at = position.sequence * SHAPE.tokens
        inner = gl.load(sources.range_first + (at + (SHAPE.tokens - 1))).to(gl.int32)
        edge = gl.minimum(gl.load(sources.range_end + at), last + 1).to(gl.int32)
    else:
        inner, edge = last * 0, last - (SHAPE.tokens - 2)
        if sources.window is not None:
            inner = (last - (sources.window - 1)).to(gl.int32)
    first = gl.maximum(first, (first_unit + position.unit) * SHAPE.unit)
    begin = first // _KEYS * _KEYS
    tiles = gl.where(units > 0, (stop - begin + (_KEYS - 1)) // _KEYS, 0)
    table_row = program.pools.table + position.sequence.to(gl.int64) * program.pools.table_stride
    return Item(
        position.sequence, table_row, position.at, last, first, stop, gl.maximum(inner, first), gl.minimum(edge, stop),
        begin, tiles, unit_end - position.unit, position.unit == 0, unit_end >= units,
    )  # fmt: skip


@gluon.jit
def after(position, item):
    """The position of the next item."""
    return Position(
        gl.where(item.ends, position.sequence + 1, position.sequence),
        gl.where(item.ends, 0, position.unit + item.units),
        position.at + item.units,
        position.stop,
    )


@gluon.jit
def row_bounds(program, item, rows, SHAPE: gl.constexpr):
    """The keys [first, end) of the item that each row sees; none for rows that do not exist."""
    sources, is_row = program.sources, rows.exist
    if sources.range_first is not None:
        at = item.sequence * SHAPE.tokens + rows.token
        first = gl.load(sources.range_first + at, mask=is_row, other=0)
        end = gl.minimum(gl.load(sources.range_end + at, mask=is_row, other=0), item.last + 1)
        first = gl.maximum(gl.minimum(first, item.stop), 0).to(gl.int32)
        end = gl.maximum(end, 0).to(gl.int32)
    else:
        end = item.last - (SHAPE.tokens - 2) + rows.token
        first = end * 0
        if sources.window is not None:
            first = (end - sources.window).to(gl.int32)
    return gl.maximum(first, item.first), gl.where(is_row, gl.minimum(end, item.stop), 0)


class Shape(NamedTuple):
    """The constants of a kernel."""

    tokens: Any
    group: Any
    rows: Any  # per tile, in the buffers of splits
    tile: Any  # rows of a tile in registers
    block_size: Any
    piece: Any  # keys per copy
    unit: Any
    fixed: Any
    sign: Any  # of the scale: 1, -1 or 0, multiplied into the queries
    ring: Any  # slots of keys in shared memory


# What a program computes: a tile of query rows, over the keys of one partition.
WorkTile = namedtuple("WorkTile", "head head_tile heads row_begin partition")
# The query rows of a work tile.
Rows = namedtuple("Rows", "exist head token")
# The copy engine's views of the pool, of which those of latents in 8 bits have scales, and the block table.
Pools = namedtuple("Pools", "main tail scales table table_stride")
# Where results are written: of whole sequences, and of splits.
Results = namedtuple("Results", "out out_strides lse lse_strides part_out part_lse sinks")
# What the groups of warps of a program have in common; memory and barriers are the kernel's own.
Program = namedtuple("Program", "q q_strides memory barriers sources position work results scale_log2 pools")


class Memory(NamedTuple):
    """Shared memory of the kernels over latents, each of which lacks some of it."""

    q: Any = None  # of quarters of the columns
    q_tail: Any = None
    q_unit: Any = None  # of each row: the power of two that its queries were divided by
    k: Any = None  # quarters
    tails: Any = None
    scales: Any = None  # of the quarters of a tile
    weights: Any = None
    acc_scale: Any = None  # factor of the sums so far after a new maximum
    weight: Any = None  # of the sums at the end of an item
    codes: Any = None  # where keys are widened


def why_not(call: DecodeCall) -> str | None:
    """The reason why the kernels over latents cannot serve these tensors; None if they can."""
    k, rope = values_of(call.k), rope_of(call.k)
    if not v_in_k(call) or (call.q.shape[3], call.value_dim) != (D_V + D_TAIL, D_V):
        return f"its kernels take k_pool of head_dim {D_V + D_TAIL}, and v_pool as k_pool[..., :{D_V}]"
    if rope is not None and call.q.dtype != torch.bfloat16:
        return f"its kernels take bf16 with fp8_ds_mla, not {call.q.dtype}"
    return why_not_pools(call, k, *((call.k.scales, rope) if isinstance(call.k, Quantized) else ()))


def why_not_pools(call: DecodeCall, *pools: Tensor | None) -> str | None:
    """The reason why no kernel can serve a call over these pools; None if some can."""
    if not call.paged or call.block_size not in BLOCK_SIZES:
        return f"its kernels take pools of block_size {', '.join(map(str, BLOCK_SIZES))}"
    if call.mask is not None or call.tree is not None or call.shared:
        return "its kernels take no mask, tree or share_cache"
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take fp16 and bf16, not {call.q.dtype}"
    for x in pools:
        if x is not None and (not x.numel() or x.data_ptr() % 16 or any(n * x.itemsize % 16 for n in x.stride()[:3])):
            return "its kernels take pools whose rows are aligned to 16 bytes, not empty ones"
    return None


def launch_over_latents(kernel: Any, schedule: Schedule, tile: int, ring: int, first_sequence: int) -> Launches:
    """`launch_kernel` on quarters of the values, tails and, of latents in 8 bits, scales."""
    stored = schedule.call.k
    k, rope = values_of(stored), rope_of(stored)
    scales = (stored.scales, D_V // LATENT_GROUP) if isinstance(stored, Quantized) else None
    pools = (k[..., :D_V], D_V // 4), (k[..., D_V:] if rope is None else rope, D_TAIL), scales
    return launch_kernel(kernel, schedule, pools, tile, ring, first_sequence)


def launch_kernel(
    kernel: Any, schedule: Schedule, pools: Sequence[tuple[Tensor, int] | None], tile: int, ring: int,
    first_sequence: int, **constants: Any,
) -> Launches:  # fmt: skip
    """Launches a kernel that attends over splits, in tiles of `tile` rows, and the merge kernel.

    The kernel gets the copy engine's views of the pools as [Hkv, blocks, block_size, columns], in blocks of so many
    columns each.
    """
    call, options = schedule.call, schedule.constants
    batch, kv_heads, _, capacity, window, partitions, max_splits = schedule.numbers
    piece = min(KEYS, call.block_size)
    views = [x and descriptor(x[0].permute(2, 0, 1, 3), [1, 1, piece, x[1]]) for x in pools]
    args = (
        *views, call.q, call.q.stride()[:3], *schedule.sources, *schedule.written, *schedule.parts, call.sinks,
        batch, kv_heads, capacity, window, partitions, max_splits, (abs(call.scale) or 1.0) * LOG2_E,
    )  # fmt: skip
    shape = Shape(
        call.q.shape[2], call.group, schedule.rows, tile, call.block_size, piece, options["UNIT"], schedule.fixed,
        (call.scale > 0) - (call.scale < 0), ring,
    )  # fmt: skip
    return schedule.launch(
        kernel, args, first_sequence, SHAPE=shape, BATCH=options["BATCH"], EARLY=options["EARLY"], num_warps=4,
        **constants,
    )  # fmt: skip


@gluon.jit
def update_raw_max(raw_max, highest, factor):
    """The new `raw_max` of rows, factor and shift of their weights (see `gluon_exponents`), and factor of their sums.

    The maximum changes only if weights would exceed 2**RESCALE_THRESHOLD.
    """
    new_raw_max = gl.where(highest - raw_max > RESCALE_THRESHOLD / factor, highest, raw_max)
    factor, shift, exponent = row_exponents(raw_max, new_raw_max, factor)
    return new_raw_max, factor, shift, gl.exp2(exponent)


@gluon.jit
def work_of_program(sources, kv_heads, partitions, max_splits, SHAPE: gl.constexpr, BATCH: gl.constexpr):
    """The work tile of this program, whose barriers are made, and where its partition of the list begins.

    Programs are ordered by partition, then by head and tile of rows.
    """
    fence_async_shared()
    tiles = (SHAPE.group * SHAPE.tokens + SHAPE.rows - 1) // SHAPE.rows
    heads = kv_heads * tiles
    head_tile = gl.program_id(0) % heads
    work = WorkTile(head_tile // tiles, head_tile, heads, head_tile % tiles * SHAPE.rows, gl.program_id(0) // heads)
    return work, _first_position(sources, work, partitions, max_splits, SHAPE, BATCH)


@gluon.jit
def fence_warps():
    """Lets the products of a group of warps see what its warps have written to shared memory."""
    fence_async_shared()
    group_barrier()


@gluon.jit
def fence_and_arrive(barriers, at):
    """Lets the products of others, who wait for a barrier, see what a group of warps has written to shared memory."""
    fence_async_shared()
    mbarrier.arrive(barriers.index(at), count=1)


@gluon.jit
def blocks_of(item, key, SHAPE: gl.constexpr):
    """The blocks of a tile of keys. Those past the item are outside the pool."""
    blocks = ()
    for piece in gl.static_range(_KEYS // SHAPE.piece):
        begin = key + piece * SHAPE.piece
        blocks = blocks + (gl.load(item.table_row + begin // SHAPE.block_size, mask=begin < item.stop, other=-1),)  # noqa: RUF005
    return blocks


@gluon.jit
def fetch(program, pool, memory, ready, blocks, key, column, SHAPE: gl.constexpr):
    """Some columns of a tile of keys, one block after another. Blocks outside the pool are read as 0."""
    PIECES: gl.constexpr = _KEYS // SHAPE.piece
    mbarrier.expect(ready, pool.block_type.nbytes * PIECES)
    for piece in gl.static_range(PIECES):
        offset = (key + piece * SHAPE.piece) % SHAPE.block_size
        into = memory.slice(piece * SHAPE.piece, SHAPE.piece, dim=2)
        tma.async_copy_global_to_shared(pool, [program.work.head, blocks[piece], offset, column], ready, into)


@gluon.jit
def fetch_tail(program, step, blocks, key, SHAPE: gl.constexpr):
    """`fetch` of the tail of a tile of keys, into the ring of tails."""
    slot = step % program.memory.tails.shape[0]
    into, ready = program.memory.tails.index(slot), program.barriers.tail_ready.index(slot)
    fetch(program, program.pools.tail, into, ready, blocks, key, 0, SHAPE)


@gluon.jit
def load_quarters(program, SHAPE: gl.constexpr):
    """A producer: lets the copy engine fetch the quarters and the tail of every tile, as soon as there is room."""
    memory, barriers, position = program.memory, program.barriers, program.position
    RING: gl.constexpr = SHAPE.ring
    step = 0  # tiles so far, of all items
    while position.at < position.stop:
        item = item_at(program, position, SHAPE)
        for tile in range(item.tiles):
            key = item.begin + tile * _KEYS
            blocks = blocks_of(item, key, SHAPE)
            for quarter in gl.static_range(4):
                at = 4 * step + quarter
                mbarrier.wait(barriers.k_free.index(at % RING), (at // RING & 1) ^ 1)
                into, ready = memory.k.index(at % RING), barriers.k_ready.index(at % RING)
                fetch(program, program.pools.main, into, ready, blocks, key, quarter * _QUARTER, SHAPE)
            fetch_tail(program, step, blocks, key, SHAPE)
            step += 1
        position = after(position, item)


@gluon.jit
def locate_rows(work, layout: gl.constexpr, SHAPE: gl.constexpr, FIRST: gl.constexpr = 0):
    """The rows of a work tile, from FIRST on."""
    row = work.row_begin + FIRST + gl.arange(0, SHAPE.tile, layout=layout)
    return Rows(row < SHAPE.group * SHAPE.tokens, work.head * SHAPE.group + row // SHAPE.tokens, row % SHAPE.tokens)


@gluon.jit
def row_offsets(strides, item, rows):
    """The offsets of rows in a tensor [sequences, query heads, tokens, ...]."""
    row = item.sequence.to(gl.int64) * strides[0] + rows.head.to(gl.int64) * strides[1]
    return row + rows.token.to(gl.int64) * strides[2]


@gluon.jit
def split_rows(item, work, layout: gl.constexpr, SHAPE: gl.constexpr, FIRST: gl.constexpr = 0):
    """The rows of an item in the buffers of splits."""
    if SHAPE.fixed:
        slot = item.at
    else:
        slot = 2 * work.partition.to(gl.int64) + gl.where(item.starts, 1, 0)
    return (slot * work.heads + work.head_tile) * SHAPE.rows + FIRST + gl.arange(0, SHAPE.tile, layout=layout)


@gluon.jit
def load_queries(
    program, item, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, SHAPE: gl.constexpr, FIRST: gl.constexpr = 0,
    PAIRS: gl.constexpr = False,
):  # fmt: skip
    """Columns of the queries from COLUMN on, or every second of their PAIRS, times the sign of the scale."""
    rows = locate_rows(program.work, gl.SliceLayout(1, LINES), SHAPE, FIRST)
    begin = program.q + row_offsets(program.q_strides, item, rows)[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES))[None, :]
    if PAIRS:
        column = column // 2 * 4 + column % 2
    values = gl.load(begin + (column + COLUMN), mask=rows.exist[:, None], other=0.0)
    if SHAPE.sign == 1:
        return values
    else:  # noqa: RET505, a constant condition
        return (values * SHAPE.sign).to(values.dtype)


@gluon.jit
def matrix(memory, slot):
    """A slot of keys as a matrix."""
    return memory.index(slot).reshape([_KEYS, memory.shape[4]])


@gluon.jit
def clear_outside(memory, step, key, item, SHAPE: gl.constexpr):
    """Keys outside of the item become 0, in the columns that are values."""
    for quarter in gl.static_range(4):
        tile = matrix(memory, (4 * step + quarter) % SHAPE.ring)
        for part in gl.static_range(2):
            clear_columns(tile.slice(part * (_QUARTER // 2), _QUARTER // 2, dim=1), key, item)


@gluon.jit
def clear_columns(some, key, item):
    """Keys outside of the item become 0, in some columns of their tile."""
    at = key + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, LINES))
    inside = ((at >= item.first) & (at < item.stop))[:, None]
    COLUMNS: gl.constexpr = some.shape[1]
    values = some.load(LINES)
    some.store(gl.where(inside, values, gl.zeros([_KEYS, COLUMNS], values.dtype, LINES)))


@gluon.jit
def finish_rows(
    program, item, rows, row_max, total, layout: gl.constexpr, SHAPE: gl.constexpr, FIRST: gl.constexpr = 0
):
    """Writes the lse of the rows of an item, of a whole sequence or of a split; returns the factor of their sums."""
    results = program.results
    if item.starts & item.ends:
        # A sink is one more key without a value. A row without any key has total 0 and row_max -inf.
        sink = gl.full([SHAPE.tile], float("-inf"), gl.float32, layout)
        if results.sinks is not None:
            sink = gl.load(results.sinks + rows.head, mask=rows.exist, other=float("-inf")).to(gl.float32) * _LOG2_E
        new_row_max = gl.maximum(row_max, sink)
        shift = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        acc_scale = gl.exp2(row_max - shift)
        total = total * acc_scale + gl.exp2(gl.where(sink == float("inf"), 0.0, sink - shift))
        factor = acc_scale / gl.where(total == 0.0, 1.0, total)
        row = row_offsets(results.lse_strides, item, rows)
        gl.store(results.lse + row, (shift + gl.log2(total)) * _LN_2, mask=rows.exist)
    else:
        factor = 1.0 / gl.where(total == 0.0, 1.0, total)
        row = split_rows(item, program.work, layout, SHAPE, FIRST)
        gl.store(results.part_lse + row, row_max + gl.log2(total), mask=rows.exist)
    return factor


@gluon.jit
def store_sums(
    program, item, sums, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, grid: gl.constexpr, SHAPE: gl.constexpr,
    FIRST: gl.constexpr = 0, AXIS: gl.constexpr = 0, STEP: gl.constexpr = 1,
):  # fmt: skip
    """Writes every STEP-th of COLUMNS output columns, from COLUMN on, of a whole sequence or of a split.

    Rows are the AXIS of the sums; FIRST is the first of them in the work tile.
    """
    along: gl.constexpr = gl.SliceLayout(1 - AXIS, grid)
    results, rows = program.results, locate_rows(program.work, along, SHAPE, FIRST)
    columns = gl.arange(0, sums.shape[1 - AXIS], layout=gl.SliceLayout(AXIS, grid))
    column = COLUMN + STEP * gl.expand_dims(columns, AXIS)
    if item.starts & item.ends:
        row = gl.expand_dims(row_offsets(results.out_strides, item, rows), 1 - AXIS)
        exist = gl.expand_dims(rows.exist, 1 - AXIS)
        gl.store(results.out + row + column, sums.to(results.out.dtype.element_ty), mask=exist)
    else:
        row = gl.expand_dims(split_rows(item, program.work, along, SHAPE, FIRST) * COLUMNS, 1 - AXIS)
        gl.store(results.part_out + row + column, sums, mask=gl.expand_dims(rows.exist, 1 - AXIS))
