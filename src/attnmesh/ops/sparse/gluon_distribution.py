"""The attention distribution of chosen keys, summed over heads, for Hopper in Gluon.

One program serves all heads of a row, so that every key is gathered once: the gather, not the arithmetic, limits this
kernel. Its twelve warps have three roles (eight warps and two roles for up to 64 heads)::

    producer     gathers 64 keys at a time into a ring of three slots, and writes out the finished sums
    consumer 0   heads 0..63:    their queries stay in registers, scores = queries x keys, exponentials, sums
    consumer 1   heads 64..127:  likewise, half a block behind, so that one multiplies while one exponentiates

Queries pass through the ring as keys do, in the order Q0 K0 Q1 K1 K2 ...: consumer 0 starts on K0 while Q1 is being
copied. Each of these is an *item*; both consumers wait for every item and release it, even if they do not use it.

Barriers, with what completes a phase; `item` and `block` are counted over all rows of a program, equally by all roles:

    ready[item % 3]    128 threads of the producer, each when its copies have arrived
    free[item % 3]     each consumer, after its last read of the item
    summed[block % 4]  each consumer, after its sums of the block are in shared memory
    turns[consumer]    the other consumer, when its product has been issued: strict alternation. Consumers in
                       step would exponentiate at the same time, and nothing would bring them out of step

A barrier distinguishes only odd phases from even ones, so no role may fall two phases behind. None does: the slot of an
item is refilled only after both consumers released it, and sums are overwritten (block b writes over b - 4) only after
the keys of block b are ready, which the producer signals after it has read the sums of b - 4. There is no deadlock:
what the producer waits for before it sends block b, an item three back and sums four back, needs only what it has sent.

tests/helpers/gluon.py runs this file on the CPU under adversarial schedules.
"""

from collections import namedtuple
from typing import Any

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
from attnmesh.ops.launch import Launch, Recent, is_hopper, multiprocessors, repeat
from attnmesh.ops.sparse.arguments import SparseCall
from attnmesh.ops.sparse.gluon_common import COPIED_ROWS, LOG2_E, copy_columns

# Tuning.
# Consumers -> registers per thread of consumer 1, of the producer (consumer 0 has the rest), and at launch.
REGISTERS = {1: (None, 72, 240), 2: (216, 72, None)}
WIDTHS = {128: (128, 0), 192: (128, 64), 256: (256, 0), 512: (512, 0), 576: (512, 64)}  # blocks are powers of two wide
_launches: Recent[Launch] = Recent()

HEADS = 64  # per consumer: the rows of one matrix instruction
TILE = 64  # columns: 128 bytes, the widest swizzle
_HEADS = gl.constexpr(HEADS)
_TILE = gl.constexpr(TILE)
_LOG2_E = gl.constexpr(LOG2_E)
_KEYS = gl.constexpr(64)  # per block
_SLOTS = gl.constexpr(3)  # a fourth does not fit
_SUMS = gl.constexpr(4)  # blocks whose sums wait to be written
_NOT_SPECIALIZED = [  # they vary, and each value would be compiled separately
    "q_stride", "q_head_stride", "k_stride", "indices_stride", "lse_stride", "lse_head_stride", "s_q", "h", "topk",
    "k_offset",
]  # fmt: skip
_GRID = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of scores
_QUERIES = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2))


def _exchange(heads: int) -> Any:
    """The layout [warp, 2, heads, key] of a sum over the second axis, which is in registers: it stays in the thread.

    Each differs from the layout after the last sum by one bit exchanged with the lane.
    """
    keys = [[0, 0, 0, 1 << i] for i in range(6)]
    of_heads = [[0, 0, 1 << i, 0] for i in range(heads.bit_length() - 1)]
    held = 3 + len(of_heads)
    registers, lanes = [keys[0], *keys[3:held], [0, 1, 0, 0]], [*keys[1:3], *of_heads, *keys[held:]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 2, heads, 64])


