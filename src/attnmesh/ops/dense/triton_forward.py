"""Attention forward in Triton: one pass over the visible keys, from a state to a state.

The kernel continues its online softmax from the state it is given, so that a partial result stays in float32 from the
first step of a ring to the last, and no merge kernel runs in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.dense import triton_tiles as common
from attnmesh.ops.dense.triton_tiles import LENGTHS, LOG2_E, PLAIN, Bounds, DenseTiles, ScoreTerms, Shape
from attnmesh.ops.launch import Launch, Recent, prepare, signature
from attnmesh.ops.merge import new_state

_LOG2_E = tl.constexpr(LOG2_E)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, bounds: tuple[Tensor, Tensor] | Bounds | None,
    state: State | None, out_dtype: torch.dtype, terms: ScoreTerms = PLAIN, sinks: Tensor | None = None,
    tiles: DenseTiles | None = None, ordered: bool = False,
) -> State:  # fmt: skip
    """Attention of q [B, Hq, Sq, D] over k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv], merged with `state`.

    Row i attends to all keys, or to keys j <= i if `causal` (Sq == Sk), or, with `bounds = (first, end)`, to the keys
    first[p, b, i] <= j < end[p, b, i] of every part p: int32 [parts, B or 1, Sq], both non-decreasing along the rows,
    the parts of a row disjoint. `state` is float32; it is overwritten with the result if `out_dtype` is float32, else
    the result is new. `sinks` [Hq] are scores of one more key per head, whose value is 0. A row that attends to no key
    has out 0, and the sink or -inf as its lse. If `ordered`, a row reduces its keys in ascending tiles of each part,
    whatever other rows see.
    """
    visible = Bounds.of(bounds)
    state_out, state_lse = state or (None, None)
    sinks = None if sinks is None else sinks.contiguous()
    given = q, k, v, visible.first, visible.end, state_out, state_lse, sinks, *terms[1:4]
    key = signature(*given), scale, causal, out_dtype, terms.softcap, tiles, ordered
    launch = _known.get(key)
    if launch is None and scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        return forward(
            q, k, v, scale=scale, causal=causal, bounds=bounds, state=state, out_dtype=out_dtype, terms=terms,
            sinks=sinks, tiles=tiles, ordered=ordered,
        )  # fmt: skip
    result = state if state is not None and out_dtype == torch.float32 else new_state(q, v.shape[3], out_dtype)
    if launch is not None:
        launch(*given, *result)
        return result
    if not result.out.numel():
        return result
    batch, q_heads, q_len, key_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    table = common.FORWARD_TILES if visible.first is None else common.BOUNDED_FORWARD_TILES
    tiles = tiles or common.pick_tiles(table, q, v, held=("q",))
    q_strides, k_strides, v_strides, state_strides, out_strides = common.row_strides(
        q=q, k=k, v=v, state_out=state_out, out=result.out
    )
    shape = Shape(tiles.rows, tiles.keys, key_dim, value_dim, visible.parts, causal, ordered)
    # Without keys the loops are empty and the state passes through.
    launch = prepare(
        _forward_kernel, (triton.cdiv(q_len, tiles.rows) * batch * q_heads,),
        (
            q, q_strides, k, k_strides, v, v_strides, visible.first, visible.end, visible.strides,
            state_out, state_strides, state_lse, (0, 0, 0) if state_lse is None else state_lse.stride(),
            result.out, out_strides, result.lse, result.lse.stride(),
            sinks, q_len, kv_len, q_heads, q_heads // kv_heads, scale, terms.softcap, *terms[1:4],
        ),
        (*given, *result), SHAPE=shape, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _known.add(key, launch)
    return result


_known: Recent[Launch] = Recent()


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    q, q_strides, k, k_strides, v, v_strides, first, end, bounds_strides,
    state_out, state_out_strides, state_lse, state_lse_strides,
    out, out_strides, lse, lse_strides, sinks,
    q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions, SHAPE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = SHAPE.rows
    tile_count = tl.cdiv(q_len, ROWS)
    tile, head, batch = common.locate(tile_count, q_heads)
    # The last rows have the most keys. They run first, so that short tiles fill the gaps at the end.
    row_begin = (tile_count - 1 - tile) * ROWS
    rows = row_begin + tl.arange(0, ROWS)

    q_tile = common.load_tile(common.rows_of(q, q_strides, batch, head), row_begin, q_len, True, ROWS, SHAPE.d)
    kv_head = head // group
    keys = (common.rows_of(k, k_strides, batch, kv_head), common.rows_of(v, v_strides, batch, kv_head), kv_len)

    # The carry: `acc / total` is the output so far, `raw_max * factor + log2(total)` its log-sum-exp in base 2.
    factor = scale * _LOG2_E if softcap is None and slopes is None else tl.full((), 1.0, tl.float32)
    lowest = common.lowest_of(factor)
    acc = common.zero_tile(ROWS, SHAPE.dv)
    total = tl.zeros((ROWS,), tl.float32)
    raw_max = total + lowest
    if state_out is not None:
        lse_rows = common.rows_of(state_lse, state_lse_strides, batch, head)
        row_max = common.load_rows(lse_rows, row_begin, q_len, float("-inf"), True, ROWS) * _LOG2_E
        some = row_max != float("-inf")
        total = some.to(tl.float32)
        # The `out` of an empty state does not count: it may hold anything.
        out_rows = common.rows_of(state_out, state_out_strides, batch, head)
        out_tile = common.load_tile(out_rows, row_begin, q_len, True, ROWS, SHAPE.dv)
        acc = [tl.where(some[:, None], block, 0.0) for block in out_tile]
        raw_max = tl.where(some, row_max / factor, lowest)

    acc, total, raw_max = common.over_keys(
        _attend, (acc, total, raw_max), (q_tile, factor), keys, (scale, softcap, slopes, q_positions, k_positions),
        (first, end, bounds_strides), rows, row_begin, q_len, head, batch, SHAPE,
    )  # fmt: skip
    row_max = tl.where(raw_max > lowest, raw_max * factor, float("-inf"))
    if sinks is not None:
        total, row_max, acc_scale = _with_sink(total, row_max, tl.load(sinks + head).to(tl.float32) * _LOG2_E)
        acc = [block * acc_scale[:, None] for block in acc]
    # A row without keys has total 0 and row_max -inf: out 0 / 1, lse -inf + -inf.
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    result = [block * inverse for block in acc]
    common.store_tile(common.rows_of(out, out_strides, batch, head), row_begin, q_len, result, ROWS, SHAPE.dv)
    lse = common.rows_of(lse, lse_strides, batch, head)
    common.store_rows(lse, row_begin, q_len, (row_max + tl.log2(total)) / _LOG2_E, ROWS)


@triton.jit
def _attend(carry, held, keys, terms, key_begin, row_first, row_end, SHAPE: tl.constexpr):
    """One step of the online softmax, over the key tile at `key_begin`: see `over_keys`."""
    MASKED: tl.constexpr = row_first is not None
    acc, total, raw_max = carry
    q_tile, factor = held
    _, v_tile, scores, _ = common.score_keys(q_tile, keys, terms, key_begin, MASKED, False, SHAPE)
    if MASKED:
        key = key_begin + tl.arange(0, SHAPE.keys)[None, :]
        scores = tl.where((key >= row_first[:, None]) & (key < row_end[:, None]), scores, float("-inf"))
    new_raw_max = tl.maximum(raw_max, tl.max(scores, 1))
    factors, shift, exponent = common.row_exponents(raw_max, new_raw_max, factor)
    # The scale is part of the multiply-add in the exponent instead of a separate pass.
    weights = tl.exp2(scores * factors[:, None] - shift[:, None])
    acc_scale = tl.exp2(exponent)
    total = total * acc_scale + tl.sum(weights, 1)
    acc = common.add_product([block * acc_scale[:, None] for block in acc], weights, v_tile)
    return acc, total, new_raw_max


@triton.jit
def _with_sink(total, row_max, sink):
    """Total and row_max with one more key, of score `sink` in base 2 and value 0, and the factor `acc_scale` of acc."""
    new_row_max = tl.maximum(row_max, sink)
    shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    acc_scale = tl.exp2(row_max - shift)
    # An infinite sink has all the weight: subtract nothing, since inf - inf would be NaN.
    weight = tl.exp2(tl.where(sink == float("inf"), 0.0, sink - shift))
    return total * acc_scale + weight, new_row_max, acc_scale
