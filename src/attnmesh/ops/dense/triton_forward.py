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
    BOUNDED_FORWARD_TILES,
    FORWARD_TILES,
    LENGTHS,
    LOG2_E,
    PLAIN,
    Bounds,
    DenseTiles,
    ScoreTerms,
    add_product,
    at_head,
    at_part,
    base2_scores,
    blocks_of,
    dot_rows,
    edge_count,
    edge_tile,
    from_origin,
    key_phases,
    load_positions,
    load_rows,
    load_tile,
    locate,
    lowest_of,
    pick_tiles,
    row_exponents,
    row_strides,
    scale_tile,
    select_rows,
    store_rows,
    store_tile,
    visible_keys,
    zero_tile,
)
from attnmesh.ops.launch import Launch, Recent, prepare, signature
from attnmesh.ops.merge import new_state

_LOG2_E = tl.constexpr(LOG2_E)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    bounds: tuple[Tensor, Tensor] | Bounds | None,
    state: State | None,
    out_dtype: torch.dtype,
    terms: ScoreTerms = PLAIN,
    sinks: Tensor | None = None,
    tiles: DenseTiles | None = None,
    ordered: bool = False,
) -> State:
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
    given = q, k, v, visible.first, visible.end, state_out, state_lse, sinks, *terms.tensors
    key = signature(*given), scale, causal, out_dtype, terms.softcap, tiles, ordered
    launch = _known.get(key)
    if launch is None and scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        return forward(
            q, k, v, scale=scale, causal=causal, bounds=bounds, state=state, out_dtype=out_dtype, terms=terms,
            sinks=sinks, tiles=tiles, ordered=ordered,
        )  # fmt: skip
    if state is not None and out_dtype == torch.float32:
        result = state
    else:
        result = new_state(q, v.shape[3], out_dtype)
    if launch is not None:
        launch(*given, *result)
    elif result.out.numel():
        with torch.cuda.device_of(q):
            launch = _first_launch(q, k, v, visible, state, sinks, terms, result, scale, causal, tiles, ordered)
        _known.add(key, launch)
    return result


_known: Recent[Launch] = Recent()


