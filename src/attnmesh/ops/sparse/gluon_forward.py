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

LOG2_E = 1.4426950408889634
_LOG2_E = gl.constexpr(LOG2_E)
HEADS = 64  # per item: the rows of one matrix instruction
KEYS = 64  # per tile; two tiles and the queries fill shared memory
D_V = 512
_QUARTER = gl.constexpr(D_V // 4)
_TAIL = gl.constexpr(64)
_SLACK = gl.constexpr(8.0)  # weights may grow to 2**_SLACK before the sums are rescaled
_AVERAGER, _GATHERER = gl.constexpr(160), gl.constexpr(64)  # registers per thread; the scorer has the rest of 512
_GATHERERS = gl.constexpr(128)  # threads, each of which reports its own copies
NOT_SPECIALIZED = ["items", "heads", "k_offset", "scale_log2", "topk"]


def supports(q: Tensor, k: Tensor, v: Tensor | None, *, d_v: int) -> bool:
    """Whether the kernel can serve the call: latent keys in 16 bits, rows aligned to 16 bytes, on Hopper."""
    return (
        v is None
        and d_v == D_V
        and q.shape[-1] in (D_V, D_V + 64)
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
            TAILED=d > D_V, NARROW_OUT=out_dtype.itemsize == 2, HEADS=HEADS, KEYS=KEYS, num_warps=4,
        )  # fmt: skip
    return (out, lse) if top is None else (out, lse, top)


def processors(q: Tensor) -> int:
    """The multiprocessors of q's GPU, each of which runs one program."""
    # Three in the emulation, so that a program has several items.
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 3


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def _forward_kernel(
    q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, sinks, out, lse, top,
    items, heads, topk, k_offset, scale_log2,
    TAILED: gl.constexpr, NARROW_OUT: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Processes every num_programs-th item. Neighboring programs share a row: its keys are in L2 for the second."""
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_main = gl.allocate_shared_memory(dtype, [4, HEADS, _QUARTER], wide)
    q_tail = gl.allocate_shared_memory(dtype, [HEADS, _TAIL], wide)
    k_main = gl.allocate_shared_memory(dtype, [8, KEYS, _QUARTER], wide)  # four quarters of each tile
    k_tail = gl.allocate_shared_memory(dtype, [2, KEYS, _TAIL], wide)  # and then the weights [HEADS, KEYS]
    bias = gl.allocate_shared_memory(gl.float32, [2, KEYS], flat)  # 0, or -inf where the slot is invalid
    decay = gl.allocate_shared_memory(gl.float32, [2, HEADS], flat)  # factor of the sums so far after a new maximum
    share = gl.allocate_shared_memory(gl.float32, [HEADS], flat)  # 1 / sum of weights, at the end

    once: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    front_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    back_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    decay_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    weights_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    front_free = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    back_free = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    share_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    share_free = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    mbarrier.init(q_ready.index(0), count=_GATHERERS)
    mbarrier.init(share_ready.index(0), count=1)
    mbarrier.init(q_free.index(0), count=1)
    mbarrier.init(share_free.index(0), count=2)
    for stage in gl.static_range(2):
        mbarrier.init(front_ready.index(stage), count=_GATHERERS)
        mbarrier.init(back_ready.index(stage), count=_GATHERERS + 1)  # the copies and, once, the bias
        mbarrier.init(decay_ready.index(stage), count=1)
        mbarrier.init(weights_ready.index(stage), count=1)
        mbarrier.init(front_free.index(stage), count=2)  # each averager reads a quarter of the front,
        mbarrier.init(back_free.index(stage), count=2)  # a quarter of the back, and the weights
    fence_async_shared()

    gl.warp_specialize(
        [
            (_score, (q_main, q_tail, k_main, k_tail, bias, decay, share,
                      q_ready, q_free, front_ready, back_ready, decay_ready, weights_ready, share_ready, share_free,
                      slots, items, topk, scale_log2, sinks, lse, top, heads, TAILED, HEADS, KEYS)),
            (_average, (k_main, k_tail, decay, share, decay_ready, weights_ready, share_ready, share_free,
                        front_free, back_free, slots, items, topk, out, heads, 0, NARROW_OUT, HEADS, KEYS)),
            (_average, (k_main, k_tail, decay, share, decay_ready, weights_ready, share_ready, share_free,
                        front_free, back_free, slots, items, topk, out, heads, 1, NARROW_OUT, HEADS, KEYS)),
            (_gather, (q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, k_offset,
                       q_main, q_tail, k_main, k_tail, bias,
                       q_ready, q_free, front_ready, back_ready, front_free, back_free,
                       items, topk, heads, TAILED, HEADS, KEYS)),
        ],
        [4, 4, 4],
        [_AVERAGER, _AVERAGER, _GATHERER],
    )  # fmt: skip


@gluon.jit
def _item(item, slots, topk, heads, HEADS: gl.constexpr):
    """The row of a work item, its first head, and the number of slots of the row."""
    head_tiles = (heads + HEADS - 1) // HEADS
    row = (item // head_tiles).to(gl.int64)
    slot_count = gl.maximum(gl.minimum(gl.load(slots + row), topk), 0)
    return row, item % head_tiles * HEADS, slot_count


@gluon.jit
def _gather(
    q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, k_offset,
    q_main, q_tail, k_main, k_tail, bias,
    q_ready, q_free, front_ready, back_ready, front_free, back_free,
    items, topk, heads, TAILED: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
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
        row, head_begin, slot_count = _item(item, slots, topk, heads, HEADS)
        first = gl.load(lo + row)
        end = gl.load(hi + row)
        row_indices = indices + row * indices_row
        slot = gl.arange(0, KEYS, layout=down)
        key = gl.load(row_indices + slot, mask=slot < slot_count, other=-2147483648)
        tiles = (slot_count + KEYS - 1) // KEYS
        for tile in range(tiles):
            stage = step % 2
            turn = (step // 2) & 1
            valid = (key >= first) & (key < end) & (slot < slot_count)
            k_rows = k + ((key.to(gl.int64) - k_offset) * k_row)[:, None]
            # Load the next indices early, so that the copies do not wait for them.
            slot = slot + KEYS
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
                head = head_begin + gl.arange(0, HEADS, layout=down)
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
    TAILED: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Scores, running maximum, weights and their sum; at the end the log-sum-exp, with the sink of each head."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    across: gl.constexpr = gl.SliceLayout(0, grid)
    held: gl.constexpr = gl.DotOperandLayout(0, grid, 2)
    step = 0  # tiles so far, of all items
    served = 0  # items so far that have any tile
    done = 0  # items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, head_begin, slot_count = _item(item, slots, topk, heads, HEADS)
        tiles = (slot_count + KEYS - 1) // KEYS
        peak = gl.full([HEADS], float("-inf"), gl.float32, down)
        largest = peak  # `peak` lags behind it by up to _SLACK
        total = gl.full([HEADS], 0.0, gl.float32, down)
        mbarrier.wait(q_ready.index(0), served & 1, pred=tiles > 0)
        # As many of the queries as fit in registers: shared memory bandwidth limits the products.
        q_first = q_main.index(0).load(held)
        for _tile in range(tiles):
            stage = step % 2
            turn = (step // 2) & 1
            step += 1
            scores = gl.zeros([HEADS, KEYS], gl.float32, grid)
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
            new_peak = gl.where(highest > peak + _SLACK, highest, peak)
            # No valid key yet: subtract 0, because -inf - -inf is NaN.
            shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
            tile_decay = gl.exp2(peak - shift)
            decay.index(stage).store(tile_decay)
            # The averagers rescale while the weights are computed. Arriving also synchronizes the warps of this group:
            # none writes weights over the tail of the keys while another still multiplies with it.
            mbarrier.arrive(decay_ready.index(stage), count=1)
            weights = gl.exp2(scores - shift[:, None])
            k_tail.index(stage).store(weights.to(k_tail.dtype))
            fence_async_shared()
            mbarrier.arrive(weights_ready.index(stage), count=1)
            total = total * tile_decay + gl.sum(weights, 1)
            peak = new_peak

        if tiles > 0:
            mbarrier.arrive(q_free.index(0), count=1)
            served += 1
        head = head_begin + gl.arange(0, HEADS, layout=down)
        kept = 1.0
        if sinks is not None:
            sink = gl.load(sinks + head, mask=head < heads, other=0.0).to(gl.float32) * _LOG2_E
            highest = gl.maximum(peak, sink)
            shift = gl.where(highest == float("-inf"), 0.0, highest)
            kept = gl.exp2(peak - shift)
            total = total * kept + gl.where(sink == shift, 1.0, gl.exp2(sink - shift))  # also if both are +inf
            peak = highest
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
    PART: gl.constexpr, NARROW_OUT: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Adds weights times keys to two quarters of the output columns, one of the front and one of the back."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _QUARTER, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    step = 0  # tiles so far, of all items
    done = 0  # items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, head_begin, slot_count = _item(item, slots, topk, heads, HEADS)
        tiles = (slot_count + KEYS - 1) // KEYS
        front = gl.zeros([HEADS, _QUARTER], gl.float32, grid)
        back = gl.zeros([HEADS, _QUARTER], gl.float32, grid)
        for _tile in range(tiles):
            stage = step % 2
            turn = (step // 2) & 1
            step += 1
            mbarrier.wait(decay_ready.index(stage), turn)
            tile_decay = decay.index(stage).load(down)
            # Rarely taken; otherwise 128 multiplications per thread would precede the matrix products of every tile.
            if gl.min(tile_decay, 0) < 1.0:
                front = front * tile_decay[:, None]
                back = back * tile_decay[:, None]
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
        write_columns(out_row, front * scale, PART * _QUARTER, head_begin, heads, NARROW_OUT, HEADS, grid)
        write_columns(out_row, back * scale, (2 + PART) * _QUARTER, head_begin, heads, NARROW_OUT, HEADS, grid)


@gluon.jit
def write_columns(
    out, result, column_begin, head_begin, heads, NARROW: gl.constexpr, HEADS: gl.constexpr, grid: gl.constexpr
):
    """Writes a quarter of the output columns of some heads of a row."""
    result = result.to(out.dtype.element_ty)
    if NARROW:
        # Four lanes exchange pairs of columns until each has eight in a row: 16-byte stores, without shared memory,
        # where the queries of the next item already arrive.
        lines: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]], [], [HEADS, _QUARTER],
        )  # fmt: skip
        _write_rows(out, gl.convert_layout(result, lines), column_begin, head_begin, heads, HEADS, lines)
    else:
        _write_rows(out, result, column_begin, head_begin, heads, HEADS, grid)


@gluon.jit
def _write_rows(out, result, column_begin, head_begin, heads, HEADS: gl.constexpr, grid: gl.constexpr):
    head = head_begin + gl.arange(0, HEADS, layout=gl.SliceLayout(1, grid))[:, None]
    column = column_begin + gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, grid))[None, :]
    gl.store(out + head.to(gl.int64) * (4 * _QUARTER) + column, result, mask=head < heads)
