"""KL(p || softmax(scores)) of every row over all the keys it sees, a stretch of keys at a time.

With mass m = sum p, a row's loss is sum(p log p) / m - log m - sum(p I) / m + log sum exp(I): sums over keys, so that
one pass is enough. The backward takes a second one: softmax(I) - p / m needs both normalizations first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.indexer import Indexing
from attnmesh.ops.sparse.mask import Rows
from attnmesh.ops.sparse.target import AttentionTarget

_MOST_SLOTS = 1 << 23  # of all rows at a time


def dense_kl(call: Indexing, target: AttentionTarget, rows: Rows) -> Tensor:
    """[s_q], differentiable in the indexer's tensors."""
    loss: Tensor = _DenseKL.apply(call.iq, call.ik, call.w, call, target, rows)  # type: ignore[no-untyped-call]
    return loss


class Sums:
    """What the loss of every row is made of, over the keys met so far: `log_z` and `mass` normalize I and p."""

    def __init__(self, iq: Tensor) -> None:
        wide = accumulation_dtype(iq.dtype)
        self.mass, self._p_log_p, self._p_scores = (iq.new_zeros(iq.shape[0], dtype=wide) for _ in range(3))
        self.log_z = torch.full_like(self.mass, -torch.inf)

    def meet(self, p: Tensor, scores: Tensor) -> None:
        """Add keys: their mass, and their scores, -inf where they are not seen."""
        p = p.to(scores.dtype)
        self.log_z = torch.logaddexp(self.log_z, torch.logsumexp(scores, -1))
        self.mass += p.sum(-1)
        self._p_log_p += torch.special.xlogy(p, p).sum(-1)
        self._p_scores += torch.where(p > 0, p * scores, 0.0).sum(-1)

    def loss(self) -> Tensor:
        """[s_q]; a row without mass costs nothing."""
        some_mass = torch.where(self.mass > 0, self.mass, 1.0)
        loss = (self._p_log_p - self._p_scores) / some_mass - some_mass.log() + self.log_z
        return torch.where(self.mass > 0, loss, 0.0)


def score_gradient(p: Tensor, scores: Tensor, log_z: Tensor, mass: Tensor, grad: Tensor) -> Tensor:
    """What the loss of each row says about the scores of some keys, [s_q, keys]."""
    counts = (mass > 0)[:, None]
    some_mass = torch.where(mass > 0, mass, 1.0)[:, None]
    return torch.where(counts, torch.exp(scores - log_z[:, None]) - p.to(scores.dtype) / some_mass, 0.0) * grad[:, None]


class Stretch(NamedTuple):
    """Some of the keys, each of them a slot of every row: `indices` take no memory, `rows` say where each row stops."""

    keys: slice
    indices: Tensor
    rows: Rows


def stretches(s_q: int, s_kv: int, rows: Rows) -> Iterator[Stretch]:
    """All keys, in stretches."""
    n = max(128, _MOST_SLOTS // max(1, s_q))
    for begin in range(0, s_kv if s_q else 0, n):
        keys = slice(begin, min(begin + n, s_kv))
        first, size = rows.k_offset + begin, keys.stop - begin
        indices = torch.arange(first, first + size, dtype=torch.int32, device=rows.lo.device).expand(s_q, size)
        yield Stretch(keys, indices, rows._replace(slots=(rows.hi - first).clamp(0, size), k_offset=first))


class _DenseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: Indexing, target: AttentionTarget, rows: Rows
    ) -> Tensor:
        sums = Sums(iq)
        for keys, indices, some in stretches(iq.shape[0], ik.shape[0], rows):
            scores = call.backend.scores_at(iq, ik[keys], w, indices, some, scale=call.scale, relu=call.relu)
            sums.meet(target.over(keys).at(indices, some), scores)
        ctx.save_for_backward(iq, ik, w, sums.log_z, sums.mass)
        ctx.rest = call.without_tensors(), target, rows
        return sums.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w, log_z, mass = ctx.saved_tensors
        call, target, rows = ctx.rest
        d_iq, d_ik, d_w = (torch.zeros_like(x, dtype=log_z.dtype) for x in (iq, ik, w))
        for keys, indices, some in stretches(iq.shape[0], ik.shape[0], rows):
            scores = call.backend.scores_at(iq, ik[keys], w, indices, some, scale=call.scale, relu=call.relu)
            found = call.backend.stretch_backward(
                iq, ik[keys], w, some, score_gradient(target.over(keys).at(indices, some), scores, log_z, mass, grad),
                scale=call.scale, relu=call.relu, dtype=d_iq.dtype,
            )  # fmt: skip
            for total, part in zip((d_iq, d_ik[keys], d_w), found, strict=True):
                total += part
        return d_iq.to(iq.dtype), d_ik.to(ik.dtype), d_w.to(w.dtype), None, None, None
