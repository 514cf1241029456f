"""The backward of attention on Hopper in Gluon: one pass over the keys, adding into float32 gradients.

A program has 128 keys of one kv head, and loops over the rows that see any of them, in every query head of the group.
It recomputes the weights p from the log-sum-exp of the whole softmax::

    grad_v += p^T @ grad_out          ds = p * (grad_out @ v^T - delta)
    grad_q += scale * ds @ k          grad_k += scale * ds^T @ q

Three groups of warps share the work:

- the loader copies a tile of q and grad_out, and the terms of its rows, two or more tiles ahead;
- two differentiators each have 64 of the keys, whose gradients they keep in registers. Scores are computed transposed,
  [keys, rows]: p^T and ds^T are left operands of the next products as they are, without leaving registers.

grad_q sums over all keys: the differentiators exchange ds in shared memory, each multiplies it with half of the columns
of k (or half of the rows of ds), and adds the result to memory atomically. The scores of the next rows are computed
behind these products, so that the tensor cores have work while weights and sums are.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
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

from attnmesh.ops.dense import triton_backward
from attnmesh.ops.dense.call import loadable
from attnmesh.ops.dense.gluon_atomics import add_pairs
from attnmesh.ops.dense.gluon_online_softmax import tanh
from attnmesh.ops.dense.gluon_tma import async_add_shared_to_global
from attnmesh.ops.dense.triton_tiles import LOG2_E, PLAIN, Bounds, ScoreTerms, padded

_LOG2_E = gl.constexpr(LOG2_E)
KEYS = 64  # of each differentiator: the rows of one matrix instruction
MAX_WIDTH = 128  # of keys and values: both gradients of 64 keys are in registers
_DIFFERENTIATOR, _LOADER = gl.constexpr(240), gl.constexpr(24)  # registers per thread, of 504


class BackwardTiles(NamedTuple):
    """How a launch is divided, and how a step runs.

    `rows` of a step, `stages` of q and grad_out in shared memory, `unrolled` steps in a turn of the loop. A program
    sums over `heads` query heads of a group (None: all of them; else programs add to grad_k and grad_v atomically).
    Programs of `section` kv heads are launched together, those of the first keys first (None: of all heads). `bulk`:
    the copy engine adds to grad_q, else atomics do. `paired`: ds is exchanged once in two steps, each differentiator
    multiplies the rows of one. `held`: keys and values stay in registers.
    """

    rows: int = 64
    stages: int = 2
    unrolled: int = 2
    heads: int | None = None
    section: int | None = None
    bulk: bool = True
    paired: bool = True
    held: bool = False

    @classmethod
    def pick(cls, q: Tensor, v: Tensor) -> "BackwardTiles":
        """What was fastest for the head dims."""
        return cls(stages=4, held=True) if max(q.shape[-1], v.shape[-1]) <= 64 else cls()


def refusal(q: Tensor, v: Tensor) -> str | None:
    """The reason why the kernel cannot serve these queries and values; None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its backward kernel takes fp16 and bf16, not {q.dtype}"
    if any(x.shape[-1] % 8 or x.shape[-1] > MAX_WIDTH for x in (q, v)):
        widths = f"{q.shape[-1]} (keys) and {v.shape[-1]} (values)"
        return f"its backward kernel takes head_dim in multiples of 8 up to {MAX_WIDTH}, not {widths}"
    return None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    causal: bool,
    bounds: tuple[Tensor, Tensor] | None,
    grad_q: Tensor | None = None,
    grad_k: Tensor | None = None,
    grad_v: Tensor | None = None,
    overwrite: bool = False,
    terms: ScoreTerms = PLAIN,
    deterministic: bool = False,
    tiles: BackwardTiles | None = None,
) -> None:
    """`triton_backward.backward` for arguments without a `refusal`, and scores without slopes.

    Programs add to grad_q in the order in which they come. If `deterministic`, a second pass, in Triton, computes it.
    """
    if deterministic:
        tiles = (tiles or BackwardTiles.pick(q, v))._replace(heads=None)
        common: dict[str, Any] = {
            "scale": scale,
            "causal": causal,
            "bounds": bounds,
            "overwrite": overwrite,
            "terms": terms,
        }
        triton_backward.backward(q, k, v, grad_out, lse, delta, grad_q=grad_q, **common)
        grad_q = None
    if grad_q is grad_k is grad_v is None:
        return
    if q.numel() == 0 or k.numel() == 0:
        for grad in (grad_q, grad_k, grad_v) if overwrite else ():
            if grad is not None:
                grad.zero_()
        return
    tiles = tiles or BackwardTiles.pick(q, v)
    q, k, v, grad_out = (loadable(x) for x in (q, k, v, grad_out))
    once = overwrite and tiles.heads is None and (bounds is None or bounds[0].shape[0] == 1)
    sum_q = None if grad_q is None else _sums(grad_q, q, overwrite)
    sum_k, sum_v = _sums(grad_k, k, overwrite, once), _sums(grad_v, v, overwrite, once)
    with torch.cuda.device_of(q):
        _launch(q, k, v, grad_out, lse, delta, sum_q, sum_k, sum_v, scale, causal, bounds, terms.softcap, once, tiles)
    for grad, total in ((grad_q, sum_q), (grad_k, sum_k), (grad_v, sum_v)):
        if grad is not None and total is not None and grad is not total:
            grad.copy_(total)


