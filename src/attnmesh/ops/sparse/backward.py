"""The backward pass of sparse attention by kernels: any number of heads, widths and slots; 16-bit types or float32.

Three kernels run over chunks of rows and recompute the weights p from the lse::

    scores_kernel      p = exp(scale * q @ k^T - lse)     ds = p * (dout @ v^T - delta)    to workspaces
    grad_query_kernel  dq = scale * ds @ k
    grad_key_kernel    dk += scale * ds^T @ q             dv += p^T @ dout                 scattered to the keys

The cost is dominated not by the products but by the gradients of the keys: 4 bytes per slot and column, 19 GB for 4096
rows of 2048 slots and 576 columns. They are therefore summed over all heads before they leave a multiprocessor. One
kernel could not do that: q, dout and dq of 128 heads and 576 columns exceed the memory of a multiprocessor, and half of
the heads at a time would write twice as much. Between kernels p and ds take 2 bytes per slot and head, and every
product reads each key once for 64 heads or more.

The workspaces of p and ds are [rows, padded_heads, padded_slots]: 0 where a slot is invalid or a head does not exist.
Tiles past the last slot of a row are neither written nor read.

dk and dv are summed by atomics or, if `deterministic`, written slot by slot and then summed key by key, in the order of
rows and slots.

With `gluon` the kernels of `gluon_backward` take the place of the last two, for the heads that they support.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.launch import cdiv, next_power_of_2
from attnmesh.ops.sparse import gluon_backward, triton_backward
from attnmesh.ops.sparse.arguments import SparseCall
from attnmesh.ops.sparse.gluon_common import KEYS
from attnmesh.ops.sparse.triton_backward import BackwardTiles, SlotsByKey, add_by_key, sort_slots_by_key

# By bytes per element. Fixed rather than autotuned: the order of the sums must not depend on a timing. 16 bits: the
# fastest of those tried on an H200 with 128 heads of 576 columns. float32 runs without tensor cores (tf32 is not
# float32), so a thread holds rows of both operands, which requires small tiles. The other kernels' keys must divide
# those of SCORES, because a tile reads only what one tile of the scores has written.
SCORES = {2: BackwardTiles(64, 128, 64, 4, 3), 4: BackwardTiles(32, 32, 32, 4, 1)}
# For rows that are not aligned to 16 bytes.
SCORES_UNALIGNED = {2: BackwardTiles(64, 64, 64, 4, 1), 4: BackwardTiles(32, 32, 32, 4, 1)}
GRAD_QUERY = {2: BackwardTiles(128, 64, 128, 4, 3), 4: BackwardTiles(32, 32, 64, 4, 1)}
GRAD_QUERY_FEW_HEADS = {2: BackwardTiles(32, 64, 64, 2, 4), 4: BackwardTiles(32, 32, 64, 4, 1)}
GRAD_KEY = {2: BackwardTiles(128, 64, 128, 8, 3), 4: BackwardTiles(16, 32, 64, 4, 1)}
# For more heads than one tile of GRAD_KEY holds: q and dout are then read once per tile of keys.
GRAD_KEY_MANY_HEADS = {2: BackwardTiles(64, 64, 128, 8, 3), 4: BackwardTiles(16, 32, 64, 4, 1)}
# Bytes of the workspaces of a chunk of rows: enough for several waves of programs.
WORKSPACE = 1 << 29
WORKSPACE_DETERMINISTIC = 1 << 30


def backward(
    call: SparseCall, lse: Tensor, delta: Tensor, dout: Tensor, dtype: torch.dtype, *, gluon: bool,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`dispatch.backward`; dk and dv are float32.

    `chunk_rows` rows are computed at a time, by default the most that the workspaces allow; with `deterministic` the
    result has the same bits for every number.
    """
    q, k, v = call.q, call.k, call.v
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = None if v is None else torch.zeros(v.shape, dtype=torch.float32, device=q.device)
    if 0 in (*q.shape, *k.shape, *call.indices.shape):
        return dq.zero_(), dk, dv

    plan = _plan(call, dout, gluon, chunk_rows)
    segments = gluon_backward.segments(dk, plan.padded_heads) if gluon and not call.deterministic else 0
    if segments > 1:
        indices, slots = gluon_backward.sort_by_key(call.indices, call.bounds)
        call = call._replace(indices=indices, bounds=call.bounds._replace(slots=slots))
    workspace = (plan.rows, plan.padded_heads, plan.padded_slots)
    weights, grad_scores = (torch.empty(workspace, dtype=q.dtype, device=q.device) for _ in range(2))
    query_kernels = gluon_backward if gluon and plan.padded_heads == gluon_backward.QUERY_HEADS else triton_backward
    with torch.cuda.device_of(q):
        for begin in range(0, q.shape[0], plan.rows):
            rows = range(begin, min(begin + plan.rows, q.shape[0]))
            triton_backward.scores(call, rows, lse, delta, dout, weights, grad_scores, plan.scores)
            query_kernels.grad_query(call, rows, grad_scores, dq, plan.grad_query)
            order = None
            if call.deterministic:
                bounds = call.bounds.narrow(rows.start, rows.stop)
                order = sort_slots_by_key(call.indices[rows.start : rows.stop], bounds, k.shape[0])
            for_k, for_v = (grad_scores, q), (weights, dout)
            if dv is None:
                _add_to_keys(dk, call, rows, call.scale, for_k, for_v, plan, order, segments)
            else:
                _add_to_keys(dk, call, rows, call.scale, for_k, None, plan, order, segments)
                _add_to_keys(dv, call, rows, 1.0, for_v, None, plan, order, segments)
    return dq, dk, dv


