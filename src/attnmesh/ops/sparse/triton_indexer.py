"""Index scores of given slots in Triton, and what the kernels of the indexer share: the score itself.

A score is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`. Keys are the rows of the matrix product and heads its
columns, so the sum over heads stays within four neighboring threads, and a key that holds NaN affects only its own
score. Every kernel sums in the same order: the score of a pair has the same bits wherever it is computed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.launch import Launch, Recent, cdiv, repeat
from attnmesh.ops.sparse.arguments import IndexerCall
from attnmesh.ops.sparse.indexer_tiles import SCORES, IndexerTiles, head_tile, padded

_launches: Recent[Launch] = Recent()


class Shape(NamedTuple):
    """The constants of a kernel."""

    keys: int
    rows: int
    heads: int  # of one product
    one_tile: bool  # whether one product has all heads
    relu: bool
    d: int
    block_d: int


def shape_of(iq: Tensor, keys: int, rows: int, heads: int, relu: bool) -> Shape:
    """The constants of kernels over queries [.., heads, head dim], with products of so many keys, rows and heads."""
    return Shape(keys, rows, heads, iq.shape[-2] <= heads, relu, iq.shape[-1], padded(iq.shape[-1]))


@triton.jit
def load_queries(source, row, s_q, first_head, heads, first_dim, DIMS: tl.constexpr, SHAPE: tl.constexpr):
    """Heads from `first_head` on of some rows as one tile, and their weights; 0 past the last row or head.

    The tile has the DIMS columns of the head dim from `first_dim` on. `source` is iq and w, with their strides.
    """
    iq, iq_strides, w, w_strides = source
    column = tl.arange(0, SHAPE.rows * SHAPE.heads)
    rows = row + column // SHAPE.heads
    head = first_head + column % SHAPE.heads
    dims = first_dim + tl.arange(0, DIMS)
    real = (rows < s_q) & (head < heads)
    at = rows.to(tl.int64) * iq_strides[0] + head.to(tl.int64) * iq_strides[1]
    queries = tl.load(iq + at[:, None] + dims[None, :], mask=real[:, None] & (dims < SHAPE.d)[None, :], other=0.0)
    weights = tl.load(w + rows.to(tl.int64) * w_strides[0] + head * w_strides[1], mask=real, other=0.0)
    return queries, weights.to(tl.float32)


@triton.jit
def dot_products(keys, queries):
    """The product of each key (rows) with each query head (columns), in float32."""
    return tl.dot(keys, tl.trans(queries), input_precision="ieee")


@triton.jit
def _head_sum(dots, weights, SHAPE: tl.constexpr):
    """The weighted sum over the heads of each row: [keys, rows]."""
    if SHAPE.relu:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(tl.reshape(dots * weights[None, :], (SHAPE.keys, SHAPE.rows, SHAPE.heads)), 2)


@triton.jit
def sum_over_heads(tile, queries, weights, source, row, s_q, heads, SHAPE: tl.constexpr):
    """The weighted sums over all heads [keys, rows] of a tile of keys; `queries` and `weights` are of the first."""
    total = _head_sum(dot_products(tile, queries), weights, SHAPE)
    if not SHAPE.one_tile:
        for head in range(SHAPE.heads, heads, SHAPE.heads):
            more, more_weights = load_queries(source, row, s_q, head, heads, 0, SHAPE.block_d, SHAPE)
            total += _head_sum(dot_products(tile, more), more_weights, SHAPE)
    return total


@triton.jit
def final_score(total, scale):
    """The score from the sum over all heads. -0.0 becomes 0.0, so that equal scores have equal bits."""
    score = total * scale
    return tl.where(score == 0.0, 0.0, score)


_MIN_PROGRAMS = 1024  # with fewer rows than this, several programs share the slots of a row


def scores_at(call: IndexerCall, *, tiles: IndexerTiles | None = None) -> Tensor:
    """`dispatch.scores_at`, in float32. Only keys of valid slots are read."""
    iq, ik, w, indices, (lo, hi, slots, k_offset), scale, relu, *_ = call
    assert indices is not None
    (s_q, heads, _), topk = iq.shape, indices.shape[1]
    scores = torch.empty(s_q, topk, dtype=torch.float32, device=iq.device)
    if scores.numel() == 0:
        return scores
    tiles = tiles or SCORES[iq.element_size()]
    # Enough programs to fill the GPU, each with at least four tiles.
    splits = min(-(-_MIN_PROGRAMS // s_q), -(-topk // (4 * tiles.keys)))
    span = -(-topk // (splits * tiles.keys)) * tiles.keys
    repeat(
        _launches, _scores_kernel, (s_q * cdiv(topk, span),),
        (
            iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), indices, indices.stride(0), lo, hi, slots, scores,
            topk, span, heads, k_offset, scale,
        ),
        SHAPE=shape_of(iq, tiles.keys, 1, head_tile(heads), relu), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return scores


@triton.jit
def valid_keys(indices, j, limit, lo, hi, k_offset):
    """Whether slots j of a row are valid, and the rows of their keys, else row 0. Without indices, slot j is key j."""
    index = j
    if indices is not None:
        index = tl.load(indices + j, mask=j < limit, other=0)
    valid = (j < limit) & (index >= lo) & (index < hi)
    return valid, tl.where(valid, index - k_offset, 0).to(tl.int64)


@triton.jit
def gather_keys(ik, ik_stride, keys, valid, first_dim, D: tl.constexpr, DIMS: tl.constexpr):
    """Columns [first_dim, first_dim + DIMS) of the keys of valid slots; 0 for the others."""
    dims = first_dim + tl.arange(0, DIMS)
    at = keys[:, None] * ik_stride + dims[None, :]
    return tl.load(ik + at, mask=valid[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["topk", "span", "heads", "k_offset", "indices_stride"])
def _scores_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, indices, indices_stride, lo, hi, slots, scores,
    topk, span, heads, k_offset, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    splits = tl.cdiv(topk, span)
    row = tl.program_id(0) // splits
    begin = tl.program_id(0) % splits * span
    end = tl.minimum(begin + span, topk)
    limit = tl.minimum(tl.load(slots + row), end)
    row_lo, row_hi = tl.load(lo + row), tl.load(hi + row)
    row_indices = indices + row.to(tl.int64) * indices_stride
    row_scores = scores + row.to(tl.int64) * topk
    if row_hi <= row_lo:
        limit = begin
    source = iq, iq_strides, w, w_strides
    queries, weights = load_queries(source, row, row + 1, 0, heads, 0, SHAPE.block_d, SHAPE)
    for first in range(begin, limit, SHAPE.keys):
        j = first + tl.arange(0, SHAPE.keys)
        valid, keys = valid_keys(row_indices, j, limit, row_lo, row_hi, k_offset)
        tile = gather_keys(ik, ik_stride, keys, valid, 0, SHAPE.d, SHAPE.block_d)
        total = sum_over_heads(tile, queries, weights, source, row, row + 1, heads, SHAPE)
        score = tl.where(valid, tl.reshape(final_score(total, scale), (SHAPE.keys,)), float("-inf"))
        tl.store(row_scores + j, score, mask=j < end)
    # No slot is valid from here on. (The loop above wrote its last tile completely.)
    done = begin + tl.cdiv(tl.maximum(limit - begin, 0), SHAPE.keys) * SHAPE.keys
    for first in range(done, end, SHAPE.keys):
        j = first + tl.arange(0, SHAPE.keys)
        tl.store(row_scores + j, tl.full((SHAPE.keys,), float("-inf"), tl.float32), mask=j < end)
