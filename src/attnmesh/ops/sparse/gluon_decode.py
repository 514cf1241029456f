"""Sparse decode over latents in `fp8_ds_mla` on Hopper in Gluon: 512 values in 8 bits and 64 of the rope part.

A program is persistent and processes one work item after another: 64 heads of one token, or of a part of its slots.
Four groups of warps share an item, 64 keys at a time, double-buffered:

- the producer loads values in 8 bits into registers, half of a tile ahead, multiplies them by their scales and writes
  them to shared memory in 16 bits; it copies the scales, the rope part and the queries;
- the consumer of scores multiplies queries and keys, keeps the row maximum, and writes the weights over the tail of the
  keys (the rope part, which only scores need);
- two consumers of values each hold 256 of the 512 output columns in registers, and add weights times keys.

Synchronization: half of a tile is ready when the producer has written it, and the rope part, which scores need last,
when it has been copied. A half is free when the products of both consumers of values have read it. The weights and the
rescale factor of a tile live as long as its keys, so they need no barrier of their own before they are overwritten;
queries and inverse sums live as long as an item, and have one. Barriers are waited for by the parity of their phase,
counted over all items: stage `step % 2` is used for the `step // 2`-th time; waiting for the phase before the first
succeeds at once.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.gluon_widening import widen
from attnmesh.ops.launch import Launch, Recent, cdiv, is_hopper, repeat
from attnmesh.ops.sparse import gluon_common as common
from attnmesh.ops.sparse.gluon_common import COPIED, COPIED_ROWS, D_TAIL, D_V, HEADS, KEYS, LOG2_E, RESCALE_THRESHOLD
from attnmesh.ops.sparse.paged import SparseDecodeCall
from attnmesh.ops.storage import Quantized

_LOG2_E, _RESCALE_THRESHOLD = gl.constexpr(LOG2_E), gl.constexpr(RESCALE_THRESHOLD)
_HEADS, _KEYS = gl.constexpr(HEADS), gl.constexpr(KEYS)
_QUARTER, _TAIL = gl.constexpr(D_V // 4), gl.constexpr(D_TAIL)
# Per thread; the consumer of scores has the rest of 512.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(160), gl.constexpr(112)
_PRODUCER_THREADS = gl.constexpr(128)  # threads, each of which reports its own copies
_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))  # a lane has the scales of a row
# Of the words of a quarter. A lane has 16 columns of a row; the eight that write together write to different banks.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]], [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]], [[4, 0], [8, 0]], [],
        [KEYS, D_V // 16],
    )
)  # fmt: skip
NOT_SPECIALIZED = ["items", "heads", "span", "splits", "topk", "scale_log2"]
_launches: Recent[Launch] = Recent()


class Memory(NamedTuple):
    """Shared memory."""

    q: Any  # quarters
    q_tail: Any
    k: Any  # quarters of two tiles
    tail: Any  # of two tiles, and then the weights [HEADS, KEYS]
    scales: Any  # of two tiles
    rescale: Any  # factor of the sums so far after a new maximum
    inv_sum: Any  # 1 / sum of weights, at the end


# Of queries, scales, halves of tiles, tails, weights and inverse sums.
Barriers = namedtuple(
    "Barriers",
    "q_ready q_free scales_ready k_ready k_free tail_ready tail_free rescale_ready weights_ready "
    "inv_sum_ready inv_sum_free",
)
# The slots of all tokens, and how they are divided into items.
Work = namedtuple("Work", "slots lengths topk span splits heads items")


# 64 heads of `count` slots of a token from `begin` on: part number `part` of all tokens. With a fault an index of the
# token is outside of the cache.
Item = namedtuple("Item", "row part head_begin begin count tiles fault")
# The pool, with strides in units of 16 bytes; `codes` are the values in 8 bits, four in a word.
Source = namedtuple("Source", "codes code_steps scales scale_steps rope rope_steps")


NEEDS = "bfloat16 queries over fp8_ds_mla latents of 512 and a rope part of 64, rows aligned to 16 bytes, on Hopper"


def supports(q: Tensor, pool: object, d_v: int) -> bool:
    """Whether the kernel can serve queries [B, T, heads, 576] over a pool: they have what it NEEDS.

    The offset of a row in units of 16 bytes must fit in 32 bits: 32 GiB.
    """
    if not isinstance(pool, Quantized) or pool.rope is None:
        return False
    parts = (q.flatten(0, 1), pool.values, pool.scales, pool.rope)
    return (
        d_v == D_V
        and q.dtype == torch.bfloat16
        and (pool.values.shape[-1], pool.rope.shape[-1]) == (D_V, D_TAIL)
        and all(x.data_ptr() % 16 == 0 and all(n * x.itemsize % 16 == 0 for n in x.stride()[:2]) for x in parts)
        and all(len(x) * x.stride(0) * x.itemsize < 2**35 for x in (pool.values, pool.scales, pool.rope))
        and pool.scales.stride(3) == 1
        and is_hopper(q.device)
    )


def attend(
    call: SparseDecodeCall, slots: Tensor, lengths: Tensor, sinks: Tensor | None, results: tuple[Tensor, ...],
    *, span: int, splits: int,
) -> None:  # fmt: skip
    """Out, lse and largest scores of a call over `slots` [rows, topk], in parts of `span` slots.

    The results are [rows, heads, ...], or [rows, splits, heads, ...] in float32 with logarithms to base 2.
    """
    q, pool = call.q.flatten(0, 1), call.keys.pool
    assert isinstance(pool, Quantized)
    assert pool.rope is not None
    rows, heads, _ = q.shape
    items = rows * splits * cdiv(heads, HEADS)
    repeat(
        _launches, _attend_kernel, (min(items, common.processors(q)),),
        (
            q, _steps(q), pool.values[:, :, 0].view(torch.int32), _steps(pool.values), pool.scales, _steps(pool.scales),
            pool.rope, _steps(pool.rope), slots, lengths, *results, sinks,
            items, heads, span, splits, slots.shape[1], call.scale * LOG2_E,
        ),
        BLOCK_SIZE=pool.values.shape[1], SPLIT=splits > 1, NARROW_OUT=results[0].dtype.itemsize == 2, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip


def _steps(x: Tensor) -> tuple[int, int]:
    """The first two strides in units of 16 bytes, which the compiler must know to divide them."""
    return x.stride(0) * x.itemsize // 16, x.stride(1) * x.itemsize // 16


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def _attend_kernel(
    q, q_steps, pool, pool_steps, scales, scale_steps, rope, rope_steps, slots, lengths, out, lse, top, sinks,
    items, heads, span, splits, topk, scale_log2,
    BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr, NARROW_OUT: gl.constexpr,
):  # fmt: skip
    """Processes every num_programs-th item. Neighboring programs share a token: its keys are in L2 for the second."""
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    memory = Memory(
        gl.allocate_shared_memory(dtype, [4, _HEADS, _QUARTER], wide),
        gl.allocate_shared_memory(dtype, [_HEADS, _TAIL], wide),
        gl.allocate_shared_memory(dtype, [8, _KEYS, _QUARTER], wide),
        gl.allocate_shared_memory(dtype, [2, _KEYS, _TAIL], wide),
        gl.allocate_shared_memory(gl.float32, [2, _KEYS, 4], scale_layout),
        gl.allocate_shared_memory(gl.float32, [2, _HEADS], flat),
        gl.allocate_shared_memory(gl.float32, [_HEADS], flat),
    )
    barriers = Barriers(
        q_ready=new_barriers(1, _PRODUCER_THREADS),
        q_free=new_barriers(1, 1),
        scales_ready=new_barriers(2, _PRODUCER_THREADS),
        k_ready=new_barriers(4, 1),
        k_free=new_barriers(4, 2),
        tail_ready=new_barriers(2, _PRODUCER_THREADS),
        tail_free=new_barriers(2, 2),
        rescale_ready=new_barriers(2, 1),
        weights_ready=new_barriers(2, 1),
        inv_sum_ready=new_barriers(1, 1),
        inv_sum_free=new_barriers(1, 2),
    )
    fence_async_shared()
    gdc_wait()  # for the kernel before this one, which writes the slots and may still run
    if SPLIT:
        gdc_launch_dependents()  # the merge kernel may start: it waits for the end of this kernel itself

    work = Work(slots, lengths, topk, span, splits, heads, items)
    results = common.Results(out, lse, top, sinks)
    source = Source(pool, pool_steps, scales, scale_steps, rope, rope_steps)
    gl.warp_specialize(
        [(_score, (memory, barriers, work, results, scale_log2, SPLIT)),
         (_accumulate, (memory, barriers, work, out, 0, NARROW_OUT)),
         (_accumulate, (memory, barriers, work, out, 1, NARROW_OUT)),
         (_produce, (q, q_steps, source, memory, barriers, work, BLOCK_SIZE))],
        [4, 4, 4], [_CONSUMER_REGISTERS, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
    invalidate_barriers(barriers)


@gluon.jit
def _item(number, work):
    """An item by its number."""
    head_tiles = (work.heads + _HEADS - 1) // _HEADS
    part = number // head_tiles
    row = part // work.splits
    length = gl.load(work.lengths + row)
    begin = part % work.splits * work.span
    count = gl.maximum(gl.minimum(begin + work.span, length) - begin, 0)
    tiles = (count + _KEYS - 1) // _KEYS
    return Item(row.to(gl.int64), part.to(gl.int64), number % head_tiles * _HEADS, begin, count, tiles, length < 0)


@gluon.jit
def _produce(q, q_steps, source, memory, barriers, work, BLOCK_SIZE: gl.constexpr):
    """Converts the keys of the slots of each item, tile by tile, and copies its queries; 0 past the last slot."""
    step = 0  # tiles so far, of all items
    served = 0  # items so far that have any tile
    for number in range(gl.program_id(0), work.items, gl.num_programs(0)):
        item = _item(number, work)
        if item.tiles > 0:
            slots = work.slots + item.row * work.topk + item.begin
            count = item.count  # of the slots that are left
            slot = _slots(slots, count, _WORDS)
            first = _load(source, 0, slot, BLOCK_SIZE)
            second = _load(source, 1, slot, BLOCK_SIZE)
            _copy_scales(source, memory, barriers, step, _slots(slots, count, _SCALES), BLOCK_SIZE)
            _copy_queries(q, q_steps, memory, barriers, item, work, served)
            served += 1
            for tile in range(item.tiles):
                stage = step % 2
                turn = step // 2 & 1
                # A warp can only wait for all of its loads: half of a tile is loaded after the first quarter of the
                # other half has been converted, and while the second is.
                mbarrier.wait(barriers.scales_ready.index(stage), turn)
                mbarrier.wait(barriers.k_free.index(2 * stage), turn ^ 1)
                _convert(memory, stage, 0, first)
                third = _load(source, 2, slot, BLOCK_SIZE)
                fourth = _load(source, 3, slot, BLOCK_SIZE)
                slots += _KEYS
                count -= _KEYS
                after = _slots(slots, count, _WORDS)
                scaled = _slots(slots, count, _SCALES)
                _convert(memory, stage, 1, second)
                fence_async_shared()  # writes and products access shared memory through different proxies
                mbarrier.arrive(barriers.k_ready.index(2 * stage), count=1)

                of_tail = gl.convert_layout(slot, COPIED_ROWS)
                rows, valid = _rows(source.rope, source.rope_steps, of_tail, 8, BLOCK_SIZE)
                mbarrier.wait(barriers.tail_free.index(stage), turn ^ 1)
                common.copy_columns(memory.tail.index(stage), rows, valid, 0, _TAIL)
                async_copy.mbarrier_arrive(barriers.tail_ready.index(stage), increment_count=False)
                slot = after
                mbarrier.wait(barriers.k_free.index(2 * stage + 1), turn ^ 1)
                _convert(memory, stage, 2, third)
                first = _load(source, 0, slot, BLOCK_SIZE)
                second = _load(source, 1, slot, BLOCK_SIZE)
                if tile + 1 < item.tiles:
                    _copy_scales(source, memory, barriers, step + 1, scaled, BLOCK_SIZE)
                _convert(memory, stage, 3, fourth)
                fence_async_shared()
                mbarrier.arrive(barriers.k_ready.index(2 * stage + 1), count=1)
                step += 1


@gluon.jit
def _slots(slots, count, layout: gl.constexpr):
    """The next slots, as the rows of a layout; -1 past the last."""
    j = gl.arange(0, _KEYS, layout=gl.SliceLayout(1, layout))
    return gl.load(slots + j, mask=j < count, other=-1)


@gluon.jit
def _load(source, quarter: gl.constexpr, slot, BLOCK_SIZE: gl.constexpr):
    """A quarter of the values of some slots."""
    rows, valid = _rows(source.codes, source.code_steps, slot, 4, BLOCK_SIZE)
    SIZE: gl.constexpr = _QUARTER // 4
    column = quarter * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, _WORDS))[None, :]
    return gl.load(rows[:, None] + column, mask=valid[:, None], other=0)


@gluon.jit
def _convert(memory, stage, quarter: gl.constexpr, words):
    """Writes a quarter of a tile in 16 bits."""
    scale = memory.scales.index(stage).slice(quarter, 1, dim=1).load(_WORDS)
    widen(words, scale, memory.k.index(4 * stage + quarter))


@gluon.jit
def _rows(pointer, steps, slot, UNIT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The addresses of the rows of some slots, and which of them exist. 16 bytes are UNIT elements."""
    row = slot // BLOCK_SIZE * steps[0] + slot % BLOCK_SIZE * steps[1]
    return pointer + row.to(gl.int64) * UNIT, slot >= 0


