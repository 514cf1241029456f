"""Attention backward in Triton: deterministic, without atomics, adding into float32 gradients.

Two kernels recompute the weights p from the log-sum-exp of the whole softmax. One loops over the keys for each tile of
queries (grad_q), one over the queries for each tile of keys (grad_k, grad_v)::

    grad_v += p^T @ grad_out          ds = p * (grad_out @ v^T - delta)
    grad_q += scale * ds @ k          grad_k += scale * ds^T @ q

`lse` and `delta` are those of the whole softmax, so the keys may be processed in any number of parts, in any order.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.dense.triton_tiles import (
    GRAD_KEY_TILES,
    GRAD_QUERY_TILES,
    LENGTHS,
    LOG2_E,
    DenseTiles,
    at_head,
    key_phases,
    load_rows,
    load_tile,
    locate,
    padded,
    pick_tiles,
    row_strides,
    split_phases,
    store_rows,
    tile_mask,
    tile_pointers,
    visible_keys,
)

_LOG2_E = tl.constexpr(LOG2_E)
_DELTA_ELEMENTS = 4096  # per program of the memory-bound delta kernel


def delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """The row term of the softmax gradient, `rowsum(out * grad_out) - grad_lse`: float32 [B, H, S]."""
    batch, heads, length, head_dim = out.shape
    result = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    if result.numel() == 0:
        return result
    rows = max(1, _DELTA_ELEMENTS // padded(head_dim))
    out_strides, grad_out_strides = row_strides(out=out, grad_out=grad_out)
    with torch.cuda.device_of(out):
        _delta_kernel[(triton.cdiv(length, rows) * batch * heads,)](
            out, out_strides, grad_out, grad_out_strides,
            grad_lse, (0, 0, 0) if grad_lse is None else grad_lse.stride(),
            result, result.stride(), length, heads,
            D=head_dim, BLOCK_D=padded(head_dim), ROWS=rows, num_warps=4,
        )  # fmt: skip
    return result


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
    grad_q: Tensor | None,
    grad_k: Tensor | None,
    grad_v: Tensor | None,
    query_tiles: DenseTiles | None = None,
    key_tiles: DenseTiles | None = None,
) -> None:
    """Adds the gradients of attention to the float32 `grad_q`, `grad_k` and `grad_v`; None is not computed.

    Shapes and visibility are those of `forward`. `lse` and `delta` [B, Hq, Sq] are of the whole softmax over all keys
    on all ranks. A row whose lse is -inf contributes nothing.
    """
    if q.numel() == 0 or k.numel() == 0:
        return
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    first, end = bounds or (None, None)
    q_strides, k_strides, v_strides, grad_out_strides, grad_q_strides, grad_k_strides, grad_v_strides = row_strides(
        q=q, k=k, v=v, grad_out=grad_out, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v
    )
    inputs = (
        q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
        lse, lse.stride(), delta, delta.stride(), first, end,
    )  # fmt: skip
    sizes = (q_len, kv_len, q_heads, q_heads // kv_heads, scale)
    head = {"CAUSAL": causal, "D": head_dim, "BLOCK_D": padded(head_dim)}
    with torch.cuda.device_of(q):
        if grad_q is not None:
            tiles = query_tiles or pick_tiles(GRAD_QUERY_TILES, q)
            _grad_query_kernel[(triton.cdiv(q_len, tiles.rows) * batch * q_heads,)](
                *inputs, grad_q, grad_q_strides, *sizes,
                **head, ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
        if grad_k is not None or grad_v is not None:
            tiles = key_tiles or pick_tiles(GRAD_KEY_TILES, q)
            _grad_key_kernel[(triton.cdiv(kv_len, tiles.keys) * batch * kv_heads,)](
                *inputs, None if bounds is None else _rows_per_key_tile(*bounds, kv_len, tiles.keys),
                grad_k, grad_k_strides, grad_v, grad_v_strides, *sizes,
                **head, ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip


def _rows_per_key_tile(first: Tensor, end: Tensor, kv_len: int, block: int) -> Tensor:
    """The rows that attend to each key tile: int32 [tiles, 4] of begin, full_begin, full_end, stop.

    `first` and `end` ascend, so these rows are contiguous: rows in [begin, stop) attend to some key of the tile, rows
    in [full_begin, full_end) to every key. Computed on the device of the bounds; the host does not wait.
    """
    tile_begin = torch.arange(0, kv_len, block, dtype=torch.int32, device=first.device)
    tile_end = (tile_begin + block).clamp_(max=kv_len)
    begin = torch.searchsorted(end, tile_begin, right=True)  # the first row with end > tile_begin
    full_begin = torch.searchsorted(end, tile_end)  # end >= tile_end
    full_end = torch.searchsorted(first, tile_begin, right=True)  # first > tile_begin
    stop = torch.searchsorted(first, tile_end)  # first >= tile_end
    return torch.stack((begin, full_begin, full_end, stop), dim=1).to(torch.int32)


@triton.jit
def _delta_kernel(
    out, out_strides, grad_out, grad_out_strides, grad_lse, grad_lse_strides, delta, delta_strides,
    length, heads, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, batch = locate(tl.cdiv(length, ROWS), heads)
    begin = tile * ROWS
    out_head = at_head(out, out_strides, batch, head)
    grad_out_head = at_head(grad_out, grad_out_strides, batch, head)
    out_tile = load_tile(out_head, out_strides[2], begin, length, True, ROWS, D, BLOCK_D)
    grad_out_tile = load_tile(grad_out_head, grad_out_strides[2], begin, length, True, ROWS, D, BLOCK_D)
    result = tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)
    if grad_lse is not None:
        grad_lse_head = at_head(grad_lse, grad_lse_strides, batch, head)
        result -= load_rows(grad_lse_head, grad_lse_strides[2], begin, length, 0.0, True, ROWS).to(tl.float32)
    delta_head = at_head(delta, delta_strides, batch, head)
    store_rows(delta_head, delta_strides[2], begin, length, result, ROWS)


@triton.jit
def _load_row_terms(lse, lse_stride, delta, delta_stride, begin, q_len, EDGE: tl.constexpr, ROWS: tl.constexpr):
    """The lse (base 2) and the delta of a tile of rows; (+inf, 0), so that weights are 0, for rows without keys."""
    row_lse = load_rows(lse, lse_stride, begin, q_len, float("-inf"), EDGE, ROWS)
    row_delta = load_rows(delta, delta_stride, begin, q_len, 0.0, EDGE, ROWS)
    empty = row_lse == float("-inf")
    return tl.where(empty, float("inf"), row_lse * _LOG2_E), tl.where(empty, 0.0, row_delta)


@triton.jit
def _add_to_tile(base, stride, begin, limit, value, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Adds `value` to rows [begin, begin + ROWS) of one head. No other program writes them."""
    pointers = tile_pointers(base, stride, begin, ROWS, BLOCK_D)
    mask = tile_mask(begin, limit, ROWS, D, BLOCK_D)
    tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=LENGTHS)
