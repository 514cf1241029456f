"""Decode over a paged cache on Hopper for many rows (query heads and tokens) per KV head: GQA with large groups.

A row of the matrix instructions is a query head and token of the KV head, 64 in a group of warps. Two groups of warps
(the consumers) multiply queries and keys, keep the row maximum, and add weights times values, all in registers:

- with at most 64 rows, both have the same rows and take the tiles of 64 keys in turns; at the end of an item the second
  hands its sums to the first (`halves` is 1);
- with up to 128 rows each has 64 of them and sees all tiles (`halves` is 2): every key is read once for all rows.

One more warp, the producer, lets the copy engine (TMA) fetch keys and values, by the block table, into rings of tiles.
Tiles of keys and of values are `ready` when they have arrived and `free` when the groups that read them are done.
Barriers are waited for by the parity of their phase, counted over all items. See `gluon_latent` for keys outside of an
item.
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
from attnmesh.ops.storage import Quantized, values_of

HEAD_DIMS = (64, 128)
MIN_ROWS = 16
_ROWS, _KEYS = gl.constexpr(64), gl.constexpr(common.KEYS)
_SECOND, _PRODUCER = gl.constexpr(232), gl.constexpr(24)  # registers per thread


# Shared memory. The sums, maxima and totals are of the second group.
Memory = namedtuple("Memory", "q k v sums row_max total")
# The copy engine's views of the pools, and the block table.
Pools = namedtuple("Pools", "k v table table_stride")
# The barriers of tiles, and of the results of the second group.
Barriers = namedtuple("Barriers", "k_ready k_free v_ready v_free cleared sums_ready sums_free")


def why_not(call: DecodeCall) -> str | None:
    """The reason why the kernel cannot serve these tensors; None if it can."""
    head_dim, rows = call.q.shape[3], call.group * call.q.shape[2]
    if isinstance(call.k, Quantized) or isinstance(call.v, Quantized):
        return "its kernel takes plain caches"
    if head_dim not in HEAD_DIMS or call.value_dim != head_dim or rows < MIN_ROWS:
        dims = " and ".join(map(str, HEAD_DIMS))
        return f"its kernel takes head_dim {dims}, and {MIN_ROWS} or more query heads and tokens per KV head"
    return common.why_not_pools(call, call.k, call.v)


def launch(call: DecodeCall, state: State, first_sequence: int) -> Launches:
    """Out and lse of a call whose `why_not` is None, in two launches."""
    halves = 1 if call.group * call.q.shape[2] <= 64 else 2
    schedule = Schedule.of(call, state, DecodeTiles(rows=64 * halves, keys=common.KEYS, warps=4, stages=2, resident=1))
    head_dim = call.q.shape[3]
    # Even, so that all tiles in a slot are read by one group of warps, which never waits for a phase too far ahead.
    ring = (4 if halves == 1 else 6) * (128 // head_dim)
    pools = (values_of(call.k), head_dim), (values_of(call.v), head_dim)
    return common.launch_kernel(_attend_kernel, schedule, pools, 64, ring, first_sequence, D=head_dim, HALVES=halves)


@gluon.jit(do_not_specialize=common.NOT_SPECIALIZED)
def _attend_kernel(
    k_blocks, v_blocks, q, q_strides, table, table_stride, cur_pos, range_first, range_end,
    out, out_strides, lse, lse_strides, part_out, part_lse, sinks,
    batch, kv_heads, capacity, window, partitions, max_splits, scale_log2,
    SHAPE: gl.constexpr, D: gl.constexpr, HALVES: gl.constexpr, BATCH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Attends over this program's partition of the keys; writes whole sequences to out, and splits to the buffers."""
    if EARLY:
        gdc_launch_dependents()  # the merge kernel may start: it waits for the end of this kernel itself
    dtype: gl.constexpr = q.dtype.element_ty
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = Memory(
        gl.allocate_shared_memory(dtype, [2, _ROWS, D], OPERAND),
        gl.allocate_shared_memory(dtype, [SHAPE.ring, 1, 1, _KEYS, D], k_blocks.layout),
        gl.allocate_shared_memory(dtype, [SHAPE.ring, 1, 1, _KEYS, D], v_blocks.layout),
        gl.allocate_shared_memory(gl.float32, [_ROWS if HALVES == 1 else 1, D], plain),
        gl.allocate_shared_memory(gl.float32, [_ROWS], VECTOR),
        gl.allocate_shared_memory(gl.float32, [_ROWS], VECTOR),
    )
    RING: gl.constexpr = SHAPE.ring
    barriers = Barriers(
        k_ready=new_barriers(RING, 1), k_free=new_barriers(RING, HALVES), v_ready=new_barriers(RING, 1),
        v_free=new_barriers(RING, HALVES), cleared=new_barriers(1, 2), sums_ready=new_barriers(1, 1),
        sums_free=new_barriers(1, 1),
    )  # fmt: skip
    sources = common.Sources(cur_pos, range_first, range_end, batch, capacity, window)
    work, position = common.work_of_program(sources, kv_heads, partitions, max_splits, SHAPE, BATCH)
    results = common.Results(out, out_strides, lse, lse_strides, part_out, part_lse, sinks)
    pools = Pools(k_blocks, v_blocks, table, table_stride)
    program = common.Program(q, q_strides, memory, barriers, sources, position, work, results, scale_log2, pools)
    gl.warp_specialize(
        [(_attend, (0, program, SHAPE, D, HALVES)), (_attend, (1, program, SHAPE, D, HALVES)),
         (_load, (program, SHAPE))],
        [4, 1], [_SECOND, _PRODUCER],
    )  # fmt: skip
    invalidate_barriers(barriers)


