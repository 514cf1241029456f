"""The indexer's scores at given slots, in Triton: one program for some slots of a row, whose keys it gathers."""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.sparse.triton_indexer_tiles import (
    SCORES,
    Tiles,
    check_inputs,
    finished,
    head_sum,
    head_tile,
    load_queries,
    padded,
    products,
)

_ENOUGH_PROGRAMS = 1024  # with fewer rows than this, several programs share a row's slots


def scores_at(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    indices: Tensor,
    lo: Tensor,
    hi: Tensor,
    slots: Tensor,
    *,
    k_offset: int,
    scale: float,
    relu: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """Scores of the keys that slots name: float32 [s_q, topk], -inf where a slot is not valid.

    iq [s_q, heads, d], ik [s_kv, d], w [s_q, heads]; indices int32 [s_q, topk] with any row stride. Slot j of row i is
    valid if `j < slots[i]` and `lo[i] <= indices[i, j] < hi[i]`; its key is `ik[indices[i, j] - k_offset]`. No other
    key is read.
    """
    check_inputs(iq, ik, w)
    (s_q, heads, width), topk = iq.shape, indices.shape[1]
    scores = torch.empty(s_q, topk, dtype=torch.float32, device=iq.device)
    if scores.numel() == 0:
        return scores
    tiles = tiles or SCORES[iq.element_size()]
    # As many programs as keep the processors busy, none with less than four tiles.
    shares = min(-(-_ENOUGH_PROGRAMS // s_q), -(-topk // (4 * tiles.keys)))
    span = -(-topk // (shares * tiles.keys)) * tiles.keys
    with torch.cuda.device_of(iq):
        _scores_kernel[(s_q * triton.cdiv(topk, span),)](
            iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), indices, indices.stride(0), lo, hi, slots, scores,
            topk, span, heads, k_offset, scale,
            RELU=relu, KEYS=tiles.keys, HEADS=head_tile(heads), ONE_TILE=heads <= head_tile(heads),
            D=width, BLOCK_D=padded(width), num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return scores


@triton.jit
def valid_keys(indices, j, limit, lo, hi, k_offset):
    """Which slots j of a row are valid, and where their keys lie (0 if not valid). Without indices j names key j."""
    index = j
    if indices is not None:
        index = tl.load(indices + j, mask=j < limit, other=0)
    valid = (j < limit) & (index >= lo) & (index < hi)
    return valid, tl.where(valid, index - k_offset, 0)


@triton.jit
def gather_keys(ik, ik_stride, keys, valid, first_dim, D: tl.constexpr, DIMS: tl.constexpr):
    """Columns [first_dim, first_dim + DIMS) of the keys that valid slots name; 0 for the others."""
    dims = first_dim + tl.arange(0, DIMS)
    at = keys.to(tl.int64)[:, None] * ik_stride + dims[None, :]
    return tl.load(ik + at, mask=valid[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["topk", "span", "heads", "k_offset", "indices_stride"])
def _scores_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, indices, indices_stride, lo, hi, slots, scores,
    topk, span, heads, k_offset, scale,
    RELU: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, ONE_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    shares = tl.cdiv(topk, span)
    row = tl.program_id(0) // shares
    begin = tl.program_id(0) % shares * span
    end = tl.minimum(begin + span, topk)
    limit = tl.minimum(tl.load(slots + row), end)
    row_lo, row_hi = tl.load(lo + row), tl.load(hi + row)
    row_indices = indices + row.to(tl.int64) * indices_stride
    row_scores = scores + row.to(tl.int64) * topk
    if row_hi <= row_lo:
        limit = begin
    queries, weights = load_queries(iq, iq_strides, w, w_strides, row, row + 1, 0, heads, 0, 1, HEADS, D, BLOCK_D)
    for first in range(begin, limit, KEYS):
        j = first + tl.arange(0, KEYS)
        valid, keys = valid_keys(row_indices, j, limit, row_lo, row_hi, k_offset)
        tile = gather_keys(ik, ik_stride, keys, valid, 0, D, BLOCK_D)
        total = head_sum(products(tile, queries), weights, RELU, KEYS, 1, HEADS)
        if not ONE_TILE:
            for head in range(HEADS, heads, HEADS):
                more, more_weights = load_queries(
                    iq, iq_strides, w, w_strides, row, row + 1, head, heads, 0, 1, HEADS, D, BLOCK_D
                )
                total += head_sum(products(tile, more), more_weights, RELU, KEYS, 1, HEADS)
        score = tl.where(valid, tl.reshape(finished(total, scale), (KEYS,)), float("-inf"))
        tl.store(row_scores + j, score, mask=j < end)
    # Where no slot can be valid nothing is computed. (The loop above has written a last tile to its end.)
    done = begin + tl.cdiv(tl.maximum(limit - begin, 0), KEYS) * KEYS
    for first in range(done, end, KEYS):
        j = first + tl.arange(0, KEYS)
        tl.store(row_scores + j, tl.full((KEYS,), float("-inf"), tl.float32), mask=j < end)
