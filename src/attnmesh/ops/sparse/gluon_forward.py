"""The forward pass of sparse attention on Hopper in Gluon: d 576 or 512, values the first 512 columns of the keys.

A program is persistent and processes one work item after another: 64 heads of one query row. Three groups of warps
share an item, whose keys come in pairs of tiles of 64:

- the producer copies the rows of the keys into shared memory, half of the columns (front or back) at a time;
- two consumers score one tile of a pair each, and hold 256 of the 512 output columns in registers, to which they add
  weights times keys of both tiles: their own weights from registers, the other's from shared memory, where they are
  written over the tail of the keys (64 columns that only scores need).

So one consumer exponentiates while the other keeps the tensor cores busy: the first while the second scores, the
second while both add the first tile. The scores of the next pair, or of the next item, begin behind the last product
of weights and keys of the first consumer.

Synchronization: half of a tile is `ready` when the copies of every thread of the producer have arrived (each reports
its own), and `free` when the consumer of those columns has read it, which is after the scores of the tile. The row
maximum and the rescale factor of a tile are ready before its weights. They, the weights and the bias of a tile live as
long as its keys, so they need no barrier of their own before they are overwritten. Barriers are waited for by the
parity of their phase, counted over the pairs of all items; waiting for the phase before the first succeeds at once.

The scores of a query with NaN or inf stay NaN where a slot is invalid. So whether an item has any valid slot is not
told by its scores: the producer tells it.
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

from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.launch import Launch, cdiv, is_hopper, prepare
from attnmesh.ops.sparse import gluon_common as common
from attnmesh.ops.sparse.arguments import RowBounds, SparseCall
from attnmesh.ops.sparse.gluon_common import COPIED_ROWS, D_TAIL, D_V, HEADS, KEYS, LOG2_E, RESCALE_THRESHOLD

_LOG2_E, _RESCALE_THRESHOLD = gl.constexpr(LOG2_E), gl.constexpr(RESCALE_THRESHOLD)
_HEADS, _KEYS = gl.constexpr(HEADS), gl.constexpr(KEYS)  # two tiles of keys and the queries fill shared memory
_HALF, _TAIL = gl.constexpr(D_V // 2), gl.constexpr(D_TAIL)
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(216), gl.constexpr(72)  # registers per thread
_PRODUCER_THREADS = gl.constexpr(128)  # threads, each of which reports its own copies
# Of scores, of a number per head, and of half of the output columns.
_GRID = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
_DOWN = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])))
_WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V // 2, 16]))
_EVERY_WARP = gl.constexpr(gl.BlockedLayout([HEADS // 32], [32], [4], [0]))  # of heads: each warp has all of them
NOT_SPECIALIZED = ["items", "heads", "k_offset", "scale_log2", "topk"]


NEEDS = "keys of 512 or 576 features in 16 bits whose first 512 are the values, rows aligned to 16 bytes, on Hopper"


def supports(call: SparseCall) -> bool:
    """Whether the kernel can serve the call: it has what it NEEDS."""
    q, k = call.q, call.k
    return (
        call.v is None
        and call.d_v == D_V
        and q.shape[-1] in (D_V, D_V + D_TAIL)
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(x.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:-1]) for x in (q, k))
        and is_hopper(q.device)
    )


def launch(call: SparseCall, sinks: Tensor | None, results: tuple[Tensor, ...]) -> Launch:
    """The first launch of a `Forward`, of a call that the kernel supports."""
    q, k, v, indices, bounds, scale, *_ = call
    return launch_ranges(q, k, bounds, scale, sinks, results, v, indices)


def launch_ranges(
    q: Tensor, k: Tensor, bounds: RowBounds, scale: float, sinks: Tensor | None, results: tuple[Tensor, ...],
    v: Tensor | None = None, indices: Tensor | None = None,
) -> Launch:  # fmt: skip
    """The first launch for rows that, without indices, attend to all keys from `lo` to `hi`: there are `slots`."""
    lo, hi, slots, k_offset = bounds
    s_q, heads, d = q.shape
    items = s_q * cdiv(heads, HEADS)
    row, topk = (0, k.shape[0]) if indices is None else (indices.stride(0), indices.shape[1])
    args = (
        q, q.stride(0), q.stride(1), k, k.stride(0), indices, row, lo, hi, slots, sinks, *results,
        *(None,) * (3 - len(results)), items, heads, topk, k_offset, scale * LOG2_E,
    )  # fmt: skip
    return prepare(
        _forward_kernel, (min(items, common.processors(q)),), args, (q, k, v, indices, lo, hi, slots, sinks, *results),
        TAILED=d > D_V, NARROW_OUT=results[0].dtype.itemsize == 2, num_warps=4,
    )  # fmt: skip


class Memory(NamedTuple):
    """Shared memory."""

    q: Any  # two halves
    q_tail: Any
    k: Any  # two halves of each tile
    tail: Any  # of each tile, and then its weights [HEADS, KEYS]
    bias: Any  # of each tile: 0, or -inf where the slot is invalid
    seen: Any  # the maxima of the biases of all tiles, for two items: all are -inf if no slot is valid
    row_max: Any  # of each tile: the running maximum with it
    rescale: Any  # of each tile: the factor of the sums so far
    sums: Any  # of weights, of the tiles of a consumer, for two items
    largest: Any  # score of the tiles of a consumer, for two items


# Of halves of queries and tiles, of the scores of the first tile (they are under way), of row maxima, weights and sums.
Barriers = namedtuple(
    "Barriers", "q_ready q_free front_ready back_ready front_free back_free scored max_ready weights_ready sums_ready"
)
# The slots of all rows, and how they are divided into items.
Work = namedtuple("Work", "slots topk heads items")
# The row maximum, which lags behind the largest score (see `_weigh`), that, and the sum of weights.
Sums = namedtuple("Sums", "row_max largest total")
# 64 heads of a row: the slots are `count`, the pairs are of tiles.
Item = namedtuple("Item", "row head_begin count pairs")


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def _forward_kernel(
    q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, sinks, out, lse, top,
    items, heads, topk, k_offset, scale_log2,
    TAILED: gl.constexpr, NARROW_OUT: gl.constexpr,
):  # fmt: skip
    """Processes every num_programs-th item. Neighboring programs share a row: its keys are in L2 for the second."""
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = Memory(
        q=gl.allocate_shared_memory(dtype, [2, _HEADS, _HALF], wide),
        q_tail=gl.allocate_shared_memory(dtype, [1, _HEADS, _TAIL], wide),
        k=gl.allocate_shared_memory(dtype, [4, _KEYS, _HALF], wide),
        tail=gl.allocate_shared_memory(dtype, [2, _KEYS, _TAIL], wide),
        bias=gl.allocate_shared_memory(gl.float32, [2, _KEYS], flat),
        seen=gl.allocate_shared_memory(gl.float32, [2, _KEYS], flat),
        row_max=gl.allocate_shared_memory(gl.float32, [2, _HEADS], flat),
        rescale=gl.allocate_shared_memory(gl.float32, [2, _HEADS], flat),
        sums=gl.allocate_shared_memory(gl.float32, [4, _HEADS], flat),
        largest=gl.allocate_shared_memory(gl.float32, [4, _HEADS], flat),
    )
    barriers = Barriers(
        q_ready=new_barriers(2, _PRODUCER_THREADS),
        q_free=new_barriers(1, 2),  # each consumer scores a tile of the last pair
        front_ready=new_barriers(2, _PRODUCER_THREADS),
        back_ready=new_barriers(2, _PRODUCER_THREADS + 1),  # the copies and, once, the bias
        front_free=new_barriers(2, 1),  # by the first consumer
        back_free=new_barriers(2, 1),  # by the second
        scored=new_barriers(1, 1),
        max_ready=new_barriers(2, 1),
        weights_ready=new_barriers(2, 1),
        sums_ready=new_barriers(4, 1),
    )
    fence_async_shared()

    work = Work(slots, topk, heads, items)
    results = common.Results(out, lse, top, sinks)
    gl.warp_specialize(
        [(_consume_first, (memory, barriers, work, results, scale_log2, TAILED, NARROW_OUT)),
         (_consume_second, (memory, barriers, work, results, scale_log2, TAILED, NARROW_OUT)),
         (_produce, (q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, k_offset,
                     memory, barriers, work, TAILED))],
        [4, 4], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
    invalidate_barriers(barriers)


@gluon.jit
def _item(number, work):
    """An item by its number, with at least one pair of tiles.

    Every group loads the number of slots of each item anew. A loop over items must not carry it to the next turn:
    Triton (3.6 and 3.7) drops what a loop carries if it is used only as the bound of a loop inside.
    """
    head_tiles = (work.heads + _HEADS - 1) // _HEADS
    row = number // head_tiles
    count = gl.maximum(gl.minimum(gl.load(work.slots + row), work.topk), 0)
    pairs = gl.maximum((count + 2 * _KEYS - 1) // (2 * _KEYS), 1)
    return Item(row.to(gl.int64), number % head_tiles * _HEADS, count, pairs)


# Of the producer.


@gluon.jit
def _produce(
    q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, k_offset, memory, barriers, work, TAILED: gl.constexpr
):  # fmt: skip
    """Copies the queries of each item and, pair by pair, the keys of its slots; 0 where a slot is invalid."""
    ready, room = (barriers.front_ready, barriers.back_ready), (barriers.front_free, barriers.back_free)
    step = 0  # pairs so far, of all items
    done = 0  # items so far
    for number in range(gl.program_id(0), work.items, gl.num_programs(0)):
        item = _item(number, work)
        first = gl.load(lo + item.row)
        end = gl.load(hi + item.row)
        row_indices = None if indices is None else indices + item.row * indices_row
        slot = gl.arange(0, _KEYS, layout=COPIED_ROWS)
        key = _keys_of(row_indices, slot, first, item.count)
        head = item.head_begin + slot
        is_head = head < work.heads
        q_rows = q + item.row * q_row + head.to(gl.int64) * q_head
        seen = gl.full([_KEYS], float("-inf"), gl.float32, COPIED_ROWS)
        mbarrier.wait(barriers.q_free.index(0), (done & 1) ^ 1)
        for pair in range(item.pairs):
            free = (step & 1) ^ 1
            for tile in gl.static_range(2):
                valid = (key >= first) & (key < end) & (slot < item.count)
                rows = k + (key.to(gl.int64) - k_offset) * k_row
                # Load the next indices early, so that the copies do not wait for them.
                slot = slot + _KEYS
                key = _keys_of(row_indices, slot, first, item.count)

                for half in gl.static_range(2):
                    if tile == 0 and pair == 0:
                        common.copy_columns(memory.q.index(half), q_rows, is_head, half * _HALF, _HALF)
                        if TAILED and half == 1:
                            common.copy_columns(memory.q_tail.index(0), q_rows, is_head, 2 * _HALF, _TAIL)
                        async_copy.mbarrier_arrive(barriers.q_ready.index(half), increment_count=False)
                    mbarrier.wait(room[half].index(tile), free)
                    common.copy_columns(memory.k.index(2 * tile + half), rows, valid, half * _HALF, _HALF)
                    if TAILED and half != tile:  # the first consumer reads the weights of the second tile over its tail
                        common.copy_columns(memory.tail.index(tile), rows, valid, 2 * _HALF, _TAIL)
                    async_copy.mbarrier_arrive(ready[half].index(tile), increment_count=False)
                bias = gl.where(valid, 0.0, float("-inf"))
                memory.bias.index(tile).store(bias)
                seen = gl.maximum(seen, bias)
                if tile == 1:  # both consumers have finished the item before the last, whose buffer this is
                    memory.seen.index(done % 2).store(seen)
                mbarrier.arrive(barriers.back_ready.index(tile), count=1)
            step += 1
        done += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _keys_of(row_indices, slot, first, count):
    """The indices in some slots of a row; without indices, all keys from the first one on."""
    if row_indices is None:
        key = first + slot
    else:
        key = gl.load(row_indices + slot, mask=slot < count, other=-2147483648)
    return key


# Of the consumers.


@gluon.jit
def _consume_first(memory, barriers, work, results, scale_log2, TAILED: gl.constexpr, NARROW_OUT: gl.constexpr):
    """Scores the first tile of each pair, and sums the front half of the columns."""
    step = 0  # pairs so far, of all items
    done = 0  # items so far
    before = _item(gl.program_id(0), work)
    result = gl.zeros([_HEADS, _HALF], gl.float32, _WIDE).to(results.out.dtype.element_ty)
    for number in range(gl.program_id(0), work.items, gl.num_programs(0)):
        item = _item(number, work)
        scores = _score(None, memory, barriers, step, done, 0, 0, TAILED)
        scores = _score(scores, memory, barriers, step, done, 0, 1, TAILED)
        mbarrier.arrive(barriers.scored.index(0), count=1)
        # The results of the item before are written while the first scores of this one are computed.
        _write(result, results, before, gl.where(done > 0, work.heads, 0), work.heads, 0, NARROW_OUT)
        before = item
        nothing = gl.full([_HEADS], float("-inf"), gl.float32, _DOWN)
        sums = Sums(nothing, nothing, gl.full([_HEADS], 0.0, gl.float32, _DOWN))
        out = gl.zeros([_HEADS, _HALF], gl.float32, _WIDE)
        for _pair in range(item.pairs - 1):
            scores = warpgroup_mma_wait(0, [scores])
            out, sums = _add_front(scores, out, sums, memory, barriers, step, scale_log2, results.top is not None)
            # The next scores begin behind this product.
            step += 1
            scores = _score(None, memory, barriers, step, done, 0, 0, TAILED)
            out = warpgroup_mma_wait(1, [out])
            mbarrier.arrive(barriers.front_free.index(1), count=1)
            scores = _score(scores, memory, barriers, step, done, 0, 1, TAILED)
            mbarrier.arrive(barriers.scored.index(0), count=1)

        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(barriers.q_free.index(0), count=1)
        out, sums = _add_front(scores, out, sums, memory, barriers, step, scale_log2, results.top is not None)
        step += 1
        out = warpgroup_mma_wait(0, [out])
        mbarrier.arrive(barriers.front_free.index(1), count=1)
        result = _epilogue(out, sums, memory, barriers, results, item, work.heads, done, 0)
        done += 1  # noqa: SIM113 - Gluon has no enumerate
    _write(result, results, before, work.heads, work.heads, 0, NARROW_OUT)


@gluon.jit
def _add_front(scores, out, sums, memory, barriers, step, scale_log2, LARGEST: gl.constexpr):
    """The sums with a pair, given the scores of its first tile. The product of the second is still under way."""
    turn = step & 1
    zero = _zero(step)
    weights, rescale, lowest, sums = _weigh(scores, memory, barriers, 0, sums, scale_log2, LARGEST)
    out = _rescale(out, rescale, lowest)
    out = warpgroup_mma(weights, memory.k.index(0 + zero), out, is_async=True)
    out = warpgroup_mma_wait(0, [out])
    mbarrier.arrive(barriers.front_free.index(0), count=1)

    mbarrier.wait(barriers.max_ready.index(1), turn)
    row_max = memory.row_max.index(1).load(_DOWN)
    rescale = memory.rescale.index(1).load(_DOWN)
    out = _rescale(out, rescale, _lowest(memory, 1))
    mbarrier.wait(barriers.weights_ready.index(1), turn)
    out = warpgroup_mma(memory.tail.index(1 + zero), memory.k.index(2 + zero), out, is_async=True)
    return out, Sums(row_max, sums.largest, sums.total * rescale)


@gluon.jit
def _consume_second(memory, barriers, work, results, scale_log2, TAILED: gl.constexpr, NARROW_OUT: gl.constexpr):
    """Scores the second tile of each pair, and sums the back half of the columns."""
    step = 0  # pairs so far, of all items
    done = 0  # items so far
    for number in range(gl.program_id(0), work.items, gl.num_programs(0)):
        item = _item(number, work)
        nothing = gl.full([_HEADS], float("-inf"), gl.float32, _DOWN)
        sums = Sums(nothing, nothing, gl.full([_HEADS], 0.0, gl.float32, _DOWN))
        out = gl.zeros([_HEADS, _HALF], gl.float32, _WIDE)
        for pair in range(item.pairs):
            turn = step & 1
            zero = _zero(step)
            # Behind the scores of the first tile, whose weights this consumer needs as well.
            mbarrier.wait(barriers.scored.index(0), turn)
            scores = _score(None, memory, barriers, step, done, 1, 0, TAILED)
            scores = _score(scores, memory, barriers, step, done, 1, 1, TAILED)
            step += 1
            mbarrier.wait(barriers.max_ready.index(0), turn)
            row_max = memory.row_max.index(0).load(_DOWN)
            rescale = memory.rescale.index(0).load(_DOWN)
            lowest = _lowest(memory, 0)
            sums = Sums(row_max, sums.largest, sums.total * rescale)
            # No product may be under way where the sums are rescaled: the compiler would make all of them wait.
            scores = warpgroup_mma_wait(0, [scores])
            out = _rescale(out, rescale, lowest)
            mbarrier.wait(barriers.weights_ready.index(0), turn)
            # The first tile is added while the scores of the second are exponentiated.
            out = warpgroup_mma(memory.tail.index(0 + zero), memory.k.index(1 + zero), out, is_async=True)
            mbarrier.arrive(barriers.q_free.index(0), count=1, pred=pair + 1 == item.pairs)
            weights, rescale, lowest, sums = _weigh(
                scores, memory, barriers, 1, sums, scale_log2, results.top is not None
            )
            out = warpgroup_mma_wait(0, [out])
            mbarrier.arrive(barriers.back_free.index(0), count=1)
            out = _rescale(out, rescale, lowest)
            out = warpgroup_mma(weights, memory.k.index(3 + zero), out, is_async=True)
            out = warpgroup_mma_wait(0, [out])
            mbarrier.arrive(barriers.back_free.index(1), count=1)

        result = _epilogue(out, sums, memory, barriers, results, item, work.heads, done, 1)
        _write(result, results, item, work.heads, work.heads, 1, NARROW_OUT)
        done += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _zero(step):
    """0, unknown to the compiler, which otherwise keeps the addresses of all operands in registers during a loop."""
    return step >> 30


@gluon.jit
def _score(scores, memory, barriers, step, done, TILE: gl.constexpr, HALF: gl.constexpr, TAILED: gl.constexpr):
    """Starts the scores of a tile with the front half of the columns, or goes on with the back half and the tail."""
    if HALF == 0:
        scores = gl.zeros([_HEADS, _KEYS], gl.float32, _GRID)
    zero, ready = _zero(step), (barriers.front_ready, barriers.back_ready)
    mbarrier.wait(barriers.q_ready.index(HALF), done & 1)
    mbarrier.wait(ready[HALF].index(TILE), step & 1)
    fence_async_shared()  # copies and tensor cores access shared memory through different proxies
    keys = memory.k.index(2 * TILE + HALF + zero).permute([1, 0])
    scores = warpgroup_mma(memory.q.index(HALF + zero), keys, scores, use_acc=HALF > 0, is_async=True)
    if TAILED and HALF == 1:
        tail = memory.tail.index(TILE + zero).permute([1, 0])
        scores = warpgroup_mma(memory.q_tail.index(zero), tail, scores, is_async=True)
    return scores


@gluon.jit
def _weigh(scores, memory, barriers, TILE: gl.constexpr, sums, scale_log2, LARGEST: gl.constexpr):
    """Writes the weights of a tile, its row maximum and rescale factor; returns weights, factor and the new sums.

    The row maximum, in base 2, lags behind the scores by up to RESCALE_THRESHOLD: sums are rarely rescaled.
    """
    bias = memory.bias.index(TILE).load(gl.SliceLayout(0, _GRID))
    scores = scores * scale_log2 + bias[None, :]
    highest = gl.max(scores, 1)
    largest = gl.maximum(sums.largest, highest) if LARGEST else sums.largest
    new_max = gl.where(highest > sums.row_max + _RESCALE_THRESHOLD, highest, sums.row_max)
    # No valid key yet, or scores of -inf: subtract 0, because -inf - -inf is NaN.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(sums.row_max - shift)
    memory.row_max.index(TILE).store(new_max)
    memory.rescale.index(TILE).store(rescale)
    # Arriving also synchronizes the warps of this group: none writes weights over the tail of the keys while another
    # still multiplies with it.
    mbarrier.arrive(barriers.max_ready.index(TILE), count=1)
    lowest = _lowest(memory, TILE)
    weights = gl.exp2(scores - shift[:, None])
    narrow = weights.to(memory.tail.dtype)
    memory.tail.index(TILE).store(narrow)
    fence_async_shared()
    mbarrier.arrive(barriers.weights_ready.index(TILE), count=1)
    held = gl.convert_layout(narrow, gl.DotOperandLayout(0, _WIDE, 2))
    return held, rescale, lowest, Sums(new_max, largest, sums.total * rescale + gl.sum(weights, 1))


@gluon.jit
def _lowest(memory, TILE: gl.constexpr):
    """The smallest rescale factor of a tile. Computed long before it decides a branch."""
    return gl.min(memory.rescale.index(TILE).load(_EVERY_WARP), 0)


@gluon.jit
def _rescale(out, rescale, lowest):
    """Half of the output columns, with the rescale factor of a tile."""
    # Rarely taken; otherwise 128 multiplications per thread would precede the matrix products of every tile.
    if lowest < 1.0:
        out = out * gl.convert_layout(rescale, gl.SliceLayout(1, _WIDE))[:, None]
    return out


@gluon.jit
def _epilogue(out, sums, memory, barriers, results, item, heads, done, PART: gl.constexpr):
    """Half of the columns of the result, with the sums of both consumers and the sinks; writes the log-sum-exp."""
    row_max, largest, total = sums
    seen = gl.max(memory.seen.index(done % 2).load(_EVERY_WARP), 0)  # before the wait, which hides it
    # Alternating between two buffers: a consumer is at most one item ahead of the other.
    buffer = 2 * (done % 2)
    memory.sums.index(buffer + PART).store(total)
    if results.top is not None:
        memory.largest.index(buffer + PART).store(largest)
    mbarrier.arrive(barriers.sums_ready.index(buffer + PART), count=1)
    mbarrier.wait(barriers.sums_ready.index(buffer + 1 - PART), (done // 2) & 1)
    total = total + memory.sums.index(buffer + 1 - PART).load(_DOWN)
    # Without a valid slot the scores are -inf or NaN, the maximum is -inf, and all sums may be NaN.
    total = gl.where(seen < 0.0, 0.0, total)
    if seen < 0.0:  # rarely taken; the compiler would make a selection, for every item, of an assignment of 0
        out = gl.where(out == out, out, 0.0)  # 0 or NaN
    head = item.head_begin + gl.arange(0, _HEADS, layout=_DOWN)
    is_head = head < heads
    kept = 1.0
    if results.sinks is not None:
        row_max, total, kept = common.add_sinks(results.sinks, head, is_head, row_max, total)
    # A row without a valid slot has total 0 and maximum -inf: out 0 * 1, lse -inf + -inf.
    inv_sum = gl.convert_layout(kept / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, _WIDE))
    if PART == 1:
        gl.store(results.lse + item.row * heads + head, (row_max + gl.log2(total)) / _LOG2_E, mask=is_head)
        if results.top is not None:
            largest = gl.maximum(largest, memory.largest.index(buffer).load(_DOWN))
            largest = gl.where(seen < 0.0, float("-inf"), largest)
            gl.store(results.top + item.row * heads + head, largest / _LOG2_E, mask=is_head)
    return (out * inv_sum[:, None]).to(results.out.dtype.element_ty)


@gluon.jit
def _write(result, results, item, end, heads, PART: gl.constexpr, NARROW: gl.constexpr):
    """Writes half of the columns of the results of the heads before `end`."""
    out_row = results.out + item.row * heads * (2 * _HALF)
    common.write_columns(out_row, result, PART * _HALF, item.head_begin, end, NARROW, _WIDE)
