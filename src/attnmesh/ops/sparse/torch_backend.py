"""Keys that slots name, a few rows of queries at a time: what the torch backend is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.arguments import Rows, Slots, in_order

_MOST_ELEMENTS = 1 << 22  # of the keys gathered at a time: beside inputs and outputs, memory stays bounded


@dataclass(frozen=True)
class Part:
    """Some rows: which slots are valid [rows, topk], the keys they name [rows, topk, d], zero where none, and where
    those lie [rows, topk].

    Where all rows name the same keys, `keys` is [topk, d] and `at` [topk]: one product serves all rows.
    """

    rows: slice
    valid: Tensor
    keys: Tensor
    at: Tensor

    def dots(self, x: Tensor) -> Tensor:
        """The products of x [rows, heads, d] with the keys, [rows, heads, topk]."""
        # Copied: oneDNN on ARM is up to a hundred times slower when it is handed a transposed operand.
        return torch.matmul(x, self.keys.mT.contiguous())

    def for_keys(self, weights: Tensor, x: Tensor) -> Tensor:
        """For each slot the sum over heads of weights [rows, heads, topk], 0 if not valid, times x [rows, heads, d]."""
        if self.keys.ndim == 3:
            return torch.matmul(weights.mT, x)
        x = x.masked_fill(~self.valid.any(1)[:, None, None], 0.0)  # a row that sees nothing may hold anything
        return weights.flatten(0, 1).mT @ x.flatten(0, 1)

    def add_to(self, total: Tensor, found: Tensor, deterministic: bool) -> None:
        """Add what was found for each slot to its key; `total` has one more row, for slots that name none."""
        at, found = self.at.flatten(), found.reshape(-1, found.shape[-1]).to(total.dtype)
        if deterministic and total.is_cuda:
            total.index_put_((at,), found, accumulate=True)
        else:
            total.index_add_(0, at, found)


def gather_parts(k: Tensor, indices: Tensor, rows: Rows, per_slot: int) -> Iterator[Part]:
    """All rows, in parts. `per_slot`: elements that a row needs for each of its slots."""
    s_q, topk = indices.shape
    shared = indices.stride(0) == 0 and s_q > 1
    step = max(1, _MOST_ELEMENTS // max(1, topk * per_slot))
    for start in range(0, s_q, step):
        some = slice(start, min(s_q, start + step))
        valid = rows.part(some.start, some.stop).valid(indices[some])
        if shared:
            keys, at = _named(k, indices[start] - rows.k_offset, valid.any(0))
            if torch.isfinite(keys).all():  # or else zero times a key that a row must not see would be NaN
                yield Part(some, valid, keys, at)
                continue
        yield Part(some, valid, *_named(k, indices[some] - rows.k_offset, valid))


def _named(k: Tensor, at: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The keys at these rows, zero where not used, and the rows, those not used past the last."""
    s_kv = k.shape[0]
    at = at.masked_fill(~used, s_kv).long()
    keys = k[at.clamp(max=s_kv - 1)] if s_kv else k.new_zeros(*at.shape, k.shape[1])
    # Filled, not multiplied by zero: memory that nobody names may hold anything.
    return keys.to(accumulation_dtype(k.dtype)).masked_fill(~used[..., None], 0.0), at


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    rows: Rows,
    *,
    scale: float,
    d_v: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`out` [s_q, h, d_v] of `dtype` and `lse` [s_q, h]."""
    s_q, h, _ = q.shape
    out = q.new_empty(s_q, h, d_v, dtype=dtype)
    lse = q.new_empty(s_q, h, dtype=accumulation_dtype(q.dtype))
    for part, values in _parts(q, k, v, indices, rows, d_v):
        s = _scores(q, part, scale)
        top = s.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        out[part.rows] = torch.matmul(p, values.keys) / total.masked_fill(total == 0, 1.0)
        lse[part.rows] = (top + total.log()).squeeze(-1)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, lse: Tensor, delta: Tensor, dout: Tensor,
    *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq of `dtype`; dk and dv summed up, not rounded. Without `v`, dk has the values' gradient, too."""
    dq = torch.empty_like(q, dtype=dtype)
    dk = _sum(q, k.shape[0], k.shape[1])
    dv = None if v is None else _sum(q, v.shape[0], d_v)
    for part, values in _parts(q, k, v, indices, rows, d_v):
        p = _probabilities(q, part, lse, scale)
        grad = dout[part.rows].to(p.dtype)
        seen = part.valid[:, None] & torch.isfinite(lse[part.rows, :, None])
        dp = values.dots(grad)
        ds = torch.where(seen, p * (dp - delta[part.rows, :, None]), 0.0) * scale
        dq[part.rows] = torch.matmul(ds, part.keys).to(dq.dtype)
        to_keys = part.for_keys(ds, q[part.rows].to(p.dtype))
        to_values = values.for_keys(p, grad)
        if dv is None:
            to_keys[..., :d_v] += to_values
        else:
            values.add_to(dv, to_values, deterministic)
        part.add_to(dk, to_keys, deterministic)
    return dq, dk[:-1], None if dv is None else dv[:-1]


