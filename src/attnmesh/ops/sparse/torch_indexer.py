"""The lightning indexer in torch operations, on any device: the CPU's backend.

Scores of the top-k come in tiles of one shape, whatever the lengths: BLAS sums in an order that depends on shapes, and
a key's score must be the same number in whichever block, shard or batch it is met.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.canonical import Slots
from attnmesh.ops.sparse.mask import Rows
from attnmesh.ops.sparse.select import in_order
from attnmesh.ops.sparse.torch_gather import parts

_TILE_ROWS, _TILE_KEYS = 8, 128


def scores_at(iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, *, scale: float, relu: bool) -> Tensor:
    """[s_q, topk], -inf where a slot is not valid."""
    dtype = accumulation_dtype(iq.dtype)
    scores = iq.new_empty(indices.shape, dtype=dtype)
    for part in parts(ik, indices, rows, iq.shape[1] + iq.shape[2]):
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
    for part in parts(ik, indices, rows, iq.shape[1] + iq.shape[2]):
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
