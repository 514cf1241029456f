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

from attnmesh.ops.dense import triton_tiles as common
from attnmesh.ops.dense.triton_tiles import LENGTHS, LOG2_E, PLAIN, Bounds, DenseTiles, ScoreTerms, Shape
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
        rows = max(1, _DELTA_ELEMENTS // common.padded(head_dim))
        out_strides, grad_out_strides = common.row_strides(out=out, grad_out=grad_out)
        launch = prepare(
            _delta_kernel, (triton.cdiv(length, rows) * batch * heads,),
            (
                out, out_strides, grad_out, grad_out_strides,
                grad_lse, (0, 0, 0) if grad_lse is None else grad_lse.stride(), result, result.stride(), length, heads,
            ),
            (out, grad_out, grad_lse, result), D=head_dim, BLOCK_D=common.padded(head_dim), ROWS=rows, num_warps=4,
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
            tiles = query_tiles or common.pick_tiles(common.GRAD_QUERY_TILES, q, v, held=("q", "grad_out"))
            programs = triton.cdiv(q.shape[2], tiles.rows) * q.shape[0] * q.shape[1]
            (strides,) = common.row_strides(grad_q=grad_q)
            shape = Shape(tiles.rows, tiles.keys, q.shape[3], v.shape[3], visible.parts, causal, ordered, overwrite)
            launch = prepare(
                _grad_query_kernel, (programs,),
                (*_inputs(*rows, delta.stride(), visible), grad_q, strides, *_sizes(q, k, scale, terms)), used,
                SHAPE=shape, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            _known.add(key, launch)
    if grad_k is not None or grad_v is not None:
        # The same kernel for every mask: without bounds the compiler recomputes more in each step.
        visible = as_bounds(causal, q, k) if bounds is None else Bounds.of(bounds)
        tiles = key_tiles or common.pick_tiles(common.GRAD_KEY_TILES, q, v, held=("k", "v"))
        programs = triton.cdiv(k.shape[2], tiles.keys) * k.shape[0] * k.shape[1]
        splits = _MAX_SPLITS if visible.parts > 1 and not ordered else 1
        once = overwrite_keys and splits == 1
        sums = [grad_k, grad_v]
        if overwrite_keys and not once:  # splits add to float32
            sums = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in sums]
        rows_per_tile = rows_per_key_tile(visible, q.shape[2], k.shape[2], tiles.keys)
        shape = Shape(
            tiles.rows, tiles.keys, q.shape[3], v.shape[3], visible.parts, False, ordered, once, False, splits,
            steps_per_split,
        )  # fmt: skip
        # One after the other where a tile for both would not fit.
        apart = grad_k is not None and grad_v is not None and 192 < max(q.shape[3], v.shape[3]) <= 256
        for keys, values in [(sums[0], None), (None, sums[1])] if apart else [(sums[0], sums[1])]:
            turns = torch.zeros(programs, dtype=torch.int32, device=q.device) if splits > 1 else None
            tensors = *rows, visible.first, visible.end, *terms[1:4], rows_per_tile, turns, keys, values
            key = "keys", signature(*tensors), *how
            if key in _known:
                _known[key](*tensors)
                continue
            key_strides, value_strides = common.row_strides(grad_k=keys, grad_v=values)
            launch = prepare(
                _grad_key_kernel, (programs * splits,),
                (
                    *_inputs(*rows, delta.stride(), visible), rows_per_tile, turns, keys, key_strides,
                    values, value_strides, *_sizes(q, k, scale, terms),
                ),
                tensors, SHAPE=shape, num_warps=tiles.warps, num_stages=tiles.stages,
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
    strides = common.row_strides(grad_q=grads[0], grad_k=grads[1], grad_v=grads[2])
    launch = prepare(
        _short_kernel, (programs,),
        (
            *_inputs(q, k, v, grad_out, lse, out, common.row_strides(out=out)[0], visible), rows_per_tile,
            *(x for pair in zip(grads, strides, strict=True) for x in pair), *_sizes(q, k, scale, terms),
        ),
        (*used, rows_per_tile, *grads), SHAPE=Shape(tiles.rows, tiles.keys, q.shape[3], v.shape[3], from_out=True),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _known.add(key, launch)
    return list(grads)


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, delta_strides: tuple[int, ...],
    visible: Bounds,
) -> tuple[Any, ...]:  # fmt: skip
    q_strides, k_strides, v_strides, grad_out_strides = common.row_strides(q=q, k=k, v=v, grad_out=grad_out)
    return (
        q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides, lse, lse.stride(), delta, delta_strides,
        visible.first, visible.end, visible.strides,
    )  # fmt: skip


def _sizes(q: Tensor, k: Tensor, scale: float, terms: ScoreTerms) -> tuple[Any, ...]:
    return q.shape[2], k.shape[2], q.shape[1], q.shape[1] // k.shape[1], scale, terms.softcap, *terms[1:4]


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
        part_first, part_end = common.at_part(first, strides, part, batch), common.at_part(end, strides, part, batch)
        row_first, row_end = common.visible_keys(part_first, part_end, rows, q_len, kv_len, False)
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
    tile, head, batch = common.locate(tl.cdiv(length, ROWS), heads)
    begin = tile * ROWS
    out = common.rows_of(out, out_strides, batch, head)
    grad_out = common.rows_of(grad_out, grad_out_strides, batch, head)
    out_tile = common.load_block(out, begin, length, True, ROWS, D, BLOCK_D)
    grad_out_tile = common.load_block(grad_out, begin, length, True, ROWS, D, BLOCK_D)
    result = tl.sum(out_tile.to(tl.float32) * grad_out_tile.to(tl.float32), 1)
    if grad_lse is not None:
        grad_lse_rows = common.rows_of(grad_lse, grad_lse_strides, batch, head)
        result -= common.load_rows(grad_lse_rows, begin, length, 0.0, True, ROWS).to(tl.float32)
    common.store_rows(common.rows_of(delta, delta_strides, batch, head), begin, length, result, ROWS)


@triton.jit
def _load_row_terms(lse, delta, grad_out_tile, begin, q_len, EDGE: tl.constexpr, SHAPE: tl.constexpr):
    """The lse (base 2) and the delta of a tile of rows; (+inf, 0), so that weights are 0, for rows without keys."""
    row_lse = common.load_rows(lse, begin, q_len, float("-inf"), EDGE, SHAPE.rows)
    if SHAPE.from_out:
        out_tile = common.load_tile(delta, begin, q_len, EDGE, SHAPE.rows, SHAPE.dv)
        row_delta = tl.sum(out_tile[0].to(tl.float32) * grad_out_tile[0].to(tl.float32), 1)
        if len(out_tile) == 2:
            row_delta += tl.sum(out_tile[1].to(tl.float32) * grad_out_tile[1].to(tl.float32), 1)
    else:
        row_delta = common.load_rows(delta, begin, q_len, 0.0, EDGE, SHAPE.rows)
    empty = row_lse == float("-inf")
    return tl.where(empty, float("inf"), row_lse * _LOG2_E), tl.where(empty, 0.0, row_delta)


@triton.jit(do_not_specialize=LENGTHS)
def _grad_query_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, first, end, bounds_strides,
    grad_q, grad_q_strides, q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions,
    SHAPE: tl.constexpr,
):  # fmt: skip
    tile, head, batch = common.locate(tl.cdiv(q_len, SHAPE.rows), q_heads)
    _grad_query_tile(
        tile, head, group, batch, (q, k, v, grad_out, lse, delta),
        (q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides), (first, end, bounds_strides),
        (scale, softcap, slopes, q_positions, k_positions), grad_q, grad_q_strides, q_len, kv_len, SHAPE,
    )  # fmt: skip


@triton.jit
def _grad_query_tile(
    tile, head, group, batch, inputs, strides, mask, terms, grad_q, grad_q_strides, q_len, kv_len, SHAPE: tl.constexpr
):
    """Computes the gradient of a tile of queries."""
    ROWS: tl.constexpr = SHAPE.rows
    row_begin = (tl.cdiv(q_len, ROWS) - 1 - tile) * ROWS  # the longest tiles first, as in forward
    rows = row_begin + tl.arange(0, ROWS)
    q, k, v, grad_out, lse, delta = inputs
    q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides = strides
    k, v = common.rows_of(k, k_strides, batch, head // group), common.rows_of(v, v_strides, batch, head // group)
    q, grad_out = common.rows_of(q, q_strides, batch, head), common.rows_of(grad_out, grad_out_strides, batch, head)
    q_tile = common.load_tile(q, row_begin, q_len, True, ROWS, SHAPE.d)
    grad_out_tile = common.load_tile(grad_out, row_begin, q_len, True, ROWS, SHAPE.dv)
    lse, delta = common.rows_of(lse, lse_strides, batch, head), common.rows_of(delta, delta_strides, batch, head)
    row_lse, row_delta = _load_row_terms(lse, delta, grad_out_tile, row_begin, q_len, True, SHAPE)
    acc = common.over_keys(
        _add_key_tile, common.zero_tile(ROWS, SHAPE.d), (q_tile, grad_out_tile, row_lse, row_delta), (k, v, kv_len),
        terms, mask, rows, row_begin, q_len, head, batch, SHAPE,
    )  # fmt: skip
    grad_q_rows = common.rows_of(grad_q, grad_q_strides, batch, head)
    result = [block * terms[0] for block in acc]
    common.add_to_tile(grad_q_rows, row_begin, q_len, result, SHAPE.overwrite, ROWS, SHAPE.d)


@triton.jit
def _add_key_tile(acc, held, keys, terms, key_begin, row_first, row_end, SHAPE: tl.constexpr):
    """Adds ds @ k of the key tile at `key_begin`: see `over_keys`."""
    MASKED: tl.constexpr = row_first is not None
    q_tile, grad_out_tile, row_lse, row_delta = held
    k_tile, v_tile, scores, capped = common.score_keys(q_tile, keys, terms, key_begin, MASKED, True, SHAPE)
    weights = tl.exp2(scores - row_lse[:, None])
    if MASKED:
        key = key_begin + tl.arange(0, SHAPE.keys)[None, :]
        weights = tl.where((key >= row_first[:, None]) & (key < row_end[:, None]), weights, 0.0)
    grad_scores = weights * (common.dot_rows(grad_out_tile, v_tile) - row_delta[:, None])
    if terms[1] is not None:
        grad_scores *= 1.0 - capped * capped
    return common.add_product(acc, grad_scores, k_tile)


@triton.jit(do_not_specialize=LENGTHS)
def _grad_key_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, delta, delta_strides, first, end, bounds_strides, rows_per_tile, turns,
    grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions, SHAPE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = SHAPE.rows
    KEYS: tl.constexpr = SHAPE.keys
    SPLITS: tl.constexpr = SHAPE.splits
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
        for part in range(SHAPE.parts):
            begin, inner, edge, stop = _row_phases(of_tile + part * part_stride, ROWS)
            steps += (common.edge_count(begin, inner, edge, stop, ROWS) + (edge - inner) // ROWS) * group
        split_count = tl.minimum(tl.cdiv(steps, SHAPE.steps), SPLITS)
        if split >= split_count:
            return
    acc_k, acc_v = _grad_key_tile(
        key_begin, kv_head, batch, of_tile, part_stride, split, split_count, (q, k, v, grad_out, lse, delta),
        (q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides), (first, end, bounds_strides),
        (scale, softcap, slopes, q_positions, k_positions), q_len, kv_len, group,
        grad_k is not None, grad_v is not None, SHAPE,
    )  # fmt: skip
    if SPLITS > 1:
        # Additions are in the order of the splits. A program waits only for programs that started before it.
        while tl.atomic_cas(turns + program, split, split, sem="acquire") != split:
            pass
    if grad_k is not None:
        k_rows = common.rows_of(grad_k, grad_k_strides, batch, kv_head)
        common.add_to_tile(k_rows, key_begin, kv_len, acc_k, SHAPE.overwrite, KEYS, SHAPE.d)
    if grad_v is not None:
        v_rows = common.rows_of(grad_v, grad_v_strides, batch, kv_head)
        common.add_to_tile(v_rows, key_begin, kv_len, acc_v, SHAPE.overwrite, KEYS, SHAPE.dv)
    if SPLITS > 1:
        tl.debug_barrier()
        tl.atomic_xchg(turns + program, split + 1, sem="release")


@triton.jit
def _grad_key_tile(
    key_begin, kv_head, batch, of_tile, part_stride, split, split_count, inputs, strides, mask, terms,
    q_len, kv_len, group, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, from a split of the rows that attend to it: ds^T @ q, p^T @ grad_out.

    Scores are computed transposed, [keys, rows], which makes them the left operand of both products without a
    transposition.
    """
    ROWS: tl.constexpr = SHAPE.rows
    KEYS: tl.constexpr = SHAPE.keys
    q, k, v, grad_out, lse, delta = inputs
    q_strides, k_strides, v_strides, grad_out_strides, lse_strides, delta_strides = strides
    k, v = common.rows_of(k, k_strides, batch, kv_head), common.rows_of(v, v_strides, batch, kv_head)
    k_tile = common.load_tile(k, key_begin, kv_len, True, KEYS, SHAPE.d)
    v_tile = common.load_tile(v, key_begin, kv_len, True, KEYS, SHAPE.dv)
    scale, softcap, slopes, q_positions, k_positions = terms
    key_positions = None if slopes is None else common.load_positions(k_positions, key_begin, kv_len, KEYS)

    acc_k, acc_v = common.zero_tile(KEYS, SHAPE.d), common.zero_tile(KEYS, SHAPE.dv)
    head = kv_head * group  # the first of the query heads that share these keys
    q, grad_out = common.at_head(q, q_strides, batch, head), common.at_head(grad_out, grad_out_strides, batch, head)
    lse, delta = common.at_head(lse, lse_strides, batch, head), common.at_head(delta, delta_strides, batch, head)
    head_slopes = None if slopes is None else slopes + head
    for part in range(SHAPE.parts):
        first, end = common.at_part(mask[0], mask[2], part, batch), common.at_part(mask[1], mask[2], part, batch)
        # Keys beyond the last need no mask: each has its own row of the gradients, which is not stored.
        begin, inner, edge, stop = _row_phases(of_tile + part * part_stride, ROWS)
        if SHAPE.ordered:
            inner, edge = begin, begin  # every tile is masked, in one loop
        for masked in tl.static_range(2):  # the row tiles of [inner, edge), then those that need a mask
            # Heads and tiles are one loop: the pipeline does not drain at each head, the addresses of a second loop
            # need no registers, and the sum over the group stays in registers.
            tile_count = common.edge_count(begin, inner, edge, stop, ROWS) if masked else tl.cdiv(edge - inner, ROWS)
            steps = tile_count * group
            for step in range(steps * split // split_count, steps * (split + 1) // split_count):
                member = step // tile_count
                index = step % tile_count
                row_begin = common.edge_tile(index, begin, inner, edge, ROWS) if masked else inner + index * ROWS
                far = tl.cast(member, tl.int64)
                q_rows = (q + far * q_strides[1], q_strides[2])
                q_tile = common.load_tile(q_rows, row_begin, q_len, masked, ROWS, SHAPE.d)
                grad_out_rows = (grad_out + far * grad_out_strides[1], grad_out_strides[2])
                grad_out_tile = common.load_tile(grad_out_rows, row_begin, q_len, masked, ROWS, SHAPE.dv)
                row_lse, row_delta = _load_row_terms(
                    (lse + far * lse_strides[1], lse_strides[2]), (delta + far * delta_strides[1], delta_strides[2]),
                    grad_out_tile, row_begin, q_len, masked, SHAPE,
                )  # fmt: skip
                slope, left, right = None, None, None
                if slopes is not None:
                    slope = tl.load(head_slopes + member)
                    left, right = common.distances(key_positions, q_positions, row_begin, q_len, ROWS)
                products = common.dot_rows(k_tile, q_tile)
                exact = k_tile[0].dtype == tl.float32
                scores, capped = common.base2_scores(products, scale, softcap, slope, left, right, exact)
                weights = tl.exp2(scores - row_lse[None, :])
                if masked:  # rows beyond the last have weights of 0
                    rows = row_begin + tl.arange(0, ROWS)
                    row_first = tl.load(first + rows, mask=rows < q_len, other=0)[None, :]
                    row_end = tl.load(end + rows, mask=rows < q_len, other=0)[None, :]
                    keys = key_begin + tl.arange(0, KEYS)[:, None]
                    weights = tl.where((keys >= row_first) & (keys < row_end), weights, 0.0)
                if NEEDS_V:
                    acc_v = common.add_product(acc_v, weights, grad_out_tile)
                if NEEDS_K:
                    grad_scores = weights * (common.dot_rows(v_tile, grad_out_tile) - row_delta[None, :])
                    if softcap is not None:
                        grad_scores *= 1.0 - capped * capped
                    acc_k = common.add_product(acc_k, grad_scores, q_tile)
    return [block * scale for block in acc_k], acc_v


@triton.jit(do_not_specialize=LENGTHS)
def _short_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad_out, grad_out_strides,
    lse, lse_strides, out, out_strides, first, end, bounds_strides, rows_per_tile,
    grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, q_heads, group, scale, softcap, slopes, q_positions, k_positions, SHAPE: tl.constexpr,
):  # fmt: skip
    """The programs of one sequence have its tiles of queries first, then its tiles of keys."""
    ROWS: tl.constexpr = SHAPE.rows
    KEYS: tl.constexpr = SHAPE.keys
    query_tiles, key_tiles, kv_heads = tl.cdiv(q_len, ROWS), tl.cdiv(kv_len, KEYS), q_heads // group
    per_sequence = query_tiles * q_heads + key_tiles * kv_heads
    batch, program = tl.program_id(0) // per_sequence, tl.program_id(0) % per_sequence
    inputs = (q, k, v, grad_out, lse, out)
    strides = (q_strides, k_strides, v_strides, grad_out_strides, lse_strides, out_strides)
    mask, terms = (first, end, bounds_strides), (scale, softcap, slopes, q_positions, k_positions)
    if program < query_tiles * q_heads:
        _grad_query_tile(
            program % query_tiles, program // query_tiles, group, batch, inputs, strides, mask, terms,
            grad_q, grad_q_strides, q_len, kv_len, SHAPE,
        )  # fmt: skip
    else:
        program -= query_tiles * q_heads
        tile, kv_head = program % key_tiles, program // key_tiles
        of_tile = rows_per_tile + ((batch if bounds_strides[1] != 0 else 0) * key_tiles + tile) * 4
        acc_k, acc_v = _grad_key_tile(
            tile * KEYS, kv_head, batch, of_tile, 0, 0, 1, inputs, strides, mask, terms, q_len, kv_len, group,
            True, True, SHAPE,
        )  # fmt: skip
        k_rows = common.rows_of(grad_k, grad_k_strides, batch, kv_head)
        v_rows = common.rows_of(grad_v, grad_v_strides, batch, kv_head)
        common.store_tile(k_rows, tile * KEYS, kv_len, acc_k, KEYS, SHAPE.d)
        common.store_tile(v_rows, tile * KEYS, kv_len, acc_v, KEYS, SHAPE.dv)


@triton.jit
def _row_phases(of_tile, ROWS: tl.constexpr):
    """The (begin, inner, edge, stop) of the rows that attend to a key tile, from its entry in `rows_per_tile`."""
    return common.split_phases(tl.load(of_tile), tl.load(of_tile + 1), tl.load(of_tile + 2), tl.load(of_tile + 3), ROWS)
