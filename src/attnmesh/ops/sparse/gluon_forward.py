"""The forward pass of sparse attention on Hopper in Gluon: d 576 or 512, values the first 512 columns of the keys.

A program is persistent and processes one work item after another: 64 heads of one query row. Four warp groups share an
item, 64 keys at a time, double-buffered:

- the gatherer copies the rows of the keys into shared memory, front columns first;
- the scorer multiplies queries and keys, keeps the running maximum, and writes the weights over the tail of the keys
  (64 columns that only scores need);
- two averagers each hold 256 of the 512 output columns in registers, and add weights times keys.

So the softmax of one group runs while the others keep the tensor cores busy, no group holds more than one kind of
accumulator, and the first keys of the next item arrive while the last of this one are summed.

Synchronization: a stage is `ready` when the copies of every gathering thread have arrived (each reports its own), its
weights are ready after the scores of that tile have been computed, and it is `free` when the last products of the
averagers have read it. The weights, the decay and the bias of a stage live exactly as long as its keys, so they need no
barrier of their own before they are overwritten; queries and shares live as long as an item, and have one. Barriers are
waited for by the parity of their phase, counted over all items: stage `step % 2` is used for the `step // 2`-th time;
waiting for the phase before the first succeeds at once.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import torch
import triton
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

from attnmesh.ops.gluon_barriers import allocate_barriers, init_barriers
from attnmesh.ops.sparse.gluon_common import (
    D_TAIL,
    D_V,
    HEADS,
    KEYS,
    LOG2_E,
    add_sinks,
    processors,
    rescale,
    weigh,
    write_columns,
)

_LOG2_E = gl.constexpr(LOG2_E)
_HEADS, _KEYS = gl.constexpr(HEADS), gl.constexpr(KEYS)  # two tiles of keys and the queries fill shared memory
_QUARTER, _TAIL = gl.constexpr(D_V // 4), gl.constexpr(D_TAIL)
_AVERAGER, _GATHERER = gl.constexpr(160), gl.constexpr(64)  # registers per thread; the scorer has the rest of 512
_GATHERERS = gl.constexpr(128)  # threads, each of which reports its own copies
NOT_SPECIALIZED = ["items", "heads", "k_offset", "scale_log2", "topk"]


def supports(q: Tensor, k: Tensor, v: Tensor | None, *, d_v: int) -> bool:
    """Whether the kernel can serve the call: latent keys in 16 bits, rows aligned to 16 bytes, on Hopper."""
    return (
        v is None
        and d_v == D_V
        and q.shape[-1] in (D_V, D_V + D_TAIL)
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(x.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:-1]) for x in (q, k))
        and q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    lo: Tensor,
    hi: Tensor,
    slots: Tensor,
    *,
    d_v: int,
    k_offset: int,
    scale: float,
    out_dtype: torch.dtype,
    sinks: Tensor | None = None,
    max_logits: bool = False,
) -> tuple[Tensor, ...]:
    """`triton_forward.forward` for arguments that satisfy `supports`."""
    assert v is None
    s_q, heads, d = q.shape
    out = torch.empty(s_q, heads, d_v, dtype=out_dtype, device=q.device)
    lse = torch.empty(s_q, heads, dtype=torch.float32, device=q.device)
    top = torch.empty_like(lse) if max_logits else None
    sinks = None if sinks is None else sinks.contiguous()
    if out.numel() == 0:
        return (out, lse) if top is None else (out, lse, top)
    with torch.cuda.device_of(q):
        items = s_q * triton.cdiv(heads, HEADS)
        _forward_kernel[(min(items, processors(q)),)](
            q, q.stride(0), q.stride(1), k, k.stride(0), indices, indices.stride(0), lo, hi, slots, sinks, out, lse,
            top, items, heads, indices.shape[1], k_offset, scale * LOG2_E,
            TAILED=d > D_V, NARROW_OUT=out_dtype.itemsize == 2, num_warps=4,
        )  # fmt: skip
    return (out, lse) if top is None else (out, lse, top)


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
    q_main = gl.allocate_shared_memory(dtype, [4, _HEADS, _QUARTER], wide)
    q_tail = gl.allocate_shared_memory(dtype, [_HEADS, _TAIL], wide)
    k_main = gl.allocate_shared_memory(dtype, [8, _KEYS, _QUARTER], wide)  # four quarters of each tile
    k_tail = gl.allocate_shared_memory(dtype, [2, _KEYS, _TAIL], wide)  # and then the weights [_HEADS, _KEYS]
    bias = gl.allocate_shared_memory(gl.float32, [2, _KEYS], flat)  # 0, or -inf where the slot is invalid
    decay = gl.allocate_shared_memory(gl.float32, [2, _HEADS], flat)  # factor of the sums so far after a new maximum
    share = gl.allocate_shared_memory(gl.float32, [_HEADS], flat)  # 1 / sum of weights, at the end

    q_ready = allocate_barriers(1)
    q_free = allocate_barriers(1)
    front_ready = allocate_barriers(2)
    back_ready = allocate_barriers(2)
    decay_ready = allocate_barriers(2)
    weights_ready = allocate_barriers(2)
    front_free = allocate_barriers(2)
    back_free = allocate_barriers(2)
    share_ready = allocate_barriers(1)
    share_free = allocate_barriers(1)
    init_barriers(q_ready, _GATHERERS)
    init_barriers(q_free, 1)
    init_barriers(front_ready, _GATHERERS)
    init_barriers(back_ready, _GATHERERS + 1)  # the copies and, once, the bias
    init_barriers(decay_ready, 1)
    init_barriers(weights_ready, 1)
    init_barriers(front_free, 2)  # each averager reads a quarter of the front,
    init_barriers(back_free, 2)  # a quarter of the back, and the weights
    init_barriers(share_ready, 1)
    init_barriers(share_free, 2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_score, (q_main, q_tail, k_main, k_tail, bias, decay, share,
                      q_ready, q_free, front_ready, back_ready, decay_ready, weights_ready, share_ready, share_free,
                      slots, items, topk, scale_log2, sinks, lse, top, heads, TAILED)),
            (_average, (k_main, k_tail, decay, share, decay_ready, weights_ready, share_ready, share_free,
                        front_free, back_free, slots, items, topk, out, heads, 0, NARROW_OUT)),
            (_average, (k_main, k_tail, decay, share, decay_ready, weights_ready, share_ready, share_free,
                        front_free, back_free, slots, items, topk, out, heads, 1, NARROW_OUT)),
            (_gather, (q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, k_offset,
                       q_main, q_tail, k_main, k_tail, bias,
                       q_ready, q_free, front_ready, back_ready, front_free, back_free,
                       items, topk, heads, TAILED)),
        ],
        [4, 4, 4],
        [_AVERAGER, _AVERAGER, _GATHERER],
    )  # fmt: skip


@gluon.jit
def _item(item, slots, topk, heads):
    """The row of a work item, its first head, and the number of slots of the row."""
    head_tiles = (heads + _HEADS - 1) // _HEADS
    row = (item // head_tiles).to(gl.int64)
    slot_count = gl.maximum(gl.minimum(gl.load(slots + row), topk), 0)
    return row, item % head_tiles * _HEADS, slot_count


@gluon.jit
def _gather(
    q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, k_offset,
    q_main, q_tail, k_main, k_tail, bias,
    q_ready, q_free, front_ready, back_ready, front_free, back_free,
    items, topk, heads, TAILED: gl.constexpr,
):  # fmt: skip
    """Copies the queries of each item and, tile by tile, the keys of its slots; 0 where a slot is invalid."""
    # Eight lanes copy 128 bytes of a row: whole cache lines, and columns at constant offsets.
    grid: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    across: gl.constexpr = gl.SliceLayout(0, grid)
    down: gl.constexpr = gl.SliceLayout(1, grid)
    column = gl.arange(0, _QUARTER, layout=across)[None, :]
    tail = gl.arange(0, _TAIL, layout=across)[None, :]
    step = 0  # tiles so far, of all items
    served = 0  # items so far that have any tile
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, head_begin, slot_count = _item(item, slots, topk, heads)
        first = gl.load(lo + row)
        end = gl.load(hi + row)
        row_indices = indices + row * indices_row
        slot = gl.arange(0, _KEYS, layout=down)
        key = gl.load(row_indices + slot, mask=slot < slot_count, other=-2147483648)
        tiles = (slot_count + _KEYS - 1) // _KEYS
        for tile in range(tiles):
            stage = step % 2
            turn = (step // 2) & 1
            valid = (key >= first) & (key < end) & (slot < slot_count)
            k_rows = k + ((key.to(gl.int64) - k_offset) * k_row)[:, None]
            # Load the next indices early, so that the copies do not wait for them.
            slot = slot + _KEYS
            key = gl.load(row_indices + slot, mask=slot < slot_count, other=-2147483648)

            mbarrier.wait(front_free.index(stage), turn ^ 1)
            for quarter in gl.static_range(2):
                async_copy.async_copy_global_to_shared(
                    k_main.index(4 * stage + quarter), k_rows + (column + quarter * _QUARTER), mask=valid[:, None]
                )
            async_copy.mbarrier_arrive(front_ready.index(stage), increment_count=False)

            mbarrier.wait(back_free.index(stage), turn ^ 1)
            for quarter in gl.static_range(2, 4):
                async_copy.async_copy_global_to_shared(
                    k_main.index(4 * stage + quarter), k_rows + (column + quarter * _QUARTER), mask=valid[:, None]
                )
            if TAILED:
                async_copy.async_copy_global_to_shared(
                    k_tail.index(stage), k_rows + (tail + 4 * _QUARTER), mask=valid[:, None]
                )
            async_copy.mbarrier_arrive(back_ready.index(stage), increment_count=False)
            bias.index(stage).store(gl.where(valid, 0.0, float("-inf")))
            mbarrier.arrive(back_ready.index(stage), count=1)
            step += 1

            # After the first keys, which may arrive while the scores of the last item still read its queries.
            if tile == 0:
                mbarrier.wait(q_free.index(0), (served & 1) ^ 1)
                head = head_begin + gl.arange(0, _HEADS, layout=down)
                real = (head < heads)[:, None]
                q_rows = q + row * q_row + (head.to(gl.int64) * q_head)[:, None]
                for quarter in gl.static_range(4):
                    async_copy.async_copy_global_to_shared(
                        q_main.index(quarter), q_rows + (column + quarter * _QUARTER), mask=real
                    )
                if TAILED:
                    async_copy.async_copy_global_to_shared(q_tail, q_rows + (tail + 4 * _QUARTER), mask=real)
                async_copy.mbarrier_arrive(q_ready.index(0), increment_count=False)
                served += 1


@gluon.jit
def _score(
    q_main, q_tail, k_main, k_tail, bias, decay, share,
    q_ready, q_free, front_ready, back_ready, decay_ready, weights_ready, share_ready, share_free,
    slots, items, topk, scale_log2, sinks, lse, top, heads,
    TAILED: gl.constexpr,
):  # fmt: skip
    """Scores, running maximum, weights and their sum; at the end the log-sum-exp, with the sink of each head."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    across: gl.constexpr = gl.SliceLayout(0, grid)
    held: gl.constexpr = gl.DotOperandLayout(0, grid, 2)
    step = 0  # tiles so far, of all items
    served = 0  # items so far that have any tile
    done = 0  # items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, head_begin, slot_count = _item(item, slots, topk, heads)
        tiles = (slot_count + _KEYS - 1) // _KEYS
        peak = gl.full([_HEADS], float("-inf"), gl.float32, down)
        largest = peak  # which lags behind it (see `weigh`)
        total = gl.full([_HEADS], 0.0, gl.float32, down)
        mbarrier.wait(q_ready.index(0), served & 1, pred=tiles > 0)
        # As many of the queries as fit in registers: shared memory bandwidth limits the products.
        q_first = q_main.index(0).load(held)
        for _tile in range(tiles):
            stage = step % 2
            turn = (step // 2) & 1
            step += 1
            scores = gl.zeros([_HEADS, _KEYS], gl.float32, grid)
            mbarrier.wait(front_ready.index(stage), turn)
            fence_async_shared()  # copies and tensor cores access shared memory through different proxies
            keys = k_main.index(4 * stage).permute([1, 0])
            scores = warpgroup_mma(q_first, keys, scores, use_acc=False, is_async=True)
            keys = k_main.index(4 * stage + 1).permute([1, 0])
            scores = warpgroup_mma(q_main.index(1), keys, scores, is_async=True)
            mbarrier.wait(back_ready.index(stage), turn)
            fence_async_shared()
            for quarter in gl.static_range(2, 4):
                keys = k_main.index(4 * stage + quarter).permute([1, 0])
                scores = warpgroup_mma(q_main.index(quarter), keys, scores, is_async=True)
            if TAILED:
                scores = warpgroup_mma(q_tail, k_tail.index(stage).permute([1, 0]), scores, is_async=True)
            tile_bias = bias.index(stage).load(across)
            scores = warpgroup_mma_wait(0, [scores])

            scores = scores * scale_log2 + tile_bias[None, :]
            highest = gl.max(scores, 1)
            if top is not None:
                largest = gl.maximum(largest, highest)
            peak, total = weigh(
                scores, highest, peak, total, stage, decay, k_tail, decay_ready, weights_ready
            )  # fmt: skip

        if tiles > 0:
            mbarrier.arrive(q_free.index(0), count=1)
            served += 1
        head = head_begin + gl.arange(0, _HEADS, layout=down)
        kept = 1.0
        if sinks is not None:
            peak, total, kept = add_sinks(sinks, head, head < heads, peak, total)
        # A row without a valid slot has total 0 and peak -inf: out 0 * 1, lse -inf + -inf.
        mbarrier.wait(share_free.index(0), (done & 1) ^ 1)
        share.store(kept / gl.where(total == 0.0, 1.0, total))
        mbarrier.arrive(share_ready.index(0), count=1)
        gl.store(lse + row * heads + head, (peak + gl.log2(total)) / _LOG2_E, mask=head < heads)
        if top is not None:
            gl.store(top + row * heads + head, largest / _LOG2_E, mask=head < heads)
        done += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _average(
    k_main, weights, decay, share, decay_ready, weights_ready, share_ready, share_free,
    front_free, back_free, slots, items, topk, out, heads,
    PART: gl.constexpr, NARROW_OUT: gl.constexpr,
):  # fmt: skip
    """Adds weights times keys to two quarters of the output columns, one of the front and one of the back."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _QUARTER, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    step = 0  # tiles so far, of all items
    done = 0  # items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, head_begin, slot_count = _item(item, slots, topk, heads)
        tiles = (slot_count + _KEYS - 1) // _KEYS
        front = gl.zeros([_HEADS, _QUARTER], gl.float32, grid)
        back = gl.zeros([_HEADS, _QUARTER], gl.float32, grid)
        for _tile in range(tiles):
            stage = step % 2
            turn = (step // 2) & 1
            step += 1
            front, back = rescale(front, back, stage, turn, decay, decay_ready, down)
            mbarrier.wait(weights_ready.index(stage), turn)
            front = warpgroup_mma(weights.index(stage), k_main.index(4 * stage + PART), front, is_async=True)
            back = warpgroup_mma(weights.index(stage), k_main.index(4 * stage + 2 + PART), back, is_async=True)
            # Release the front while the back is still read, so that its next keys arrive earlier.
            front = warpgroup_mma_wait(1, [front])
            mbarrier.arrive(front_free.index(stage), count=1)
            back = warpgroup_mma_wait(0, [back])
            mbarrier.arrive(back_free.index(stage), count=1)

        mbarrier.wait(share_ready.index(0), done & 1)
        scale = share.load(down)[:, None]
        mbarrier.arrive(share_free.index(0), count=1)
        done += 1  # noqa: SIM113 - Gluon has no enumerate
        out_row = out + row * heads * (4 * _QUARTER)
        write_columns(out_row, front * scale, PART * _QUARTER, head_begin, heads, NARROW_OUT, grid)
        write_columns(out_row, back * scale, (2 + PART) * _QUARTER, head_begin, heads, NARROW_OUT, grid)
