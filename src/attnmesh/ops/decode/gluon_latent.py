"""Decode over a paged latent cache (MLA) on Hopper in Gluon: keys of 576 columns, of which the first 512 are values.

Floors, for `rows` query heads and tokens per sequence over n keys: 2 * (576 + 512) * rows * n operations, 1152 * n
bytes. With 64 rows or fewer per KV head the bytes take longer on an H200, with 128 the operations. Then what limits
the speed is the bandwidth of shared memory (128 bytes per cycle), from which the tensor cores read, and its size: the
64 x 512 sums of a tile of rows fill half of the registers, its queries and two tiles of keys all of shared memory.

A program is persistent and has one tile of 64 rows: the query heads and tokens that share a KV head. It processes the
items of its partition of the keys (see `gluon_common`), 64 keys at a time, by four groups of warps:

- the producer (one warp) lets the copy engine (TMA) fetch keys, by the block table: four quarters of 128 columns, which
  are the values, into a ring of nine, and a tail of 64 columns into a ring of three;
- the score consumer (four warps) multiplies queries and keys, keeps the row maximum, and writes the weights over the
  tail of the keys. The first quarter of the queries is in its registers, which leaves room for a quarter of keys in
  shared memory;
- two value consumers (four warps each) have two quarters of the output columns each, and add weights times values.

Latents in 8 bits (`fp8_ds_mla`), of more than 32 rows, are widened once for the 64 rows of a tile: the producer then
has four warps, fetches quarters in 8 bits and scales, and writes the quarters in fp16 into a ring of eight. Queries and
weights are fp16 then, too, and the tails bf16. `gluon_widening` says how fp16 has range enough.

A group of warps cannot do anything else while it issues products, so that the tensor cores would be idle during every
softmax. Therefore the value consumers multiply half of tile i at once, which makes room for the keys of tile i + 2, and
the other half when the scores of tile i + 1 are done (`scored`): during the softmax of tile i + 1.

Each tile of rows reads every key once. Tiles of the same KV head run at the same time, so that all but the first read
keys from L2.

Synchronization: a quarter (or tail) is `ready` when the producer has written it, and a quarter is `free` when the
value consumer that reads it last is done. When the quarters of tile i are free for tile i + 2, both
value consumers are done with tile i - 1. So its tail, weights and `acc_scale` need no separate barriers.
Barriers are waited for by the parity of their phase, counted over all items; waiting for the phase before the first
succeeds at once.

Keys outside of an item (past the end of a sequence, or before a window) may hold anything: their scores are masked, and
since 0 * NaN is NaN the score consumer clears them in shared memory. The copy engine reads blocks outside the pool as
0; the merge kernel records them.
"""

# mypy: disable-error-code="assignment"
from collections import namedtuple
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from attnmesh.core.state import State
from attnmesh.ops.decode import gluon_common as common
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.gluon_common import LINES, OPERAND, VECTOR
from attnmesh.ops.decode.triton import DecodeTiles, Launches, Schedule, rope_of
from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.gluon_exponents import lowest_of, row_max_of
from attnmesh.ops.gluon_widening import (
    LOWEST_UNIT,
    as_rows,
    inverse_of,
    read_unit,
    row_unit_of,
    scale_tail,
    unit_of,
    widen_to_fp16,
    write_unit,
)

ROWS = 64  # of a tile: the rows of one matrix instruction
TILES = DecodeTiles(rows=ROWS, keys=common.KEYS, warps=4, stages=2, resident=1)
_ROWS, _D_V = gl.constexpr(ROWS), gl.constexpr(common.D_V)
_KEYS, _QUARTER, _TAIL = gl.constexpr(common.KEYS), gl.constexpr(common.D_V // 4), gl.constexpr(common.D_TAIL)
QUARTERS, WIDENED_QUARTERS = 9, 8  # of keys in shared memory, in 16 bits: as they are stored, or widened
_TAILS = gl.constexpr(3)
# Registers per thread; the score consumer has the rest of 512.
_VALUE_CONSUMER, _PRODUCER, _WIDENING_PRODUCER = gl.constexpr(160), gl.constexpr(24), gl.constexpr(56)

# Of the pairs of bytes of a quarter. A lane has 16 columns of a row. The eight lanes that access shared memory together
# read different banks, and write to different banks.
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [16, 0], [32, 0]], [[0, 8], [0, 16], [5, 0], [0, 32], [2, 0]], [[4, 0], [8, 0]], [],
        [common.KEYS, common.D_V // 8],
    )
)  # fmt: skip

