"""The sparse backend in torch operations, for any device; the backend of the CPU.

Keys are gathered for a few query rows at a time, so memory stays bounded. The top-k computes scores in tiles of one
shape, whatever the lengths: BLAS sums in an order that depends on shapes, and the score of a key must have the same
bits in every block, shard and batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype, add_sinks
from attnmesh.ops.sparse.arguments import IndexerCall, RowBounds, SparseCall, TopKIndices, sort_by_key

_MAX_GATHERED = 1 << 22  # elements of the keys gathered at a time
_TILE_ROWS, _TILE_KEYS = 8, 128

Compute = TypeVar("Compute", bound=Callable[..., Any])


def _without_autocast(compute: Compute) -> Compute:
    """Disable autocast in `compute`, which chooses its dtypes itself."""

    @functools.wraps(compute)
    def wrapped(call: SparseCall | IndexerCall, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(call[0].device.type, enabled=False):
            return compute(call, *args, **kwargs)

    return cast(Compute, wrapped)


# Gathered keys.


@dataclass(frozen=True)
class GatheredKeys:
    """The keys of the slots of some rows: `keys` [rows, topk, d], 0 where a slot is invalid; `at` [rows, topk], their
    rows in memory; `valid` [rows, topk].

    Where the rows share one list of keys, `keys` is [topk, d] and `at` [topk], so that one matmul serves all rows.
    """

    rows: slice
    valid: Tensor
    keys: Tensor
    at: Tensor

    def dots(self, x: Tensor) -> Tensor:
        """The products of x [rows, heads, d] with the keys, [rows, heads, topk]."""
        # Contiguous: oneDNN on ARM is up to a hundred times slower with a transposed operand.
        return torch.matmul(x, self.keys.mT.contiguous())

    def key_grads(self, weights: Tensor, x: Tensor) -> Tensor:
        """For each slot, the sum over heads of weights [rows, heads, topk], 0 if invalid, times x [rows, heads, d]."""
        if self.keys.ndim == 3:
            return torch.matmul(weights.mT, x)
        x = x.masked_fill(~self.valid.any(1)[:, None, None], 0.0)  # a row without a valid slot may hold any values
        return weights.flatten(0, 1).mT @ x.flatten(0, 1)

    def add_to(self, total: Tensor, grads: Tensor, deterministic: bool) -> None:
        """Add the gradient of each slot to the row of its key; `total` has one more row, for invalid slots."""
        at, grads = self.at.flatten(), grads.reshape(-1, grads.shape[-1]).to(total.dtype)
        if deterministic and total.is_cuda:
            total.index_put_((at,), grads, accumulate=True)
        else:
            total.index_add_(0, at, grads)


def gather_keys(k: Tensor, indices: Tensor, bounds: RowBounds, per_slot: int) -> Iterator[GatheredKeys]:
    """The keys of all rows, some rows at a time. `per_slot`: elements that a row needs for each of its slots."""
    s_q, topk = indices.shape
    shared = indices.stride(0) == 0 and s_q > 1
    step = max(1, _MAX_GATHERED // max(1, topk * per_slot))
    for start in range(0, s_q, step):
        rows = slice(start, min(s_q, start + step))
        valid = bounds.narrow(rows.start, rows.stop).valid(indices[rows])
        if shared:
            keys, at = _keys_at(k, indices[start] - bounds.k_offset, valid.any(0))
            if torch.isfinite(keys).all():  # otherwise 0 times a key that a row must not see would be NaN
                yield GatheredKeys(rows, valid, keys, at)
                continue
        yield GatheredKeys(rows, valid, *_keys_at(k, indices[rows] - bounds.k_offset, valid))


def _keys_at(k: Tensor, at: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The keys in rows `at`, 0 where not used; and the rows, s_kv where not used."""
    s_kv = k.shape[0]
    at = at.masked_fill(~used, s_kv).long()
    keys = k[at.clamp(max=s_kv - 1)] if s_kv else k.new_zeros(*at.shape, k.shape[1])
    # masked_fill, not a product with 0: unused keys may hold NaN.
    return keys.to(accumulation_dtype(k.dtype)).masked_fill(~used[..., None], 0.0), at


# Attention.


@_without_autocast
def forward(
    call: SparseCall, dtype: torch.dtype, sinks: Tensor | None = None, max_logits: bool = False
) -> tuple[Tensor, ...]:
    """`dispatch.forward`."""
    q, d_v = call.q, call.d_v
    s_q, heads, _ = q.shape
    out = q.new_empty(s_q, heads, d_v, dtype=dtype)
    lse, largest = (q.new_empty(s_q, heads, dtype=accumulation_dtype(q.dtype)) for _ in range(2))
    for part, values in _gather_keys_and_values(call):
        s = _scores(call, part)
        top = s.amax(-1, keepdim=True)
        largest[part.rows] = top.squeeze(-1)
        top = top.masked_fill(top == -torch.inf, 0.0)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        mean = torch.matmul(p, values.keys) / total.masked_fill(total == 0, 1.0)
        state = State(mean, (top + total.log()).squeeze(-1))
        out[part.rows], lse[part.rows] = state if sinks is None else add_sinks(state, sinks)
    return (out, lse, largest) if max_logits else (out, lse)


