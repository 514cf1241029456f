"""MLA decode on Hopper for up to 32 rows over latents in 8 bits (`fp8_ds_mla`): 512 values, four scales, 64 of rope.

As in `gluon_narrow`, keys are the rows of the matrix instructions and the queries their columns, 16 or 32. Keys stay in
8 bits in shared memory, whose bandwidth is the limit when they are also written and read there in 16: each group of
warps loads its operands into registers and widens it there. Scales are not multiplied into keys, but into the
scores of each quarter of the columns, and into the weights, of which each quarter has its own.

- Scores: one instruction makes two neighboring columns fp16, and the queries are fp16, too, with a power of two per
  row. Of every four columns, the first two and the last two are separate products.
- Averages: two neighboring keys of a column must come together, so the bytes are separated, and shifted into
  bf16: three instructions. Even columns and odd columns are separate products. NaN becomes a number, so that bytes
  outside of a sequence count nothing with a weight of 0. (A visible NaN is found in the score of its key.)

The groups of warps are

- the producer (one warp), which lets the copy engine fetch tiles of 64 keys;
- the score consumer: products of keys and queries, running maximum, weights;
- two value consumers: add values times weights, each for half of the output columns.

Tiles, weights and `acc_scale` are in rings of the same number of slots. When the score consumer has a tile, the value
consumers are thus done with the tile that was in this slot before.
"""

# mypy: disable-error-code="assignment"
from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from attnmesh.core.state import State
from attnmesh.ops.decode import gluon_common as common
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.gluon_common import OPERAND, RESCALE_THRESHOLD, VECTOR
from attnmesh.ops.decode.triton import DecodeTiles, Launches, Schedule
from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.gluon_exponents import times

ROWS = 32  # of a tile, at most
TILES = DecodeTiles(rows=ROWS, keys=common.KEYS, warps=4, stages=2, resident=1)
_KEYS, _QUARTER, _TAIL = gl.constexpr(common.KEYS), gl.constexpr(common.D_V // 4), gl.constexpr(common.D_TAIL)
_PAIRS = gl.constexpr(common.D_V // 8)  # of columns of a quarter
_COPIES = gl.constexpr(6)  # of a tile: quarters, tail and scales
_PRODUCER = gl.constexpr(24)  # registers per thread
# Bytes are widened to bf16 by moving their bits, exponents unchanged: the results are 2**-120 of the values. Weights
# and sums are multiplied by half of that, so that no product leaves the range of float32.
_HALF_BIAS = gl.constexpr(2.0**60)
# Two pairs of e4m3 to the first of each, or the second, in bf16: sign and byte, as 16 bits, to the left.
_FIRST = gl.constexpr("prmt.b32 $0, $1, 0, 0xA280; shl.b32 $0, $0, 4; and.b32 $0, $0, 0x87F087F0;")
_SECOND = gl.constexpr("prmt.b32 $0, $1, 0, 0xB391; shl.b32 $0, $0, 4; and.b32 $0, $0, 0x87F087F0;")
# Two pairs of e4m3 to the first pair, or the second, in fp16.
_LOW = gl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }")
_HIGH = gl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, high; }")
# Twice the inverse of the power of two in a number of bf16.
_INVERSE = gl.constexpr("and.b32 $0, $1, 0x7F807F80; xor.b32 $0, $0, 0x7F807F80;")
_SMALLEST, _LARGEST = gl.constexpr(2.0**-111), gl.constexpr(2.0**127)  # such powers: the factors are normal numbers
_SPREAD = gl.constexpr(2.0**13)  # queries of up to 4 to the range of fp16


# The barriers of tiles, weights and results.
Barriers = namedtuple("Barriers", "k_ready k_free weights_ready result_ready result_free")