def _grad_query_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, first, end,
    grad_q, grad_q_strides, q_len, kv_len, q_heads, group, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile_count = tl.cdiv(q_len, ROWS)
    tile, head, batch = locate(tile_count, q_heads)
    row_begin = (tile_count - 1 - tile) * ROWS  # the longest tiles first, as in forward
    rows = row_begin + tl.arange(0, ROWS)
    k_head = at_head(k, k_strides, batch, head // group)
    v_head = at_head(v, v_strides, batch, head // group)
    q_head = at_head(q, q_strides, batch, head)
    grad_out_head = at_head(grad_out, grad_out_strides, batch, head)

    q_tile = load_tile(q_head, q_strides[2], row_begin, q_len, True, ROWS, D, BLOCK_D)
    grad_out_tile = load_tile(grad_out_head, grad_out_strides[2], row_begin, q_len, True, ROWS, D, BLOCK_D)
    row_lse, row_delta = _load_row_terms(
        at_head(lse, lse_strides, batch, head), lse_strides[2],
        at_head(delta, delta_strides, batch, head), delta_strides[2], row_begin, q_len, True, ROWS,
    )  # fmt: skip

    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    begin, inner, edge, stop = key_phases(
        first, end, row_begin, tl.minimum(row_begin + ROWS, q_len), kv_len, CAUSAL, KEYS
    )
    if first is not None:  # without bounds key 0 is visible to every row, and there is no left edge
        acc = _sum_over_keys(
            acc, q_tile, grad_out_tile, row_lse, row_delta, k_head, k_strides[2], v_head, v_strides[2],
            begin, inner, first, end, rows, q_len, kv_len, scale, True, CAUSAL, KEYS, D, BLOCK_D,
        )  # fmt: skip
    acc = _sum_over_keys(
        acc, q_tile, grad_out_tile, row_lse, row_delta, k_head, k_strides[2], v_head, v_strides[2],
        inner, edge, first, end, rows, q_len, kv_len, scale, False, CAUSAL, KEYS, D, BLOCK_D,
    )  # fmt: skip
    acc = _sum_over_keys(
        acc, q_tile, grad_out_tile, row_lse, row_delta, k_head, k_strides[2], v_head, v_strides[2],
        edge, stop, first, end, rows, q_len, kv_len, scale, True, CAUSAL, KEYS, D, BLOCK_D,
    )  # fmt: skip
    grad_q_head = at_head(grad_q, grad_q_strides, batch, head)
    _add_to_tile(grad_q_head, grad_q_strides[2], row_begin, q_len, acc * scale, ROWS, D, BLOCK_D)


@triton.jit
def _sum_over_keys(
    acc, q_tile, grad_out_tile, row_lse, row_delta, k, k_stride, v, v_stride,
    begin, stop, first, end, rows, q_len, kv_len, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds ds @ k over the key tiles of [begin, stop) to the gradient of one query tile."""
    for key_begin in range(begin, stop, KEYS):
        k_tile = load_tile(k, k_stride, key_begin, kv_len, MASKED, KEYS, D, BLOCK_D)
        v_tile = load_tile(v, v_stride, key_begin, kv_len, MASKED, KEYS, D, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        weights = tl.exp2(scores * (scale * _LOG2_E) - row_lse[:, None])
        if MASKED:
            row_first, row_end = visible_keys(first, end, rows, q_len, kv_len, CAUSAL)
            keys = key_begin + tl.arange(0, KEYS)[None, :]
            weights = tl.where((keys >= row_first[:, None]) & (keys < row_end[:, None]), weights, 0.0)
        grad_weights = tl.dot(grad_out_tile, tl.trans(v_tile), input_precision="ieee")
        grad_scores = weights * (grad_weights - row_delta[:, None])
        acc = tl.dot(grad_scores.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def _grad_key_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, first, end, rows_per_tile,
    grad_k, grad_k_strides, grad_v, grad_v_strides, q_len, kv_len, q_heads, group, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The first keys are visible to the most rows: in this order the longest tiles already run first.
    tile, kv_head, batch = locate(tl.cdiv(kv_len, KEYS), q_heads // group)
    key_begin = tile * KEYS
    k_head = at_head(k, k_strides, batch, kv_head)
    v_head = at_head(v, v_strides, batch, kv_head)
    k_tile = load_tile(k_head, k_strides[2], key_begin, kv_len, True, KEYS, D, BLOCK_D)
    v_tile = load_tile(v_head, v_strides[2], key_begin, kv_len, True, KEYS, D, BLOCK_D)

    # Keys beyond the last need no mask here: each has its own row of the gradients, which is not stored.
    if first is not None:
        of_tile = rows_per_tile + tile * 4
        begin, inner, edge, stop = split_phases(
            tl.load(of_tile), tl.load(of_tile + 1), tl.load(of_tile + 2), tl.load(of_tile + 3), ROWS
        )
    elif CAUSAL:
        last_key = tl.minimum(key_begin + KEYS, kv_len) - 1
        begin, inner, edge, stop = split_phases(key_begin, last_key, q_len, q_len, ROWS)
    else:
        begin, inner, edge, stop = split_phases(0, 0, q_len, q_len, ROWS)

    acc_k = tl.zeros((KEYS, BLOCK_D), tl.float32)
    acc_v = tl.zeros((KEYS, BLOCK_D), tl.float32)
    head = kv_head * group  # the first of the query heads that share these keys
    q_head = at_head(q, q_strides, batch, head)
    grad_out_head = at_head(grad_out, grad_out_strides, batch, head)
    lse_head = at_head(lse, lse_strides, batch, head)
    delta_head = at_head(delta, delta_strides, batch, head)
    if CAUSAL or first is not None:  # without a mask every key is visible to row 0, and there is no upper edge
        acc_k, acc_v = _sum_over_rows(
            acc_k, acc_v, k_tile, v_tile, q_head, q_strides, grad_out_head, grad_out_strides,
            lse_head, lse_strides, delta_head, delta_strides, begin, inner, first, end,
            key_begin, q_len, kv_len, group, scale,
            grad_k is not None, grad_v is not None, True, CAUSAL, ROWS, KEYS, D, BLOCK_D,
        )  # fmt: skip
    acc_k, acc_v = _sum_over_rows(
        acc_k, acc_v, k_tile, v_tile, q_head, q_strides, grad_out_head, grad_out_strides,
        lse_head, lse_strides, delta_head, delta_strides, inner, edge, first, end,
        key_begin, q_len, kv_len, group, scale,
        grad_k is not None, grad_v is not None, False, CAUSAL, ROWS, KEYS, D, BLOCK_D,
    )  # fmt: skip
    acc_k, acc_v = _sum_over_rows(
        acc_k, acc_v, k_tile, v_tile, q_head, q_strides, grad_out_head, grad_out_strides,
        lse_head, lse_strides, delta_head, delta_strides, edge, stop, first, end,
        key_begin, q_len, kv_len, group, scale,
        grad_k is not None, grad_v is not None, True, CAUSAL, ROWS, KEYS, D, BLOCK_D,
    )  # fmt: skip
    if grad_k is not None:
        grad_k_head = at_head(grad_k, grad_k_strides, batch, kv_head)
        _add_to_tile(grad_k_head, grad_k_strides[2], key_begin, kv_len, acc_k * scale, KEYS, D, BLOCK_D)
    if grad_v is not None:
        grad_v_head = at_head(grad_v, grad_v_strides, batch, kv_head)
        _add_to_tile(grad_v_head, grad_v_strides[2], key_begin, kv_len, acc_v, KEYS, D, BLOCK_D)


@triton.jit
def _sum_over_rows(
    acc_k, acc_v, k_tile, v_tile, q, q_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, begin, stop, first, end,
    key_begin, q_len, kv_len, group, scale,
    NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds ds^T @ q and p^T @ grad_out over the row tiles of [begin, stop), in every query head of the group.

    Heads and tiles are one loop: the pipeline does not drain at each head, the addresses of a second loop need no
    registers, and the sum over the group stays in registers. Scores are computed transposed, [keys, rows], which makes
    them the left operand of both products without a transposition.
    """
    tile_count = tl.cdiv(stop - begin, ROWS)
    for step in range(tile_count * group):
        member = step // tile_count
        row_begin = begin + step % tile_count * ROWS
        q_tile = load_tile(
            q + tl.cast(member, tl.int64) * q_strides[1], q_strides[2],
            row_begin, q_len, MASKED, ROWS, D, BLOCK_D,
        )  # fmt: skip
        grad_out_tile = load_tile(
            grad_out + tl.cast(member, tl.int64) * grad_out_strides[1], grad_out_strides[2],
            row_begin, q_len, MASKED, ROWS, D, BLOCK_D,
        )  # fmt: skip
        row_lse, row_delta = _load_row_terms(
            lse + tl.cast(member, tl.int64) * lse_strides[1], lse_strides[2],
            delta + tl.cast(member, tl.int64) * delta_strides[1], delta_strides[2],
            row_begin, q_len, MASKED, ROWS,
        )  # fmt: skip
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        weights = tl.exp2(scores * (scale * _LOG2_E) - row_lse[None, :])
        if MASKED:
            rows = row_begin + tl.arange(0, ROWS)
            row_first, row_end = visible_keys(first, end, rows, q_len, kv_len, CAUSAL)
            keys = key_begin + tl.arange(0, KEYS)[:, None]
            weights = tl.where((keys >= row_first[None, :]) & (keys < row_end[None, :]), weights, 0.0)
        if NEEDS_V:
            acc_v = tl.dot(weights.to(grad_out_tile.dtype), grad_out_tile, acc_v, input_precision="ieee")
        if NEEDS_K:
            grad_weights = tl.dot(v_tile, tl.trans(grad_out_tile), input_precision="ieee")
            grad_scores = weights * (grad_weights - row_delta[None, :])
            acc_k = tl.dot(grad_scores.to(q_tile.dtype), q_tile, acc_k, input_precision="ieee")
    return acc_k, acc_v
