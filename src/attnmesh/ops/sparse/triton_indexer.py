"""Index scores of given slots in Triton, and what the kernels of the indexer share: tile sizes and the score itself.

A score is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`. Keys are the rows of the matrix product and heads its
columns, so the sum over heads stays within four neighboring threads, and a key that holds NaN affects only its own
score. Every kernel sums in the same order: the score of a pair has the same bits wherever it is computed.
"""

# Kernels are written in Triton's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.gpu import gpu_of
from attnmesh.ops.launch import Launch, Recent, repeat

MAX_HEAD_DIM = 256
_launches: Recent[Launch] = Recent()


class IndexerTiles(NamedTuple):
    """Keys and rows of one product, and the warps and pipeline stages of its program."""

    keys: int
    rows: int
    warps: int
    stages: int


# By bytes per element. Fixed rather than autotuned: the order of the sums, and so the bits of a score, must not depend
# on a timing. The compile tests check that they do not spill on sm_90. float32 runs without tensor cores: small tiles.
#
# Scores: 64 keys and four warps are the smallest product of Hopper's warp groups. The top-k takes four rows at a time:
# 256 columns, so that tensor cores and not shared memory are the bottleneck. In float32 both must be equal, or they
# would sum over heads in different orders.
SCORES = {2: IndexerTiles(keys=64, rows=1, warps=4, stages=3), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=2)}
TOPK = {2: IndexerTiles(keys=64, rows=4, warps=4, stages=3), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=2)}
# Gradients at slots, of a chunk of keys, and of both where the head dim exceeds 128.
GRADS = {2: IndexerTiles(keys=64, rows=1, warps=4, stages=2), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=1)}
DENSE_GRADS = {2: IndexerTiles(keys=64, rows=1, warps=4, stages=3), 4: IndexerTiles(keys=16, rows=1, warps=8, stages=1)}
WIDE_GRADS = {2: IndexerTiles(keys=64, rows=1, warps=8, stages=2), 4: IndexerTiles(keys=16, rows=1, warps=16, stages=1)}

MAX_COLUMNS = 256  # rows times heads of a product
MAX_HEADS = 128  # of a product; more heads are summed block by block
MAX_GRAD_HEADS = 64  # at a time: their gradients stay in registers
MAX_GRAD_COLUMNS = 128  # of the gradients of queries and keys, likewise; wider heads take two programs
DENSE_KEY_PROGRAMS = 256  # about as many as run at a time; with fewer tiles of keys the rows are split
LONG_ROW = 65536  # keys; selecting from such a row takes long, so the workspace of the top-k must hold many
SPAN = 1024  # keys that one program of the top-k scores at a time


def padded(n: int) -> int:
    """The extent of a tile that holds `n`: the next power of two, at least 16 for a matrix product."""
    return max(16, int(triton.next_power_of_2(n)))


def head_tile(heads: int) -> int:
    """The number of heads of one product."""
    return min(MAX_HEADS, padded(heads))


def grad_head_tile(heads: int) -> int:
    """The number of heads whose gradients one program computes."""
    return min(MAX_GRAD_HEADS, padded(heads))


def check_inputs(iq: Tensor, ik: Tensor, w: Tensor) -> None:
    """Raises ValueError for inputs that the kernels cannot read."""
    if iq.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"the head dim of iq must be at most {MAX_HEAD_DIM} for the Triton kernels, got {iq.shape[2]}")
    if iq.dtype != ik.dtype:
        raise ValueError(f"iq and ik must have the same dtype, got {iq.dtype} and {ik.dtype}")
    for name, x in {"iq": iq, "ik": ik}.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 along its head dim, got {x.stride(-1)}")
    if w.shape != iq.shape[:2]:
        raise ValueError(f"w must be [s_q, heads] = {list(iq.shape[:2])}, got {list(w.shape)}")


