"""Sparse attention and its indexer row by row, for as many rows as there are: in float64, or plainly in less.

`attnmesh.ops.sparse.reference` has the scores of all keys in memory and loops over slots; here only the chosen keys of
some rows are, so that the sizes of a real model are a few seconds' work on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.ops.sparse.arguments import TopKIndices
from attnmesh.testing.errors import ROUNDING, assert_close

_ELEMENTS = 1 << 27  # of the tensors of some rows

Results = dict[str, Tensor]


def random_lengths(rows: int, topk: int, seed: int = 0) -> Tensor:
    """How many slots of each row are valid: any number, and often none, one, all, or at the edge of a tile of 64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, topk + 1, (rows,), generator=generator)
    edges = torch.tensor([0, 0, 1, 63, 64, 65, 128, 192, topk - 1, topk]).clamp(0, topk)
    odd = torch.randint(0, 2 * len(edges), (rows,), generator=generator)
    lengths = torch.where(odd < len(edges), edges[odd % len(edges)], lengths).int()
    lengths[1:2], lengths[2:3], lengths[-1:] = 0, topk, 1  # however few rows there are
    return lengths


@dataclass(frozen=True)
class ChosenKeys:
    """Attention of q [s_q, heads, d] over the keys kv [s_kv, d] in the valid slots of `indices` [s_q, topk]."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    valid: Tensor
    scale: float
    d_v: int
    sinks: Tensor | None = None

    @classmethod
    def draw(
        cls, s_q: int, s_kv: int, heads: int, d: int, d_v: int, topk: int, *, device: torch.device | str,
        dtype: torch.dtype, sinks: bool = False, seed: int = 0,
    ) -> ChosenKeys:  # fmt: skip
        """Rows of unequal numbers of slots. Keys that no valid slot names are NaN; slots past the last name one."""
        torch.manual_seed(seed)
        q = torch.randn(s_q, heads, d, device=device).to(dtype)
        kv = torch.randn(s_kv + 1, d, device=device).to(dtype)
        kv[s_kv] = torch.nan
        indices = torch.rand(s_q, s_kv, device=device).argsort(1)[:, :topk].int()
        valid = torch.arange(topk, device=device) < random_lengths(s_q, topk, seed).to(device)[:, None]
        used = torch.zeros(s_kv + 1, dtype=torch.bool, device=device)
        used[indices[valid].long()] = True
        kv[~used] = torch.nan
        given = torch.randn(heads, device=device) if sinks else None
        return cls(q, kv, indices.masked_fill(~valid, s_kv), valid, 2 * d**-0.5, d_v, given)

    @property
    def lengths(self) -> Tensor:
        """The number of valid slots of each row, which are its first ones."""
        return self.valid.sum(1).int()

    def rows(self, some: Tensor) -> ChosenKeys:
        """The same for some rows."""
        return replace(self, q=self.q[some], indices=self.indices[some], valid=self.valid[some])

    def parts(self) -> Iterator[Tensor]:
        """The numbers of the rows, as many at a time as fit."""
        per_row = self.indices.shape[1] * (2 * self.q.shape[2] + 4 * self.q.shape[1])
        yield from torch.arange(len(self.q), device=self.q.device).split(max(1, _ELEMENTS // per_row))

    def results(
        self, grad_out: Tensor, grad_lse: Tensor, *, keep: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> Results:
        """Out, lse, max_logits and the distribution summed over heads, of all rows or of those to `keep`; gradients.

        Those of keys and sinks are sums over all rows, always.
        """
        kept = torch.ones(len(self.q), dtype=torch.bool, device=self.q.device)
        if keep is not None:
            kept.fill_(False)[keep] = True
        d_kv = torch.zeros(self.kv.shape, dtype=_sum_dtype(dtype), device=self.kv.device)
        d_sinks = None if self.sinks is None else torch.zeros_like(self.sinks, dtype=_sum_dtype(dtype))
        found: dict[str, list[Tensor]] = {}
        for at in self.parts():
            part = self.rows(at)
            of_rows, d_keys, d_sink = part._backward(grad_out[at].to(dtype), grad_lse[at].to(dtype), dtype)
            d_kv.index_add_(0, part.keys.flatten(), d_keys.flatten(0, 1).to(d_kv.dtype))
            if d_sinks is not None:
                d_sinks += d_sink
            for name, x in of_rows.items():
                found.setdefault(name, []).append(x[kept[at]])
        whole = {name: torch.cat(parts) for name, parts in found.items()} | {"dkv": d_kv.to(dtype)}
        return whole if d_sinks is None else whole | {"dsinks": d_sinks.to(dtype)}

    @property
    def keys(self) -> Tensor:
        """The key of every slot; the first where a slot is not valid, which then has no weight."""
        return torch.where(self.valid, self.indices, 0).long()

    def _backward(self, grad_out: Tensor, grad_lse: Tensor, dtype: torch.dtype) -> tuple[Results, Tensor, Tensor]:
        """The results of rows, the gradients of the keys in their slots, and that of the sinks."""
        q, valid = self.q.to(dtype), self.valid[:, None]
        k = self.kv[self.keys].to(dtype).masked_fill(~self.valid[..., None], 0.0)
        v = k[..., : self.d_v]
        scores = (q @ k.mT * self.scale).masked_fill(~valid, -torch.inf)
        sinks = scores[..., :0] if self.sinks is None else self.sinks.to(dtype)[:, None].expand(len(q), -1, 1)
        every = torch.cat([scores, sinks], -1)
        some = every.amax(-1, keepdim=True) > -torch.inf
        lse = every.logsumexp(-1)
        weights = every.masked_fill(~some, 0.0).softmax(-1).masked_fill(~some, 0.0)
        p, p_sinks = weights[..., : valid.shape[-1]], weights[..., valid.shape[-1] :]
        out = p @ v
        delta = (out * grad_out).sum(-1) - grad_lse.masked_fill(lse.isinf(), 0.0)
        d_scores = p * (grad_out @ v.mT - delta[..., None])
        d_keys = d_scores.mT @ q * self.scale
        d_keys[..., : self.d_v] += p.mT @ grad_out
        of_rows = {"out": out, "lse": lse, "max_logits": scores.amax(-1), "distribution": p.sum(1)}
        return of_rows | {"dq": d_scores @ k * self.scale}, d_keys, -(p_sinks.sum(-1) * delta).sum(0)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of sums over rows: no implementation rounds them row by row."""
    return torch.promote_types(dtype, torch.float32)


