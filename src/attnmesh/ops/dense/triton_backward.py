"""Attention backward in Triton: deterministic, adding into float32 gradients.

Two kernels recompute the weights p from the log-sum-exp of the whole softmax. One loops over the keys for each tile of
queries (grad_q), one over the queries for each tile of keys (grad_k, grad_v)::

    grad_v += p^T @ grad_out          ds = p * (grad_out @ v^T - delta)
    grad_q += scale * ds @ k          grad_k += scale * ds^T @ q

With a softcap ds is also multiplied with the derivative of its tanh. `lse` and `delta` belong to the whole softmax,
so the keys may be processed in any number of parts, in any order.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.dense.triton_tiles import (
    GRAD_KEY_TILES,
    GRAD_QUERY_TILES,
    LENGTHS,
    LOG2_E,
    PLAIN,
    Bounds,
    DenseTiles,
    ScoreTerms,
    add_product,
    add_to_tile,
    at_head,
    at_part,
    base2_scores,
    dot_rows,
    edge_count,
    edge_tile,
    from_origin,
    load_block,
    load_positions,
    load_rows,
    load_tile,
    locate,
    over_keys,
    padded,
    pick_tiles,
    row_strides,
    rows_of,
    scale_tile,
    score_keys,
    split_phases,
    store_rows,
    store_tile,
    visible_keys,
    zero_tile,
)
from attnmesh.ops.launch import Launch, Recent, cdiv, prepare, signature
from attnmesh.ops.merge import stream_of

_LOG2_E = tl.constexpr(LOG2_E)
_DELTA_ELEMENTS = 4096  # per program of the memory-bound delta kernel
# A mask of several parts may have keys that all rows attend to beside keys that few do. With one program for each key
# tile, programs with the former would run long after the others.
_MAX_SPLITS = 8
_SHORT_TILES = {2: DenseTiles(64, 64, 8, 2), 4: DenseTiles(32, 32, 8, 1)}  # by bytes per element
_SCANNED_ROWS = 1024  # at a time, by the kernel that finds the rows of each key tile


def delta(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """The row term of the softmax gradient, `rowsum(out * grad_out) - grad_lse`: float32 [B, H, S]."""
    result = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    key = signature(out, grad_out, grad_lse)
    launch = _known.get(key)
    if launch is not None:
        launch(out, grad_out, grad_lse, result)
    elif result.numel():
        batch, heads, length, head_dim = out.shape
        rows = max(1, _DELTA_ELEMENTS // padded(head_dim))
        out_strides, grad_out_strides = row_strides(out=out, grad_out=grad_out)
        launch = prepare(
            _delta_kernel, (triton.cdiv(length, rows) * batch * heads,),
            (
                out, out_strides, grad_out, grad_out_strides,
                grad_lse, (0, 0, 0) if grad_lse is None else grad_lse.stride(), result, result.stride(), length, heads,
            ),
            (out, grad_out, grad_lse, result), D=head_dim, BLOCK_D=padded(head_dim), ROWS=rows, num_warps=4,
        )  # fmt: skip
        _known.add(key, launch)
    return result


_known: Recent[Launch] = Recent()


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, *, scale: float, causal: bool,
    bounds: tuple[Tensor, Tensor] | Bounds | None, grad_q: Tensor | None = None, grad_k: Tensor | None = None,
    grad_v: Tensor | None = None, overwrite: bool = False, overwrite_keys: bool = False, terms: ScoreTerms = PLAIN,
    query_tiles: DenseTiles | None = None, key_tiles: DenseTiles | None = None, steps_per_split: int = 256,
    ordered: bool = False,
) -> None:  # fmt: skip
    """Adds the gradients of attention to the float32 `grad_q`, `grad_k` and `grad_v`; None is not computed.

    With `overwrite` the gradients are written instead, to tensors of any dtype; with `overwrite_keys` the gradients of
    keys and values are. Shapes and visibility are the same as of `forward`. `lse` and `delta` [B, Hq, Sq] are of the
    whole softmax over all keys on all ranks. A row whose lse is -inf contributes nothing. With several parts, a key
    tile that more than `steps_per_split` row tiles attend to is split among programs, which add to its gradients in a
    fixed order. If `ordered`, the gradient of a row is a sum over ascending tiles of keys, and of a key over
    ascending tiles of rows, whatever other rows and keys there are.
    """
    overwrite_keys |= overwrite
    if q.numel() == 0 or k.numel() == 0:
        for grad, written in ((grad_q, overwrite), (grad_k, overwrite_keys), (grad_v, overwrite_keys)):
            if grad is not None and written:
                grad.zero_()
        return
    rows = q, k, v, grad_out, lse, delta
    how = scale, causal, overwrite, overwrite_keys, terms.softcap, query_tiles, key_tiles, steps_per_split, ordered
    if grad_q is not None:
        visible = Bounds.of(bounds)
        used = *rows, visible.first, visible.end, *terms[1:4], grad_q
        key = "queries", signature(*used), *how
        if key in _known:
            _known[key](*used)
        else:
            tiles = query_tiles or pick_tiles(GRAD_QUERY_TILES, q, v, held=("q", "grad_out"))
            programs = triton.cdiv(q.shape[2], tiles.rows) * q.shape[0] * q.shape[1]
            (strides,) = row_strides(grad_q=grad_q)
            launch = prepare(
                _grad_query_kernel, (programs,),
                (*_inputs(*rows, delta.stride(), visible), grad_q, strides, *_sizes(q, k, scale, terms)), used,
                PARTS=visible.parts, OVERWRITE=overwrite, CAUSAL=causal, ORDERED=ordered, ROWS=tiles.rows,
                KEYS=tiles.keys, D=q.shape[3], DV=v.shape[3], num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            _known.add(key, launch)
    if grad_k is not None or grad_v is not None:
        # The same kernel for every mask: without bounds the compiler recomputes more in each step.
        visible = as_bounds(causal, q, k) if bounds is None else Bounds.of(bounds)
        tiles = key_tiles or pick_tiles(GRAD_KEY_TILES, q, v, held=("k", "v"))
        programs = triton.cdiv(k.shape[2], tiles.keys) * k.shape[0] * k.shape[1]
        splits = _MAX_SPLITS if visible.parts > 1 and not ordered else 1
        once = overwrite_keys and splits == 1
        sums = [grad_k, grad_v]
        if overwrite_keys and not once:  # splits add to float32
            sums = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in sums]
        rows_per_tile = rows_per_key_tile(visible, q.shape[2], k.shape[2], tiles.keys)
        for keys, values in _key_targets(*sums):
            turns = torch.zeros(programs, dtype=torch.int32, device=q.device) if splits > 1 else None
            tensors = *rows, visible.first, visible.end, *terms[1:4], rows_per_tile, turns, keys, values
            key = "keys", signature(*tensors), *how
            if key in _known:
                _known[key](*tensors)
                continue
            key_strides, value_strides = row_strides(grad_k=keys, grad_v=values)
            launch = prepare(
                _grad_key_kernel, (programs * splits,),
                (
                    *_inputs(*rows, delta.stride(), visible), rows_per_tile, turns, keys, key_strides,
                    values, value_strides, *_sizes(q, k, scale, terms),
                ),
                tensors, PARTS=visible.parts, OVERWRITE=once, SPLITS=splits, STEPS=steps_per_split, ORDERED=ordered,
                ROWS=tiles.rows, KEYS=tiles.keys, D=q.shape[3], DV=v.shape[3], num_warps=tiles.warps,
                num_stages=tiles.stages,
            )  # fmt: skip
            _known.add(key, launch)
        for grad, total in zip((grad_k, grad_v), sums, strict=True):
            if grad is not None and total is not None and grad is not total:
                grad.copy_(total)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, *, needs: tuple[bool, bool, bool],
    by: Callable[..., None] | None = None, **how: Any,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k and v, or None where they are not needed, in their dtype.

    `by` another module's `backward`, or the one here. `how` are its options.
    """
    grads = [torch.empty_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    grad_q, grad_k, grad_v = grads
    by = by or backward
    by(q, k, v, grad_out, lse, delta, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v, overwrite=True, **how)
    return grads


def short_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, *, scale: float, causal: bool,
    bounds: tuple[Tensor, Tensor] | Bounds | None, terms: ScoreTerms = PLAIN,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k and v by one launch, for calls bound by the host: deltas are computed where needed.

    Heads have at most 128 columns, and the mask one part.
    """
    visible = as_bounds(causal, q, k) if bounds is None else Bounds.of(bounds)
    tiles = _SHORT_TILES[q.element_size()]
    rows_per_tile = rows_per_key_tile(visible, q.shape[2], k.shape[2], tiles.keys)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    used = q, k, v, grad_out, lse, out, visible.first, visible.end, *terms[1:4]
    told = used if bounds is not None or terms is not PLAIN else used[:6]
    key = "short", signature(*told), scale, causal, terms.softcap
    launch = _known.get(key)
    if launch is not None:
        launch(*used, rows_per_tile, *grads)
        return list(grads)
    batch, heads, q_len, _ = q.shape
    programs = batch * (heads * cdiv(q_len, tiles.rows) + k.shape[1] * cdiv(k.shape[2], tiles.keys))
    strides = row_strides(grad_q=grads[0], grad_k=grads[1], grad_v=grads[2])
    launch = prepare(
        _short_kernel, (programs,),
        (
            *_inputs(q, k, v, grad_out, lse, out, row_strides(out=out)[0], visible), rows_per_tile,
            *(x for pair in zip(grads, strides, strict=True) for x in pair), *_sizes(q, k, scale, terms),
        ),
        (*used, rows_per_tile, *grads), ROWS=tiles.rows, KEYS=tiles.keys, D=q.shape[3], DV=v.shape[3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _known.add(key, launch)
    return list(grads)


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, delta_strides: tuple[int, ...],
    visible: Bounds,
) -> tuple[Any, ...]:  # fmt: skip
    q_strides, k_strides, v_strides, grad_out_strides = row_strides(q=q, k=k, v=v, grad_out=grad_out)
    return (
        q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides, lse, lse.stride(), delta, delta_strides,
        visible.first, visible.end, visible.strides,
    )  # fmt: skip


def _sizes(q: Tensor, k: Tensor, scale: float, terms: ScoreTerms) -> tuple[Any, ...]:
    return q.shape[2], k.shape[2], q.shape[1], q.shape[1] // k.shape[1], scale, terms.softcap, *terms[1:4]


def _key_targets(grad_k: Tensor | None, grad_v: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
    """The gradients of each launch: both, or one after the other where a tile for both would not fit."""
    if grad_k is None or grad_v is None or not 192 < max(grad_k.shape[-1], grad_v.shape[-1]) <= 256:
        return [(grad_k, grad_v)]
    return [(grad_k, None), (None, grad_v)]


_bounds: Recent[Bounds] = Recent(32)


def as_bounds(causal: bool, q: Tensor, k: Tensor) -> Bounds:
    """The bounds of rows that attend to all keys, or to keys j <= i if `causal`."""
    q_len, kv_len, device = q.shape[2], k.shape[2], q.device
    stream = stream_of(q)
    key = causal, q_len, kv_len, device, stream
    found = _bounds.get(key)
    if found is None:
        on_device, on_host = (_whole_bounds(causal, q_len, kv_len, at) for at in (device, torch.device("cpu")))
        found = Bounds.of(on_device, on_host)
        if stream is not None:
            _bounds.add(key, found)
    return found


def _whole_bounds(causal: bool, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    end = torch.full((1, 1, q_len), kv_len, dtype=torch.int32, device=device)
    if causal:
        end = torch.arange(1, q_len + 1, dtype=torch.int32, device=device)[None, None]
    return torch.zeros_like(end), end


def rows_per_key_tile(visible: Bounds, q_len: int, kv_len: int, keys: int) -> Tensor:
    """The rows that attend to each key tile: int32 [parts, B or 1, tiles, 4] of begin, full_begin, full_end, stop.

    Rows in [begin, stop) attend to some key of the tile, rows in [full_begin, full_end) to every key. Computed on the
    device of the bounds, once for each stream; the host does not wait.
    """
    assert visible.first is not None
    stream = stream_of(visible.first)
    key = q_len, kv_len, keys, stream
    result: Tensor | None = visible.kept.get(key)
    if result is None:
        tile_count = triton.cdiv(kv_len, keys)
        result = torch.empty((*visible.first.shape[:2], tile_count, 4), dtype=torch.int32, device=visible.first.device)
        with torch.cuda.device_of(result):
            _rows_per_key_tile_kernel[(tile_count, result.shape[1], result.shape[0])](
                visible.first, visible.end, visible.strides, result, q_len, kv_len, KEYS=keys, ROWS=_SCANNED_ROWS,
                num_warps=4,
            )  # fmt: skip
        if stream is not None:
            visible.kept[key] = result
    return result


@triton.jit(do_not_specialize=LENGTHS)
def _rows_per_key_tile_kernel(first, end, strides, result, q_len, kv_len, KEYS: tl.constexpr, ROWS: tl.constexpr):
    tile, batch, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile_begin = tile * KEYS
    tile_end = tl.minimum(tile_begin + KEYS, kv_len)
    begin, stop = q_len, 0
    full_begin, full_end = q_len, 0
    for row_begin in range(0, q_len, ROWS):
        rows = row_begin + tl.arange(0, ROWS)
        row_first, row_end = visible_keys(
            at_part(first, strides, part, batch), at_part(end, strides, part, batch), rows, q_len, kv_len, False
        )
        some = (tl.maximum(row_first, tile_begin) < tl.minimum(row_end, tile_end)) & (rows < q_len)
        every = some & (row_first <= tile_begin) & (row_end >= tile_end)
        begin = tl.minimum(begin, tl.min(tl.where(some, rows, q_len), 0))
        stop = tl.maximum(stop, tl.max(tl.where(some, rows + 1, 0), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(every, rows, q_len), 0))
        full_end = tl.maximum(full_end, tl.max(tl.where(every, rows + 1, 0), 0))
    at = result + ((tl.cast(part, tl.int64) * tl.num_programs(1) + batch) * tl.num_programs(0) + tile) * 4
    tl.store(at, tl.minimum(begin, stop))
    tl.store(at + 1, full_begin)
    tl.store(at + 2, full_end)
    tl.store(at + 3, stop)


@triton.jit
def _delta_kernel(
    out, out_strides, grad_out, grad_out_strides, grad_lse, grad_lse_strides, delta, delta_strides,
    length, heads, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, batch = locate(tl.cdiv(length, ROWS), heads)
    begin = tile * ROWS
    out, grad_out = rows_of(out, out_strides, batch, head), rows_of(grad_out, grad_out_strides, batch, head)
    out_tile = load_block(out, begin, length, True, ROWS, D, BLOCK_D)
    grad_out_tile = load_block(grad_out, begin, length, True, ROWS, D, BLOCK_D)
    result = tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)
    if grad_lse is not None:
        grad_lse_rows = rows_of(grad_lse, grad_lse_strides, batch, head)
        result -= load_rows(grad_lse_rows, begin, length, 0.0, True, ROWS).to(tl.float32)
    store_rows(rows_of(delta, delta_strides, batch, head), begin, length, result, ROWS)


@triton.jit
def _load_row_terms(
    lse, delta, grad_out_tile, begin, q_len,
    FROM_OUT: tl.constexpr, EDGE: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The lse (base 2) and the delta of a tile of rows; (+inf, 0), so that weights are 0, for rows without keys.

    If FROM_OUT, `delta` is the output of the forward, and the delta is computed from it.
    """
    row_lse = load_rows(lse, begin, q_len, float("-inf"), EDGE, ROWS)
    if FROM_OUT:
        out_tile = load_tile(delta, begin, q_len, EDGE, ROWS, DV)
        row_delta = tl.sum(out_tile[0].to(tl.float32) * grad_out_tile[0].to(tl.float32), 1)
        if len(out_tile) == 2:
            row_delta += tl.sum(out_tile[1].to(tl.float32) * grad_out_tile[1].to(tl.float32), 1)
    else:
        row_delta = load_rows(delta, begin, q_len, 0.0, EDGE, ROWS)
    empty = row_lse == float("-inf")
    return tl.where(empty, float("inf"), row_lse * _LOG2_E), tl.where(empty, 0.0, row_delta)


@triton.jit(do_not_specialize=LENGTHS)
def _grad_query_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, first, end, bounds_strides,
    grad_q, grad_q_strides, q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions,
    CAUSAL: tl.constexpr, PARTS: tl.constexpr, OVERWRITE: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    tile, head, batch = locate(tl.cdiv(q_len, ROWS), q_heads)
    _grad_query_tile(
        tile, head, group, batch, (q, k, v, grad_out, lse, delta),
        (q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides), (first, end, bounds_strides),
        (scale, softcap, slopes, q_positions, k_positions), grad_q, grad_q_strides, q_len, kv_len,
        False, CAUSAL, PARTS, OVERWRITE, ORDERED, ROWS, KEYS, D, DV,
    )  # fmt: skip


@triton.jit
def _grad_query_tile(
    tile, head, group, batch, inputs, strides, mask, terms, grad_q, grad_q_strides, q_len, kv_len,
    FROM_OUT: tl.constexpr, CAUSAL: tl.constexpr, PARTS: tl.constexpr, OVERWRITE: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of a tile of queries."""
    row_begin = (tl.cdiv(q_len, ROWS) - 1 - tile) * ROWS  # the longest tiles first, as in forward
    rows = row_begin + tl.arange(0, ROWS)
    q, k, v, grad_out, lse, delta = inputs
    q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides = strides
    k, v = rows_of(k, k_strides, batch, head // group), rows_of(v, v_strides, batch, head // group)
    q, grad_out = rows_of(q, q_strides, batch, head), rows_of(grad_out, grad_out_strides, batch, head)
    q_tile = load_tile(q, row_begin, q_len, True, ROWS, D)
    grad_out_tile = load_tile(grad_out, row_begin, q_len, True, ROWS, DV)
    lse, delta = rows_of(lse, lse_strides, batch, head), rows_of(delta, delta_strides, batch, head)
    row_lse, row_delta = _load_row_terms(lse, delta, grad_out_tile, row_begin, q_len, FROM_OUT, True, ROWS, DV)
    scale, _, slopes, q_positions, _ = terms
    slope = None if slopes is None else tl.load(slopes + head)
    row_positions = None if slopes is None else load_positions(q_positions, row_begin, q_len, ROWS)
    acc = over_keys(
        _add_key_tile, zero_tile(ROWS, D), (q_tile, grad_out_tile, row_lse, row_delta), (k, v, kv_len), terms,
        slope, row_positions, mask, rows, row_begin, q_len, batch, CAUSAL, PARTS, ORDERED, ROWS, KEYS, D, DV,
    )  # fmt: skip
    grad_q_rows = rows_of(grad_q, grad_q_strides, batch, head)
    add_to_tile(grad_q_rows, row_begin, q_len, scale_tile(acc, scale), OVERWRITE, ROWS, D)


@triton.jit
def _add_key_tile(
    acc, held, keys, terms, slope, row_positions, key_begin, row_first, row_end,
    KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Adds ds @ k of the key tile at `key_begin`: see `over_keys`."""
    MASKED: tl.constexpr = row_first is not None
    q_tile, grad_out_tile, row_lse, row_delta = held
    k_tile, v_tile, scores, capped = score_keys(
        q_tile, keys, terms, slope, row_positions, key_begin, MASKED, True, KEYS, D, DV
    )
    weights = tl.exp2(scores - row_lse[:, None])
    if MASKED:
        key = key_begin + tl.arange(0, KEYS)[None, :]
        weights = tl.where((key >= row_first[:, None]) & (key < row_end[:, None]), weights, 0.0)
    grad_scores = weights * (dot_rows(grad_out_tile, v_tile) - row_delta[:, None])
    if terms[1] is not None:
        grad_scores *= 1.0 - capped * capped
    return add_product(acc, grad_scores, k_tile)


@triton.jit(do_not_specialize=LENGTHS)
def _grad_key_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, first, end, bounds_strides, rows_per_tile, turns,
    grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions,
    PARTS: tl.constexpr, OVERWRITE: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    # The first keys are visible to the most rows: in this order the longest tiles already run first.
    tile_count = tl.cdiv(kv_len, KEYS)
    program = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    kv_heads = q_heads // group
    tile, kv_head, batch = program % tile_count, program // tile_count % kv_heads, program // (tile_count * kv_heads)
    key_begin = tile * KEYS
    per_sequence = bounds_strides[1] != 0
    of_tile = rows_per_tile + ((batch if per_sequence else 0) * tile_count + tile) * 4
    part_stride = (tl.num_programs(0) // (SPLITS * tile_count * kv_heads) if per_sequence else 1) * tile_count * 4
    split_count = 1
    if SPLITS > 1:
        steps = 0
        for part in range(PARTS):
            begin, inner, edge, stop = _row_phases(of_tile + part * part_stride, ROWS)
            steps += (edge_count(begin, inner, edge, stop, ROWS) + (edge - inner) // ROWS) * group
        split_count = tl.minimum(tl.cdiv(steps, STEPS), SPLITS)
        if split >= split_count:
            return
    acc_k, acc_v = _grad_key_tile(
        key_begin, kv_head, batch, of_tile, part_stride, split, split_count, (q, k, v, grad_out, lse, delta),
        (q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides), (first, end, bounds_strides),
        (scale, softcap, slopes, q_positions, k_positions), q_len, kv_len, group,
        False, grad_k is not None, grad_v is not None, PARTS, ORDERED, ROWS, KEYS, D, DV,
    )  # fmt: skip
    if SPLITS > 1:
        # Additions are in the order of the splits. A program waits only for programs that started before it.
        while tl.atomic_cas(turns + program, split, split, sem="acquire") != split:
            pass
    if grad_k is not None:
        add_to_tile(rows_of(grad_k, grad_k_strides, batch, kv_head), key_begin, kv_len, acc_k, OVERWRITE, KEYS, D)
    if grad_v is not None:
        add_to_tile(rows_of(grad_v, grad_v_strides, batch, kv_head), key_begin, kv_len, acc_v, OVERWRITE, KEYS, DV)
    if SPLITS > 1:
        tl.debug_barrier()
        tl.atomic_xchg(turns + program, split + 1, sem="release")


@triton.jit
def _grad_key_tile(
    key_begin, kv_head, batch, of_tile, part_stride, split, split_count, inputs, strides, mask, terms,
    q_len, kv_len, group, FROM_OUT: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr, PARTS: tl.constexpr,
    ORDERED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, from a split of the rows that attend to it."""
    q, k, v, grad_out, lse, delta = inputs
    q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides = strides
    k, v = rows_of(k, k_strides, batch, kv_head), rows_of(v, v_strides, batch, kv_head)
    k_tile, v_tile = load_tile(k, key_begin, kv_len, True, KEYS, D), load_tile(v, key_begin, kv_len, True, KEYS, DV)
    scale, _, slopes, _, k_positions = terms
    key_positions = None if slopes is None else load_positions(k_positions, key_begin, kv_len, KEYS)

    acc_k, acc_v = zero_tile(KEYS, D), zero_tile(KEYS, DV)
    head = kv_head * group  # the first of the query heads that share these keys
    q, grad_out = at_head(q, q_strides, batch, head), at_head(grad_out, grad_out_strides, batch, head)
    lse, delta = at_head(lse, lse_strides, batch, head), at_head(delta, delta_strides, batch, head)
    head_slopes = None if slopes is None else slopes + head
    for part in range(PARTS):
        first, end = at_part(mask[0], mask[2], part, batch), at_part(mask[1], mask[2], part, batch)
        # Keys beyond the last need no mask: each has its own row of the gradients, which is not stored.
        begin, inner, edge, stop = _row_phases(of_tile + part * part_stride, ROWS)
        if ORDERED:
            inner, edge = begin, begin  # every tile is masked, in one loop
        for masked in tl.static_range(2):
            acc_k, acc_v = _sum_over_rows(
                acc_k, acc_v, k_tile, v_tile, (q, grad_out, lse, delta), strides,
                (begin, inner, edge, stop), first, end, key_begin, q_len, group, split, split_count,
                terms, head_slopes, key_positions, FROM_OUT, NEEDS_K, NEEDS_V, masked == 1, ROWS, KEYS, D, DV,
            )  # fmt: skip
    return scale_tile(acc_k, scale), acc_v


@triton.jit(do_not_specialize=LENGTHS)
def _short_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, out, out_strides, first, end, bounds_strides, rows_per_tile,
    grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The programs of one sequence have its tiles of queries first, then its tiles of keys."""
    query_tiles, key_tiles, kv_heads = tl.cdiv(q_len, ROWS), tl.cdiv(kv_len, KEYS), q_heads // group
    per_sequence = query_tiles * q_heads + key_tiles * kv_heads
    batch, program = tl.program_id(0) // per_sequence, tl.program_id(0) % per_sequence
    inputs = (q, k, v, grad_out, lse, out)
    strides = (q_strides, k_strides, v_strides, grad_out_strides, lse_strides, out_strides)
    mask = (first, end, bounds_strides)
    if program < query_tiles * q_heads:
        _grad_query_tile(
            program % query_tiles, program // query_tiles, group, batch, inputs, strides, mask,
            (scale, softcap, slopes, q_positions, k_positions), grad_q, grad_q_strides, q_len, kv_len,
            True, False, 1, True, False, ROWS, KEYS, D, DV,
        )  # fmt: skip
    else:
        program -= query_tiles * q_heads
        tile, kv_head = program % key_tiles, program // key_tiles
        of_tile = rows_per_tile + ((batch if bounds_strides[1] != 0 else 0) * key_tiles + tile) * 4
        acc_k, acc_v = _grad_key_tile(
            tile * KEYS, kv_head, batch, of_tile, 0, 0, 1, inputs, strides, mask,
            (scale, softcap, slopes, q_positions, k_positions), q_len, kv_len, group,
            True, True, True, 1, False, ROWS, KEYS, D, DV,
        )  # fmt: skip
        k_rows = rows_of(grad_k, grad_k_strides, batch, kv_head)
        v_rows = rows_of(grad_v, grad_v_strides, batch, kv_head)
        store_tile(k_rows, tile * KEYS, kv_len, acc_k, KEYS, D)
        store_tile(v_rows, tile * KEYS, kv_len, acc_v, KEYS, DV)


@triton.jit
def _row_phases(of_tile, ROWS: tl.constexpr):
    """The (begin, inner, edge, stop) of the rows that attend to a key tile, from its entry in `rows_per_tile`."""
    return split_phases(tl.load(of_tile), tl.load(of_tile + 1), tl.load(of_tile + 2), tl.load(of_tile + 3), ROWS)


@triton.jit
def _sum_over_rows(
    acc_k, acc_v, k_tile, v_tile, inputs, strides, phases, first, end, key_begin, q_len, group, split, split_count,
    terms, slopes, key_positions, FROM_OUT: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Adds ds^T @ q and p^T @ grad_out, in every query head of the group.

    The sums are over the row tiles that need a mask if MASKED, else over the row tiles of [inner, edge). Heads and
    tiles are one loop: the pipeline does not drain at each head, the addresses of a second loop need no registers, and
    the sum over the group stays in registers. Scores are computed transposed, [keys, rows], which makes them the left
    operand of both products without a transposition.
    """
    q, grad_out, lse, delta = inputs
    q_strides, _, _, grad_out_strides, lse_strides, delta_strides = strides
    begin, inner, edge, stop = phases
    scale, softcap, _, q_positions, _ = terms
    tile_count = edge_count(begin, inner, edge, stop, ROWS) if MASKED else tl.cdiv(edge - inner, ROWS)
    steps = tile_count * group
    for step in range(steps * split // split_count, steps * (split + 1) // split_count):
        member = step // tile_count
        index = step % tile_count
        row_begin = edge_tile(index, begin, inner, edge, ROWS) if MASKED else inner + index * ROWS
        far = tl.cast(member, tl.int64)
        q_rows = (q + far * q_strides[1], q_strides[2])
        q_tile = load_tile(q_rows, row_begin, q_len, MASKED, ROWS, D)
        grad_out_rows = (grad_out + far * grad_out_strides[1], grad_out_strides[2])
        grad_out_tile = load_tile(grad_out_rows, row_begin, q_len, MASKED, ROWS, DV)
        row_lse, row_delta = _load_row_terms(
            (lse + far * lse_strides[1], lse_strides[2]), (delta + far * delta_strides[1], delta_strides[2]),
            grad_out_tile, row_begin, q_len, FROM_OUT, MASKED, ROWS, DV,
        )  # fmt: skip
        slope, left, right = None, None, None
        if slopes is not None:
            slope = tl.load(slopes + member)
            origin = tl.load(q_positions + row_begin)
            left = from_origin(key_positions, origin)
            right = from_origin(load_positions(q_positions, row_begin, q_len, ROWS), origin)
        products = dot_rows(k_tile, q_tile)
        scores, capped = base2_scores(products, scale, softcap, slope, left, right, k_tile[0].dtype == tl.float32)
        weights = tl.exp2(scores - row_lse[None, :])
        if MASKED:  # rows beyond the last have weights of 0
            rows = row_begin + tl.arange(0, ROWS)
            row_first = tl.load(first + rows, mask=rows < q_len, other=0)[None, :]
            row_end = tl.load(end + rows, mask=rows < q_len, other=0)[None, :]
            keys = key_begin + tl.arange(0, KEYS)[:, None]
            weights = tl.where((keys >= row_first) & (keys < row_end), weights, 0.0)
        if NEEDS_V:
            acc_v = add_product(acc_v, weights, grad_out_tile)
        if NEEDS_K:
            grad_scores = weights * (dot_rows(v_tile, grad_out_tile) - row_delta[None, :])
            if softcap is not None:
                grad_scores *= 1.0 - capped * capped
            acc_k = add_product(acc_k, grad_scores, q_tile)
    return acc_k, acc_v