@gluon.jit
def _copy_scales(source, memory, barriers, step, slot, BLOCK_SIZE: gl.constexpr):
    """The scales of a tile."""
    rows, valid = _rows(source.scales, source.scale_steps, slot, 4, BLOCK_SIZE)
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, _SCALES))[None, :]
    async_copy.async_copy_global_to_shared(memory.scales.index(step % 2), rows[:, None] + column, mask=valid[:, None])
    async_copy.mbarrier_arrive(barriers.scales_ready.index(step % 2), increment_count=False)


@gluon.jit
def _copy_queries(q, q_steps, memory, barriers, item, work, served):
    """After the first keys, which may arrive while the scores of the last item still read its queries."""
    column = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, COPIED))[None, :]
    tail = gl.arange(0, _TAIL, layout=gl.SliceLayout(0, COPIED))[None, :]
    head = item.head_begin + gl.arange(0, _HEADS, layout=COPIED_ROWS)
    real = (head < work.heads)[:, None]
    rows = q + (item.row * q_steps[0] + head.to(gl.int64) * q_steps[1])[:, None] * 8
    mbarrier.wait(barriers.q_free.index(0), (served & 1) ^ 1)
    for quarter in gl.static_range(4):
        async_copy.async_copy_global_to_shared(memory.q.index(quarter), rows + (column + quarter * _QUARTER), mask=real)
    async_copy.async_copy_global_to_shared(memory.q_tail, rows + (tail + 4 * _QUARTER), mask=real)
    async_copy.mbarrier_arrive(barriers.q_ready.index(0), increment_count=False)


