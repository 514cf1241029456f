"""What the indexer's kernels share: tile sizes, and the one way in which a score is computed.

A score is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`. Keys are the rows of the matrix product and heads its
columns, so that the sum over heads stays within four neighbouring threads, and a key that holds NaN spoils only its
own score. Every kernel sums in the same order: the score of a pair has the same bits wherever it is computed.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

WIDEST = 256


class Tiles(NamedTuple):
    """How a program cuts its work: keys and rows of one product, and the warps and pipeline stages that run it."""

    keys: int
    rows: int
    warps: int
    stages: int


# By bytes per element. Fixed rather than autotuned: the order of the sums, and so the bits of a score, must not depend
# on a timing. The compile tests keep them from spilling on sm_90. float32 runs without tensor cores: small tiles.
#
# Scores: 64 keys and four warps are the smallest product of Hopper's warp groups. The top-k takes four rows at a time:
# 256 columns, so that the matrix units and not shared memory set the pace. In float32 the two must be alike, or they
# would not sum over heads in the same order.
SCORES = {2: Tiles(keys=64, rows=1, warps=4, stages=3), 4: Tiles(keys=16, rows=1, warps=8, stages=2)}
TOPK = {2: Tiles(keys=64, rows=4, warps=4, stages=3), 4: Tiles(keys=16, rows=1, warps=8, stages=2)}
# Gradients, at slots and of a stretch of keys; and of both where a head is wider than 128.
GRADS = {2: Tiles(keys=64, rows=1, warps=4, stages=2), 4: Tiles(keys=16, rows=1, warps=8, stages=1)}
DENSE_GRADS = {2: Tiles(keys=64, rows=1, warps=4, stages=3), 4: Tiles(keys=16, rows=1, warps=8, stages=1)}
WIDE_GRADS = {2: Tiles(keys=64, rows=1, warps=8, stages=2), 4: Tiles(keys=16, rows=1, warps=16, stages=1)}

MOST_COLUMNS = 256  # of a product: rows times heads
MOST_HEADS = 128  # of a product; more heads are summed block by block
MOST_GRAD_HEADS = 64  # at a time: their gradients stay in registers
MOST_GRAD_COLUMNS = 128  # of the gradients of queries and keys, for the same reason: wider ones take two programs
DENSE_KEY_PROGRAMS = 256  # about as many as run at a time: fewer tiles of keys than these share out the rows
LONG_ROW = 65536  # keys; few such rows fit into what the top-k's scores may take: selection must not wait for four
SPAN = 1024  # keys that a program of the top-k scores at a time


def padded(n: int) -> int:
    """The extent of a tile that holds `n`: the next power of two, and enough for a matrix product."""
    return max(16, int(triton.next_power_of_2(n)))


def head_tile(heads: int) -> int:
    """How many heads one product takes."""
    return min(MOST_HEADS, padded(heads))


def grad_head_tile(heads: int) -> int:
    """How many heads' gradients one program computes."""
    return min(MOST_GRAD_HEADS, padded(heads))


def check_inputs(iq: Tensor, ik: Tensor, w: Tensor) -> None:
    """Refuse what the kernels cannot read."""
    if iq.shape[2] > WIDEST:
        raise ValueError(f"the indexer's head dim is {iq.shape[2]}; the Triton kernels take up to {WIDEST}")
    if iq.dtype != ik.dtype:
        raise ValueError(f"iq is {iq.dtype} and ik is {ik.dtype}; the Triton kernels take one dtype")
    for name, x in {"iq": iq, "ik": ik}.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} along its head dim; the Triton kernels need 1")
    if w.shape != iq.shape[:2]:
        raise ValueError(f"w has shape {tuple(w.shape)}; iq [{iq.shape[0]}, {iq.shape[1]}, ...] needs one a head")


def pick_topk_tiles(iq: Tensor, s_kv: int) -> Tiles:
    """For the top-k: no more rows than fill a product, or than fit in memory beside the keys."""
    tiles, heads = TOPK[iq.element_size()], head_tile(iq.shape[1])
    rows = min(tiles.rows, MOST_COLUMNS // heads, max(1, 4 * 128 // padded(iq.shape[2])))
    return tiles._replace(rows=rows if iq.shape[1] <= heads and s_kv <= LONG_ROW else 1)


def pick_grad_tiles(iq: Tensor) -> Tiles:
    """For gradients at slots."""
    return (GRADS if iq.shape[2] <= MOST_GRAD_COLUMNS else WIDE_GRADS)[iq.element_size()]


def pick_dense_tiles(iq: Tensor) -> Tiles:
    """For gradients of a stretch of keys."""
    return (DENSE_GRADS if iq.shape[2] <= MOST_GRAD_COLUMNS else WIDE_GRADS)[iq.element_size()]


@triton.jit
def load_queries(
    iq, iq_strides, w, w_strides, row, s_q, first_head, heads, first_dim,
    ROWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Heads [first_head, first_head + HEADS) of some rows as one tile, and their weights; what is not there is 0.

    Of the head dim, the DIMS columns from `first_dim` on.
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
def products(keys, queries):
    """The product of each key (rows) with each query head (columns), in float32."""
    return tl.dot(keys, tl.trans(queries), input_precision="ieee")


@triton.jit
def head_sum(dots, weights, RELU: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """The weighted sum over the heads of each row: [KEYS, ROWS]."""
    if RELU:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(tl.reshape(dots * weights[None, :], (KEYS, ROWS, HEADS)), 2)


@triton.jit
def finished(total, scale):
    """The score of a sum over all heads. Zero has one sign only, or equal scores could differ in their bits."""
    score = total * scale
    return tl.where(score == 0.0, 0.0, score)
