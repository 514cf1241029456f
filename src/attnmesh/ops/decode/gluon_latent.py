"""Decode over a paged latent cache (MLA) on Hopper in Gluon: keys of 576 columns, of which the first 512 are values.

Floors, for `rows` query heads and tokens per sequence over n keys: 2 * (576 + 512) * rows * n operations, 1152 * n
bytes. With 64 rows or fewer per KV head the bytes take longer on an H200, with 128 the operations. Then what limits
the speed is the bandwidth of shared memory (128 bytes per cycle), from which the tensor cores read, and its size: the
64 x 512 sums of a tile of rows fill half of the registers, its queries and two tiles of keys all of shared memory.

A program is persistent and has one tile of 64 rows: the query heads and tokens that share a KV head. It processes the
items of its share of the keys (see `gluon_schedule`), 64 keys at a time, by four groups of warps:

- the loader (one warp) lets the copy engine (TMA) fetch keys, by the block table: four quarters of 128 columns, which
  are the values, into a ring of nine, and a tail of 64 columns into a ring of three;
- the scorer multiplies queries and keys, keeps the running maximum, and writes the weights over the tail of the keys.
  It starts the products of the next tile before the softmax of this one, so that the tensor cores never wait for it.
  The first quarter of the queries is in its registers, which leaves room for a quarter of keys in shared memory;
- two averagers have two quarters of the output columns each, and add weights times values.

Each key is read from memory once per tile of rows. Tiles of the same KV head run next to each other, so that all but
the first find it in L2.

Synchronization: a quarter (or tail) is `ready` when the copy engine has written it, and a quarter is `free` when the
averager that reads it last is done. By the time that the quarters of a tile are free for the next but one, both
averagers are done with the tile before: with its tail, weights and decay, which therefore need no barrier of their own.
Barriers are waited for by the parity of their phase, counted over all items; waiting for the phase before the first
succeeds at once.

Keys outside of an item (past the end of a sequence, or before a window) may hold anything: their scores are masked, and
since 0 * NaN is NaN the scorer clears them in shared memory. Blocks outside the pool are read as 0 by the copy engine;
the merge kernel records them.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False, disable-error-code="assignment"
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.gluon_schedule import KEYS, Sources, after, item_at, row_bounds, share_of_program
from attnmesh.ops.decode.triton import DecodeTiles, Launch, v_in_k
from attnmesh.ops.storage import values_of

ROWS = 64  # of a tile: the rows of one matrix instruction
D_V, D_TAIL = 512, 64
TILES = DecodeTiles(rows=ROWS, keys=KEYS, warps=4, stages=2, resident=1)
BLOCK_SIZES = (16, 32, 64, 128, 256)
LOG2_E = 1.4426950408889634
_ROWS, _KEYS, _QUARTER, _TAIL = gl.constexpr(ROWS), gl.constexpr(KEYS), gl.constexpr(D_V // 4), gl.constexpr(D_TAIL)
_LOG2_E, _LN_2 = gl.constexpr(LOG2_E), gl.constexpr(0.6931471805599453)
_QUARTERS, _TAILS = gl.constexpr(9), gl.constexpr(3)  # of keys in shared memory
_SLACK = gl.constexpr(8.0)  # weights may grow to 2**_SLACK before the sums are rescaled
_AVERAGER, _LOADER = gl.constexpr(160), gl.constexpr(24)  # registers per thread; the scorer has the rest of 512
NOT_SPECIALIZED = ["batch", "capacity", "window", "shares", "max_splits", "scale_log2", "table_stride"]


class Shape(NamedTuple):
    """The constants of a kernel."""

    tokens: Any
    group: Any
    rows: Any  # per tile, in the buffers of splits
    block_size: Any
    piece: Any  # keys per copy
    unit: Any
    fixed: Any


class Memory(NamedTuple):
    """Shared memory."""

    q: Any  # all but the first quarter
    q_tail: Any
    k: Any
    tails: Any  # and then the weights [ROWS, KEYS]
    decay: Any  # factor of the sums so far after a new maximum
    weight: Any  # of the sums at the end of an item


class Barriers(NamedTuple):
    """The barriers of quarters, tails and results."""

    k_ready: Any
    k_free: Any
    tail_ready: Any
    decay_ready: Any
    weights_ready: Any
    result_ready: Any
    result_free: Any


class Place(NamedTuple):
    """The tile of rows of this program, and its share."""

    head: Any
    head_tile: Any
    heads: Any
    row_begin: Any
    share: Any


class Results(NamedTuple):
    """Where results are written: of whole sequences, and of splits."""

    out: Any
    out_strides: Any
    lse: Any
    lse_strides: Any
    part_out: Any
    part_lse: Any
    sinks: Any


def refusal(call: DecodeCall) -> str | None:
    """The reason why the kernel cannot serve these tensors; None if it can."""
    k = values_of(call.k)
    if not v_in_k(call) or (call.q.shape[3], call.value_dim) != (D_V + D_TAIL, D_V):
        return f"its kernel takes k_pool of head_dim {D_V + D_TAIL}, and v_pool as k_pool[..., :{D_V}]"
    if not call.paged or call.block_size not in BLOCK_SIZES:
        return f"its kernel takes pools of block_size {', '.join(map(str, BLOCK_SIZES))}"
    if call.mask is not None or call.tree is not None or call.shared:
        return "its kernel takes no mask, tree or share_cache"
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        return f"its kernel takes fp16 and bf16, not {call.q.dtype}"
    if not k.numel() or k.data_ptr() % 16 or any(n * k.itemsize % 16 for n in k.stride()[:3]):
        return "its kernel takes pools that are not empty and whose rows are aligned to 16 bytes"
    return None


def launch(call: DecodeCall, state: State, first_sequence: int) -> None:
    """Out and lse of a call without a `refusal`, in two launches."""
    shared = Launch.of(call, state, TILES)
    q, constants = shared.q, shared.constants
    table, table_stride, cur_pos, first, end = shared.sources
    batch, kv_heads, _, capacity, window, shares, max_splits = shared.numbers
    piece = min(KEYS, call.block_size)
    shape = Shape(
        q.shape[2], call.group, shared.rows, call.block_size, piece, constants["UNIT"], constants["FIXED"],
    )  # fmt: skip
    with torch.cuda.device_of(q):
        _attend_kernel[(shared.shares * shared.heads,)](
            _descriptor(call, 0, D_V // 4, piece), _descriptor(call, D_V, D_TAIL, piece), q, q.stride()[:3],
            table, table_stride, cur_pos, first, end, *shared.written, *shared.parts, shared.sinks,
            batch, kv_heads, capacity, window, shares, max_splits, call.scale * LOG2_E,
            SHAPE=shape, BATCH=constants["BATCH"], EARLY=constants["EARLY"], num_warps=4,
        )  # fmt: skip
        shared.merge(first_sequence)


def _descriptor(call: DecodeCall, begin: int, width: int, piece: int) -> Any:
    """The copy engine's view of the pool from a column on, as [Hkv, blocks, block_size, columns]."""
    pool = values_of(call.k).permute(2, 0, 1, 3)[..., begin:]
    # A dimension of size 1 is never stepped along, but its stride would have to be aligned.
    strides = [D_V + D_TAIL if n == 1 else stride for n, stride in zip(pool.shape[:3], pool.stride()[:3], strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(pool, list(pool.shape), [*strides, 1], [1, 1, piece, width], layout)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def _attend_kernel(
    k_main, k_tail, q, q_strides, table, table_stride, cur_pos, range_first, range_end,
    out, out_strides, lse, lse_strides, part_out, part_lse, sinks,
    batch, kv_heads, capacity, window, shares, max_splits, scale_log2,
    SHAPE: gl.constexpr, BATCH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Attends over this program's share of the keys; writes whole sequences to out, and splits to the buffers."""
    if EARLY:
        gdc_launch_dependents()  # the merge kernel may start: it waits for the end of this kernel itself
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_memory = gl.allocate_shared_memory(dtype, [3, _ROWS, _QUARTER], wide)
    q_tail = gl.allocate_shared_memory(dtype, [_ROWS, _TAIL], wide)
    keys = gl.allocate_shared_memory(dtype, [_QUARTERS, 1, 1, _KEYS, _QUARTER], k_main.layout)
    tails = gl.allocate_shared_memory(dtype, [_TAILS, 1, 1, _KEYS, _TAIL], k_tail.layout)
    decay = gl.allocate_shared_memory(gl.float32, [_TAILS, _ROWS], flat)
    weight = gl.allocate_shared_memory(gl.float32, [_ROWS], flat)

    once: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [_QUARTERS, 1], once)
    k_free = gl.allocate_shared_memory(gl.int64, [_QUARTERS, 1], once)
    tail_ready = gl.allocate_shared_memory(gl.int64, [_TAILS, 1], once)
    decay_ready = gl.allocate_shared_memory(gl.int64, [_TAILS, 1], once)
    weights_ready = gl.allocate_shared_memory(gl.int64, [_TAILS, 1], once)
    result_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    result_free = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    for slot in gl.static_range(_QUARTERS):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=1)
    for slot in gl.static_range(_TAILS):
        mbarrier.init(tail_ready.index(slot), count=1)
        mbarrier.init(decay_ready.index(slot), count=1)
        mbarrier.init(weights_ready.index(slot), count=1)
    mbarrier.init(result_ready.index(0), count=1)
    mbarrier.init(result_free.index(0), count=2)
    fence_async_shared()

    sources = Sources(cur_pos, range_first, range_end, batch, capacity, window)
    tiles = (SHAPE.group * SHAPE.tokens + _ROWS - 1) // _ROWS
    heads = kv_heads * tiles
    head_tile = gl.program_id(0) % heads
    share = gl.program_id(0) // heads
    place = Place(head_tile // tiles, head_tile, heads, head_tile % tiles * _ROWS, share)
    position = share_of_program(sources, share.to(gl.int64), shares, max_splits, SHAPE.tokens, SHAPE.unit, BATCH)
    memory = Memory(q_memory, q_tail, keys, tails, decay, weight)
    barriers = Barriers(k_ready, k_free, tail_ready, decay_ready, weights_ready, result_ready, result_free)
    results = Results(out, out_strides, lse, lse_strides, part_out, part_lse, sinks)
    gl.warp_specialize(
        [
            (_score, (q, q_strides, memory, barriers, sources, position, place, results, scale_log2, SHAPE)),
            (_average, (0, memory, barriers, sources, position, place, results, SHAPE)),
            (_average, (1, memory, barriers, sources, position, place, results, SHAPE)),
            (_load, (k_main, k_tail, table, table_stride, memory, barriers, sources, position, place, SHAPE)),
        ],
        [4, 4, 1],
        [_AVERAGER, _AVERAGER, _LOADER],
    )


@gluon.jit
def _load(k_main, k_tail, table, table_stride, memory, barriers, sources, position, place, SHAPE: gl.constexpr):
    """Lets the copy engine fetch the keys of every tile, as soon as there is room."""
    step = 0  # tiles so far, of all items
    while position.at < position.stop:
        item = item_at(sources, position, SHAPE.tokens, SHAPE.unit, SHAPE.fixed)
        table_row = table + position.sequence.to(gl.int64) * table_stride
        for tile in range(item.tiles):
            key = item.begin + tile * _KEYS
            for quarter in gl.static_range(4):
                slot = (4 * step + quarter) % _QUARTERS
                mbarrier.wait(barriers.k_free.index(slot), ((4 * step + quarter) // _QUARTERS & 1) ^ 1)
                ready = barriers.k_ready.index(slot)
                _fetch(k_main, memory.k.index(slot), ready, table_row, key, quarter * _QUARTER, item, place, SHAPE)
            slot = step % _TAILS
            ready = barriers.tail_ready.index(slot)
            _fetch(k_tail, memory.tails.index(slot), ready, table_row, key, 0, item, place, SHAPE)
            step += 1
        position = after(position, item)


@gluon.jit
def _fetch(blocks, memory, ready, table_row, key, column, item, place, SHAPE: gl.constexpr):
    """Some columns of a tile of keys, one block after another. Blocks past the item are outside the pool: 0."""
    PIECES: gl.constexpr = _KEYS // SHAPE.piece
    mbarrier.expect(ready, blocks.block_type.nbytes * PIECES)
    for piece in gl.static_range(PIECES):
        begin = key + piece * SHAPE.piece
        block = gl.load(table_row + begin // SHAPE.block_size, mask=begin < item.stop, other=-1)
        into = memory.slice(piece * SHAPE.piece, SHAPE.piece, dim=2)
        tma.async_copy_global_to_shared(blocks, [place.head, block, begin % SHAPE.block_size, column], ready, into)


@gluon.jit
def _locate(place, layout: gl.constexpr, SHAPE: gl.constexpr):
    """Whether the rows of this program exist, their query heads, and their tokens."""
    row = place.row_begin + gl.arange(0, _ROWS, layout=layout)
    return row < SHAPE.group * SHAPE.tokens, place.head * SHAPE.group + row // SHAPE.tokens, row % SHAPE.tokens


@gluon.jit
def _offsets(strides, sequence, head, token):
    """The offsets of rows in a tensor [sequences, query heads, tokens, ...]."""
    return sequence.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1] + token.to(gl.int64) * strides[2]


@gluon.jit
def _split(position, item, place, SHAPE: gl.constexpr):
    """The first row of an item in the buffers of splits."""
    if SHAPE.fixed:
        slot = position.at
    else:
        slot = 2 * place.share.to(gl.int64) + gl.where(item.starts, 1, 0)
    return (slot * place.heads + place.head_tile) * SHAPE.rows


@gluon.jit
def _score(
    q, q_strides, memory, barriers, sources, position, place, results, scale_log2, SHAPE: gl.constexpr
):  # fmt: skip
    """Scores, running maximum, weights and their sum; at the end the log-sum-exp."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    is_row, row_head, token = _locate(place, down, SHAPE)
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = item_at(sources, position, SHAPE.tokens, SHAPE.unit, SHAPE.fixed)
        if item.tiles > 0:
            row_first, row_end = row_bounds(sources, item, position.sequence, token, is_row, SHAPE.tokens)
            q_first = _load_queries(q, q_strides, memory, position.sequence, place, grid, SHAPE)
            peak = gl.full([_ROWS], float("-inf"), gl.float32, down)
            total = gl.full([_ROWS], 0.0, gl.float32, down)
            scores = warpgroup_mma_wait(0, [_products(q_first, memory, barriers, step, grid)])
            for tile in range(1, item.tiles):
                key = item.begin + (tile - 1) * _KEYS
                following = _products(q_first, memory, barriers, step + 1, grid)
                peak, total = _weigh(
                    scores, peak, total, key, row_first, row_end, item, memory, barriers, step, scale_log2, grid
                )
                scores = warpgroup_mma_wait(0, [following])
                step += 1
            key = item.begin + (item.tiles - 1) * _KEYS
            peak, total = _weigh(
                scores, peak, total, key, row_first, row_end, item, memory, barriers, step, scale_log2, grid
            )
            step += 1

            mbarrier.wait(barriers.result_free.index(0), (done & 1) ^ 1)
            if item.starts & item.ends:
                # A sink is one more key without a value. A row without any key has total 0 and peak -inf.
                sink = gl.full([_ROWS], float("-inf"), gl.float32, down)
                if results.sinks is not None:
                    sink = gl.load(results.sinks + row_head, mask=is_row, other=float("-inf")).to(gl.float32) * _LOG2_E
                top = gl.maximum(peak, sink)
                shift = gl.where(top == float("-inf"), 0.0, top)
                decay = gl.exp2(peak - shift)
                total = total * decay + gl.exp2(gl.where(sink == float("inf"), 0.0, sink - shift))
                memory.weight.store(decay / gl.where(total == 0.0, 1.0, total))
                row = _offsets(results.lse_strides, position.sequence, row_head, token)
                gl.store(results.lse + row, (shift + gl.log2(total)) * _LN_2, mask=is_row)
            else:
                memory.weight.store(1.0 / gl.where(total == 0.0, 1.0, total))
                row = _split(position, item, place, SHAPE) + gl.arange(0, _ROWS, layout=down)
                gl.store(results.part_lse + row, peak + gl.log2(total), mask=is_row)
            mbarrier.arrive(barriers.result_ready.index(0), count=1)
            done += 1
        position = after(position, item)


@gluon.jit
def _load_queries(q, q_strides, memory, sequence, place, grid: gl.constexpr, SHAPE: gl.constexpr):
    """Writes all but the first quarter of the queries to shared memory; returns the first."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    held: gl.constexpr = gl.DotOperandLayout(0, grid, 2)
    is_row, head, token = _locate(place, gl.SliceLayout(1, lines), SHAPE)
    rows = q + _offsets(q_strides, sequence, head, token)[:, None]
    column = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, lines))[None, :]
    tail = gl.arange(0, _TAIL, layout=gl.SliceLayout(0, lines))[None, :]
    first = gl.load(rows + column, mask=is_row[:, None], other=0.0)
    for quarter in gl.static_range(1, 3):
        values = gl.load(rows + (column + quarter * _QUARTER), mask=is_row[:, None], other=0.0)
        memory.q.index(quarter - 1).store(values)
    memory.q_tail.store(gl.load(rows + (tail + 4 * _QUARTER), mask=is_row[:, None], other=0.0))
    values = gl.load(rows + (column + 3 * _QUARTER), mask=is_row[:, None], other=0.0)
    memory.q.index(2).store(first)  # on its way to registers
    first = memory.q.index(2).load(held)
    gl.thread_barrier()  # all warps have read it
    memory.q.index(2).store(values)
    fence_async_shared()
    gl.thread_barrier()
    return first


@gluon.jit
def _products(q_first, memory, barriers, step, grid: gl.constexpr):
    """Starts the products of the queries with a tile of keys."""
    scores = gl.zeros([_ROWS, _KEYS], gl.float32, grid)
    slot = 4 * step % _QUARTERS
    mbarrier.wait(barriers.k_ready.index(slot), 4 * step // _QUARTERS & 1)
    scores = warpgroup_mma(q_first, _matrix(memory.k, slot).permute([1, 0]), scores, use_acc=False, is_async=True)
    for quarter in gl.static_range(1, 4):
        slot = (4 * step + quarter) % _QUARTERS
        mbarrier.wait(barriers.k_ready.index(slot), (4 * step + quarter) // _QUARTERS & 1)
        keys = _matrix(memory.k, slot).permute([1, 0])
        scores = warpgroup_mma(memory.q.index(quarter - 1), keys, scores, is_async=True)
    slot = step % _TAILS
    mbarrier.wait(barriers.tail_ready.index(slot), step // _TAILS & 1)
    return warpgroup_mma(memory.q_tail, _matrix(memory.tails, slot).permute([1, 0]), scores, is_async=True)


@gluon.jit
def _matrix(memory, slot):
    return memory.index(slot).reshape([_KEYS, memory.shape[4]])


@gluon.jit
def _weigh(
    scores, peak, total, key, row_first, row_end, item, memory, barriers, step, scale_log2, grid: gl.constexpr
):  # fmt: skip
    """The weights of a tile, and the decay of what was before, for the averagers; returns the new maximum and sum."""
    slot = step % _TAILS
    scores = scores * scale_log2
    if (key < item.inner) | (key + _KEYS > item.edge):
        column = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, grid))[None, :]
        visible = (column >= (row_first - key)[:, None]) & (column < (row_end - key)[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        if (key < item.first) | (key + _KEYS > item.stop):
            _clear(memory.k, step, key, item)
    highest = gl.max(scores, 1)
    new_peak = gl.where(highest > peak + _SLACK, highest, peak)
    # No visible key yet: subtract 0, because -inf - -inf is NaN.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = gl.exp2(peak - shift)
    memory.decay.index(slot).store(decay)
    # The averagers rescale while the weights are computed.
    mbarrier.arrive(barriers.decay_ready.index(slot), count=1)
    weights = gl.exp2(scores - shift[:, None])
    _matrix(memory.tails, slot).store(weights.to(memory.tails.dtype))
    fence_async_shared()
    mbarrier.arrive(barriers.weights_ready.index(slot), count=1)
    return new_peak, total * decay + gl.sum(weights, 1)


@gluon.jit
def _clear(memory, step, key, item):
    """Keys outside of the item become 0, in the columns that are values."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = key + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, lines))
    inside = ((at >= item.first) & (at < item.stop))[:, None]
    for quarter in gl.static_range(4):
        tile = _matrix(memory, (4 * step + quarter) % _QUARTERS)
        for part in gl.static_range(2):
            some = tile.slice(part * (_QUARTER // 2), _QUARTER // 2, dim=1)
            values = some.load(lines)
            some.store(gl.where(inside, values, gl.zeros([_KEYS, _QUARTER // 2], values.dtype, lines)))


@gluon.jit
def _average(PART: gl.constexpr, memory, barriers, sources, position, place, results, SHAPE: gl.constexpr):
    """Adds weights times values, for two quarters of the output columns."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _QUARTER, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    step = 0  # tiles so far, of all items
    done = 0  # items so far that have any tile
    while position.at < position.stop:
        item = item_at(sources, position, SHAPE.tokens, SHAPE.unit, SHAPE.fixed)
        if item.tiles > 0:
            left = gl.zeros([_ROWS, _QUARTER], gl.float32, grid)
            right = gl.zeros([_ROWS, _QUARTER], gl.float32, grid)
            for _tile in range(item.tiles):
                slot = step % _TAILS
                turn = step // _TAILS & 1
                mbarrier.wait(barriers.decay_ready.index(slot), turn)
                decay = memory.decay.index(slot).load(down)
                # Rarely taken; otherwise 128 multiplications per thread would precede the products of every tile.
                if gl.min(decay, 0) < 1.0:
                    left = left * decay[:, None]
                    right = right * decay[:, None]
                mbarrier.wait(barriers.weights_ready.index(slot), turn)
                weights = _matrix(memory.tails, slot)
                near, far = (4 * step + PART) % _QUARTERS, (4 * step + PART + 2) % _QUARTERS
                left = warpgroup_mma(weights, _matrix(memory.k, near), left, is_async=True)
                right = warpgroup_mma(weights, _matrix(memory.k, far), right, is_async=True)
                left = warpgroup_mma_wait(1, [left])
                mbarrier.arrive(barriers.k_free.index(near), count=1)
                right = warpgroup_mma_wait(0, [right])
                mbarrier.arrive(barriers.k_free.index(far), count=1)
                step += 1

            mbarrier.wait(barriers.result_ready.index(0), done & 1)
            weight = memory.weight.load(down)[:, None]
            mbarrier.arrive(barriers.result_free.index(0), count=1)
            done += 1
            _store(results, left * weight, PART * _QUARTER, position, item, place, grid, SHAPE)
            _store(results, right * weight, (PART + 2) * _QUARTER, position, item, place, grid, SHAPE)
        position = after(position, item)


@gluon.jit
def _store(results, sums, COLUMN: gl.constexpr, position, item, place, grid: gl.constexpr, SHAPE: gl.constexpr):
    """A quarter of the output columns, of a whole sequence or of a split."""
    down: gl.constexpr = gl.SliceLayout(1, grid)
    is_row, head, token = _locate(place, down, SHAPE)
    column = COLUMN + gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, grid))[None, :]
    if item.starts & item.ends:
        row = _offsets(results.out_strides, position.sequence, head, token)
        gl.store(results.out + row[:, None] + column, sums.to(results.out.dtype.element_ty), mask=is_row[:, None])
    else:
        row = (_split(position, item, place, SHAPE) + gl.arange(0, _ROWS, layout=down)) * (4 * _QUARTER)
        gl.store(results.part_out + row[:, None] + column, sums, mask=is_row[:, None])