@gluon.jit
def _score(memory, barriers, work, results, scale_log2, SPLIT: gl.constexpr):
    """Scores, running maximum, weights and their sum; at the end the log-sum-exp, with the sink of each head."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    near = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, grid))[None, :]
    step = 0  # tiles so far, of all items
    served = 0  # items so far that have any tile
    done = 0  # items so far
    for number in range(gl.program_id(0), work.items, gl.num_programs(0)):
        item = _item(number, work)
        row_max = gl.full([_HEADS], float("-inf"), gl.float32, down)
        largest = row_max  # which lags behind it (see `_weigh`)
        total = gl.full([_HEADS], 0.0, gl.float32, down)
        mbarrier.wait(barriers.q_ready.index(0), served & 1, pred=item.tiles > 0)
        fence_async_shared()  # the queries were copied through another proxy
        for tile in range(item.tiles):
            stage = step % 2
            scores = gl.zeros([_HEADS, _KEYS], gl.float32, grid)
            for quarter in gl.static_range(4):
                if quarter % 2 == 0:
                    mbarrier.wait(barriers.k_ready.index(2 * stage + quarter // 2), step // 2 & 1)
                keys = memory.k.index(4 * stage + quarter).permute([1, 0])
                scores = warpgroup_mma(memory.q.index(quarter), keys, scores, use_acc=quarter > 0, is_async=True)
            mbarrier.wait(barriers.tail_ready.index(stage), step // 2 & 1)
            fence_async_shared()
            scores = warpgroup_mma(memory.q_tail, memory.tail.index(stage).permute([1, 0]), scores, is_async=True)
            scores = warpgroup_mma_wait(0, [scores]) * scale_log2
            if tile + 1 == item.tiles:
                mbarrier.arrive(barriers.q_free.index(0), count=1)  # the next queries arrive meanwhile
            step += 1

            if (tile + 1) * _KEYS > item.count:
                scores = gl.where(near < item.count - tile * _KEYS, scores, float("-inf"))
            highest = gl.max(scores, 1)
            largest = gl.maximum(largest, highest)
            row_max, total = _weigh(scores, highest, row_max, total, stage, memory, barriers)

        if item.tiles > 0:
            served += 1
        head = item.head_begin + gl.arange(0, _HEADS, layout=down)
        real = head < work.heads
        kept = 1.0
        if not SPLIT and results.sinks is not None:
            row_max, total, kept = common.add_sinks(results.sinks, head, real, row_max, total)
        # Without a key total is 0 and the maximum -inf: out 0 * 1, lse -inf + -inf.
        inv_sum = kept / gl.where(total == 0.0, 1.0, total)
        unit = 1.0 if SPLIT else 1.0 / _LOG2_E
        spoiled = gl.where(item.fault, float("nan"), 0.0)
        mbarrier.wait(barriers.inv_sum_free.index(0), (done & 1) ^ 1)
        memory.inv_sum.store(inv_sum + spoiled)
        mbarrier.arrive(barriers.inv_sum_ready.index(0), count=1)
        at = item.part * work.heads + head
        gl.store(results.lse + at, (row_max + gl.log2(total)) * unit + spoiled, mask=real)
        gl.store(results.top + at, largest * unit + spoiled, mask=real)
        done += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _accumulate(memory, barriers, work, out, PART: gl.constexpr, NARROW_OUT: gl.constexpr):
    """Adds weights times keys to two quarters of the output columns, one of the front and one of the back."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _QUARTER, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    step = 0  # tiles so far, of all items
    done = 0  # items so far
    for number in range(gl.program_id(0), work.items, gl.num_programs(0)):
        item = _item(number, work)
        front = gl.zeros([_HEADS, _QUARTER], gl.float32, grid)
        back = gl.zeros([_HEADS, _QUARTER], gl.float32, grid)
        for _tile in range(item.tiles):
            stage = step % 2
            turn = step // 2 & 1
            step += 1
            mbarrier.wait(barriers.rescale_ready.index(stage), turn)
            rescale = memory.rescale.index(stage).load(down)
            # Rarely taken; otherwise 128 multiplications per thread would precede the matrix products of every tile.
            if gl.min(rescale, 0) < 1.0:
                front = front * rescale[:, None]
                back = back * rescale[:, None]
            mbarrier.wait(barriers.weights_ready.index(stage), turn)
            weights = memory.tail.index(stage)
            front = warpgroup_mma(weights, memory.k.index(4 * stage + PART), front, is_async=True)
            back = warpgroup_mma(weights, memory.k.index(4 * stage + 2 + PART), back, is_async=True)
            front = warpgroup_mma_wait(1, [front])
            mbarrier.arrive(barriers.k_free.index(2 * stage), count=1)
            back = warpgroup_mma_wait(0, [back])
            mbarrier.arrive(barriers.k_free.index(2 * stage + 1), count=1)
            mbarrier.arrive(barriers.tail_free.index(stage), count=1)

        mbarrier.wait(barriers.inv_sum_ready.index(0), done & 1)
        scale = memory.inv_sum.load(down)[:, None]
        mbarrier.arrive(barriers.inv_sum_free.index(0), count=1)
        done += 1  # noqa: SIM113 - Gluon has no enumerate
        rows = out + item.part * work.heads * (4 * _QUARTER)
        common.write_columns(rows, front * scale, PART * _QUARTER, item.head_begin, work.heads, NARROW_OUT, grid)
        common.write_columns(rows, back * scale, (2 + PART) * _QUARTER, item.head_begin, work.heads, NARROW_OUT, grid)


@gluon.jit
def _weigh(scores, highest, row_max, total, stage, memory, barriers):
    """Writes the weights of a tile, and the rescale factor of the sums so far; returns the new maximum and sum.

    `highest` are the maxima of the scores, which are in base 2. `row_max` lags behind them by up to _RESCALE_THRESHOLD.
    The weights overwrite the tail of the keys.
    """
    new_max = gl.where(highest > row_max + _RESCALE_THRESHOLD, highest, row_max)
    # No valid key yet, or scores of -inf: subtract 0, because -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    tile_rescale = gl.exp2(row_max - shift)
    memory.rescale.index(stage).store(tile_rescale)
    # The consumers of values rescale while weights are computed. Arriving also synchronizes the warps of this group:
    # none writes weights over the tail of the keys while another still multiplies with it.
    mbarrier.arrive(barriers.rescale_ready.index(stage), count=1)
    tile_weights = gl.exp2(scores - shift[:, None])
    memory.tail.index(stage).store(tile_weights.to(memory.tail.dtype))
    fence_async_shared()
    mbarrier.arrive(barriers.weights_ready.index(stage), count=1)
    return new_max, total * tile_rescale + gl.sum(tile_weights, 1)
