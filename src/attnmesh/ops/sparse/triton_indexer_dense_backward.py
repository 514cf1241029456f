"""Gradients of the indexer's scores of a stretch of keys that all rows may see, in Triton: without atomics.

Where all rows name the same keys, atomics are contended. Here one kernel walks the keys for each row (d_iq, d_w), one
walks the rows for each tile of keys (d_ik); both recompute the products. The same bits in every run.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.sparse.triton_indexer_backward import Grads, launch_grads, power_below
from attnmesh.ops.sparse.triton_indexer_tiles import (
    DENSE_KEY_PROGRAMS,
    MOST_GRAD_COLUMNS,
    Tiles,
    check_inputs,
    grad_head_tile,
    load_queries,
    padded,
    pick_dense_tiles,
    products,
)


def scores_backward_dense(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    first_key: int,
    lo: Tensor,
    hi: Tensor,
    grad: Tensor,
    *,
    scale: float,
    relu: bool,
    d_iq_dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> Grads:
    """Gradients of the scores of the keys [first_key, first_key + n), of which `ik` [n, d] holds the rows.

    Row i sees those with lo[i] <= key < hi[i]; `grad` float32 [s_q, n] is not read elsewhere.
    """
    check_inputs(iq, ik, w)
    (s_q, heads, width), n = iq.shape, ik.shape[0]
    grads = Grads(
        torch.empty(iq.shape, dtype=d_iq_dtype or iq.dtype, device=iq.device),
        torch.empty(ik.shape, dtype=torch.float32, device=iq.device),
        torch.empty(w.shape, dtype=torch.float32, device=iq.device),
    )
    if s_q == 0 or n == 0:
        return Grads(*(x.zero_() for x in grads))
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    # Bounds among the keys that are here: no number below passes 32 bits, wherever the stretch begins.
    lo, hi = (lo - first_key).clamp(0, n), (hi - first_key).clamp(0, n)
    tiles = tiles or pick_dense_tiles(iq)
    launch_grads(
        iq, ik, w, None, lo, hi, None, grad, grads.iq, None, grads.w, None,
        rows=range(s_q), topk=n, k_offset=0, scale=scale, relu=relu, tiles=tiles,
    )  # fmt: skip

    head_block, columns = grad_head_tile(heads), min(padded(width), MOST_GRAD_COLUMNS)
    blocks, pieces = triton.cdiv(n, tiles.keys), triton.cdiv(padded(width), columns)
    begins, ends = _seeing_rows(lo, hi, blocks, tiles.keys)
    shares = max(1, min(DENSE_KEY_PROGRAMS // (blocks * pieces), s_q))
    parts = grads.ik[None] if shares == 1 else torch.empty(shares, *ik.shape, dtype=torch.float32, device=iq.device)
    with torch.cuda.device_of(iq):
        for head in range(0, heads, head_block):
            _grad_keys_kernel[(blocks * shares, pieces)](
                iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), lo, hi, grad, grad.stride(0),
                begins, ends, parts, s_q, n, head, heads, scale, shares,
                RELU=relu, KEYS=tiles.keys, HEADS=head_block, D=width, BLOCK_D=padded(width), COLUMNS=columns,
                NARROW=iq.dtype == torch.float16, MORE=head > 0, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
    if shares > 1:
        torch.sum(parts, 0, out=grads.ik)
    return grads


def _seeing_rows(lo: Tensor, hi: Tensor, blocks: int, block: int) -> tuple[Tensor, Tensor]:
    """For each tile of keys, the rows from the first to the last that sees some of it; (0, 0) if none does."""
    begin = torch.arange(blocks, device=lo.device, dtype=torch.int32)[:, None] * block
    sees = (torch.maximum(lo, begin) < torch.minimum(hi, begin + block)).to(torch.int32)
    some = sees.amax(1)
    first, last = sees.argmax(1), lo.shape[0] - 1 - sees.flip(1).argmax(1)
    return (first * some).to(torch.int32), ((last + 1) * some).to(torch.int32)


@triton.jit(do_not_specialize=["grad_stride", "s_q", "n", "first_head", "heads", "shares"])
def _grad_keys_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, lo, hi, grad, grad_stride,
    begins, ends, parts, s_q, n, first_head, heads, scale, shares,
    RELU: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr, NARROW: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """d_ik of KEYS keys, as far as one share of the rows goes.

    Keys are the rows of both products: one that no query sees may hold NaN, and it stays there.
    """
    block, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    keys = block * KEYS + tl.arange(0, KEYS)
    all_dims = tl.arange(0, BLOCK_D)
    tile = tl.load(
        ik + keys.to(tl.int64)[:, None] * ik_stride + all_dims[None, :],
        mask=(keys < n)[:, None] & (all_dims < D)[None, :], other=0.0,
    )  # fmt: skip
    first_dim = tl.program_id(1) * COLUMNS
    each = tl.cdiv(s_q, shares)
    begin = tl.maximum(tl.load(begins + block), share * each)
    end = tl.minimum(tl.load(ends + block), (share + 1) * each)

    unit = 1.0 + tl.zeros((), tl.float32)
    if NARROW:
        largest = tl.zeros((KEYS,), tl.float32)
        for row in range(begin, end):
            largest = tl.maximum(largest, tl.abs(_upstream(grad, grad_stride, row, keys, lo, hi, scale)))
        unit = power_below(tl.max(largest, 0))

    d_keys = tl.zeros((KEYS, COLUMNS), tl.float32)
    for row in range(begin, end):
        # A row that sees nothing may hold anything: zeros are read in its place.
        rows = tl.where(tl.load(lo + row) < tl.load(hi + row), s_q, 0)
        queries, weights = load_queries(
            iq, iq_strides, w, w_strides, row, rows, first_head, heads, 0, 1, HEADS, D, BLOCK_D
        )  # fmt: skip
        my_queries = queries
        if COLUMNS < BLOCK_D:
            my_queries, _same_weights = load_queries(
                iq, iq_strides, w, w_strides, row, rows, first_head, heads, first_dim, 1, HEADS, D, COLUMNS
            )  # fmt: skip
        upstream = _upstream(grad, grad_stride, row, keys, lo, hi, scale) / unit
        d_dots = upstream[:, None] * weights[None, :]
        if RELU:
            d_dots = tl.where(products(tile, queries) > 0.0, d_dots, 0.0)
        d_keys = tl.dot(d_dots.to(tile.dtype), my_queries, d_keys, input_precision="ieee")

    dims = first_dim + tl.arange(0, COLUMNS)
    at = parts + (share.to(tl.int64) * n + keys)[:, None] * D + dims[None, :]
    inside = (keys < n)[:, None] & (dims < D)[None, :]
    d_keys *= unit
    if MORE:
        d_keys += tl.load(at, mask=inside, other=0.0)
    tl.store(at, d_keys, mask=inside)


@triton.jit
def _upstream(grad, grad_stride, row, keys, lo, hi, scale):
    """A row's gradient of some keys, times the scale; 0 where it does not see them."""
    seen = (keys >= tl.load(lo + row)) & (keys < tl.load(hi + row))
    return tl.load(grad + tl.cast(row, tl.int64) * grad_stride + keys, mask=seen, other=0.0) * scale