def _sums(grad: Tensor | None, x: Tensor, overwrite: bool, once: bool = False) -> Tensor:
    """Where the kernel adds the gradient of x; it writes to the gradient itself if it writes `once`."""
    if once and grad is not None:
        return grad
    if grad is None or overwrite:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return grad


def _launch(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor,
    grad_q: Tensor | None, grad_k: Tensor, grad_v: Tensor,
    scale: float, causal: bool, bounds: tuple[Tensor, Tensor] | None, softcap: float | None, overwrite: bool,
    tiles: BackwardTiles,
) -> None:  # fmt: skip
    """One launch for each part of the mask."""
    batch, q_heads, q_len, key_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    key_width, value_width = max(64, padded(key_dim)), max(64, padded(value_dim))
    members = tiles.heads or q_heads // kv_heads
    splits = q_heads // kv_heads // members
    streams = batch * kv_heads * splits
    q_blocks, k_blocks = _descriptor(q, tiles.rows, key_width), _descriptor(k, KEYS, key_width)
    grad_out_blocks, v_blocks = _descriptor(grad_out, tiles.rows, value_width), _descriptor(v, KEYS, value_width)
    grad_q_blocks = None
    if grad_q is not None and tiles.bulk:
        grad_q_blocks = _descriptor(
            grad_q, KEYS, key_width if tiles.rows == 2 * KEYS or tiles.paired else key_width // 2
        )
    for part in range(1 if bounds is None else bounds[0].shape[0]):
        visible = Bounds.of(None if bounds is None else (bounds[0][part : part + 1], bounds[1][part : part + 1]))
        ranges = None if bounds is None else triton_backward.rows_per_key_tile(visible, q_len, kv_len, 2 * KEYS)
        _backward_kernel[(streams * triton.cdiv(kv_len, 2 * KEYS),)](
            q_blocks, grad_out_blocks, k_blocks, v_blocks, lse, lse.stride(), delta, delta.stride(),
            visible.first, visible.end, visible.strides[1], ranges,
            grad_q_blocks, grad_q, (0, 0, 0) if grad_q is None else grad_q.stride()[:3],
            grad_k, grad_k.stride()[:3], grad_v, grad_v.stride()[:3],
            q_len, kv_len, kv_heads, splits, members, streams, tiles.section or streams, scale, softcap,
            CAUSAL=causal, ATOMIC=splits > 1, OVERWRITE=overwrite, D=key_dim, K_WIDTH=key_width,
            DV=value_dim, V_WIDTH=value_width, ROWS=tiles.rows, KEYS=KEYS,
            STAGES=tiles.stages, UNROLLED=1 if grad_q is None else tiles.unrolled, PAIRED=tiles.paired,
            HELD=tiles.held, num_warps=4,
        )  # fmt: skip


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    strides = [stride if n > 1 else 64 for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    layout = gl.NVMMASharedLayout(128, 8 * x.element_size(), 4)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns], layout)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "kv_heads", "splits", "members", "streams", "section"])
def _backward_kernel(
    q, grad_out, k, v, lse, lse_strides, delta, delta_strides, first, end, bounds_stride, ranges,
    grad_q_blocks, grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, kv_heads, splits, members, streams, section, scale, softcap,
    CAUSAL: gl.constexpr, ATOMIC: gl.constexpr, OVERWRITE: gl.constexpr, D: gl.constexpr, K_WIDTH: gl.constexpr,
    DV: gl.constexpr, V_WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    UNROLLED: gl.constexpr, PAIRED: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # The tiles of one section, longest first, and then the next section.
    tile_count = gl.cdiv(kv_len, 2 * KEYS)
    in_section = gl.program_id(0) % (section * tile_count)
    section_begin = gl.program_id(0) // (section * tile_count) * section
    section_size = gl.minimum(section, streams - section_begin)
    stream = section_begin + in_section % section_size
    key_begin = in_section // section_size * (2 * KEYS)
    kv_head = stream // splits % kv_heads
    batch = stream // splits // kv_heads
    head = stream % (splits * kv_heads) * members  # the first of the query heads
    begin, inner, edge, stop = _row_phases(
        ranges, bounds_stride, batch, key_begin, q_len, kv_len, tile_count, CAUSAL, ROWS, 2 * KEYS
    )
    head_end = head + members
    steps = gl.cdiv(gl.cdiv(stop - begin, ROWS) * members, UNROLLED) * UNROLLED
    if steps <= 0:
        if OVERWRITE:
            grid: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
            no_grad_k = gl.zeros([2 * KEYS, K_WIDTH], gl.float32, grid)
            no_grad_v = gl.zeros([2 * KEYS, V_WIDTH], gl.float32, grid)
            _add(grad_k, grad_k_strides, no_grad_k, batch, kv_head, key_begin, kv_len, False, True, D, 2 * KEYS, grid)
            _add(grad_v, grad_v_strides, no_grad_v, batch, kv_head, key_begin, kv_len, False, True, DV, 2 * KEYS, grid)
        return

    k_tiles = gl.allocate_shared_memory(dtype, [2, KEYS, K_WIDTH], wide)
    v_tiles = gl.allocate_shared_memory(dtype, [2, KEYS, V_WIDTH], wide)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, K_WIDTH], wide)
    grad_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, V_WIDTH], wide)
    ds_tiles = gl.allocate_shared_memory(dtype, [4, KEYS, ROWS], wide)  # of two steps, of both differentiators
    Q_COLUMNS: gl.constexpr = K_WIDTH if ROWS == 128 or PAIRED else K_WIDTH // 2
    grad_q_tiles: gl.constexpr = None
    if grad_q_blocks is not None:
        floats: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        grad_q_tiles = gl.allocate_shared_memory(gl.float32, [2, 64, Q_COLUMNS], floats)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    row_bounds = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS], flat)

    once: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    v_ready = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], once)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], once)
    grad_out_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], once)
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    ds_free = gl.allocate_shared_memory(gl.int64, [1, 1], once)
    grad_q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    grad_q_free = gl.allocate_shared_memory(gl.int64, [2, 1], once)
    mbarrier.init(k_ready.index(0), count=1)
    mbarrier.init(v_ready.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(stage), count=2)  # the copies and, once, the terms of the rows
        mbarrier.init(grad_out_ready.index(stage), count=2)
        mbarrier.init(q_free.index(stage), count=2)
    mbarrier.init(ds_free.index(0), count=2)
    for stage in gl.static_range(2):
        mbarrier.init(ds_ready.index(stage), count=2)
        mbarrier.init(grad_q_ready.index(stage), count=1)
        mbarrier.init(grad_q_free.index(stage), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_differentiate, (
                k_tiles, v_tiles, q_tiles, grad_out_tiles, ds_tiles, lse_rows, delta_rows, row_bounds,
                k_ready, v_ready, q_ready, q_free, grad_out_ready, ds_ready, ds_free,
                grad_q_tiles, grad_q_ready, grad_q_free,
                grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides,
                q_len, kv_len, batch, head, head_end, kv_head, key_begin,
                begin, inner, edge, stop, steps, scale, softcap,
                first is not None, CAUSAL, ATOMIC, OVERWRITE, D, K_WIDTH, DV, V_WIDTH,
                ROWS, KEYS, STAGES, UNROLLED, PAIRED, HELD, 0)),
            (_differentiate, (
                k_tiles, v_tiles, q_tiles, grad_out_tiles, ds_tiles, lse_rows, delta_rows, row_bounds,
                k_ready, v_ready, q_ready, q_free, grad_out_ready, ds_ready, ds_free,
                grad_q_tiles, grad_q_ready, grad_q_free,
                grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides,
                q_len, kv_len, batch, head, head_end, kv_head, key_begin,
                begin, inner, edge, stop, steps, scale, softcap,
                first is not None, CAUSAL, ATOMIC, OVERWRITE, D, K_WIDTH, DV, V_WIDTH,
                ROWS, KEYS, STAGES, UNROLLED, PAIRED, HELD, 1)),
            (_load, (
                q, grad_out, k, v, lse, lse_strides, delta, delta_strides, first, end, bounds_stride,
                k_tiles, v_tiles, q_tiles, grad_out_tiles, lse_rows, delta_rows, row_bounds,
                k_ready, v_ready, q_ready, q_free, grad_out_ready,
                q_len, kv_len, batch, head, head_end, kv_head, key_begin, begin, stop, steps,
                K_WIDTH, V_WIDTH, ROWS, KEYS, STAGES)),
            (_add_rows, (
                grad_q_blocks, grad_q_tiles, grad_q_ready, grad_q_free,
                q_len, batch, head, head_end, begin, stop, steps, K_WIDTH, ROWS, PAIRED)),
        ],
        [4, 1, 1],
        [_DIFFERENTIATOR, _LOADER, _LOADER],
    )  # fmt: skip