def assert_results(actual: Results, plain: Results, exact: Results, dtype: torch.dtype) -> None:
    """Assert the error rule for every result; lse and max_logits, which are float32, are closer than that."""
    for name, found in actual.items():
        near, simple, right = (x.detach()[None, None] for x in (found, plain[name], exact[name]))
        assert_close(name, near, simple, right.double(), rounding=ROUNDING[dtype] * (4 if name == "dsinks" else 1))
        if name in ("lse", "max_logits"):
            off = (found.double() - exact[name]).abs().nan_to_num(nan=0.0)  # -inf in both
            assert (off <= 1e-4 * exact[name].abs().clamp(min=1.0)).all(), f"{name}: off by {off.max():.1e}"


# The indexer.


@dataclass(frozen=True)
class Indexer:
    """The indexer's scores of the keys ik [s_kv, d] for rows of iq [s_q, heads, d], with weights w [s_q, heads]."""

    iq: Tensor
    ik: Tensor
    w: Tensor
    scale: float

    def scores(self, rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Those of all keys for some rows, [rows, s_kv]."""
        return _scores(self.iq[rows].to(dtype), self.ik.to(dtype), self.w[rows].to(dtype), self.scale)

    def losses(
        self, chosen: ChosenKeys, target: Tensor, grad_loss: Tensor, *, dtype: torch.dtype = torch.float64
    ) -> Results:
        """KL(target || softmax(scores)) of every row over its valid slots, and the gradients of the indexer."""
        d_ik = torch.zeros(self.ik.shape, dtype=_sum_dtype(dtype), device=self.ik.device)
        found: dict[str, list[Tensor]] = {"loss": [], "d_iq": [], "d_w": []}
        for at in chosen.parts():
            keys, valid = chosen.rows(at).keys, chosen.valid[at]
            gathered = self.ik[keys].masked_fill(~valid[..., None], 0.0)
            iq, ik, w = (x.to(dtype).requires_grad_() for x in (self.iq[at], gathered, self.w[at]))
            scores = _scores(iq, ik, w, self.scale).masked_fill(~valid, -torch.inf)
            log_q = scores.masked_fill(~valid.any(1, keepdim=True), 0.0).log_softmax(-1)
            p = target[at].to(dtype)
            p = p / p.sum(1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
            terms = torch.where(p > 0, p * (p.clamp(min=torch.finfo(dtype).tiny).log() - log_q), 0.0)
            loss = terms.sum(1)
            d_iq, d_keys, d_w = torch.autograd.grad(loss, (iq, ik, w), grad_loss[at].to(dtype))
            d_ik.index_add_(0, keys.flatten(), d_keys.flatten(0, 1).to(d_ik.dtype))
            for name, x in (("loss", loss.detach()), ("d_iq", d_iq), ("d_w", d_w)):
                found[name].append(x)
        return {name: torch.cat(parts) for name, parts in found.items()} | {"d_ik": d_ik.to(dtype)}


def _scores(iq: Tensor, ik: Tensor, w: Tensor, scale: float) -> Tensor:
    """Of keys [s_kv, d] that all rows share, or [rows, keys, d]."""
    return scale * (w[..., None] * (iq @ ik.mT).relu()).sum(1)


def assert_topk(found: TopKIndices, indexer: Indexer, topk: int, lo: Tensor, hi: Tensor, rows: Tensor) -> None:
    """Assert that some rows selected the best of the keys lo <= j < hi, by their scores in float64.

    Keys whose scores differ by less than rounding may stand for each other. A key whose score is NaN is not selected.
    """
    key = torch.arange(len(indexer.ik), device=rows.device)
    for some in rows.split(32):
        scores = indexer.scores(some)
        seen = (key >= lo[some, None]) & (key < hi[some, None]) & ~scores.isnan()
        scores = scores.masked_fill(~seen, -torch.inf)
        indices, lengths = found.indices[some].long(), found.lengths[some]
        chosen = torch.arange(topk, device=rows.device) < lengths[:, None]
        assert torch.equal(lengths.long(), seen.sum(1).clamp(max=topk)), "lengths"
        assert (indices[~chosen] == -1).all(), "padding"
        if not chosen.any():
            continue
        assert (indices.diff(dim=1) > 0)[chosen[:, 1:]].all(), "keys do not ascend"
        kept = scores.gather(1, indices.clamp(min=0)).masked_fill(~chosen, torch.inf)
        assert (kept > -torch.inf).all(), "a key that the row does not see"
        near = 1e-4 * scores.abs().nan_to_num(posinf=0.0).amax(1).clamp(min=1.0)
        off = (found.scores[some].double() - kept).masked_fill(~chosen, 0.0).abs()
        assert (off <= near[:, None]).all(), f"scores: off by {off.max():.1e}"
        at = torch.where(chosen, indices, len(key))
        rest = torch.nn.functional.pad(scores, (0, 1)).scatter(1, at, -torch.inf)[:, :-1].amax(1)
        assert (kept.amin(1) >= rest - 2 * near).all(), "a better key is left"
