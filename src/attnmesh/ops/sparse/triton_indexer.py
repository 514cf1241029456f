"""Index scores of given slots in Triton, their gradients, and what the kernels of the indexer share: the score itself.

A score is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`. Keys are the rows of the matrix product and heads its
columns, so the sum over heads stays within four neighboring threads, and a key that holds NaN affects only its own
score. Every kernel sums in the same order: the score of a pair has the same bits wherever it is computed.

Gradients are those of given slots, or of a chunk of keys. With g the upstream gradient times the scale, and
s = iq[i, h] . ik[j]::

    d_w[i, h] = sum_j g relu(s)     ds = g w [s > 0]     d_iq[i, h] = sum_j ds ik[j]     d_ik[j] += sum_h ds iq[i, h]

At slots there is one program per row, which gathers its keys once. Many rows add to one key: by atomics or, if
deterministic, through one workspace entry per slot, summed in the order of rows and slots.

For a chunk of keys that all rows may see, atomics would be contended. There, one kernel iterates over the keys of each
row (d_iq, d_w) and one over the rows of each tile of keys (d_ik); both recompute the products. Always deterministic.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.launch import Launch, Recent, cdiv, repeat
from attnmesh.ops.sparse import indexer_tiles
from attnmesh.ops.sparse.arguments import IndexerCall, RowBounds
from attnmesh.ops.sparse.indexer_tiles import IndexerTiles, head_tile, padded
from attnmesh.ops.sparse.triton_backward import add_by_key, sort_slots_by_key
from attnmesh.ops.sparse.triton_bounds import valid_keys

_launches: Recent[Launch] = Recent()
_grad_launches: Recent[Launch] = Recent()  # of chunks of rows: there may be more than are kept


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
def _head_sum(keys, queries, weights, SHAPE: tl.constexpr):
    """The weighted sum over the heads of each row, of the products of keys and queries: [keys, rows]."""
    dots = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    if SHAPE.relu:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(tl.reshape(dots * weights[None, :], (SHAPE.keys, SHAPE.rows, SHAPE.heads)), 2)


@triton.jit
def sum_over_heads(tile, queries, weights, source, row, s_q, heads, SHAPE: tl.constexpr):
    """The weighted sums over all heads [keys, rows] of a tile of keys; `queries` and `weights` are of the first."""
    total = _head_sum(tile, queries, weights, SHAPE)
    if not SHAPE.one_tile:
        for head in range(SHAPE.heads, heads, SHAPE.heads):
            more, more_weights = load_queries(source, row, s_q, head, heads, 0, SHAPE.block_d, SHAPE)
            total += _head_sum(tile, more, more_weights, SHAPE)
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
    tiles = tiles or indexer_tiles.SCORES[iq.element_size()]
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


# Gradients.


_WORKSPACE = 256 << 20  # bytes of the gradients per slot, if deterministic


class Grads(NamedTuple):
    """Gradients of iq, ik and w; the last two are float32."""

    iq: Tensor
    ik: Any
    w: Tensor


def scores_at_backward(
    call: IndexerCall, grad: Tensor, dtype: torch.dtype, *, tiles: IndexerTiles | None = None,
    workspace: int = _WORKSPACE,
) -> Grads:  # fmt: skip
    """`dispatch.scores_at_backward`; `grad` float32 [s_q, topk] is not read at invalid slots.

    If `deterministic`, the result has the same bits in every run and for every `workspace` (in bytes).
    """
    iq, ik, w, indices, bounds, _, _, deterministic, _ = call
    assert indices is not None
    (s_q, _, width), topk, s_kv = iq.shape, indices.shape[1], ik.shape[0]
    grads = Grads(
        torch.empty(iq.shape, dtype=dtype, device=iq.device),
        torch.zeros(ik.shape, dtype=torch.float32, device=iq.device),
        torch.empty(w.shape, dtype=torch.float32, device=iq.device),
    )
    if s_q == 0:
        return grads
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    tiles = tiles or indexer_tiles.pick_grad_tiles(iq)
    at_once = max(1, min(s_q, workspace // (4 * max(1, topk) * width))) if deterministic else s_q
    parts = torch.empty(at_once, topk, width, dtype=torch.float32, device=iq.device) if deterministic else None
    for row in range(0, s_q, at_once):
        rows = range(row, min(row + at_once, s_q))
        _launch_grads(call, grad, grads._replace(ik=grads.ik if parts is None else None), parts, rows, topk, tiles)
        if parts is not None:
            chunk = bounds.narrow(rows.start, rows.stop)
            add_by_key(grads.ik, parts, sort_slots_by_key(indices[rows.start : rows.stop], chunk, s_kv))
    return grads


def _launch_grads(
    call: IndexerCall, grad: Tensor, grads: Grads, parts: Tensor | None, rows: range, topk: int, tiles: IndexerTiles
) -> None:
    """Writes d_iq and d_w of some rows; adds to d_ik, or writes to `parts`, or neither.

    Without indices, slot j is key j.
    """
    iq, ik, w, indices, (lo, hi, slots, k_offset), scale, relu, *_ = call
    _, heads, width = iq.shape
    head_block, columns = indexer_tiles.grad_head_tile(heads), min(padded(width), indexer_tiles.MAX_GRAD_COLUMNS)
    with torch.cuda.device_of(iq):
        for head in range(0, heads, head_block):
            repeat(
                _grad_launches, _grad_kernel, (len(rows), cdiv(padded(width), columns)),
                (
                    iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(),
                    indices, 0 if indices is None else indices.stride(0), lo, hi, None if indices is None else slots,
                    grad, grad.stride(0), *grads, parts, rows.start, topk, head, heads, k_offset, scale,
                ),
                SHAPE=shape_of(iq, tiles.keys, 1, head_block, relu), COLUMNS=columns,
                NARROW=iq.dtype == torch.float16, MORE=head > 0, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip


@triton.jit
def power_below(largest):
    """The largest power of two up to a number, clamped so that its inverse is a normal number."""
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 1 << 23), 253 << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["row_begin", "topk", "first_head", "heads", "k_offset", "indices_stride", "grad_stride"])
def _grad_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, indices, indices_stride, lo, hi, slots,
    grad, grad_stride, d_iq, d_ik, d_w, parts,
    row_begin, topk, first_head, heads, k_offset, scale,
    SHAPE: tl.constexpr, COLUMNS: tl.constexpr, NARROW: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = SHAPE.keys
    HEADS: tl.constexpr = SHAPE.heads
    row = row_begin + tl.program_id(0)
    far = row.to(tl.int64)
    row_lo, row_hi = tl.load(lo + row), tl.load(hi + row)
    grad += far * grad_stride
    if indices is None:
        begin = row_lo // KEYS * KEYS
        limit = tl.minimum(row_hi, topk)
    else:
        begin = 0
        limit = tl.minimum(tl.load(slots + row), topk)
        indices += far * indices_stride
    if row_hi <= row_lo:
        limit = begin
    source = iq, iq_strides, w, w_strides
    queries, weights = load_queries(source, row, row + 1, first_head, heads, 0, SHAPE.block_d, SHAPE)
    first_dim = tl.program_id(1) * COLUMNS
    dims = first_dim + tl.arange(0, COLUMNS)
    my_queries = queries
    if SHAPE.block_d > COLUMNS:
        my_queries, _same_weights = load_queries(source, row, row + 1, first_head, heads, first_dim, COLUMNS, SHAPE)

    unit = 1.0 + tl.zeros((), tl.float32)
    if NARROW:  # gradients may underflow in float16: scale the largest of the row to about 1
        largest = tl.zeros((KEYS,), tl.float32)
        for first in range(begin, limit, KEYS):
            j = first + tl.arange(0, KEYS)
            valid, _keys = valid_keys(indices, j, limit, row_lo, row_hi, k_offset)
            largest = tl.maximum(largest, tl.abs(tl.load(grad + j, mask=valid, other=0.0) * scale))
        unit = power_below(tl.max(largest, 0))

    d_queries = tl.zeros((HEADS, COLUMNS), tl.float32)
    d_weights = tl.zeros((KEYS // 16, 8, HEADS), tl.float32)
    for first in range(begin, limit, KEYS):
        j = first + tl.arange(0, KEYS)
        valid, keys = valid_keys(indices, j, limit, row_lo, row_hi, k_offset)
        tile = gather_keys(ik, ik_stride, keys, valid, 0, SHAPE.d, SHAPE.block_d)
        my_tile = tile
        if SHAPE.block_d > COLUMNS:
            my_tile = gather_keys(ik, ik_stride, keys, valid, first_dim, SHAPE.d, COLUMNS)
        upstream = tl.load(grad + j, mask=valid, other=0.0) * scale / unit
        dots = tl.dot(tile, tl.trans(queries), input_precision="ieee")
        # where, not a product with 0: a row without a visible key may hold NaN.
        has_grad = valid[:, None]
        if SHAPE.relu:
            has_grad = has_grad & (dots > 0.0)
        d_dots = tl.where(has_grad, upstream[:, None] * weights[None, :], 0.0)
        d_weight = tl.where(has_grad, dots * upstream[:, None], 0.0)
        # A thread holds rows that are 8 apart: these are summed here, the others at the end.
        d_weights += tl.sum(tl.reshape(d_weight, (KEYS // 16, 2, 8, HEADS)), 1)
        d_dots = d_dots.to(tile.dtype)
        d_queries = tl.dot(tl.trans(d_dots), my_tile, d_queries, input_precision="ieee")
        inside = valid[:, None] & (dims < SHAPE.d)[None, :]
        if d_ik is not None or parts is not None:
            d_keys = tl.dot(d_dots, my_queries, input_precision="ieee") * unit
            target, rows = (d_ik, keys) if parts is None else (parts, tl.program_id(0).to(tl.int64) * topk + j)
            at = target + rows[:, None] * SHAPE.d + dims[None, :]
            # Parts are added to the sum of earlier heads; no other program adds, so the order is fixed.
            if parts is None or MORE:
                tl.atomic_add(at, d_keys, mask=inside, sem="relaxed")
            else:
                tl.store(at, d_keys, mask=inside)

    head = first_head + tl.arange(0, HEADS)
    at = far * heads + head
    if first_dim == 0:
        tl.store(d_w + at, tl.sum(tl.reshape(d_weights, (KEYS // 2, HEADS)), 0) * unit, mask=head < heads)
    inside = (head < heads)[:, None] & (dims < SHAPE.d)[None, :]
    tl.store(d_iq + at[:, None] * SHAPE.d + dims[None, :], (d_queries * unit).to(d_iq.dtype.element_ty), mask=inside)


def dense_scores_backward(
    call: IndexerCall, grad: Tensor, dtype: torch.dtype, *, tiles: IndexerTiles | None = None
) -> Grads:
    """`scores_at_backward` where the slots of every row are all keys, in order; without atomics.

    `grad` float32 [s_q, keys] is not read where a key is not visible.
    """
    iq, ik, w, _, (lo, hi, slots, first_key), scale, relu, *_ = call
    (s_q, heads, width), n = iq.shape, ik.shape[0]
    grads = Grads(
        torch.empty(iq.shape, dtype=dtype, device=iq.device),
        torch.empty(ik.shape, dtype=torch.float32, device=iq.device),
        torch.empty(w.shape, dtype=torch.float32, device=iq.device),
    )
    if s_q == 0 or n == 0:
        return Grads(*(x.zero_() for x in grads))
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    # Bounds relative to the chunk: no number below exceeds 32 bits, wherever the chunk begins.
    lo, hi = (lo - first_key).clamp(0, n), (hi - first_key).clamp(0, n)
    tiles = tiles or indexer_tiles.pick_dense_tiles(iq)
    relative = call._replace(indices=None, bounds=RowBounds(lo, hi, slots, 0))
    _launch_grads(relative, grad, grads._replace(ik=None), None, range(s_q), n, tiles)
    head_block, columns = indexer_tiles.grad_head_tile(heads), min(padded(width), indexer_tiles.MAX_GRAD_COLUMNS)
    blocks, pieces = cdiv(n, tiles.keys), cdiv(padded(width), columns)
    begins, ends = _row_ranges(lo, hi, blocks, tiles.keys)
    splits = max(1, min(indexer_tiles.DENSE_KEY_PROGRAMS // (blocks * pieces), s_q))
    parts = grads.ik[None] if splits == 1 else torch.empty(splits, *ik.shape, dtype=torch.float32, device=iq.device)
    with torch.cuda.device_of(iq):
        for head in range(0, heads, head_block):
            repeat(
                _grad_launches, _grad_keys_kernel, (blocks * splits, pieces),
                (
                    iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), lo, hi, grad, grad.stride(0),
                    begins, ends, parts, s_q, n, head, heads, scale, splits,
                ),
                SHAPE=shape_of(iq, tiles.keys, 1, head_block, relu), COLUMNS=columns,
                NARROW=iq.dtype == torch.float16, MORE=head > 0, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
    if splits > 1:
        torch.sum(parts, 0, out=grads.ik)
    return grads


def _row_ranges(lo: Tensor, hi: Tensor, blocks: int, block: int) -> tuple[Tensor, Tensor]:
    """For each tile of keys, the range of rows to which any of it is visible; (0, 0) if there is none."""
    begin = torch.arange(blocks, device=lo.device, dtype=torch.int32)[:, None] * block
    sees = (torch.maximum(lo, begin) < torch.minimum(hi, begin + block)).to(torch.int32)
    some = sees.amax(1)
    first, last = sees.argmax(1), lo.shape[0] - 1 - sees.flip(1).argmax(1)
    return (first * some).to(torch.int32), ((last + 1) * some).to(torch.int32)


@triton.jit(do_not_specialize=["grad_stride", "s_q", "n", "first_head", "heads", "splits"])
def _grad_keys_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, lo, hi, grad, grad_stride,
    begins, ends, parts, s_q, n, first_head, heads, scale, splits,
    SHAPE: tl.constexpr, COLUMNS: tl.constexpr, NARROW: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """d_ik of a tile of keys, summed over one split of the rows.

    Keys are the rows of both products: NaN in a key that is visible to no query affects only that key.
    """
    KEYS: tl.constexpr = SHAPE.keys
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    keys = block * KEYS + tl.arange(0, KEYS)
    all_dims = tl.arange(0, SHAPE.block_d)
    tile = tl.load(
        ik + keys.to(tl.int64)[:, None] * ik_stride + all_dims[None, :],
        mask=(keys < n)[:, None] & (all_dims < SHAPE.d)[None, :], other=0.0,
    )  # fmt: skip
    first_dim = tl.program_id(1) * COLUMNS
    each = tl.cdiv(s_q, splits)
    begin = tl.maximum(tl.load(begins + block), split * each)
    end = tl.minimum(tl.load(ends + block), (split + 1) * each)

    unit = 1.0 + tl.zeros((), tl.float32)
    if NARROW:
        largest = tl.zeros((KEYS,), tl.float32)
        for row in range(begin, end):
            largest = tl.maximum(largest, tl.abs(_upstream(grad, grad_stride, row, keys, lo, hi, scale)))
        unit = power_below(tl.max(largest, 0))

    d_keys = tl.zeros((KEYS, COLUMNS), tl.float32)
    for row in range(begin, end):
        # A row without a visible key may hold NaN: zeros are read instead.
        rows = tl.where(tl.load(lo + row) < tl.load(hi + row), s_q, 0)
        source = iq, iq_strides, w, w_strides
        queries, weights = load_queries(source, row, rows, first_head, heads, 0, SHAPE.block_d, SHAPE)
        my_queries = queries
        if SHAPE.block_d > COLUMNS:
            my_queries, _same_weights = load_queries(source, row, rows, first_head, heads, first_dim, COLUMNS, SHAPE)
        upstream = _upstream(grad, grad_stride, row, keys, lo, hi, scale) / unit
        d_dots = upstream[:, None] * weights[None, :]
        if SHAPE.relu:
            dots = tl.dot(tile, tl.trans(queries), input_precision="ieee")
            d_dots = tl.where(dots > 0.0, d_dots, 0.0)
        d_keys = tl.dot(d_dots.to(tile.dtype), my_queries, d_keys, input_precision="ieee")

    dims = first_dim + tl.arange(0, COLUMNS)
    at = parts + (split.to(tl.int64) * n + keys)[:, None] * SHAPE.d + dims[None, :]
    inside = (keys < n)[:, None] & (dims < SHAPE.d)[None, :]
    d_keys *= unit
    if MORE:
        d_keys += tl.load(at, mask=inside, other=0.0)
    tl.store(at, d_keys, mask=inside)


@triton.jit
def _upstream(grad, grad_stride, row, keys, lo, hi, scale):
    """The gradient of the scores of some keys of a row, times the scale; 0 for keys that are not visible."""
    seen = (keys >= tl.load(lo + row)) & (keys < tl.load(hi + row))
    return tl.load(grad + tl.cast(row, tl.int64) * grad_stride + keys, mask=seen, other=0.0) * scale