# A product leaves each lane two neighboring columns of a quarter at a time, so that an instruction that stores results
# writes 16 bytes to each of eight rows. Lanes exchange such words until each has four of a row, and an instruction
# writes 64 bytes to each. In two steps of one bit, which are shuffles: for both at once the compiler would need shared
# memory, of which nothing is left.


def _of_rows(registers: list[list[int]], lanes: list[list[int]], columns: int) -> gl.constexpr:
    """A layout in which these lanes, of a warp, have a row."""
    rows, warps = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(registers, [*lanes, *rows], warps, [], [ROWS, columns]))


_TWO_WORDS = _of_rows([[0, 1], [0, 8], [0, 16], [0, 32], [8, 0]], [[0, 4], [0, 2]], common.D_V // 8)
_FOUR_WORDS = _of_rows([[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]], [[0, 4], [0, 8]], common.D_V // 8)
_EIGHT_COLUMNS = _of_rows([[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16]], common.D_V // 4)
_JOIN = gl.constexpr("mov.b32 $0, {$1, $2};")
_SPLIT = gl.constexpr("mov.b32 {$0, $1}, $2;")
_KEEP = gl.constexpr("mov.b32 $0, $1;")  # the compiler does not see that nothing changes, and keeps both steps


# The barriers of quarters, tails and results.
Barriers = namedtuple("Barriers", "k_ready k_free tail_ready scored weights_ready result_ready result_free")


class Codes(NamedTuple):
    """Shared memory of keys in 8 bits, and its barriers."""

    quarters: Any  # two
    scales: Any  # of a tile
    units: Any  # of tiles: the power of two that their values in 16 bits are divided by
    row_units: Any  # that queries are divided by
    ready: Any
    scales_ready: Any


def launch(call: DecodeCall, state: State, first_sequence: int) -> Launches:
    """Out and lse of a call whose `why_not` is None, in two launches."""
    ring = QUARTERS if rope_of(call.k) is None else WIDENED_QUARTERS
    return common.launch_over_latents(_attend_kernel, Schedule.of(call, state, TILES), ROWS, ring, first_sequence)


@gluon.jit(do_not_specialize=common.NOT_SPECIALIZED)
def _attend_kernel(
    k_main, k_tail, k_scales, q, q_strides, table, table_stride, cur_pos, range_first, range_end,
    out, out_strides, lse, lse_strides, part_out, part_lse, sinks,
    batch, kv_heads, capacity, window, partitions, max_splits, scale_log2,
    SHAPE: gl.constexpr, BATCH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Attends over this program's partition of the keys; writes whole sequences to out, and splits to the buffers."""
    if EARLY:
        gdc_launch_dependents()  # the merge kernel may start: it waits for the end of this kernel itself
    dtype: gl.constexpr = q.dtype.element_ty
    main: gl.constexpr = dtype if k_scales is None else gl.float16
    # Queries without the first quarter; weights are where the tail of their tile was.
    q_rest = gl.allocate_shared_memory(main, [3, _ROWS, _QUARTER], OPERAND)
    q_tail = gl.allocate_shared_memory(dtype, [_ROWS, _TAIL], OPERAND)
    keys = gl.allocate_shared_memory(main, [SHAPE.ring, 1, 1, _KEYS, _QUARTER], gl.NVMMASharedLayout(128, 16, 4))
    tails = gl.allocate_shared_memory(dtype, [_TAILS, 1, 1, _KEYS, _TAIL], k_tail.layout)
    acc_scale = gl.allocate_shared_memory(gl.float32, [_TAILS, _ROWS], VECTOR)
    weight = gl.allocate_shared_memory(gl.float32, [_ROWS], VECTOR)
    barriers = Barriers(
        k_ready=new_barriers(SHAPE.ring, 1),
        k_free=new_barriers(SHAPE.ring, 1),
        tail_ready=new_barriers(_TAILS, 1),
        scored=new_barriers(_TAILS, 1),
        weights_ready=new_barriers(_TAILS, 1),
        result_ready=new_barriers(1, 1),
        result_free=new_barriers(1, 2),
    )
    codes = None
    if k_scales is not None:
        codes = Codes(
            gl.allocate_shared_memory(k_main.dtype, [2, 1, 1, _KEYS, _QUARTER], k_main.layout),
            gl.allocate_shared_memory(gl.float32, [1, 1, 1, _KEYS, 4], k_scales.layout),
            gl.allocate_shared_memory(gl.float32, [_TAILS, 1], VECTOR),
            gl.allocate_shared_memory(gl.float32, [_ROWS], VECTOR),
            new_barriers(2, 1),
            new_barriers(1, 1),
        )
    sources = common.Sources(cur_pos, range_first, range_end, batch, capacity, window)
    work, position = common.work_of_program(sources, kv_heads, partitions, max_splits, SHAPE, BATCH)
    memory = common.Memory(
        q=q_rest, q_tail=q_tail, k=keys, tails=tails, acc_scale=acc_scale, weight=weight, codes=codes
    )
    pools = common.Pools(k_main, k_tail, k_scales, table, table_stride)
    results = common.Results(out, out_strides, lse, lse_strides, part_out, part_lse, sinks)
    program = common.Program(q, q_strides, memory, barriers, sources, position, work, results, scale_log2, pools)
    WARPS: gl.constexpr = 1 if k_scales is None else 4
    REGISTERS: gl.constexpr = _PRODUCER if k_scales is None else _WIDENING_PRODUCER
    gl.warp_specialize(
        [(_score, (program, SHAPE)), (_add_values, (0, program, SHAPE)), (_add_values, (1, program, SHAPE)),
         (common.load_quarters if k_scales is None else _widen_quarters, (program, SHAPE))],
        [4, 4, WARPS], [_VALUE_CONSUMER, _VALUE_CONSUMER, REGISTERS],
    )  # fmt: skip
    invalidate_barriers(barriers)
    if k_scales is not None:
        invalidate_barriers((memory.codes.ready, memory.codes.scales_ready))


@gluon.jit
def _widen_quarters(program, SHAPE: gl.constexpr):
    """`load_quarters` of keys in 8 bits, two quarters ahead, which are widened as soon as there is room."""
    memory, barriers, position = program.memory, program.barriers, program.position
    RING: gl.constexpr = SHAPE.ring
    codes = memory.codes
    step = 0  # tiles so far, of all items
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        key = item.begin
        blocks = common.blocks_of(item, key, SHAPE)
        unit = item.tiles * 0.0 + LOWEST_UNIT
        if item.tiles > 0:
            _fetch_codes(program, 0, blocks, key, SHAPE)
            _fetch_codes(program, 1, blocks, key, SHAPE)
            common.fetch_tail(program, step, blocks, key, SHAPE)
        for tile in range(item.tiles):
            following = common.blocks_of(item, key + _KEYS, SHAPE)
            more = tile + 1 < item.tiles
            mbarrier.wait(codes.scales_ready.index(0), step & 1)
            scale = common.matrix(codes.scales, 0)
            unit = unit_of(scale, unit, item.first - key, item.stop - key)
            scales = ()
            for quarter in gl.static_range(4):
                scales = scales + (scale.slice(quarter, 1, dim=1).load(_PAIRS),)  # noqa: RUF005
            for quarter in gl.static_range(4):
                mbarrier.wait(codes.ready.index(quarter % 2), quarter // 2)
                pairs = codes.quarters.index(quarter % 2)._reinterpret(gl.int16, [_KEYS, _QUARTER // 2], OPERAND)
                pairs = pairs.load(_PAIRS)
                common.group_barrier()  # all warps have read them
                if quarter < 2:
                    _fetch_codes(program, quarter + 2, blocks, key, SHAPE)
                elif more:
                    _fetch_codes(program, quarter - 2, following, key + _KEYS, SHAPE)
                at = 4 * step + quarter
                mbarrier.wait(barriers.k_free.index(at % RING), (at // RING & 1) ^ 1)
                widen_to_fp16(pairs, scales[quarter], unit, common.matrix(memory.k, at % RING))
                if quarter == 0:  # in the slot of tile `step - 3`, which the value consumers are done with
                    write_unit(unit, codes.units.index(step % _TAILS))
                common.fence_and_arrive(barriers.k_ready, at % RING)
            step += 1
            key += _KEYS
            blocks = following
            if more:  # whose slot was that of tile `step - 3`, which the value consumers are done with
                common.fetch_tail(program, step, blocks, key, SHAPE)
        position = common.after(position, item)


@gluon.jit
def _fetch_codes(program, QUARTER: gl.constexpr, blocks, key, SHAPE: gl.constexpr):
    """A quarter of a tile in 8 bits, and with the first the scales."""
    codes, pools = program.memory.codes, program.pools
    if QUARTER == 0:
        common.fetch(program, pools.scales, codes.scales.index(0), codes.scales_ready.index(0), blocks, key, 0, SHAPE)
    into, ready = codes.quarters.index(QUARTER % 2), codes.ready.index(QUARTER % 2)
    common.fetch(program, pools.main, into, ready, blocks, key, QUARTER * _QUARTER, SHAPE)


@gluon.jit
def _score(program, SHAPE: gl.constexpr):
    """Scores, running maximum, weights and their sum; at the end the log-sum-exp."""
    memory, barriers, position, scale_log2 = program.memory, program.barriers, program.position, program.scale_log2
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    RING: gl.constexpr = SHAPE.ring
    rows = common.locate_rows(program.work, down, SHAPE)
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        if item.tiles > 0:
            row_first, row_end = common.row_bounds(program, item, rows, SHAPE)
            factor, unit = scale_log2, 1.0  # of scores, and of keys
            if memory.codes is None:
                q_first = _load_queries(program, item, grid, SHAPE)
            else:
                q_first, unit = _narrow_queries(program, item, step, grid, SHAPE)
                factor = memory.codes.row_units.load(down) * (scale_log2 * unit)
            raw_max = gl.zeros([_ROWS], gl.float32, down) + lowest_of(factor)
            total = gl.full([_ROWS], 0.0, gl.float32, down)
            for tile in range(item.tiles):
                scores = gl.zeros([_ROWS, _KEYS], gl.float32, grid)
                for quarter in gl.static_range(4):
                    at = 4 * step + quarter
                    mbarrier.wait(barriers.k_ready.index(at % RING), at // RING & 1)
                    queries = q_first if quarter == 0 else memory.q.index(quarter - 1)
                    keys = common.matrix(memory.k, at % RING).permute([1, 0])
                    scores = warpgroup_mma(queries, keys, scores, use_acc=quarter > 0, is_async=True)
                ratio = 1.0
                if memory.codes is not None:
                    new_unit = _unit(program, step, SHAPE)
                    ratio = unit * inverse_of(new_unit)
                    if ratio < 1.0:  # rarely
                        scale_tail(memory.q_tail, ratio)
                    unit = new_unit
                    factor = memory.codes.row_units.load(down) * (scale_log2 * unit)
                    raw_max *= ratio
                slot = step % _TAILS
                mbarrier.wait(barriers.tail_ready.index(slot), step // _TAILS & 1)
                keys = common.matrix(memory.tails, slot).permute([1, 0])
                scores = warpgroup_mma_wait(0, [warpgroup_mma(memory.q_tail, keys, scores, is_async=True)])
                mbarrier.arrive(barriers.scored.index(slot), count=1)
                key = item.begin + tile * _KEYS
                if (key < item.inner) | (key + _KEYS > item.edge):
                    near = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, grid))[None, :]
                    visible = (near >= (row_first - key)[:, None]) & (near < (row_end - key)[:, None])
                    scores = gl.where(visible, scores, float("-inf"))
                    if (key < item.first) | (key + _KEYS > item.stop):
                        common.clear_outside(memory.k, step, key, item, SHAPE)
                raw_max, row_factor, shift, acc_scale = common.update_raw_max(raw_max, gl.max(scores, 1), factor)
                memory.acc_scale.index(slot).store(acc_scale * ratio)
                weights = gl.exp2(scores * row_factor[:, None] - shift[:, None])
                _weights(memory, slot).store(weights.to(memory.q.dtype))
                common.fence_and_arrive(barriers.weights_ready, slot)
                total = total * acc_scale + gl.sum(weights, 1)
                step += 1

            mbarrier.wait(barriers.result_free.index(0), (done & 1) ^ 1)
            row_max = row_max_of(raw_max, factor)
            weight = common.finish_rows(program, item, rows, row_max, total, down, SHAPE)
            memory.weight.store(weight * unit)
            mbarrier.arrive(barriers.result_ready.index(0), count=1)
            done += 1
        position = common.after(position, item)


@gluon.jit
def _load_queries(program, item, grid: gl.constexpr, SHAPE: gl.constexpr):
    """Writes all but the first quarter of the queries to shared memory; returns the first."""
    operand: gl.constexpr = gl.DotOperandLayout(0, grid, 2)
    memory = program.memory
    # Loads start before the first is needed, as far as registers allow.
    first = common.load_queries(program, item, 0, _QUARTER, SHAPE)
    last = common.load_queries(program, item, 4 * _QUARTER, _TAIL, SHAPE)
    second = common.load_queries(program, item, _QUARTER, _QUARTER, SHAPE)
    third = common.load_queries(program, item, 2 * _QUARTER, _QUARTER, SHAPE)
    memory.q.index(0).store(first)
    memory.q_tail.store(last)
    fourth = common.load_queries(program, item, 3 * _QUARTER, _QUARTER, SHAPE)
    first = memory.q.index(0).load(operand)
    common.group_barrier()  # all warps have read it
    memory.q.index(0).store(second)
    memory.q.index(1).store(third)
    memory.q.index(2).store(fourth)
    common.fence_warps()
    return first


@gluon.jit
def _narrow_queries(program, item, step, grid: gl.constexpr, SHAPE: gl.constexpr):
    """`_load_queries` in fp16 where keys are widened; returns the unit of the first keys, too."""
    operand: gl.constexpr = gl.DotOperandLayout(0, grid, 2)
    dtype: gl.constexpr = program.q.dtype.element_ty
    memory = program.memory
    # Three quarters wait in shared memory for the largest numbers of the rows. Each thread reads what it has written.
    last = common.load_queries(program, item, 4 * _QUARTER, _TAIL, SHAPE)
    largest = gl.max(gl.abs(last.to(gl.float32)), 1)
    for quarter in gl.static_range(3):
        values = common.load_queries(program, item, quarter * _QUARTER, _QUARTER, SHAPE)
        as_rows(memory.q.index(quarter), dtype, _QUARTER).store(values)
        largest = gl.maximum(largest, gl.max(gl.abs(values.to(gl.float32)), 1))
    fourth = common.load_queries(program, item, 3 * _QUARTER, _QUARTER, SHAPE)
    row_unit = row_unit_of(gl.maximum(largest, gl.max(gl.abs(fourth.to(gl.float32)), 1)))
    memory.codes.row_units.store(row_unit)
    power = inverse_of(row_unit)[:, None]
    first = as_rows(memory.q.index(0), dtype, _QUARTER).load(LINES)
    memory.q.index(0).store((first.to(gl.float32) * power).to(gl.float16))
    common.group_barrier()
    q_first = memory.q.index(0).load(operand)
    common.group_barrier()  # all warps have read it
    for quarter in gl.static_range(2):
        values = as_rows(memory.q.index(quarter + 1), dtype, _QUARTER).load(LINES)
        memory.q.index(quarter).store((values.to(gl.float32) * power).to(gl.float16))
    memory.q.index(2).store((fourth.to(gl.float32) * power).to(gl.float16))
    unit = _unit(program, step, SHAPE)
    memory.q_tail.store((last.to(gl.float32) * (power * inverse_of(unit))).to(dtype))
    common.fence_warps()
    return q_first, unit


@gluon.jit
def _unit(program, step, SHAPE: gl.constexpr):
    """The power of two that the values of a tile were divided by."""
    slot = 4 * step % SHAPE.ring
    mbarrier.wait(program.barriers.k_ready.index(slot), 4 * step // SHAPE.ring & 1)
    return read_unit(program.memory.codes.units.index(step % _TAILS))


@gluon.jit
def _weights(memory, slot):
    """The weights of a tile, where its tail was."""
    if memory.codes is None:
        return common.matrix(memory.tails, slot)
    else:  # noqa: RET505, a constant condition
        return as_rows(memory.tails.index(slot), gl.float16, _KEYS)


@gluon.jit
def _add_values(PART: gl.constexpr, program, SHAPE: gl.constexpr):
    """Adds weights times values, for two quarters of the output columns."""
    memory, barriers, position = program.memory, program.barriers, program.position
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _QUARTER, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        if item.tiles > 0:
            left = gl.zeros([_ROWS, _QUARTER], gl.float32, grid)
            right = gl.zeros([_ROWS, _QUARTER], gl.float32, grid)
            for tile in range(item.tiles):
                slot = step % _TAILS
                turn = step // _TAILS & 1
                mbarrier.wait(barriers.weights_ready.index(slot), turn)
                acc_scale = memory.acc_scale.index(slot).load(down)
                # Rarely taken; otherwise 128 multiplications per thread would precede the products of every tile.
                if gl.min(acc_scale, 0) < 1.0:
                    left = left * acc_scale[:, None]
                    right = right * acc_scale[:, None]
                weights = _weights(memory, slot)
                near, far = (4 * step + PART) % SHAPE.ring, (4 * step + PART + 2) % SHAPE.ring
                left = warpgroup_mma(weights, common.matrix(memory.k, near), left, is_async=True)
                left = warpgroup_mma_wait(0, [left])
                mbarrier.arrive(barriers.k_free.index(near), count=1)
                # The other half is left for the time of the next softmax.
                following = step + 1
                scored = barriers.scored.index(following % _TAILS)
                mbarrier.wait(scored, following // _TAILS & 1, pred=tile + 1 < item.tiles)
                right = warpgroup_mma(weights, common.matrix(memory.k, far), right, is_async=True)
                right = warpgroup_mma_wait(0, [right])
                mbarrier.arrive(barriers.k_free.index(far), count=1)
                step += 1

            mbarrier.wait(barriers.result_ready.index(0), done & 1)
            weight = memory.weight.load(down)[:, None]
            mbarrier.arrive(barriers.result_free.index(0), count=1)
            done += 1
            _store(program, item, left * weight, PART * _QUARTER, grid, SHAPE)
            _store(program, item, right * weight, (PART + 2) * _QUARTER, grid, SHAPE)
        position = common.after(position, item)


@gluon.jit
def _store(program, item, sums, COLUMN: gl.constexpr, grid: gl.constexpr, SHAPE: gl.constexpr):
    """Writes a quarter of the output columns, from COLUMN on, of a whole sequence or of a split."""
    dtype: gl.constexpr = program.results.out.dtype.element_ty
    if item.starts & item.ends:
        if dtype == gl.float32:
            common.store_sums(program, item, sums, COLUMN, _D_V, grid, SHAPE)
        else:
            common.store_sums(program, item, _exchange(sums.to(dtype)), COLUMN, _D_V, _EIGHT_COLUMNS, SHAPE)
    else:
        common.store_sums(program, item, sums, COLUMN, _D_V, grid, SHAPE)


@gluon.jit
def _exchange(values):
    """The values of 16 bits [rows, columns] of a product, eight neighboring values to a lane."""
    even, odd = gl.split(values.reshape([_ROWS, _QUARTER // 2, 2]))
    words = gl.inline_asm_elementwise(_JOIN, "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    words = gl.convert_layout(words, _TWO_WORDS)
    words = gl.inline_asm_elementwise(_KEEP, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)
    words = gl.convert_layout(words, _FOUR_WORDS)
    pair: gl.constexpr = (values.dtype, values.dtype)
    even, odd = gl.inline_asm_elementwise(_SPLIT, "=h,=h,r", [words], dtype=pair, is_pure=True, pack=1)
    return gl.convert_layout(gl.join(even, odd).reshape([_ROWS, _QUARTER]), _EIGHT_COLUMNS)
