"""Ulysses: ranks trade their rows of all heads for all rows of some heads, attend, and trade back.

Head counts need not divide: stretches of query heads differ by one, and a kv head whose readers fall to several ranks
goes to each of them. What happens between the two trades is a schedule of its own: on one level there is nothing left
to exchange; on a two-dimensional mesh, a ring or a gathering among the ranks that have the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Call, Grads, Result
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.heads import HeadExchange
from attnmesh.parallel.message import heads_first
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.parallel.schedule import Schedule
from attnmesh.plan.ulysses import Segment, head_share, replicated


@dataclass(frozen=True)
class Ulysses:
    """The schedule that trades rows for heads."""

    queries: HeadExchange
    keys: HeadExchange
    between: Schedule  # attends with all rows of some heads
    comm: NodeGroups  # all of them, those of other nodes too
    lse: bool  # whether the lse is asked for: it and its gradient travel only then

    def calls(self, q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
        """What this rank would compute."""
        return list(self.between.calls(q, k, v))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[State, tuple[Tensor, ...]]:
        """There, attend, and back. What was traded is kept: the backward need not trade it again."""
        shares = _Shares.of(q, k, self.keys.comm)
        arriving_q, arriving_kv = self.queries.to_heads([q], shares.q), self.keys.to_heads([k, v], shares.kv)
        (q_all,), (k_all, v_all) = (heads_first(arriving.wait()) for arriving in (arriving_q, arriving_kv))
        kept = [torch.empty_like(x[:, :, :0]) for x in (q, k)]  # for their shapes
        outs = [q_all[:, :0]]
        lses = [torch.empty(q_all[:, :0].shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)]
        for heads, kv in shares.segments:
            state, more = self.between.forward(_heads(q_all, heads), _heads(k_all, kv), _heads(v_all, kv))
            outs.append(state.out)
            lses.append(state.lse)
            kept += (*state, *more)
        (out,) = self.queries.to_rows([torch.cat(outs, 1)], shares.q, q.shape[1])
        lse = lses[0]
        if self.lse:
            (lse,) = self.queries.to_rows([torch.cat(lses, 1).unsqueeze(-1)], shares.q, q.shape[1])
            lse = lse.squeeze(-1)
        return State(out, lse), tuple(kept)

    def kept_again(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, ...]:
        """Traded again."""
        shares = _Shares.of(q, k, self.keys.comm)
        arriving_q = self.queries.to_heads([q, state.out], shares.q)
        arriving_lse = self.queries.to_heads([state.lse.unsqueeze(-1)], shares.q)
        arriving_kv = self.keys.to_heads([k, v], shares.kv)
        (q_all, out), (lse,) = heads_first(arriving_q.wait()), heads_first(arriving_lse.wait())
        k_all, v_all = heads_first(arriving_kv.wait())
        kept = [torch.empty_like(x[:, :, :0]) for x in (q, k)]
        for heads, kv in shares.segments:
            part = State(_heads(out, heads), _heads(lse.squeeze(-1), heads))
            more = self.between.kept_again(_heads(q_all, heads), _heads(k_all, kv), _heads(v_all, kv), part)
            kept += (*part, *more)
        return tuple(kept)

    def backward(self, kept: tuple[Tensor, ...], result: Result, needed: Sequence[bool]) -> Grads:
        """The gradients make the same two trades."""
        q, k, *by_segment = kept
        shares = _Shares.of(q, k, self.keys.comm)
        (grad_out,) = heads_first(self.queries.to_heads([result.grad_out], shares.q).wait())
        grad_lse = None
        if self.lse:  # also where nothing depends on it here: elsewhere something may
            mine = torch.zeros_like(result.lse) if result.grad_lse is None else result.grad_lse
            (grad_lse,) = heads_first(self.queries.to_heads([mine.unsqueeze(-1)], shares.q).wait())
            grad_lse = grad_lse.squeeze(-1)
        found = []
        for at, (heads, _) in enumerate(shares.segments):
            size = len(by_segment) // len(shares.segments)
            out, lse, *more = by_segment[at * size : (at + 1) * size]
            back = Result.of(out, lse, _heads(grad_out, heads), None if grad_lse is None else _heads(grad_lse, heads))
            found.append(self.between.backward(tuple(more), back, needed))
        dq = dk = dv = None
        if needed[0]:
            parts = [grads.q.finish() for grads in found if grads.q is not None]
            (rows,) = self.queries.to_rows([self._joined(self.queries, parts, q, q.dtype)], shares.q, q.shape[1])
            dq = GradAccumulator.from_total(rows, q.dtype)
        if needed[1] or needed[2]:
            dk, dv = self._key_grads(found, k, shares)
        return Grads(dq, dk if needed[1] else None, dv if needed[2] else None)

    def _key_grads(self, found: Sequence[Grads], k: Tensor, shares: _Shares) -> list[GradAccumulator]:
        """dk and dv of this rank's rows; zeros for the one nobody asked for."""
        # Where several ranks read a kv head, parts of its gradient travel: in float32, rounded once they are summed.
        dtype = accumulation_dtype(k.dtype) if shares.replicated else k.dtype
        rows = ranges.size(self.keys.whole)

        def finished(grad: GradAccumulator | None, heads: range) -> Tensor:
            if grad is None:
                return torch.zeros(k.shape[0], len(heads), rows, k.shape[3], dtype=dtype, device=k.device)
            return grad.total() if shares.replicated else grad.finish()

        def side(name: str) -> Tensor:
            parts = [finished(getattr(grads, name), kv) for grads, (_, kv) in zip(found, shares.segments, strict=True)]
            return self._joined(self.keys, parts, k, dtype)

        return [
            GradAccumulator.from_total(rows, k.dtype)
            for rows in self.keys.to_rows([side("k"), side("v")], shares.kv, k.shape[1])
        ]

    def _joined(self, trade: HeadExchange, parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
        """The segments' results as one, [B, this rank's heads, all rows, D]; no heads at all is fine."""
        empty = torch.empty(like.shape[0], 0, ranges.size(trade.whole), like.shape[3], dtype=dtype, device=like.device)
        return torch.cat([empty, *parts], 1)


@dataclass(frozen=True)
class _Shares:
    """Which heads go where."""

    q: list[range]
    kv: list[range]
    segments: tuple[Segment, ...]  # of this rank
    replicated: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, comm: Comm) -> _Shares:
        heads = q.shape[1], k.shape[1], comm.world
        shares = [head_share(*heads, rank) for rank in range(comm.world)]
        sides = [share.q for share in shares], [share.kv for share in shares]
        return cls(*sides, shares[comm.rank].segments, replicated(*heads))


def _heads(x: Tensor, heads: range) -> Tensor:
    return x[:, heads.start : heads.stop]