def launch(call: DecodeCall, state: State, first_sequence: int) -> Launches:
    """Out and lse of a call whose `why_not` is None, in two launches."""
    schedule = Schedule.of(call, state, TILES)
    tile = max(16, schedule.rows)
    ring = 4 if tile == 16 else 3  # what the queries leave of shared memory
    return common.launch_over_latents(_attend_kernel, schedule, tile, ring, first_sequence)


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
    RING: gl.constexpr = SHAPE.ring
    memory = common.Memory(
        q=gl.allocate_shared_memory(gl.float16, [8, SHAPE.tile, _PAIRS], OPERAND),  # two halves of each quarter
        q_tail=gl.allocate_shared_memory(dtype, [SHAPE.tile, _TAIL], OPERAND),
        q_unit=gl.allocate_shared_memory(gl.float32, [SHAPE.tile], VECTOR),
        k=gl.allocate_shared_memory(k_main.dtype, [4 * RING, 1, 1, _KEYS, _QUARTER], k_main.layout),
        tails=gl.allocate_shared_memory(dtype, [RING, 1, 1, _KEYS, _TAIL], k_tail.layout),
        scales=gl.allocate_shared_memory(gl.float32, [RING, 1, 1, _KEYS, 4], k_scales.layout),
        weights=gl.allocate_shared_memory(dtype, [4 * RING, SHAPE.tile, _KEYS], OPERAND),
        acc_scale=gl.allocate_shared_memory(gl.float32, [RING, SHAPE.tile], VECTOR),
        weight=gl.allocate_shared_memory(gl.float32, [SHAPE.tile], VECTOR),
    )
    barriers = Barriers(
        k_ready=new_barriers(RING, _COPIES),
        k_free=new_barriers(RING, 2),
        weights_ready=new_barriers(RING, 1),
        result_ready=new_barriers(1, 1),
        result_free=new_barriers(1, 2),
    )
    sources = common.Sources(cur_pos, range_first, range_end, batch, capacity, window)
    work, position = common.work_of_program(sources, kv_heads, partitions, max_splits, SHAPE, BATCH)
    pools = common.Pools(k_main, k_tail, k_scales, table, table_stride)
    results = common.Results(out, out_strides, lse, lse_strides, part_out, part_lse, sinks)
    program = common.Program(q, q_strides, memory, barriers, sources, position, work, results, scale_log2, pools)
    VALUE_CONSUMER: gl.constexpr = 112 if SHAPE.tile == 16 else 128
    gl.warp_specialize(
        [(_score, (program, SHAPE)), (_add_values, (0, program, SHAPE)), (_add_values, (1, program, SHAPE)),
         (_load, (program, SHAPE))],
        [4, 4, 1], [VALUE_CONSUMER, VALUE_CONSUMER, _PRODUCER],
    )  # fmt: skip
    invalidate_barriers(barriers)


