"""MLA decode on Hopper for few rows (query heads and tokens) per KV head.

With 16 rows or fewer the bytes of the keys take longer than all products. Here keys are the rows of the matrix
instructions, and the queries are their columns: 16 instead of 64, so that the products take half of the time and
an eighth of the registers that `gluon_latent` needs, and little shared memory is left to the queries.

Tiles, copies and schedule are the same as in `gluon_latent`. The groups of warps are

- the producer (one warp);
- the score consumer: products of keys and queries, running maximum, weights;
- the value consumer: adds values times weights, for all output columns.

Tails and weights have rings of three and no barriers for being free. The ring of quarters holds fewer than three tiles:
when the last quarter of tile i is copied, the value consumer has released quarters of tile i - 3, whose scores and tail
are thus done. When the score consumer has the keys of tile i, the value consumer is done with the weights of tile i -
3.
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
from attnmesh.ops.decode.gluon_common import OPERAND, VECTOR
from attnmesh.ops.decode.triton import DecodeTiles, Launches, Schedule
from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.gluon_exponents import lowest_of, row_max_of

ROWS = 16  # of a tile, at most
RING = 11  # quarters of keys: what the queries leave of shared memory
TILES = DecodeTiles(rows=ROWS, keys=common.KEYS, warps=4, stages=2, resident=1)
_KEYS, _QUARTER, _TAIL = gl.constexpr(common.KEYS), gl.constexpr(common.D_V // 4), gl.constexpr(common.D_TAIL)
_TAILS = gl.constexpr(3)
_VALUE_CONSUMER, _PRODUCER = gl.constexpr(144), gl.constexpr(24)  # registers per thread


# The barriers of quarters, tails, weights and results.
Barriers = namedtuple("Barriers", "k_ready k_free tail_ready weights_ready result_ready result_free")


def launch(call: DecodeCall, state: State, first_sequence: int) -> Launches:
    """Out and lse of a call whose `why_not` is None, in two launches."""
    return common.launch_over_latents(_attend_kernel, Schedule.of(call, state, TILES), ROWS, RING, first_sequence)


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
    memory = common.Memory(
        q=gl.allocate_shared_memory(dtype, [4, SHAPE.tile, _QUARTER], OPERAND),
        q_tail=gl.allocate_shared_memory(dtype, [SHAPE.tile, _TAIL], OPERAND),
        k=gl.allocate_shared_memory(dtype, [SHAPE.ring, 1, 1, _KEYS, _QUARTER], k_main.layout),
        tails=gl.allocate_shared_memory(dtype, [_TAILS, 1, 1, _KEYS, _TAIL], k_tail.layout),
        weights=gl.allocate_shared_memory(dtype, [_TAILS, SHAPE.tile, _KEYS], OPERAND),
        acc_scale=gl.allocate_shared_memory(gl.float32, [_TAILS, SHAPE.tile], VECTOR),
        weight=gl.allocate_shared_memory(gl.float32, [SHAPE.tile], VECTOR),
    )
    RING: gl.constexpr = SHAPE.ring
    barriers = Barriers(
        k_ready=new_barriers(RING, 1),
        k_free=new_barriers(RING, 1),
        tail_ready=new_barriers(_TAILS, 1),
        weights_ready=new_barriers(_TAILS, 1),
        result_ready=new_barriers(1, 1),
        result_free=new_barriers(1, 1),
    )
    sources = common.Sources(cur_pos, range_first, range_end, batch, capacity, window)
    work, position = common.work_of_program(sources, kv_heads, partitions, max_splits, SHAPE, BATCH)
    pools = common.Pools(k_main, k_tail, k_scales, table, table_stride)
    results = common.Results(out, out_strides, lse, lse_strides, part_out, part_lse, sinks)
    program = common.Program(q, q_strides, memory, barriers, sources, position, work, results, scale_log2, pools)
    gl.warp_specialize(
        [(_score, (program, SHAPE)), (_add_values, (program, SHAPE)), (common.load_quarters, (program, SHAPE))],
        [4, 1],
        [_VALUE_CONSUMER, _PRODUCER],
    )
    invalidate_barriers(barriers)


@gluon.jit
def _score(program, SHAPE: gl.constexpr):
    """Scores [keys, rows], running maximum, weights and their sum; at the end the log-sum-exp."""
    memory, barriers, position, scale_log2 = program.memory, program.barriers, program.position, program.scale_log2
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
            for quarter in gl.static_range(4):
                memory.q.index(quarter).store(common.load_queries(program, item, quarter * _QUARTER, _QUARTER, SHAPE))
            memory.q_tail.store(common.load_queries(program, item, 4 * _QUARTER, _TAIL, SHAPE))
            common.fence_warps()
            raw_max = gl.full([SHAPE.tile], 0.0, gl.float32, across) + lowest_of(scale_log2)
            total = gl.full([_KEYS, SHAPE.tile], 0.0, gl.float32, grid)  # summed over the keys once, at the end
            for tile in range(item.tiles):
                key = item.begin + tile * _KEYS
                slot = step % _TAILS
                scores = gl.full([_KEYS, SHAPE.tile], 0.0, gl.float32, grid)
                for quarter in gl.static_range(4):
                    at = 4 * step + quarter
                    mbarrier.wait(barriers.k_ready.index(at % RING), at // RING & 1)
                    keys, queries = common.matrix(memory.k, at % RING), memory.q.index(quarter).permute([1, 0])
                    scores = warpgroup_mma(keys, queries, scores, use_acc=quarter > 0, is_async=True)
                mbarrier.wait(barriers.tail_ready.index(slot), step // _TAILS & 1)
                keys, queries = common.matrix(memory.tails, slot), memory.q_tail.permute([1, 0])
                scores = warpgroup_mma_wait(0, [warpgroup_mma(keys, queries, scores, is_async=True)])

                if (key < item.inner) | (key + _KEYS > item.edge):
                    visible = (near >= (row_first - key)[None, :]) & (near < (row_end - key)[None, :])
                    scores = gl.where(visible, scores, float("-inf"))
                    if (key < item.first) | (key + _KEYS > item.stop):
                        common.clear_outside(memory.k, step, key, item, SHAPE)
                raw_max, factor, shift, acc_scale = common.update_raw_max(raw_max, gl.max(scores, 0), scale_log2)
                memory.acc_scale.index(slot).store(acc_scale)
                weights = gl.exp2(scores * factor[None, :] - shift[None, :])
                memory.weights.index(slot).permute([1, 0]).store(weights.to(memory.weights.dtype))
                common.fence_and_arrive(barriers.weights_ready, slot)
                total = total * acc_scale[None, :] + weights
                step += 1

            mbarrier.wait(barriers.result_free.index(0), (done & 1) ^ 1)
            sums = gl.sum(total, 0)
            row_max = row_max_of(raw_max, scale_log2)
            memory.weight.store(common.finish_rows(program, item, rows, row_max, sums, across, SHAPE))
            mbarrier.arrive(barriers.result_ready.index(0), count=1)
            done += 1
        position = common.after(position, item)


@gluon.jit
def _add_values(program, SHAPE: gl.constexpr):
    """Adds values times weights, [columns, rows]."""
    memory, barriers, position = program.memory, program.barriers, program.position
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.tile, 16])
    across: gl.constexpr = gl.SliceLayout(0, grid)
    RING: gl.constexpr = SHAPE.ring
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        if item.tiles > 0:
            nothing = gl.full([_QUARTER, SHAPE.tile], 0.0, gl.float32, grid)
            sums = (nothing, nothing, nothing, nothing)
            for _tile in range(item.tiles):
                slot = step % _TAILS
                mbarrier.wait(barriers.weights_ready.index(slot), step // _TAILS & 1)
                acc_scale = memory.acc_scale.index(slot).load(across)[None, :]
                weights = memory.weights.index(slot).permute([1, 0])
                products = ()
                for quarter in gl.static_range(4):
                    part = sums[quarter] * acc_scale
                    values = common.matrix(memory.k, (4 * step + quarter) % RING).permute([1, 0])
                    products = products + (warpgroup_mma(values, weights, part, is_async=True),)  # noqa: RUF005
                sums = ()
                for quarter in gl.static_range(4):
                    sums = sums + (warpgroup_mma_wait(3 - quarter, [products[quarter]]),)  # noqa: RUF005
                    mbarrier.arrive(barriers.k_free.index((4 * step + quarter) % RING), count=1)
                step += 1

            mbarrier.wait(barriers.result_ready.index(0), done & 1)
            weight = memory.weight.load(across)[None, :]
            mbarrier.arrive(barriers.result_free.index(0), count=1)
            done += 1
            for quarter in gl.static_range(4):
                part, column = sums[quarter] * weight, quarter * _QUARTER
                common.store_sums(program, item, part, column, 4 * _QUARTER, grid, SHAPE, AXIS=1)
        position = common.after(position, item)