def _first_launch(
    q: Tensor, k: Tensor, v: Tensor, visible: Bounds, state: State | None, sinks: Tensor | None, terms: ScoreTerms,
    result: State, scale: float, causal: bool, tiles: DenseTiles | None, ordered: bool,
) -> Launch:  # fmt: skip
    batch, q_heads, q_len, key_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    state_out, state_lse = state or (None, None)
    table = FORWARD_TILES if visible.first is None else BOUNDED_FORWARD_TILES
    tiles = tiles or pick_tiles(table, q, v, held=("q",))
    q_strides, k_strides, v_strides, state_strides, out_strides = row_strides(
        q=q, k=k, v=v, state_out=state_out, out=result.out
    )
    # Without keys the loops are empty and the state passes through.
    return prepare(
        _forward_kernel, (triton.cdiv(q_len, tiles.rows) * batch * q_heads,),
        (
            q, q_strides, k, k_strides, v, v_strides, visible.first, visible.end, visible.strides,
            state_out, state_strides, state_lse, (0, 0, 0) if state_lse is None else state_lse.stride(),
            result.out, out_strides, result.lse, result.lse.stride(),
            sinks, q_len, kv_len, q_heads, q_heads // kv_heads, scale, terms.softcap, *terms.tensors,
        ),
        (q, k, v, visible.first, visible.end, state_out, state_lse, sinks, *terms.tensors, *result),
        CAUSAL=causal, PARTS=visible.parts, D=key_dim, K_BLOCKS=blocks_of(key_dim), DV=value_dim,
        V_BLOCKS=blocks_of(value_dim), ORDERED=ordered, ROWS=tiles.rows, KEYS=tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    q, q_strides, k, k_strides, v, v_strides, first, end, bounds_strides,
    state_out, state_out_strides, state_lse, state_lse_strides,
    out, out_strides, lse, lse_strides, sinks,
    q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions,
    CAUSAL: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, K_BLOCKS: tl.constexpr, DV: tl.constexpr,
    V_BLOCKS: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile_count = tl.cdiv(q_len, ROWS)
    tile, head, batch = locate(tile_count, q_heads)
    # The last rows have the most keys. They run first, so that short tiles fill the gaps at the end.
    row_begin = (tile_count - 1 - tile) * ROWS
    rows = row_begin + tl.arange(0, ROWS)

    q_tile = load_tile(at_head(q, q_strides, batch, head), q_strides[2], row_begin, q_len, True, ROWS, D, K_BLOCKS)
    k_head = at_head(k, k_strides, batch, head // group)
    v_head = at_head(v, v_strides, batch, head // group)
    slope = None if slopes is None else tl.load(slopes + head)
    row_positions = None if slopes is None else load_positions(q_positions, row_begin, q_len, ROWS)

    # The carry: `acc / total` is the output so far, `raw_max * factor + log2(total)` its log-sum-exp in base 2.
    factor = scale * _LOG2_E if softcap is None and slopes is None else tl.full((), 1.0, tl.float32)
    lowest = lowest_of(factor)
    acc = zero_tile(ROWS, V_BLOCKS)
    total = tl.zeros((ROWS,), tl.float32)
    raw_max = total + lowest
    if state_out is not None:
        state_lse_head = at_head(state_lse, state_lse_strides, batch, head)
        row_max = load_rows(state_lse_head, state_lse_strides[2], row_begin, q_len, float("-inf"), True, ROWS) * _LOG2_E
        some = row_max != float("-inf")
        total = some.to(tl.float32)
        # The `out` of an empty state does not count: it may hold anything.
        acc = load_tile(
            at_head(state_out, state_out_strides, batch, head), state_out_strides[2], row_begin, q_len, True,
            ROWS, DV, V_BLOCKS,
        )  # fmt: skip
        acc = select_rows(acc, some, V_BLOCKS)
        raw_max = tl.where(some, row_max / factor, lowest)

    for part in range(PARTS):
        part_first = None if first is None else at_part(first, bounds_strides, part, batch)
        part_end = None if first is None else at_part(end, bounds_strides, part, batch)
        begin, inner, edge, stop = key_phases(
            part_first, part_end, row_begin, tl.minimum(row_begin + ROWS, q_len), kv_len, CAUSAL, ROWS, KEYS
        )
        if ORDERED:  # one loop, and the same code for every tile
            inner, edge = begin, begin
        else:
            for key_begin in range(inner, edge, KEYS):
                acc, total, raw_max = _attend(
                    acc, total, raw_max, q_tile, k_head, k_strides[2], v_head, v_strides[2], key_begin, kv_len,
                    None, None, scale, factor, softcap, slope, row_positions, k_positions,
                    KEYS, D, K_BLOCKS, DV, V_BLOCKS,
                )  # fmt: skip
        row_first, row_end = visible_keys(part_first, part_end, rows, q_len, kv_len, CAUSAL)
        for index in range(edge_count(begin, inner, edge, stop, KEYS)):
            acc, total, raw_max = _attend(
                acc, total, raw_max, q_tile, k_head, k_strides[2], v_head, v_strides[2],
                edge_tile(index, begin, inner, edge, KEYS), kv_len, row_first, row_end,
                scale, factor, softcap, slope, row_positions, k_positions, KEYS, D, K_BLOCKS, DV, V_BLOCKS,
            )  # fmt: skip

    row_max = tl.where(raw_max > lowest, raw_max * factor, float("-inf"))
    if sinks is not None:
        total, row_max, acc_scale = _with_sink(total, row_max, tl.load(sinks + head).to(tl.float32) * _LOG2_E)
        acc = scale_tile(acc, acc_scale[:, None], V_BLOCKS)
    # A row without keys has total 0 and row_max -inf: out 0 / 1, lse -inf + -inf.
    result = scale_tile(acc, 1.0 / tl.where(total == 0.0, 1.0, total)[:, None], V_BLOCKS)
    store_tile(at_head(out, out_strides, batch, head), out_strides[2], row_begin, q_len, result, ROWS, DV, V_BLOCKS)
    lse_head = at_head(lse, lse_strides, batch, head)
    store_rows(lse_head, lse_strides[2], row_begin, q_len, (row_max + tl.log2(total)) / _LOG2_E, ROWS)


@triton.jit
def _attend(
    acc, total, raw_max, q_tile, k, k_stride, v, v_stride, key_begin, kv_len, row_first, row_end,
    scale, factor, softcap, slope, row_positions, k_positions,
    KEYS: tl.constexpr, D: tl.constexpr, K_BLOCKS: tl.constexpr, DV: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the key tile at `key_begin`; without `row_first` rows see all of it."""
    MASKED: tl.constexpr = row_first is not None
    k_tile = load_tile(k, k_stride, key_begin, kv_len, MASKED, KEYS, D, K_BLOCKS)
    v_tile = load_tile(v, v_stride, key_begin, kv_len, MASKED, KEYS, DV, V_BLOCKS)
    left, right = None, None
    if slope is not None:
        origin = tl.load(k_positions + key_begin)
        left = from_origin(row_positions, origin)
        right = from_origin(load_positions(k_positions, key_begin, kv_len, KEYS), origin)
    scores = dot_rows(q_tile, k_tile, K_BLOCKS)
    if softcap is not None or slope is not None:
        scores, _ = base2_scores(scores, scale, softcap, slope, left, right, k_tile[0].dtype == tl.float32)
    if MASKED:
        keys = key_begin + tl.arange(0, KEYS)[None, :]
        visible = (keys >= row_first[:, None]) & (keys < row_end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_raw_max = tl.maximum(raw_max, tl.max(scores, 1))
    factors, shift, exponent = row_exponents(raw_max, new_raw_max, factor)
    # The scale is part of the multiply-add in the exponent instead of a separate pass.
    weights = tl.exp2(scores * factors[:, None] - shift[:, None])
    acc_scale = tl.exp2(exponent)
    total = total * acc_scale + tl.sum(weights, 1)
    acc = add_product(scale_tile(acc, acc_scale[:, None], V_BLOCKS), weights, v_tile, V_BLOCKS)
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