@_without_autocast
def backward(
    call: SparseCall, lse: Tensor, delta: Tensor, dout: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`dispatch.backward`."""
    q, k, v, d_v, deterministic = call.q, call.k, call.v, call.d_v, call.deterministic
    dq = torch.empty_like(q, dtype=dtype)
    dk = _zeros_with_spare_row(q, k.shape[0], k.shape[1])
    dv = None if v is None else _zeros_with_spare_row(q, v.shape[0], d_v)
    for part, values in _gather_keys_and_values(call):
        p = _probabilities(call, part, lse)
        grad = dout[part.rows].to(p.dtype)
        has_mass = part.valid[:, None] & torch.isfinite(lse[part.rows, :, None])
        dp = values.dots(grad)
        ds = torch.where(has_mass, p * (dp - delta[part.rows, :, None]), 0.0) * call.scale
        dq[part.rows] = torch.matmul(ds, part.keys).to(dq.dtype)
        key_grads = part.key_grads(ds, q[part.rows].to(p.dtype))
        value_grads = values.key_grads(p, grad)
        if dv is None:
            key_grads[..., :d_v] += value_grads
        else:
            values.add_to(dv, value_grads, deterministic)
        part.add_to(dk, key_grads, deterministic)
    return dq, dk[:-1], None if dv is None else dv[:-1]


@_without_autocast
def distribution(call: SparseCall, lse: Tensor, head_group: int) -> Tensor:
    """`dispatch.distribution`."""
    q, indices = call.q, call.indices
    s_q, heads, d = q.shape
    dist = lse.new_empty(-(-heads // head_group), s_q, indices.shape[1], dtype=accumulation_dtype(q.dtype))
    for part in gather_keys(call.k, indices, call.bounds, d + heads):
        p = _probabilities(call, part, lse)
        for group, of_group in enumerate(p.split(head_group, 1)):
            dist[group, part.rows] = of_group.sum(1)
    return dist


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """The sum of out * dout over features, [s_q, heads]."""
    dtype = accumulation_dtype(out.dtype)
    return (out.to(dtype) * dout.to(dtype)).sum(-1)


def _gather_keys_and_values(call: SparseCall) -> Iterator[tuple[GatheredKeys, GatheredKeys]]:
    """Keys and values; without `v` the values are the first d_v features of the keys."""
    per_slot = max(call.k.shape[1], call.d_v) + call.q.shape[1]
    keys = gather_keys(call.k, call.indices, call.bounds, per_slot)
    if call.v is None:
        for part in keys:
            yield part, replace(part, keys=part.keys[..., : call.d_v])
    else:
        yield from zip(keys, gather_keys(call.v, call.indices, call.bounds, per_slot), strict=True)


def _scores(call: SparseCall, part: GatheredKeys) -> Tensor:
    s = part.dots(call.q[part.rows].to(part.keys.dtype)) * call.scale
    return s.masked_fill(~part.valid[:, None], -torch.inf)


def _probabilities(call: SparseCall, part: GatheredKeys, lse: Tensor) -> Tensor:
    """exp(score - lse); 0 where the slot is invalid or the lse of the head is infinite."""
    lse = lse[part.rows, :, None]
    infinite = torch.isinf(lse)
    p = torch.exp(_scores(call, part) - lse.masked_fill(infinite, 0.0))
    return p.masked_fill(infinite | ~part.valid[:, None], 0.0)  # without a valid slot, lse may hold any value


def _zeros_with_spare_row(q: Tensor, rows: int, width: int) -> Tensor:
    """Zeros [rows + 1, width]; the last row takes the gradients of invalid slots."""
    return q.new_zeros(rows + 1, width, dtype=accumulation_dtype(q.dtype))


# The indexer.


@_without_autocast
def scores_at(call: IndexerCall) -> Tensor:
    """`dispatch.scores_at`."""
    iq, ik, w, indices, bounds, *_ = call
    assert indices is not None
    dtype = accumulation_dtype(iq.dtype)
    scores = iq.new_empty(indices.shape, dtype=dtype)
    for part in gather_keys(ik, indices, bounds, iq.shape[1] + iq.shape[2]):
        s = part.dots(iq[part.rows].to(dtype))
        s = _sum_heads(s, w[part.rows].to(dtype), call.scale, call.relu)
        scores[part.rows] = s.masked_fill(~part.valid, -torch.inf)
    return scores


@_without_autocast
def scores_at_backward(call: IndexerCall, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`dispatch.scores_at_backward`."""
    iq, ik, w, indices, bounds, scale, relu, deterministic, _ = call
    assert indices is not None
    wide = accumulation_dtype(iq.dtype)
    d_iq, d_w = torch.empty_like(iq, dtype=dtype), torch.empty_like(w, dtype=wide)
    d_ik = _zeros_with_spare_row(iq, ik.shape[0], ik.shape[1])
    for part in gather_keys(ik, indices, bounds, iq.shape[1] + iq.shape[2]):
        q = iq[part.rows].to(wide)
        s = part.dots(q)
        # where, not a product with 0: a row without a valid slot may hold NaN.
        has_grad = part.valid[:, None] & ~(s <= 0) if relu else part.valid[:, None]
        g = grad[part.rows, None].to(wide) * scale
        ds = torch.where(has_grad, g * w[part.rows, :, None].to(wide), 0.0)
        d_w[part.rows] = torch.where(has_grad, g * s, 0.0).sum(-1)
        d_iq[part.rows] = torch.matmul(ds, part.keys).to(d_iq.dtype)
        part.add_to(d_ik, part.key_grads(ds, q), deterministic)
    return d_iq, d_ik[:-1], d_w


def dense_scores_backward(call: IndexerCall, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`scores_at_backward` where the slots of every row are all keys, in order."""
    first, size = call.bounds.k_offset, call.ik.shape[0]
    indices = torch.arange(first, first + size, dtype=torch.int32, device=call.iq.device).expand(len(call.iq), size)
    return scores_at_backward(call._replace(indices=indices, deterministic=True), grad, dtype)


@_without_autocast
def topk(call: IndexerCall, topk: int, block_size: int) -> TopKIndices:
    """`dispatch.topk`."""
    iq, ik, w, bounds = call.iq, call.ik, call.w, call.bounds
    s_q, dtype = iq.shape[0], accumulation_dtype(iq.dtype)
    running = RunningTopK.empty(s_q, topk, dtype, iq.device)
    for first in range(0, ik.shape[0], block_size):
        keys = ik[first : first + block_size].to(dtype)
        tiles = F.pad(keys, (0, 0, 0, -len(keys) % _TILE_KEYS)).unflatten(0, (-1, _TILE_KEYS)).mT.contiguous()
        indices = torch.arange(first, first + len(keys), device=iq.device, dtype=torch.int32) + bounds.k_offset
        for start in range(0, s_q, _TILE_ROWS):
            rows = slice(start, start + _TILE_ROWS)
            visible = (indices >= bounds.lo[rows, None]) & (indices < bounds.hi[rows, None])
            columns = visible.any(0).nonzero()
            if not len(columns):
                continue
            low, high = int(columns[0]) // _TILE_KEYS, int(columns[-1]) // _TILE_KEYS + 1
            scored = slice(low * _TILE_KEYS, min(high * _TILE_KEYS, len(keys)))
            scores = _tiled_scores(iq[rows].to(dtype), tiles[low:high], w[rows].to(dtype), call.scale, call.relu)
            scores = scores[:, : scored.stop - scored.start].masked_fill(~visible[:, scored], -torch.inf)
            running.update(rows, scores, indices[scored])
    return running.result()


class RunningTopK:
    """The top-k keys of every row so far. Keys come in ascending order; of equal scores the first are kept."""

    def __init__(self, scores: Tensor, indices: Tensor) -> None:
        self._scores, self._indices = scores, indices

    @classmethod
    def empty(cls, s_q: int, topk: int, dtype: torch.dtype, device: torch.device) -> RunningTopK:
        """No keys yet."""
        scores = torch.full((s_q, topk), -torch.inf, dtype=dtype, device=device)
        return cls(scores, torch.full_like(scores, -1, dtype=torch.int32))

    def update(self, rows: slice, scores: Tensor, indices: Tensor) -> None:
        """Add keys to some rows; a key with score -inf or NaN is never selected."""
        scores_now = torch.cat((self._scores[rows], scores.masked_fill(scores.isnan(), -torch.inf)), 1)
        indices_now = torch.cat((self._indices[rows], indices.expand_as(scores)), 1)
        selected = _first_topk(scores_now, self._scores.shape[1])
        self._scores[rows], self._indices[rows] = scores_now.gather(1, selected), indices_now.gather(1, selected)

    def result(self) -> TopKIndices:
        """The selected keys, sorted by index."""
        return sort_by_key(self._scores, self._indices)


def _first_topk(scores: Tensor, n: int) -> Tensor:
    """The columns of the n highest scores of every row, [rows, n] ascending; of equal scores the first."""
    last = scores.topk(n, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > last, scores == last
    ties = n - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= ties))).nonzero()[:, 1].view(-1, n)


def _tiled_scores(iq: Tensor, tiles: Tensor, w: Tensor, scale: float, relu: bool) -> Tensor:
    """[rows, keys] of up to _TILE_ROWS rows, padded to this number, and tiles of keys [d, _TILE_KEYS]."""
    rows, heads, width = iq.shape
    iq = F.pad(iq, (0, 0, 0, 0, 0, _TILE_ROWS - rows)).reshape(-1, width)
    w = F.pad(w, (0, 0, 0, _TILE_ROWS - rows))
    scores = [_sum_heads((iq @ tile).view(_TILE_ROWS, heads, _TILE_KEYS), w, scale, relu) for tile in tiles]
    return torch.cat(scores, 1)[:rows]


def _sum_heads(s: Tensor, w: Tensor, scale: float, relu: bool) -> Tensor:
    """The weighted sum over heads of [rows, heads, keys]."""
    if relu:
        s = s.relu()
    return (s * w[..., None]).sum(1) * scale
