"""Attention forward in Triton: one pass over the visible keys, from a state to a state.

The kernel continues its online softmax from the state it is given, so that a partial result stays in float32 from the
first step of a ring to the last, and no merge kernel runs in between.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.dense.triton_tiles import (
    FORWARD_TILES,
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
    store_rows,
    tile_mask,
    tile_pointers,
    visible_keys,
)

_LOG2_E = tl.constexpr(LOG2_E)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    bounds: tuple[Tensor, Tensor] | None,
    state: State | None,
    out_dtype: torch.dtype,
    tiles: DenseTiles | None = None,
) -> State:
    """Attention of q [B, Hq, Sq, D] over k and v [B, Hkv, Sk, D], merged with `state`.

    Row i attends to all keys, or to keys j <= i if `causal` (Sq == Sk), or to keys first[i] <= j < end[i] if
    `bounds = (first, end)`: int32 [Sq], both non-decreasing. `state` is float32; it is overwritten with the result if
    `out_dtype` is float32, else the result is new. A row that attends to no key has out 0 and lse -inf.
    """
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if state is not None and out_dtype == torch.float32:
        result = state
    else:
        result = State(
            torch.empty(q.shape, dtype=out_dtype, device=q.device),
            torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        )
    if q.numel() == 0:
        return result
    if scale < 0:  # the kernel takes the maximum before it scales
        q, scale = -q, -scale

    first, end = bounds or (None, None)
    state_out, state_lse = state or (None, None)
    tiles = tiles or pick_tiles(FORWARD_TILES, q)
    q_strides, k_strides, v_strides, state_strides, out_strides = row_strides(
        q=q, k=k, v=v, state_out=state_out, out=result.out
    )
    # Without keys the loops are empty and the state passes through.
    with torch.cuda.device_of(q):
        _forward_kernel[(triton.cdiv(q_len, tiles.rows) * batch * q_heads,)](
            q, q_strides, k, k_strides, v, v_strides, first, end,
            state_out, state_strides, state_lse, (0, 0, 0) if state_lse is None else state_lse.stride(),
            result.out, out_strides, result.lse, result.lse.stride(),
            q_len, kv_len, q_heads, q_heads // kv_heads, scale * LOG2_E,
            CAUSAL=causal, D=head_dim, BLOCK_D=padded(head_dim), ROWS=tiles.rows, KEYS=tiles.keys,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    q, q_strides, k, k_strides, v, v_strides, first, end,
    state_out, state_out_strides, state_lse, state_lse_strides,
    out, out_strides, lse, lse_strides,
    q_len, kv_len, q_heads, group, scale_log2,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile_count = tl.cdiv(q_len, ROWS)
    tile, head, batch = locate(tile_count, q_heads)
    # The last rows have the most keys. They run first, so that short tiles fill the gaps at the end.
    row_begin = (tile_count - 1 - tile) * ROWS
    rows = row_begin + tl.arange(0, ROWS)

    q_tile = load_tile(at_head(q, q_strides, batch, head), q_strides[2], row_begin, q_len, True, ROWS, D, BLOCK_D)
    k_head = at_head(k, k_strides, batch, head // group)
    v_head = at_head(v, v_strides, batch, head // group)

    # The carry: `acc / total` is the output so far, `peak + log2(total)` its log-sum-exp in base 2.
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    if state_out is not None:
        state_lse_head = at_head(state_lse, state_lse_strides, batch, head)
        peak = load_rows(state_lse_head, state_lse_strides[2], row_begin, q_len, float("-inf"), True, ROWS) * _LOG2_E
        some = peak != float("-inf")
        total = some.to(tl.float32)
        pointers = tile_pointers(
            at_head(state_out, state_out_strides, batch, head), state_out_strides[2], row_begin, ROWS, BLOCK_D
        )
        # The `out` of an empty state is not read: it may hold anything.
        mask = tile_mask(row_begin, q_len, ROWS, D, BLOCK_D) & some[:, None]
        acc = tl.load(pointers, mask=mask, other=0.0)

    begin, inner, edge, stop = key_phases(
        first, end, row_begin, tl.minimum(row_begin + ROWS, q_len), kv_len, CAUSAL, KEYS
    )
    if first is not None:  # without bounds key 0 is visible to every row, and there is no left edge
        acc, total, peak = _attend(
            acc, total, peak, q_tile, k_head, k_strides[2], v_head, v_strides[2], begin, inner,
            first, end, rows, q_len, kv_len, scale_log2, True, CAUSAL, KEYS, D, BLOCK_D,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q_tile, k_head, k_strides[2], v_head, v_strides[2], inner, edge,
        first, end, rows, q_len, kv_len, scale_log2, False, CAUSAL, KEYS, D, BLOCK_D,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q_tile, k_head, k_strides[2], v_head, v_strides[2], edge, stop,
        first, end, rows, q_len, kv_len, scale_log2, True, CAUSAL, KEYS, D, BLOCK_D,
    )  # fmt: skip

    # A row without keys has total 0 and peak -inf: out 0 / 1, lse -inf + -inf.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    pointers = tile_pointers(at_head(out, out_strides, batch, head), out_strides[2], row_begin, ROWS, BLOCK_D)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=tile_mask(row_begin, q_len, ROWS, D, BLOCK_D))
    lse_head = at_head(lse, lse_strides, batch, head)
    store_rows(lse_head, lse_strides[2], row_begin, q_len, (peak + tl.log2(total)) / _LOG2_E, ROWS)


@triton.jit
def _attend(
    acc, total, peak, q_tile, k, k_stride, v, v_stride, begin, stop,
    first, end, rows, q_len, kv_len, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Continues the online softmax over the key tiles of [begin, stop)."""
    for key_begin in range(begin, stop, KEYS):
        k_tile = load_tile(k, k_stride, key_begin, kv_len, MASKED, KEYS, D, BLOCK_D)
        v_tile = load_tile(v, v_stride, key_begin, kv_len, MASKED, KEYS, D, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            # Reloaded in each edge tile: two vectors fewer in registers through the hot loop.
            row_first, row_end = visible_keys(first, end, rows, q_len, kv_len, CAUSAL)
            keys = key_begin + tl.arange(0, KEYS)[None, :]
            visible = (keys >= row_first[:, None]) & (keys < row_end[:, None])
            scores = tl.where(visible, scores * scale_log2, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # No key so far: subtract 0, since -inf - -inf would be NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - shift[:, None])
        else:
            # The scale is part of the multiply-add in the exponent instead of a separate pass.
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
            shift = new_peak
            weights = tl.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak
