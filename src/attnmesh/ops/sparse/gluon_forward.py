"""Sparse attention forward on Hopper for latent keys: d 576 or 512, the value the first 512 columns of the key.

Four warp groups work on 64 heads of one query row, 64 keys at a time, two tiles of keys in turn:

- the gatherer copies the named rows into shared memory, front columns first;
- the scorer multiplies queries and keys, keeps the running maximum, and writes the weights where the tail of the
  keys was (64 columns that only scores need);
- two averagers each hold 256 of the 512 output columns in registers, and add weights times keys.

So one group's softmax runs while the others keep the matrix units busy, and no group holds more than one kind of
accumulator.

Who may write what, and when: a tile's stage is `ready` when every gathering thread's copies have landed (each reports
its own), its weights are ready after the scores of that tile were computed, and it is `free` when the averagers' last
products have read it. The weights, the decay and the bias of a stage live exactly as long as its keys, so they need no
barrier of their own to be overwritten. Barriers are waited for by the parity of their turn: stage `tile % 2` is used
for the `tile // 2`-th time; waiting for the turn before the first succeeds at once.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
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
# What a later session may tune.
HEADS = 64  # of a program: the rows of one matrix instruction
KEYS = 64  # of a tile; two tiles and the queries fill the shared memory
REGISTERS = (168, 168, 48)  # a thread's, of the averagers and the gatherer; the scorer has what is left of 512
COLUMNS = 128  # of the averagers' matrix instruction; 256 are refused: 512 threads start with 128 registers each

D_V = 512
_HALF = gl.constexpr(D_V // 2)
_TAIL = gl.constexpr(64)
_COLUMNS = gl.constexpr(COLUMNS)
_AVERAGER, _, _GATHERER = (gl.constexpr(n) for n in REGISTERS)
_GATHERERS = gl.constexpr(128)  # threads, each of which reports its own copies
NUMBERS = ["heads", "k_offset", "scale_log2", "topk"]


def suits(q: Tensor, k: Tensor, v: Tensor | None, *, d_v: int) -> bool:
    """Whether the kernel below serves these: latent keys in 16 bits, rows that 16-byte copies can read, on Hopper."""
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
    sm_scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What `triton_forward.forward` computes, for operands that `suits` this kernel."""
    assert v is None
    s_q, heads, d = q.shape
    out = torch.empty(s_q, heads, d_v, dtype=out_dtype, device=q.device)
    lse = torch.empty(s_q, heads, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    with torch.cuda.device_of(q):
        _forward_kernel[(s_q * triton.cdiv(heads, HEADS),)](
            q, q.stride(0), q.stride(1), k, k.stride(0), indices, indices.stride(0), lo, hi, slots, out, lse,
            heads, indices.shape[1], k_offset, sm_scale * LOG2_E,
            TAILED=d > D_V, STAGED=out_dtype.itemsize == 2, HEADS=HEADS, KEYS=KEYS, num_warps=4,
        )  # fmt: skip
    return out, lse


@gluon.jit(do_not_specialize=NUMBERS)
def _forward_kernel(
    q, q_row, q_head, k, k_row, indices, indices_row, lo, hi, slots, out, lse,
    heads, topk, k_offset, scale_log2,
    TAILED: gl.constexpr, STAGED: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """One query row, 64 of its heads. Neighbouring programs share a row: its keys are in L2 for the second."""
    head_tiles = (heads + HEADS - 1) // HEADS
    row = (gl.program_id(0) // head_tiles).to(gl.int64)
    head_begin = gl.program_id(0) % head_tiles * HEADS
    slot_count = gl.minimum(gl.load(slots + row), topk)
    first = gl.load(lo + row)
    end = gl.load(hi + row)
    tiles = (slot_count + KEYS - 1) // KEYS

    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_front = gl.allocate_shared_memory(dtype, [HEADS, _HALF], wide)
    q_back = gl.allocate_shared_memory(dtype, [HEADS, _HALF], wide)
    q_tail = gl.allocate_shared_memory(dtype, [HEADS, _TAIL], wide)
    k_front = gl.allocate_shared_memory(dtype, [2, KEYS, _HALF], wide)
    k_back = gl.allocate_shared_memory(dtype, [2, KEYS, _HALF], wide)
    k_tail = gl.allocate_shared_memory(dtype, [2, KEYS, _TAIL], wide)  # and then the weights [HEADS, KEYS]
    bias = gl.allocate_shared_memory(gl.float32, [2, KEYS], flat)  # 0, or -inf where the slot does not count
    decay = gl.allocate_shared_memory(gl.float32, [2, HEADS], flat)  # what a new maximum makes of the sums so far
    share = gl.allocate_shared_memory(gl.float32, [HEADS], flat)  # 1 / sum of weights, at the end

    once: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    front_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    back_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    decay_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    weights_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    front_free = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    back_free = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    share_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    mbarrier.init(q_ready.index(0), count=_GATHERERS)
    mbarrier.init(share_ready.index(0), count=1)
    for stage in gl.static_range(2):
        mbarrier.init(front_ready.index(stage), count=_GATHERERS)
        mbarrier.init(back_ready.index(stage), count=_GATHERERS + 1)  # the copies and, once, the bias
        mbarrier.init(decay_ready.index(stage), count=1)
        mbarrier.init(weights_ready.index(stage), count=1)
        mbarrier.init(front_free.index(stage), count=1)  # only one averager reads the front,
        mbarrier.init(back_free.index(stage), count=2)  # but both the weights, which lie in the tail
    fence_async_shared()

    out_row = out + row * heads * (2 * _HALF)
    gl.warp_specialize(
        [
            (_score, (q_front, q_back, q_tail, k_front, k_back, k_tail, bias, decay, share,
                      q_ready, front_ready, back_ready, decay_ready, weights_ready, share_ready,
                      tiles, scale_log2, lse + row * heads, head_begin, heads, TAILED, HEADS, KEYS)),
            (_average, (k_front, k_tail, decay, share, decay_ready, weights_ready, share_ready, front_free, back_free,
                        tiles, q_front, out_row, head_begin, heads, True, STAGED, HEADS, KEYS)),
            (_average, (k_back, k_tail, decay, share, decay_ready, weights_ready, share_ready, front_free, back_free,
                        tiles, q_back, out_row + _HALF, head_begin, heads, False, STAGED, HEADS, KEYS)),
            (_gather, (q + row * q_row, q_head, k, k_row, indices + row * indices_row, first, end, slot_count, k_offset,
                       q_front, q_back, q_tail, k_front, k_back, k_tail, bias,
                       q_ready, front_ready, back_ready, front_free, back_free,
                       tiles, head_begin, heads, TAILED, HEADS, KEYS)),
        ],
        [4, 4, 4],
        [_AVERAGER, _AVERAGER, _GATHERER],
    )  # fmt: skip


@gluon.jit
def _gather(
    q, q_head, k, k_row, indices, first, end, slot_count, k_offset,
    q_front, q_back, q_tail, k_front, k_back, k_tail, bias,
    q_ready, front_ready, back_ready, front_free, back_free,
    tiles, head_begin, heads, TAILED: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Copies the queries once, and tile after tile the keys that the slots name; zeros where a slot does not count."""
    # Eight lanes copy 128 bytes of a row: whole lines, and columns at constant distances.
    grid: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    across: gl.constexpr = gl.SliceLayout(0, grid)
    down: gl.constexpr = gl.SliceLayout(1, grid)
    half = gl.arange(0, _HALF, layout=across)[None, :]
    tail = gl.arange(0, _TAIL, layout=across)[None, :]

    head = head_begin + gl.arange(0, HEADS, layout=down)
    real = (head < heads)[:, None]
    q_rows = q + (head.to(gl.int64) * q_head)[:, None]
    async_copy.async_copy_global_to_shared(q_front, q_rows + half, mask=real)
    async_copy.async_copy_global_to_shared(q_back, q_rows + (half + _HALF), mask=real)
    if TAILED:
        async_copy.async_copy_global_to_shared(q_tail, q_rows + (tail + 2 * _HALF), mask=real)
    async_copy.mbarrier_arrive(q_ready.index(0), increment_count=False)

    slot = gl.arange(0, KEYS, layout=down)
    key = gl.load(indices + slot, mask=slot < slot_count, other=-2147483648)
    for tile in range(tiles):
        stage = tile % 2
        turn = (tile // 2) & 1
        valid = (key >= first) & (key < end) & (slot < slot_count)
        k_rows = k + ((key.to(gl.int64) - k_offset) * k_row)[:, None]
        # The next keys are named early, so that the copies need not wait for the names.
        slot += KEYS
        key = gl.load(indices + slot, mask=slot < slot_count, other=-2147483648)

        mbarrier.wait(front_free.index(stage), turn ^ 1)
        async_copy.async_copy_global_to_shared(k_front.index(stage), k_rows + half, mask=valid[:, None])
        async_copy.mbarrier_arrive(front_ready.index(stage), increment_count=False)

        mbarrier.wait(back_free.index(stage), turn ^ 1)
        async_copy.async_copy_global_to_shared(k_back.index(stage), k_rows + (half + _HALF), mask=valid[:, None])
        if TAILED:
            async_copy.async_copy_global_to_shared(
                k_tail.index(stage), k_rows + (tail + 2 * _HALF), mask=valid[:, None]
            )
        async_copy.mbarrier_arrive(back_ready.index(stage), increment_count=False)
        bias.index(stage).store(gl.where(valid, 0.0, float("-inf")))
        mbarrier.arrive(back_ready.index(stage), count=1)


@gluon.jit
def _score(
    q_front, q_back, q_tail, k_front, k_back, k_tail, bias, decay, share,
    q_ready, front_ready, back_ready, decay_ready, weights_ready, share_ready,
    tiles, scale_log2, lse, head_begin, heads, TAILED: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Scores, running maximum, weights and their sum; at the end the log-sum-exp."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    across: gl.constexpr = gl.SliceLayout(0, grid)
    peak = gl.full([HEADS], float("-inf"), gl.float32, down)
    total = gl.full([HEADS], 0.0, gl.float32, down)
    mbarrier.wait(q_ready.index(0), 0)
    for tile in range(tiles):
        stage = tile % 2
        turn = (tile // 2) & 1
        scores = gl.zeros([HEADS, KEYS], gl.float32, grid)
        mbarrier.wait(front_ready.index(stage), turn)
        fence_async_shared()  # copies write shared memory by another way than matrix units read it
        scores = warpgroup_mma(q_front, k_front.index(stage).permute([1, 0]), scores, use_acc=False, is_async=True)
        mbarrier.wait(back_ready.index(stage), turn)
        fence_async_shared()
        scores = warpgroup_mma(q_back, k_back.index(stage).permute([1, 0]), scores, is_async=True)
        if TAILED:
            scores = warpgroup_mma(q_tail, k_tail.index(stage).permute([1, 0]), scores, is_async=True)
        tile_bias = bias.index(stage).load(across)
        scores = warpgroup_mma_wait(0, [scores])

        scores = scores * scale_log2 + tile_bias[None, :]
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        # Nothing seen yet: subtract 0, since -inf - -inf would be NaN.
        shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        tile_decay = gl.exp2(peak - shift)
        decay.index(stage).store(tile_decay)
        # The averagers scale while the weights are made. Arriving also makes this group's warps wait for one another:
        # none writes weights over the tail of the keys while another still multiplies with it.
        mbarrier.arrive(decay_ready.index(stage), count=1)
        weights = gl.exp2(scores - shift[:, None])
        k_tail.index(stage).store(weights.to(k_tail.dtype))
        fence_async_shared()
        mbarrier.arrive(weights_ready.index(stage), count=1)
        total = total * tile_decay + gl.sum(weights, 1)
        peak = new_peak

    # A row that saw nothing has total 0 and peak -inf: out 0 * 1, lse -inf + -inf.
    share.store(1.0 / gl.where(total == 0.0, 1.0, total))
    mbarrier.arrive(share_ready.index(0), count=1)
    head = head_begin + gl.arange(0, HEADS, layout=down)
    gl.store(lse + head, (peak + gl.log2(total)) / _LOG2_E, mask=head < heads)


@gluon.jit
def _average(
    k_half, weights, decay, share, decay_ready, weights_ready, share_ready, front_free, back_free,
    tiles, staging, out, head_begin, heads,
    FRONT: gl.constexpr, STAGED: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Adds weights times keys to 256 of the output's columns, and writes them."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    acc = gl.zeros([HEADS, _HALF], gl.float32, grid)
    for tile in range(tiles):
        stage = tile % 2
        turn = (tile // 2) & 1
        mbarrier.wait(decay_ready.index(stage), turn)
        acc = acc * decay.index(stage).load(down)[:, None]
        mbarrier.wait(weights_ready.index(stage), turn)
        acc = warpgroup_mma(weights.index(stage), k_half.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        if FRONT:
            mbarrier.arrive(front_free.index(stage), count=1)
        mbarrier.arrive(back_free.index(stage), count=1)

    mbarrier.wait(share_ready.index(0), 0)  # by then the queries are no longer read
    result = (acc * share.load(down)[:, None]).to(out.dtype.element_ty)
    if STAGED:
        # Through shared memory, so that a warp writes whole lines.
        lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        staged = staging._reinterpret(out.dtype.element_ty, [HEADS, _HALF], wide)
        staged.store(result)
        _write(out, staged.load(lines), head_begin, heads, HEADS, lines)
    else:
        _write(out, result, head_begin, heads, HEADS, grid)


@gluon.jit
def _write(out, result, head_begin, heads, HEADS: gl.constexpr, grid: gl.constexpr):
    head = head_begin + gl.arange(0, HEADS, layout=gl.SliceLayout(1, grid))[:, None]
    column = gl.arange(0, _HALF, layout=gl.SliceLayout(0, grid))[None, :]
    gl.store(out + head.to(gl.int64) * (2 * _HALF) + column, result, mask=head < heads)