@gluon.jit
def _load(program, SHAPE: gl.constexpr):
    """Lets the copy engine fetch every tile, as soon as there is room."""
    memory, barriers, pools, position = program.memory, program.barriers, program.pools, program.position
    RING: gl.constexpr = SHAPE.ring
    step = 0  # tiles so far, of all items
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        for tile in range(item.tiles):
            key = item.begin + tile * _KEYS
            blocks = common.blocks_of(item, key, SHAPE)
            slot = step % RING
            ready = barriers.k_ready.index(slot)
            mbarrier.wait(barriers.k_free.index(slot), (step // RING & 1) ^ 1)
            for quarter in gl.static_range(4):
                into = memory.k.index(4 * slot + quarter)
                common.fetch(program, pools.main, into, ready, blocks, key, quarter * _QUARTER, SHAPE)
            common.fetch(program, pools.tail, memory.tails.index(slot), ready, blocks, key, 0, SHAPE)
            common.fetch(program, pools.scales, memory.scales.index(slot), ready, blocks, key, 0, SHAPE)
            step += 1
        position = common.after(position, item)


@gluon.jit
def _pairs(memory, slot, QUARTER: gl.constexpr):
    """The pairs of bytes [keys, pairs] of a quarter."""
    return memory.k.index(4 * slot + QUARTER)._reinterpret(gl.int16, [_KEYS, _PAIRS], OPERAND)


@gluon.jit
def _to_bf16(values, HOW: gl.constexpr):
    """Two numbers of 16 bits at a time."""
    return gl.inline_asm_elementwise(HOW, "=r,r", [values], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _to_fp16(values, HOW: gl.constexpr):
    """Two numbers of 16 bits at a time."""
    return gl.inline_asm_elementwise(HOW, "=r,r", [values], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _score(program, SHAPE: gl.constexpr):
    """Scores [keys, rows], running maximum, weights and their sum; at the end the log-sum-exp."""
    memory, barriers, position = program.memory, program.barriers, program.position
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.tile, 16])
    across: gl.constexpr = gl.SliceLayout(0, grid)
    RING: gl.constexpr = SHAPE.ring
    rows = common.locate_rows(program.work, across, SHAPE)
    near = gl.arange(0, _KEYS, layout=gl.SliceLayout(1, grid))[:, None]
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        if item.tiles > 0:
            row_first, row_end = common.row_bounds(program, item, rows, SHAPE)
            _load_queries(program, item, SHAPE)
            unit = memory.q_unit.load(across) * program.scale_log2  # of scores, which is positive
            row_max = gl.full([SHAPE.tile], float("-inf"), gl.float32, across)
            total = gl.full([_KEYS, SHAPE.tile], 0.0, gl.float32, grid)  # summed over the keys once, at the end
            for tile in range(item.tiles):
                key = item.begin + tile * _KEYS
                slot = step % RING
                mbarrier.wait(barriers.k_ready.index(slot), step // RING & 1)
                scales = _scales(memory, slot, grid)
                part = gl.full([_KEYS, SHAPE.tile], 0.0, gl.float32, grid)
                tails, queries = common.matrix(memory.tails, slot), memory.q_tail.permute([1, 0])
                scores = warpgroup_mma(tails, queries, part, use_acc=False, is_async=True)
                part0 = _multiply(memory, slot, 0, part, grid)
                part1 = _multiply(memory, slot, 1, part, grid)
                scores, part0 = warpgroup_mma_wait(2, [scores, part0])
                scores += part0 * scales[0]
                part2 = _multiply(memory, slot, 2, part, grid)
                part1 = warpgroup_mma_wait(2, [part1])
                scores += part1 * scales[1]
                part3 = _multiply(memory, slot, 3, part, grid)
                part2 = warpgroup_mma_wait(2, [part2])
                scores += part2 * scales[2]
                part3 = warpgroup_mma_wait(0, [part3])
                scores += part3 * scales[3]

                if (key < item.inner) | (key + _KEYS > item.edge):
                    visible = (near >= (row_first - key)[None, :]) & (near < (row_end - key)[None, :])
                    scores = gl.where(visible, scores, float("-inf"))
                    # Nothing is read from outside of the item, where scales may be NaN.
                    inside = (near >= item.first - key) & (near < item.stop - key)
                    scales = (
                        gl.where(inside, scales[0], 0.0), gl.where(inside, scales[1], 0.0),
                        gl.where(inside, scales[2], 0.0), gl.where(inside, scales[3], 0.0),
                    )  # fmt: skip
                scores = times(scores, unit[None, :])
                highest = gl.max(scores, 0)
                new_row_max = gl.where(highest > row_max + RESCALE_THRESHOLD, highest, row_max)
                # No visible key yet: subtract 0, because -inf - -inf is NaN.
                shift = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
                acc_scale = gl.exp2(row_max - shift)
                memory.acc_scale.index(slot).store(acc_scale)
                weights = gl.exp2(scores - shift[None, :])
                for quarter in gl.static_range(4):
                    scaled = weights * (scales[quarter] * _HALF_BIAS)
                    memory.weights.index(4 * slot + quarter).permute([1, 0]).store(scaled.to(memory.weights.dtype))
                common.fence_and_arrive(barriers.weights_ready, slot)
                total = total * acc_scale[None, :] + weights
                row_max = new_row_max
                step += 1

            mbarrier.wait(barriers.result_free.index(0), (done & 1) ^ 1)
            sums = gl.sum(total, 0)
            memory.weight.store(common.finish_rows(program, item, rows, row_max, sums, across, SHAPE))
            mbarrier.arrive(barriers.result_ready.index(0), count=1)
            done += 1
        position = common.after(position, item)


@gluon.jit
def _scales(memory, slot, grid: gl.constexpr):
    """The scales of the quarters of a tile, with NaN for infinity."""
    scales = ()
    for quarter in gl.static_range(4):  # products of an infinite scale would have one sign, those of its values both
        scale = common.matrix(memory.scales, slot).slice(quarter, 1, dim=1).load(grid)
        scales = scales + (scale + scale * 0.0,)  # noqa: RUF005
    return scales


@gluon.jit
def _multiply(memory, slot, QUARTER: gl.constexpr, part, grid: gl.constexpr):
    """Starts the two products of a quarter of the keys and the queries."""
    pairs = _pairs(memory, slot, QUARTER).load(gl.DotOperandLayout(0, grid, 2))
    low, high = memory.q.index(2 * QUARTER).permute([1, 0]), memory.q.index(2 * QUARTER + 1).permute([1, 0])
    part = warpgroup_mma(_to_fp16(pairs, _LOW), low, part, use_acc=False, is_async=True)
    return warpgroup_mma(_to_fp16(pairs, _HIGH), high, part, is_async=True)


@gluon.jit
def _load_queries(program, item, SHAPE: gl.constexpr):
    """Writes the queries to shared memory, with a power of two per row: the largest of a row is 2**14 to 2**15."""
    memory = program.memory
    tail = common.load_queries(program, item, 4 * _QUARTER, _TAIL, SHAPE).to(gl.float32)
    largest = gl.abs(tail)
    parts = ()
    for part in gl.static_range(8):
        column = part // 2 * _QUARTER + part % 2 * 2
        values = common.load_queries(program, item, column, _PAIRS, SHAPE, PAIRS=True)
        largest = gl.maximum(largest, gl.abs(values.to(gl.float32)))
        parts = parts + (values,)  # noqa: RUF005
    largest = gl.minimum(gl.maximum(gl.max(largest, 1), _SMALLEST), _LARGEST)
    inverse = _to_bf16(largest.to(gl.bfloat16), _INVERSE)
    factor = inverse.to(gl.float32)[:, None] * _SPREAD
    for part in gl.static_range(8):
        memory.q.index(part).store((parts[part].to(gl.float32) * factor).to(gl.float16))
    memory.q_tail.store((tail * factor).to(memory.q_tail.dtype))
    memory.q_unit.store(_to_bf16(inverse, _INVERSE).to(gl.float32) * (0.5 / _SPREAD))
    common.fence_warps()


@gluon.jit
def _add_values(PART: gl.constexpr, program, SHAPE: gl.constexpr):
    """Adds values times weights, [columns, rows], for two quarters of the output columns."""
    memory, barriers, position = program.memory, program.barriers, program.position
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.tile, 16])
    across: gl.constexpr = gl.SliceLayout(0, grid)
    operand: gl.constexpr = gl.DotOperandLayout(0, grid, 2)
    RING: gl.constexpr = SHAPE.ring
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        if item.tiles > 0:
            even0 = gl.full([_PAIRS, SHAPE.tile], 0.0, gl.float32, grid)
            odd0, even1, odd1 = even0, even0, even0
            for _tile in range(item.tiles):
                slot = step % RING
                mbarrier.wait(barriers.k_ready.index(slot), step // RING & 1)
                pairs = _pairs(memory, slot, 2 * PART).permute([1, 0]).load(operand)
                values = _to_bf16(pairs, _FIRST)
                mbarrier.wait(barriers.weights_ready.index(slot), step // RING & 1)
                acc_scale = memory.acc_scale.index(slot).load(across)[None, :]
                weights = memory.weights.index(4 * slot + 2 * PART).permute([1, 0])
                even0 = warpgroup_mma(values, weights, even0 * acc_scale, is_async=True)
                odd0 = warpgroup_mma(_to_bf16(pairs, _SECOND), weights, odd0 * acc_scale, is_async=True)
                pairs = _pairs(memory, slot, 2 * PART + 1).permute([1, 0]).load(operand)
                even0 = warpgroup_mma_wait(1, [even0])
                weights = memory.weights.index(4 * slot + 2 * PART + 1).permute([1, 0])
                even1 = warpgroup_mma(_to_bf16(pairs, _FIRST), weights, even1 * acc_scale, is_async=True)
                odd0 = warpgroup_mma_wait(1, [odd0])
                odd1 = warpgroup_mma(_to_bf16(pairs, _SECOND), weights, odd1 * acc_scale, is_async=True)
                even1, odd1 = warpgroup_mma_wait(0, [even1, odd1])
                mbarrier.arrive(barriers.k_free.index(slot), count=1)
                step += 1

            mbarrier.wait(barriers.result_ready.index(0), done & 1)
            weight = memory.weight.load(across)[None, :] * _HALF_BIAS
            mbarrier.arrive(barriers.result_free.index(0), count=1)
            done += 1
            sums = (even0, odd0, even1, odd1)
            for part in gl.static_range(4):
                column = (2 * PART + part // 2) * _QUARTER + part % 2
                common.store_sums(program, item, sums[part] * weight, column, 4 * _QUARTER, grid, SHAPE, AXIS=1, STEP=2)
        position = common.after(position, item)