def pick_topk_tiles(iq: Tensor, s_kv: int) -> IndexerTiles:
    """Tiles of the top-k: no more rows than fill a product or fit in shared memory beside the keys."""
    tiles, heads = TOPK[iq.element_size()], head_tile(iq.shape[1])
    rows = min(tiles.rows, MAX_COLUMNS // heads, max(1, 4 * 128 // padded(iq.shape[2])))
    # Of a few long rows each is scored by itself: there is work for all programs, and none for rows that are not there.
    together = iq.shape[1] <= heads and (s_kv <= LONG_ROW or iq.shape[0] >= 64)
    tiles = tiles._replace(rows=rows if together else 1)
    row_bytes = padded(iq.shape[2]) * iq.element_size()
    while tiles.rows * heads * row_bytes + (tiles.stages - 1) * tiles.keys * row_bytes + (tiles.rows + 1) * 1024 > (
        gpu_of(iq.device).shared_memory
    ):
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.rows > 1:
            tiles = tiles._replace(rows=tiles.rows // 2)
        else:
            break  # Triton raises OutOfResources
    return tiles


def pick_grad_tiles(iq: Tensor) -> IndexerTiles:
    """Tiles of the gradients at slots."""
    if iq.shape[2] <= MAX_GRAD_COLUMNS:
        return GRADS[iq.element_size()]
    tiles = WIDE_GRADS[iq.element_size()]  # of 64 keys, 105 KiB in 16 bits
    return tiles._replace(keys=min(tiles.keys, 32)) if gpu_of(iq.device).shared_memory < 128 * 1024 else tiles


def pick_dense_tiles(iq: Tensor) -> IndexerTiles:
    """Tiles of the gradients of a chunk of keys."""
    return (DENSE_GRADS if iq.shape[2] <= MAX_GRAD_COLUMNS else WIDE_GRADS)[iq.element_size()]


@triton.jit
def load_queries(
    iq, iq_strides, w, w_strides, row, s_q, first_head, heads, first_dim,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Heads [first_head, first_head + HEADS) of some rows as one tile, and their weights; 0 past the last row or head.

    The tile has the DIMS columns of the head dim from `first_dim` on.
    """
    place = tl.arange(0, ROWS * HEADS)
    rows = row + place // HEADS
    head = first_head + place % HEADS
    dims = first_dim + tl.arange(0, DIMS)
    real = (rows < s_q) & (head < heads)
    at = rows.to(tl.int64) * iq_strides[0] + head.to(tl.int64) * iq_strides[1]
    queries = tl.load(iq + at[:, None] + dims[None, :], mask=real[:, None] & (dims < D)[None, :], other=0.0)
    weights = tl.load(w + rows.to(tl.int64) * w_strides[0] + head * w_strides[1], mask=real, other=0.0)
    return queries, weights.to(tl.float32)


@triton.jit
def dot_products(keys, queries):
    """The product of each key (rows) with each query head (columns), in float32."""
    return tl.dot(keys, tl.trans(queries), input_precision="ieee")


@triton.jit
def head_sum(dots, weights, RELU: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """The weighted sum over the heads of each row: [KEYS, ROWS]."""
    if RELU:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(tl.reshape(dots * weights[None, :], (KEYS, ROWS, HEADS)), 2)


@triton.jit
def final_score(total, scale):
    """The score from the sum over all heads. -0.0 becomes 0.0, so that equal scores have equal bits."""
    score = total * scale
    return tl.where(score == 0.0, 0.0, score)


_MIN_PROGRAMS = 1024  # with fewer rows than this, several programs share the slots of a row


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
    tiles: IndexerTiles | None = None,
) -> Tensor:
    """Index scores of the slots: float32 [s_q, topk], -inf where a slot is invalid.

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
    # Enough programs to fill the GPU, each with at least four tiles.
    shares = min(-(-_MIN_PROGRAMS // s_q), -(-topk // (4 * tiles.keys)))
    span = -(-topk // (shares * tiles.keys)) * tiles.keys
    repeat(
        _launches, _scores_kernel, (s_q * triton.cdiv(topk, span),),
        (
            iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), indices, indices.stride(0), lo, hi, slots, scores,
            topk, span, heads, k_offset, scale,
        ),
        RELU=relu, KEYS=tiles.keys, HEADS=head_tile(heads), ONE_TILE=heads <= head_tile(heads),
        D=width, BLOCK_D=padded(width), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return scores


@triton.jit
def valid_keys(indices, j, limit, lo, hi, k_offset):
    """Whether slots j of a row are valid, and the rows of their keys, else 0. Without indices, slot j is key j."""
    index = j
    if indices is not None:
        index = tl.load(indices + j, mask=j < limit, other=0)
    valid = (j < limit) & (index >= lo) & (index < hi)
    return valid, tl.where(valid, index - k_offset, 0)


@triton.jit
def gather_keys(ik, ik_stride, keys, valid, first_dim, D: tl.constexpr, DIMS: tl.constexpr):
    """Columns [first_dim, first_dim + DIMS) of the keys of valid slots; 0 for the others."""
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
        total = head_sum(dot_products(tile, queries), weights, RELU, KEYS, 1, HEADS)
        if not ONE_TILE:
            for head in range(HEADS, heads, HEADS):
                more, more_weights = load_queries(
                    iq, iq_strides, w, w_strides, row, row + 1, head, heads, 0, 1, HEADS, D, BLOCK_D
                )
                total += head_sum(dot_products(tile, more), more_weights, RELU, KEYS, 1, HEADS)
        score = tl.where(valid, tl.reshape(final_score(total, scale), (KEYS,)), float("-inf"))
        tl.store(row_scores + j, score, mask=j < end)
    # No slot is valid from here on. (The loop above wrote its last tile completely.)
    done = begin + tl.cdiv(tl.maximum(limit - begin, 0), KEYS) * KEYS
    for first in range(done, end, KEYS):
        j = first + tl.arange(0, KEYS)
        tl.store(row_scores + j, tl.full((KEYS,), float("-inf"), tl.float32), mask=j < end)