def distribution(
    q: Tensor, k: Tensor, indices: Tensor, rows: Rows, lse: Tensor, *, scale: float, head_group: int
) -> Tensor:
    """[groups, s_q, topk]: for each slot, its probabilities summed over the heads of a group."""
    s_q, h, d = q.shape
    dist = lse.new_empty(-(-h // head_group), s_q, indices.shape[1], dtype=accumulation_dtype(q.dtype))
    for part in gather_parts(k, indices, rows, d + h):
        p = _probabilities(q, part, lse, scale)
        for group, heads in enumerate(p.split(head_group, 1)):
            dist[group, part.rows] = heads.sum(1)
    return dist


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """The sum of out * dout over features, [s_q, h]."""
    dtype = accumulation_dtype(out.dtype)
    return (out.to(dtype) * dout.to(dtype)).sum(-1)


def _parts(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, d_v: int
) -> Iterator[tuple[Part, Part]]:
    """Keys and values: those of `v`, or what the keys begin with."""
    per_slot = max(k.shape[1], d_v) + q.shape[1]
    if v is None:
        for part in gather_parts(k, indices, rows, per_slot):
            yield part, replace(part, keys=part.keys[..., :d_v])
    else:
        yield from zip(gather_parts(k, indices, rows, per_slot), gather_parts(v, indices, rows, per_slot), strict=True)


def _scores(q: Tensor, part: Part, scale: float) -> Tensor:
    s = part.dots(q[part.rows].to(part.keys.dtype)) * scale
    return s.masked_fill(~part.valid[:, None], -torch.inf)


def _probabilities(q: Tensor, part: Part, lse: Tensor, scale: float) -> Tensor:
    """exp(score - lse); nothing where the slot is not valid, or the head saw no key (or all the mass is elsewhere)."""
    lse = lse[part.rows, :, None]
    infinite = torch.isinf(lse)
    p = torch.exp(_scores(q, part, scale) - lse.masked_fill(infinite, 0.0))
    return p.masked_fill(infinite | ~part.valid[:, None], 0.0)  # where nothing is valid, lse may be anything


def _sum(q: Tensor, rows: int, width: int) -> Tensor:
    """Zeros, with a row more for what belongs to no key."""
    return q.new_zeros(rows + 1, width, dtype=accumulation_dtype(q.dtype))


_TILE_ROWS, _TILE_KEYS = 8, 128


def scores_at(iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, *, scale: float, relu: bool) -> Tensor:
    """[s_q, topk], -inf where a slot is not valid."""
    dtype = accumulation_dtype(iq.dtype)
    scores = iq.new_empty(indices.shape, dtype=dtype)
    for part in gather_parts(ik, indices, rows, iq.shape[1] + iq.shape[2]):
        s = part.dots(iq[part.rows].to(dtype))
        s = _over_heads(s, w[part.rows].to(dtype), scale, relu)
        scores[part.rows] = s.masked_fill(~part.valid, -torch.inf)
    return scores


def scores_at_backward(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, grad: Tensor,
    *, scale: float, relu: bool, deterministic: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """d_iq of `dtype`; d_ik and d_w summed up, not rounded."""
    wide = accumulation_dtype(iq.dtype)
    d_iq, d_w = torch.empty_like(iq, dtype=dtype), torch.empty_like(w, dtype=wide)
    d_ik = ik.new_zeros(ik.shape[0] + 1, ik.shape[1], dtype=wide)  # the last row is for slots that name no key
    for part in gather_parts(ik, indices, rows, iq.shape[1] + iq.shape[2]):
        q = iq[part.rows].to(wide)
        s = part.dots(q)
        # Chosen, not multiplied by zero: a row that sees nothing may hold anything.
        flows = part.valid[:, None] & ~(s <= 0) if relu else part.valid[:, None]
        g = grad[part.rows, None].to(wide) * scale
        ds = torch.where(flows, g * w[part.rows, :, None].to(wide), 0.0)
        d_w[part.rows] = torch.where(flows, g * s, 0.0).sum(-1)
        d_iq[part.rows] = torch.matmul(ds, part.keys).to(d_iq.dtype)
        part.add_to(d_ik, part.for_keys(ds, q), deterministic)
    return d_iq, d_ik[:-1], d_w


def stretch_backward(
    iq: Tensor, ik: Tensor, w: Tensor, rows: Rows, grad: Tensor, *, scale: float, relu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `scores_at_backward`, where every row names all of `ik`, in order."""
    first, size = rows.k_offset, ik.shape[0]
    indices = torch.arange(first, first + size, dtype=torch.int32, device=iq.device).expand(iq.shape[0], size)
    return scores_at_backward(iq, ik, w, indices, rows, grad, scale=scale, relu=relu, deterministic=True, dtype=dtype)


def topk(iq: Tensor, ik: Tensor, w: Tensor, topk: int, rows: Rows, *, scale: float, relu: bool, block: int) -> Slots:
    """The best `topk` keys of every row, `block` keys at a time."""
    s_q, dtype = iq.shape[0], accumulation_dtype(iq.dtype)
    best = Best.none(s_q, topk, dtype, iq.device)
    for first in range(0, ik.shape[0], block):
        keys = ik[first : first + block].to(dtype)
        tiles = F.pad(keys, (0, 0, 0, -len(keys) % _TILE_KEYS)).unflatten(0, (-1, _TILE_KEYS)).mT.contiguous()
        at = torch.arange(first, first + len(keys), device=iq.device, dtype=torch.int32) + rows.k_offset
        for start in range(0, s_q, _TILE_ROWS):
            some = slice(start, start + _TILE_ROWS)
            seen = (at >= rows.lo[some, None]) & (at < rows.hi[some, None])
            where = seen.any(0).nonzero()
            if not len(where):
                continue
            low, high = int(where[0]) // _TILE_KEYS, int(where[-1]) // _TILE_KEYS + 1
            met = slice(low * _TILE_KEYS, min(high * _TILE_KEYS, len(keys)))
            scores = _tiled_scores(iq[some].to(dtype), tiles[low:high], w[some].to(dtype), scale, relu)
            scores = scores[:, : met.stop - met.start].masked_fill(~seen[:, met], -torch.inf)
            best.meet(some, scores, at[met])
    return best.slots()


class Best:
    """The best keys that every row has met so far; of equal ones, those met first. Keys come in ascending order."""

    def __init__(self, scores: Tensor, indices: Tensor) -> None:
        self._scores, self._indices = scores, indices

    @classmethod
    def none(cls, s_q: int, topk: int, dtype: torch.dtype, device: torch.device) -> Best:
        """No key met yet."""
        scores = torch.full((s_q, topk), -torch.inf, dtype=dtype, device=device)
        return cls(scores, torch.full_like(scores, -1, dtype=torch.int32))

    def meet(self, some: slice, scores: Tensor, at: Tensor) -> None:
        """Some rows meet keys `at`, -inf where they must not see them. NaN, which has no order, is never chosen."""
        every = torch.cat((self._scores[some], scores.masked_fill(scores.isnan(), -torch.inf)), 1)
        named = torch.cat((self._indices[some], at.expand_as(scores)), 1)
        chosen = _first_best(every, self._scores.shape[1])
        self._scores[some], self._indices[some] = every.gather(1, chosen), named.gather(1, chosen)

    def slots(self) -> Slots:
        """The best ones in ascending order of their keys."""
        return in_order(self._scores, self._indices)


def _first_best(scores: Tensor, n: int) -> Tensor:
    """Where the best n of every row are, [rows, n] ascending; of equal ones the first."""
    last = scores.topk(n, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > last, scores == last
    room = n - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1].view(-1, n)


def _tiled_scores(iq: Tensor, tiles: Tensor, w: Tensor, scale: float, relu: bool) -> Tensor:
    """[rows, keys] of up to _TILE_ROWS rows, made full, and of tiles of keys [d, _TILE_KEYS]."""
    some, heads, width = iq.shape
    iq = F.pad(iq, (0, 0, 0, 0, 0, _TILE_ROWS - some)).reshape(-1, width)
    w = F.pad(w, (0, 0, 0, _TILE_ROWS - some))
    found = [_over_heads((iq @ tile).view(_TILE_ROWS, heads, _TILE_KEYS), w, scale, relu) for tile in tiles]
    return torch.cat(found, 1)[:some]


def _over_heads(s: Tensor, w: Tensor, scale: float, relu: bool) -> Tensor:
    """The weighted sum over heads of [rows, heads, keys]."""
    if relu:
        s = s.relu()
    return (s * w[..., None]).sum(1) * scale