_EXCHANGES = gl.constexpr((_exchange(4), _exchange(2), _exchange(1)))
Shape = namedtuple("Shape", "consumers main tail groups")  # constants of the kernel; columns are `main` and `tail`
Memory = namedtuple("Memory", "main tail sums")  # the ring of items, and sums of blocks
Barriers = namedtuple("Barriers", "ready free summed turns")
Sizes = namedtuple("Sizes", "s_q h topk")


NEEDS = f"up to 128 heads, in one group or in groups of 64, of {', '.join(map(str, WIDTHS))} in 16 bits, on Hopper"


def supports(call: SparseCall, head_group: int) -> bool:
    """Whether the kernel can serve the call: it has what it NEEDS, in rows that are aligned to 16 bytes."""
    q, k = call.q, call.k
    h, d = q.shape[1:]
    return (
        is_hopper(q.device)
        and q.dtype == k.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and d in WIDTHS
        and h <= 2 * HEADS
        and (head_group >= h or head_group == HEADS)
        # The copies move 16 bytes at a time.
        and all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in (q, k))
        and all(stride % 8 == 0 for stride in (*q.stride()[:2], k.stride(0)))
    )


def distribution(call: SparseCall, lse: Tensor, head_group: int) -> Tensor:
    """`dispatch.distribution`, in float32, of a call that the kernel supports."""
    q, k, _, indices, bounds, scale, *_ = call
    s_q, h, d = q.shape
    topk = indices.shape[1]
    consumers = 1 if h <= HEADS else 2
    groups = 1 if head_group >= h else 2
    out = torch.empty(groups, s_q, topk, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    main, tail = WIDTHS[d]
    of_consumer, of_producer, cap = REGISTERS[consumers]
    repeat(  # one program per multiprocessor, whose shared memory it fills
        _launches, _distribution_kernel, (multiprocessors(q.device, 132),),
        (
            q, q.stride(0) // 8, q.stride(1) // 8, k, k.stride(0) // 8, indices, indices.stride(0),
            *(x.contiguous() for x in bounds[:3]), lse, lse.stride(0), lse.stride(1), out,
            s_q, h, topk, bounds.k_offset, scale * LOG2_E,
        ),
        SHAPE=Shape(consumers, main, tail, groups),
        CONSUMER_REGISTERS=of_consumer, PRODUCER_REGISTERS=of_producer, num_warps=4, maxnreg=cap,
    )  # fmt: skip
    return out


@gluon.jit
def _unit(n, slots, sizes):
    """The n-th unit of work of a program: a row, its blocks [first, stop), and the number of its slots.

    First whole rows, every `programs`-th; the remaining rows are split, so that all programs end together.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    blocks = gl.cdiv(sizes.topk, _KEYS)
    whole = sizes.s_q // programs
    rest = (sizes.s_q - whole * programs) * blocks
    begin = program * rest // programs
    end = (program + 1) * rest // programs
    cut = begin // blocks + n - whole
    row = gl.where(n < whole, n * programs + program, gl.minimum(whole * programs + cut, sizes.s_q - 1))
    first = gl.where(n < whole, 0, gl.maximum(begin - cut * blocks, 0))
    stop = gl.where(n < whole, blocks, gl.minimum(end - cut * blocks, blocks))
    return row, first, stop, gl.load(slots + row)


@gluon.jit
def _consume(args, WHICH: gl.constexpr, SHAPE: gl.constexpr):
    lse, lse_stride, lse_head_stride, slots, memory, barriers, sizes, scale_log2 = args
    heads = WHICH * _HEADS + gl.arange(0, _HEADS, gl.SliceLayout(1, _GRID))
    item = 0  # number of items so far
    block = 0  # number of blocks so far
    row, first, end, row_slots = _unit(0, slots, sizes)
    for n in range(sizes.s_q // gl.num_programs(0) + 2):
        # Loaded for the next unit, long before they are needed.
        next_row, next_first, next_end, next_slots = _unit(n + 1, slots, sizes)
        stop = gl.minimum(end, gl.cdiv(row_slots, _KEYS))
        if first < stop:
            of_heads = lse + row.to(gl.int64) * lse_stride + heads * lse_head_stride
            given = gl.load(of_heads, mask=heads < sizes.h, other=float("inf"))
            # An infinite lse, or no head: +inf makes every probability 0.
            shift = gl.where(given == float("-inf"), float("inf"), given * _LOG2_E)
            if WHICH == 1:
                _pass_by(barriers, item)
            mine = item + 2 * WHICH
            _wait_for(barriers.ready, mine)
            q = ()
            for t in gl.static_range((SHAPE.main + SHAPE.tail) // _TILE):
                q = q + (_columns(memory, mine % _SLOTS, t, SHAPE).load(_QUERIES),)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.arrive(barriers.free.index(mine % _SLOTS), count=1)
            at = item + 1
            for i in range(stop - first):
                scores = _multiply(q, memory, barriers, at, block, WHICH, SHAPE)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(barriers.free.index(at % _SLOTS), count=1)
                _leave_sums(scores, shift, scale_log2, memory, barriers, block, WHICH, SHAPE)
                at += 1
                block += 1
                if SHAPE.consumers == 2 and i == 0:  # the queries of consumer 1 come between
                    if WHICH == 0:
                        _pass_by(barriers, at)
                    at += 1
            item += SHAPE.consumers + stop - first
        row, first, end, row_slots = next_row, next_first, next_end, next_slots


@gluon.jit
def _wait_for(ready, item):
    mbarrier.wait(ready.index(item % _SLOTS), (item // _SLOTS) & 1)


@gluon.jit
def _pass_by(barriers, item):
    """Releases the queries of the other consumer after they have arrived.

    Otherwise the slot could be refilled twice before this consumer looks, and it would wait for the barrier forever.
    """
    _wait_for(barriers.ready, item)
    mbarrier.arrive(barriers.free.index(item % _SLOTS), count=1)


@gluon.jit
def _columns(memory, slot, t: gl.constexpr, SHAPE: gl.constexpr):
    """Columns [64 t, 64 t + 64) of an item."""
    if t * _TILE < SHAPE.main:
        tile = memory.main.index(slot).slice(t * _TILE, _TILE, dim=1)
    else:
        tile = memory.tail.index(slot).slice(t * _TILE - SHAPE.main, _TILE, dim=1)
    return tile


@gluon.jit
def _multiply(q, memory, barriers, item, block, WHICH: gl.constexpr, SHAPE: gl.constexpr):
    """Starts scores = q x the keys of an item, when these are ready and it is the turn of this consumer."""
    _wait_for(barriers.ready, item)
    fence_async_shared()  # copies and tensor cores access shared memory through different proxies
    if SHAPE.consumers == 2:
        mbarrier.wait(barriers.turns.index(WHICH), (block & 1) ^ (1 - WHICH))  # consumer 0 begins
    scores = gl.zeros([_HEADS, _KEYS], gl.float32, _GRID)
    for t in gl.static_range((SHAPE.main + SHAPE.tail) // _TILE):
        keys = _columns(memory, item % _SLOTS, t, SHAPE).permute((1, 0))
        scores = warpgroup_mma(q[t], keys, scores, use_acc=t > 0, is_async=True)
    if SHAPE.consumers == 2:
        mbarrier.arrive(barriers.turns.index(1 - WHICH), count=1)
    return scores


@gluon.jit
def _leave_sums(scores, shift, scale_log2, memory, barriers, block, WHICH: gl.constexpr, SHAPE: gl.constexpr):
    p = gl.exp2(scores * scale_log2 - shift[:, None])
    # A thread holds two of every sixteen heads for sixteen keys, which seven other threads of its warp also hold. Three
    # times it exchanges half of its keys for the heads of another thread of the other half, and adds: 14 shuffles
    # instead of 48.
    part = gl.sum(p.reshape([4, 2, 8, _KEYS]), axis=1)
    for i in gl.static_range(3):
        part = gl.sum(gl.convert_layout(part.reshape([4, 2, 4 >> i, _KEYS]), _EXCHANGES[i]), axis=1)
    buffer = block % _SUMS
    memory.sums.index(buffer * SHAPE.consumers + WHICH).store(part.reshape([4, _KEYS]))
    mbarrier.arrive(barriers.summed.index(buffer), count=1)


@gluon.jit
def _produce(args, SHAPE: gl.constexpr):
    (q, q_stride, q_head_stride, k, k_stride, indices, indices_stride, lo, hi, slots, out,
     memory, barriers, sizes, k_offset) = args  # fmt: skip
    rows = gl.arange(0, _KEYS, COPIED_ROWS)
    item = 0
    block = 0
    # The last _SUMS blocks: the positions of their output, newest first, and one bit per key: was it valid?
    waiting = (-1, -1, -1, -1)
    seen = gl.zeros([_KEYS], gl.int32, COPIED_ROWS)
    row, first, end, row_slots = _unit(0, slots, sizes)
    blocks = gl.cdiv(sizes.topk, _KEYS)
    row_lo, row_hi = gl.load(lo + row), gl.load(hi + row)
    chosen = _load_indices(indices, indices_stride, row, first, sizes.topk, rows)
    for n in range(sizes.s_q // gl.num_programs(0) + 2):
        next_row, next_first, next_end, next_slots = _unit(n + 1, slots, sizes)
        next_lo, next_hi = gl.load(lo + next_row), gl.load(hi + next_row)
        stop = gl.minimum(end, gl.cdiv(row_slots, _KEYS))
        _write_zeros(out, row, gl.maximum(first, stop), end, sizes, SHAPE)
        if first < stop:
            at = first
            for i in range(SHAPE.consumers + stop - first):
                slot = item % _SLOTS
                is_query = (i == 0) | (i == 2 * (SHAPE.consumers - 1))
                valid = rows + at * _KEYS < row_slots
                valid = valid & (chosen >= row_lo) & (chosen < row_hi)
                if is_query:
                    head = rows + gl.where(i == 0, 0, _HEADS)
                    sources = q + (row.to(gl.int64) * q_stride * 8 + head.to(gl.int64) * q_head_stride * 8)
                    present = head < sizes.h
                else:
                    key = gl.where(valid, chosen - k_offset, 0)
                    sources = k + key.to(gl.int64) * k_stride * 8
                    present = valid
                mbarrier.wait(barriers.free.index(slot), ((item // _SLOTS) & 1) ^ 1)  # initially all are free
                copy_columns(memory.main.index(slot), sources, present, 0, SHAPE.main)
                if SHAPE.tail > 0:
                    copy_columns(memory.tail.index(slot), sources, present, SHAPE.main, SHAPE.tail)
                if not is_query:
                    last = at + 1 == stop  # indices are loaded one block ahead, which may be the first of the next row
                    chosen = _load_indices(
                        indices, indices_stride,
                        gl.where(last, next_row, row), gl.where(last, next_first, at + 1), sizes.topk, rows,
                    )  # fmt: skip
                    if waiting[3] >= 0:
                        _write_sums(out, memory, barriers, block - _SUMS, waiting[3], seen, rows, sizes, SHAPE)
                    waiting = (row * blocks + at, waiting[0], waiting[1], waiting[2])
                    seen = (seen << 1) | valid.to(gl.int32)
                    at += 1
                    block += 1
                # Last: that an item is ready also signals that the sums above were read.
                async_copy.mbarrier_arrive(barriers.ready.index(slot), increment_count=False)
                item += 1
        else:
            chosen = _load_indices(indices, indices_stride, next_row, next_first, sizes.topk, rows)
        row, first, end = next_row, next_first, next_end
        row_slots, row_lo, row_hi = next_slots, next_lo, next_hi
    for _ in range(_SUMS):
        if waiting[3] >= 0:
            _write_sums(out, memory, barriers, block - _SUMS, waiting[3], seen, rows, sizes, SHAPE)
        waiting = (-1, waiting[0], waiting[1], waiting[2])
        seen = seen << 1
        block += 1


@gluon.jit
def _load_indices(indices, stride, row, block, topk, rows):
    slot = block * _KEYS + rows
    return gl.load(indices + row.to(gl.int64) * stride + slot, mask=slot < topk, other=-1)


@gluon.jit
def _write_sums(out, memory, barriers, block, where_to, seen, rows, sizes, SHAPE: gl.constexpr):
    """Adds the sums of the warps of the consumers for a block, and writes them where its keys were valid."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])  # its rows are those of the producer
    buffer = block % _SUMS
    mbarrier.wait(barriers.summed.index(buffer), (block // _SUMS) & 1)
    valid = ((seen >> (_SUMS - 1)) & 1) == 1
    blocks = gl.cdiv(sizes.topk, _KEYS)
    row = where_to // blocks
    slot = (where_to - row * blocks) * _KEYS + rows
    total = gl.zeros([_KEYS], gl.float32, COPIED_ROWS)
    CONSUMERS: gl.constexpr = SHAPE.consumers
    for c in gl.static_range(CONSUMERS):
        part = memory.sums.index(buffer * CONSUMERS + c).permute((1, 0)).load(layout)
        total += gl.convert_layout(gl.sum(part, axis=1), COPIED_ROWS)
        if SHAPE.groups == 2 or c == CONSUMERS - 1:
            offset = (row.to(gl.int64) + c * (SHAPE.groups - 1) * sizes.s_q) * sizes.topk
            gl.store(out + offset + slot, gl.where(valid, total, 0.0), mask=slot < sizes.topk)
            total = gl.zeros([_KEYS], gl.float32, COPIED_ROWS)


@gluon.jit
def _write_zeros(out, row, first, stop, sizes, SHAPE: gl.constexpr):
    """Writes 0 for blocks without a valid slot."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    slots = gl.arange(0, 512, layout)
    end = gl.minimum(stop * _KEYS, sizes.topk)
    GROUPS: gl.constexpr = SHAPE.groups
    for g in gl.static_range(GROUPS):
        start = out + (row.to(gl.int64) + g * sizes.s_q) * sizes.topk
        for begin in range(first * _KEYS, end, 512):
            gl.store(start + begin + slots, gl.zeros([512], gl.float32, layout), mask=begin + slots < end)


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def _distribution_kernel(
    q, q_stride, q_head_stride, k, k_stride, indices, indices_stride, lo, hi, slots,
    lse, lse_stride, lse_head_stride, out, s_q, h, topk, k_offset, scale_log2,
    SHAPE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    main = gl.allocate_shared_memory(q.dtype.element_ty, [_SLOTS, _KEYS, SHAPE.main], swizzled)
    tail = main
    if SHAPE.tail > 0:
        tail = gl.allocate_shared_memory(q.dtype.element_ty, [_SLOTS, _KEYS, SHAPE.tail], swizzled)
    memory = Memory(main, tail, gl.allocate_shared_memory(gl.float32, [_SUMS * SHAPE.consumers, 4, _KEYS], plain))
    barriers = Barriers(
        ready=new_barriers(_SLOTS, 128),  # every thread of the producer, when its copies have arrived
        free=new_barriers(_SLOTS, SHAPE.consumers),
        summed=new_barriers(_SUMS, SHAPE.consumers),
        turns=new_barriers(2, 1),
    )

    sizes = Sizes(s_q, h, topk)
    consumer = (lse, lse_stride, lse_head_stride, slots, memory, barriers, sizes, scale_log2)
    producer = (q, q_stride, q_head_stride, k, k_stride, indices, indices_stride, lo, hi, slots, out,
                memory, barriers, sizes, k_offset)  # fmt: skip
    if SHAPE.consumers == 2:
        gl.warp_specialize(
            [(_consume, (consumer, 0, SHAPE)), (_consume, (consumer, 1, SHAPE)), (_produce, (producer, SHAPE))],
            [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize([(_consume, (consumer, 0, SHAPE)), (_produce, (producer, SHAPE))], [4], [PRODUCER_REGISTERS])
    invalidate_barriers(barriers)