@gluon.jit
def _row_phases(
    ranges, bounds_stride, batch, key_begin, q_len, kv_len, tile_count,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Rows [begin, stop) see some key of the tile; those of [inner, edge) see all of them, and need no mask."""
    begin, full_begin, full_end, stop = 0, 0, q_len, q_len
    if ranges is not None:
        of_tile = ranges + (gl.where(bounds_stride != 0, batch, 0) * tile_count + key_begin // KEYS) * 4
        begin, full_begin = gl.load(of_tile), gl.load(of_tile + 1)
        full_end, stop = gl.load(of_tile + 2), gl.load(of_tile + 3)
    elif CAUSAL:
        begin, full_begin = gl.minimum(key_begin, q_len), key_begin + KEYS - 1
    begin = begin // ROWS * ROWS
    inner = gl.cdiv(full_begin, ROWS) * ROWS
    edge = gl.where(full_end >= q_len, q_len, full_end // ROWS * ROWS)  # rows beyond the last have no weights
    edge = gl.where(key_begin + KEYS > kv_len, 0, edge)
    return begin, inner, edge, stop


@gluon.jit
def _load(
    q, grad_out, k, v, lse, lse_strides, delta, delta_strides, first, end, bounds_stride,
    k_tiles, v_tiles, q_tiles, grad_out_tiles, lse_rows, delta_rows, row_bounds,
    k_ready, v_ready, q_ready, q_free, grad_out_ready,
    q_len, kv_len, batch, head, head_end, kv_head, key_begin, begin, stop, steps,
    K_WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies keys and values once, and then the rows of every step."""
    block: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    near = gl.arange(0, ROWS, layout=line)
    lse_head = lse + batch.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
    delta_head = delta + batch.to(gl.int64) * delta_strides[0] + head.to(gl.int64) * delta_strides[1]
    mbarrier.expect(k_ready.index(0), 2 * KEYS * K_WIDTH * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            k, [batch, kv_head, key_begin + half * KEYS, 0], k_ready.index(0),
            k_tiles.index(half)._reinterpret(k.dtype, [1, 1, KEYS, K_WIDTH], block),
        )  # fmt: skip
    row = begin
    for step in range(steps):
        stage = step % STAGES
        turn = (step // STAGES) & 1
        rows = row + near
        row_lse = gl.load(lse_head + rows * lse_strides[2], mask=rows < q_len, other=float("-inf"))
        row_delta = gl.load(delta_head + rows * delta_strides[2], mask=rows < q_len, other=0.0)
        empty = row_lse == float("-inf")
        mbarrier.wait(q_free.index(stage), turn ^ 1)
        mbarrier.expect(q_ready.index(stage), ROWS * K_WIDTH * 2)
        tma.async_copy_global_to_shared(
            q, [batch, head, row, 0], q_ready.index(stage),
            q_tiles.index(stage)._reinterpret(q.dtype, [1, 1, ROWS, K_WIDTH], block),
        )  # fmt: skip
        # Rows without keys have weights of 0.
        lse_rows.index(stage).store(gl.where(empty, float("inf"), row_lse * _LOG2_E))
        if first is not None:
            row_first = gl.load(first + batch.to(gl.int64) * bounds_stride + rows, mask=rows < q_len, other=0)
            row_end = gl.load(end + batch.to(gl.int64) * bounds_stride + rows, mask=rows < q_len, other=0)
            row_bounds.index(2 * stage).store(row_first)
            row_bounds.index(2 * stage + 1).store(gl.minimum(row_end, kv_len))
        mbarrier.arrive(q_ready.index(stage), count=1)
        if step == 0:
            mbarrier.expect(v_ready.index(0), 2 * KEYS * V_WIDTH * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    v, [batch, kv_head, key_begin + half * KEYS, 0], v_ready.index(0),
                    v_tiles.index(half)._reinterpret(v.dtype, [1, 1, KEYS, V_WIDTH], block),
                )  # fmt: skip
        mbarrier.expect(grad_out_ready.index(stage), ROWS * V_WIDTH * 2)
        tma.async_copy_global_to_shared(
            grad_out, [batch, head, row, 0], grad_out_ready.index(stage),
            grad_out_tiles.index(stage)._reinterpret(grad_out.dtype, [1, 1, ROWS, V_WIDTH], block),
        )  # fmt: skip
        delta_rows.index(stage).store(gl.where(empty, 0.0, row_delta))
        mbarrier.arrive(grad_out_ready.index(stage), count=1)
        # The next rows, or the first rows of the next head.
        row = row + ROWS
        if row >= stop:
            head = head + 1
            row = gl.where(head < head_end, begin, q_len)  # no rows, to make the steps even
            lse_head += lse_strides[1]
            delta_head += delta_strides[1]


@gluon.jit
def _add_rows(
    grad_q_blocks, grad_q_tiles, grad_q_ready, grad_q_free,
    q_len, batch, head, head_end, begin, stop, steps, K_WIDTH: gl.constexpr, ROWS: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Adds what the differentiators leave in shared memory to grad_q, by the copy engine."""
    Q_COLUMNS: gl.constexpr = K_WIDTH if ROWS == 128 or PAIRED else K_WIDTH // 2
    block: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    if grad_q_blocks is not None:
        row = begin
        for step in range(steps // 2 if PAIRED else steps):
            for half in gl.static_range(2):
                mbarrier.wait(grad_q_ready.index(half), step & 1)
                row_begin = row + (half * 64 if ROWS == 128 else 0)
                column_begin = 0 if ROWS == 128 or PAIRED else half * Q_COLUMNS
                async_add_shared_to_global(
                    grad_q_blocks, [batch, head, row_begin, column_begin],
                    grad_q_tiles.index(half)._reinterpret(gl.float32, [1, 1, 64, Q_COLUMNS], block),
                )  # fmt: skip
                if PAIRED or half == 1:
                    row = row + ROWS
                    if row >= stop:
                        head = head + 1
                        row = gl.where(head < head_end, begin, q_len)
            for half in gl.static_range(2):
                tma.store_wait(1 - half)
                mbarrier.arrive(grad_q_free.index(half), count=1)


@gluon.jit
def _differentiate(
    k_tiles, v_tiles, q_tiles, grad_out_tiles, ds_tiles, lse_rows, delta_rows, row_bounds,
    k_ready, v_ready, q_ready, q_free, grad_out_ready, ds_ready, ds_free,
    grad_q_tiles, grad_q_ready, grad_q_free, grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, batch, head, head_end, kv_head, key_begin, begin, inner, edge, stop, steps, scale, softcap,
    BOUNDED: gl.constexpr, CAUSAL: gl.constexpr, ATOMIC: gl.constexpr, OVERWRITE: gl.constexpr,
    D: gl.constexpr, K_WIDTH: gl.constexpr, DV: gl.constexpr, V_WIDTH: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, UNROLLED: gl.constexpr,
    PAIRED: gl.constexpr, HELD: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys, and half of those of the queries."""
    dtype: gl.constexpr = k_tiles.dtype
    score_grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    k_grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K_WIDTH, 16])
    v_grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    across: gl.constexpr = gl.SliceLayout(0, score_grid)
    # Half of the rows of grad_q, or half of its columns.
    Q_COLUMNS: gl.constexpr = K_WIDTH if ROWS == 128 or PAIRED else K_WIDTH // 2
    q_grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q_COLUMNS, 16])

    my_keys = key_begin + HALF * KEYS
    acc_k = gl.zeros([KEYS, K_WIDTH], gl.float32, k_grid)
    acc_v = gl.zeros([KEYS, V_WIDTH], gl.float32, v_grid)
    nothing = gl.zeros([KEYS, ROWS], gl.float32, score_grid)
    no_grad_q = gl.zeros([64, Q_COLUMNS], gl.float32, q_grid)
    scale_log2 = scale * _LOG2_E
    near = gl.arange(0, 64, layout=gl.SliceLayout(1, q_grid)) + (HALF * 64 if ROWS == 128 else 0)
    column_begin: gl.constexpr = 0 if ROWS == 128 or PAIRED else HALF * Q_COLUMNS
    column = column_begin + gl.arange(0, Q_COLUMNS, layout=gl.SliceLayout(0, q_grid))
    if grad_q is not None and grad_q_tiles is None:
        grad_q_head = grad_q + batch.to(gl.int64) * grad_q_strides[0] + head.to(gl.int64) * grad_q_strides[1]
    row = begin
    # 0, but the compiler does not know: it would keep the addresses of every stage in registers.
    origin = gl.minimum(q_len, 0)
    drift = origin

    mbarrier.wait(k_ready.index(0), 0)
    mbarrier.wait(v_ready.index(0), 0)
    my_k, my_v = k_tiles.index(HALF), v_tiles.index(HALF)
    if HELD:
        my_k = my_k.load(gl.DotOperandLayout(0, score_grid, 2))
        my_v = my_v.load(gl.DotOperandLayout(0, score_grid, 2))
    for turns in range(steps // UNROLLED):
        for within in gl.static_range(UNROLLED):
            step = origin + turns * UNROLLED + within
            stage = step % STAGES
            turn = (step // STAGES) & 1
            if within == 0:
                mbarrier.wait(q_ready.index(stage), turn)
                products = warpgroup_mma(
                    my_k, q_tiles.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
                )
            mbarrier.wait(grad_out_ready.index(stage), turn)
            grad_weights = warpgroup_mma(
                my_v, grad_out_tiles.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True
            )
            row_lse = lse_rows.index(stage).load(across)
            if within == 0:
                products = warpgroup_mma_wait(1, [products])
            else:
                products, acc_k = warpgroup_mma_wait(1, [products, acc_k])
                mbarrier.arrive(q_free.index((step + STAGES - 1) % STAGES), count=1)
            if softcap is not None:
                capped = tanh(products * (scale / softcap))
                weights = gl.exp2(capped * (softcap * _LOG2_E) - row_lse[None, :])
            else:
                weights = gl.exp2(products * scale_log2 - row_lse[None, :])
            if (row < inner) | (row >= edge):
                key = my_keys + gl.arange(0, KEYS, layout=gl.SliceLayout(1, score_grid))[:, None]
                if BOUNDED:
                    row_first = row_bounds.index(2 * stage).load(across)[None, :]
                    row_end = row_bounds.index(2 * stage + 1).load(across)[None, :]
                    weights = gl.where((key >= row_first) & (key < row_end), weights, 0.0)
                elif CAUSAL:
                    last = gl.minimum(row + gl.arange(0, ROWS, layout=across), kv_len - 1)[None, :]
                    weights = gl.where(key <= last, weights, 0.0)
                else:
                    weights = gl.where(key < kv_len, weights, 0.0)
            left = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, v_grid, 2))
            acc_v = warpgroup_mma(left, grad_out_tiles.index(stage), acc_v, is_async=True)
            row_delta = delta_rows.index(stage).load(across)
            grad_weights = warpgroup_mma_wait(1, [grad_weights])
            grad_scores = weights * (grad_weights - row_delta[None, :])
            if softcap is not None:
                grad_scores = grad_scores * (1.0 - capped * capped)
            ds = grad_scores.to(dtype)
            # Of every step, or of two steps at a time: then each differentiator has the rows of one.
            ds_stage = step % 2
            if grad_q is not None:
                if PAIRED and within % 2 == 0:
                    mbarrier.wait(ds_free.index(0), (step // 2 & 1) ^ 1)
                # Unless in pairs: what was there two steps ago, both have multiplied before the last step's barrier.
                ds_tiles.index(2 * ds_stage + HALF).store(ds)
                if PAIRED and within % 2 == HALF:
                    my_row = row
            if grad_q is not None and (within % 2 == 1 or not PAIRED):
                fence_async_shared()
                at = 0 if PAIRED else ds_stage
                mbarrier.arrive(ds_ready.index(at), count=1)
                mbarrier.wait(ds_ready.index(at), (step // 2) & 1)
                if PAIRED:
                    acc_v = warpgroup_mma_wait(0, [acc_v])
                part = no_grad_q
                for half in gl.static_range(2):
                    left = ds_tiles.index(2 * (drift + HALF if PAIRED else ds_stage) + half).permute([1, 0])
                    right = k_tiles.index(drift + half)
                    if ROWS == 128:
                        left = left.slice(HALF * 64, 64, dim=0)
                    elif not PAIRED:
                        right = right.slice(HALF * Q_COLUMNS, Q_COLUMNS, dim=1)
                    part = warpgroup_mma(left, right, part, use_acc=half > 0, is_async=True)
            ds = gl.convert_layout(ds, gl.DotOperandLayout(0, k_grid, 2))
            acc_k = warpgroup_mma(ds, q_tiles.index(stage), acc_k, is_async=True)
            if grad_q is not None and (within % 2 == 1 or not PAIRED):
                part, acc_v = warpgroup_mma_wait(1, [part, acc_v])
                if PAIRED:
                    mbarrier.arrive(ds_free.index(0), count=1)
                if grad_q_tiles is not None:
                    mbarrier.wait(grad_q_free.index(HALF), ((step // 2 if PAIRED else step) & 1) ^ 1)
                    grad_q_tiles.index(HALF).store(part * scale)
                    fence_async_shared()
                    mbarrier.arrive(grad_q_ready.index(HALF), count=1)
                else:
                    if PAIRED:
                        rows = my_row + near
                    else:
                        rows = row + near
                    places = grad_q_head + rows.to(gl.int64) * grad_q_strides[2]
                    if D == K_WIDTH:
                        add_pairs(places + column_begin, rows < q_len, part * scale, Q_COLUMNS)
                    else:
                        real = (rows < q_len)[:, None] & (column < D)[None, :]
                        gl.atomic_add(places[:, None] + column[None, :], part * scale, mask=real, sem="relaxed")
            if grad_q is None:
                acc_v = warpgroup_mma_wait(1, [acc_v])
            if within + 1 < UNROLLED:
                following = (step + 1) % STAGES
                mbarrier.wait(q_ready.index(following), ((step + 1) // STAGES) & 1)
                products = warpgroup_mma(
                    my_k, q_tiles.index(following).permute([1, 0]), nothing, use_acc=False, is_async=True
                )
            if grad_q is not None and PAIRED and within % 2 == 0:
                acc_v = warpgroup_mma_wait(2, [acc_v])
            row = row + ROWS
            if row >= stop:
                row = begin
                if grad_q is not None and grad_q_tiles is None:
                    head = head + 1
                    grad_q_head += grad_q_strides[1]
                    row = gl.where(head < head_end, begin, q_len)
        drift = drift * 2
        # The compiler would serialize products that are under way from one turn to the next.
        acc_k = warpgroup_mma_wait(0, [acc_k])
        mbarrier.arrive(q_free.index((origin + turns * UNROLLED + UNROLLED - 1) % STAGES), count=1)

    _add(grad_k, grad_k_strides, acc_k * scale, batch, kv_head, my_keys, kv_len, ATOMIC, OVERWRITE, D, KEYS, k_grid)
    _add(grad_v, grad_v_strides, acc_v, batch, kv_head, my_keys, kv_len, ATOMIC, OVERWRITE, DV, KEYS, v_grid)


@gluon.jit
def _add(
    grad, strides, x, batch, head, key_begin, kv_len,
    ATOMIC: gl.constexpr, OVERWRITE: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, grid: gl.constexpr,
):  # fmt: skip
    """Adds to the gradients of some keys, or overwrites them."""
    key = key_begin + gl.arange(0, KEYS, layout=gl.SliceLayout(1, grid))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, grid))[None, :]
    of_head = grad + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    places = (of_head + key.to(gl.int64) * strides[2])[:, None] + column
    real = (key < kv_len)[:, None] & (column < D)
    if ATOMIC:
        gl.atomic_add(places, x, mask=real, sem="relaxed")
    elif OVERWRITE:
        gl.store(places, x.to(grad.dtype.element_ty), mask=real)
    else:
        gl.store(places, gl.load(places, mask=real, other=0.0) + x, mask=real)