@gluon.jit
def _load(program, SHAPE: gl.constexpr):
    """Lets the copy engine fetch the keys and values of every tile, as soon as there is room."""
    memory, barriers, pools, position = program.memory, program.barriers, program.pools, program.position
    RING: gl.constexpr = SHAPE.ring
    step = 0  # tiles so far, of all items
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        for tile in range(item.tiles):
            key = item.begin + tile * _KEYS
            blocks = common.blocks_of(item, key, SHAPE)
            slot = step % RING
            before = (step // RING & 1) ^ 1
            mbarrier.wait(barriers.k_free.index(slot), before)
            common.fetch(program, pools.k, memory.k.index(slot), barriers.k_ready.index(slot), blocks, key, 0, SHAPE)
            mbarrier.wait(barriers.v_free.index(slot), before)
            common.fetch(program, pools.v, memory.v.index(slot), barriers.v_ready.index(slot), blocks, key, 0, SHAPE)
            step += 1
        position = common.after(position, item)


@gluon.jit
def _attend(PART: gl.constexpr, program, SHAPE: gl.constexpr, D: gl.constexpr, HALVES: gl.constexpr):
    """A consumer: attends with 64 rows over all tiles or, with one half, over every second tile."""
    memory, barriers, position, scale_log2 = program.memory, program.barriers, program.position, program.scale_log2
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    RING: gl.constexpr = SHAPE.ring
    FIRST: gl.constexpr = PART * _ROWS if HALVES == 2 else 0  # row of this group
    rows = common.locate_rows(program.work, down, SHAPE, FIRST)
    column = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, grid))[None, :]
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    clears = 0  # tiles so far that are partly outside of their item
    while position.at < position.stop:
        item = common.item_at(program, position, SHAPE)
        if item.tiles > 0:
            row_first, row_end = common.row_bounds(program, item, rows, SHAPE)
            memory.q.index(PART).store(common.load_queries(program, item, 0, D, SHAPE, FIRST))
            common.fence_warps()
            raw_max = gl.zeros([_ROWS], gl.float32, down) + lowest_of(scale_log2)
            total = gl.full([_ROWS], 0.0, gl.float32, down)
            sums = gl.zeros([_ROWS, D], gl.float32, wide)
            # Of one half: the tiles whose slot in the ring, which is even, is always this group's.
            first = (step + PART) % 2 * (2 - HALVES)
            for tile in range(first, item.tiles, 3 - HALVES):
                key = item.begin + tile * _KEYS
                slot = (step + tile) % RING
                turn = (step + tile) // RING & 1
                mbarrier.wait(barriers.k_ready.index(slot), turn)
                scores = gl.zeros([_ROWS, _KEYS], gl.float32, grid)
                queries, keys = memory.q.index(PART), common.matrix(memory.k, slot).permute([1, 0])
                scores = warpgroup_mma(queries, keys, scores, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, [scores])
                mbarrier.arrive(barriers.k_free.index(slot), count=1)
                mbarrier.wait(barriers.v_ready.index(slot), turn)
                if (key < item.inner) | (key + _KEYS > item.edge):
                    visible = (column >= (row_first - key)[:, None]) & (column < (row_end - key)[:, None])
                    scores = gl.where(visible, scores, float("-inf"))
                    if (key < item.first) | (key + _KEYS > item.stop):
                        tile_part = common.matrix(memory.v, slot).slice(
                            PART * (HALVES - 1) * (D // 2), D // HALVES, dim=1
                        )
                        common.clear_columns(tile_part, key, item)
                        common.fence_warps()
                        if HALVES == 2:  # each clears half of the columns
                            mbarrier.arrive(barriers.cleared.index(0), count=1)
                            mbarrier.wait(barriers.cleared.index(0), clears & 1)
                            clears += 1
                raw_max, factor, shift, acc_scale = common.update_raw_max(raw_max, gl.max(scores, 1), scale_log2)
                weights = gl.exp2(scores * factor[:, None] - shift[:, None])
                total = total * acc_scale + gl.sum(weights, 1)
                operand = gl.convert_layout(weights.to(memory.v.dtype), gl.DotOperandLayout(0, wide, 2))
                sums = sums * gl.convert_layout(acc_scale, gl.SliceLayout(1, wide))[:, None]
                sums = warpgroup_mma(operand, common.matrix(memory.v, slot), sums, is_async=True)
                sums = warpgroup_mma_wait(0, [sums])
                mbarrier.arrive(barriers.v_free.index(slot), count=1)
            step += item.tiles

            row_max = row_max_of(raw_max, scale_log2)
            if HALVES == 1 and PART == 1:
                mbarrier.wait(barriers.sums_free.index(0), (done & 1) ^ 1)
                memory.sums.store(sums)
                memory.row_max.store(row_max)
                memory.total.store(total)
                mbarrier.arrive(barriers.sums_ready.index(0), count=1)
            else:
                if HALVES == 1:
                    mbarrier.wait(barriers.sums_ready.index(0), done & 1)
                    other = memory.row_max.load(down)
                    both = gl.maximum(row_max, other)
                    shift = gl.where(both == float("-inf"), 0.0, both)
                    mine, theirs = gl.exp2(row_max - shift), gl.exp2(other - shift)
                    total = total * mine + memory.total.load(down) * theirs
                    sums = sums * gl.convert_layout(mine, gl.SliceLayout(1, wide))[:, None]
                    sums += memory.sums.load(wide) * gl.convert_layout(theirs, gl.SliceLayout(1, wide))[:, None]
                    row_max = both
                    mbarrier.arrive(barriers.sums_free.index(0), count=1)
                factor = common.finish_rows(program, item, rows, row_max, total, down, SHAPE, FIRST)
                sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, wide))[:, None]
                common.store_sums(program, item, sums, 0, D, wide, SHAPE, FIRST)
            done += 1
        position = common.after(position, item)