def _add_to_keys(
    target: Tensor, call: SparseCall, rows: range, scale: float, product: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor] | None, plan: _Plan, order: SlotsByKey | None, segments: int,
) -> None:  # fmt: skip
    """Adds `scale * left^T @ right`, and a second such product, of some rows to their keys."""
    into = target
    if order is not None:
        shape = (len(rows) * call.indices.shape[1], target.shape[1])
        into = torch.empty(shape, dtype=torch.float32, device=target.device)
    if plan.gluon:
        assert second is not None  # the values are in the keys
        gluon_backward.grad_key(
            into, call, rows, scale, *product, *second, atomic=order is None, segments=segments
        )  # fmt: skip
    else:
        triton_backward.grad_key(into, call, rows, scale, product, second, plan.grad_key, atomic=order is None)
    if order is not None:
        add_by_key(target, into, order)


class _Plan(NamedTuple):
    """Rows per chunk, sizes of the workspaces, and the tiles of every kernel."""

    gluon: bool
    rows: int
    padded_heads: int
    padded_slots: int
    scores: BackwardTiles
    grad_query: BackwardTiles
    grad_key: BackwardTiles


def _plan(call: SparseCall, dout: Tensor, gluon: bool, chunk_rows: int | None) -> _Plan:
    (rows, heads, width), slots, size = call.q.shape, call.indices.shape[1], call.q.element_size()
    strides = [stride for x in (call.q, call.k, call.v, dout) if x is not None for stride in x.stride()[:-1]]
    scores = SCORES if all(stride % 16 == 0 for stride in strides) else SCORES_UNALIGNED
    grad_key = GRAD_KEY if heads <= GRAD_KEY[size].heads else GRAD_KEY_MANY_HEADS
    grad_query = GRAD_QUERY_FEW_HEADS if heads <= GRAD_QUERY_FEW_HEADS[size].heads else GRAD_QUERY
    least_slots = KEYS if gluon else 1  # of a tile
    every = [_fitted(table[size], heads, max(slots, least_slots), width) for table in (scores, grad_query, grad_key)]
    most_heads, most_keys = max(tiles.heads for tiles in every), max(tiles.keys for tiles in every)
    padded_heads = cdiv(heads, most_heads) * most_heads
    padded_slots = cdiv(slots, most_keys) * most_keys
    budget, row_bytes = WORKSPACE, 2 * padded_heads * padded_slots * size
    if call.deterministic:
        budget, row_bytes = WORKSPACE_DETERMINISTIC, row_bytes + slots * width * 4
    chunk = min(rows, chunk_rows or max(1, budget // row_bytes))
    return _Plan(gluon, chunk, padded_heads, padded_slots, *every)


def _fitted(tiles: BackwardTiles, heads: int, slots: int, width: int) -> BackwardTiles:
    """Tiles no larger than the operands; 16 is the minimum of `tl.dot`."""
    heads, keys, columns = (
        min(most, max(16, next_power_of_2(size))) for most, size in zip(tiles, (heads, slots, width), strict=False)
    )
    return BackwardTiles(heads, keys, columns, tiles.warps, tiles.stages)
