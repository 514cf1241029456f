"""Ulysses: an all-to-all gives each rank all rows of some heads; a second one returns the results.

Head counts need not divide by the number of ranks: shares of query heads differ by at most one, and a kv head whose
query heads are on several ranks goes to each of them. Attention between the two exchanges is an executor of its own: on
one level no communication is left; on two levels it is a ring or an all-gather between ranks with the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnmesh.comm import Comm, SubComm
from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Call, Grads, Result, Scores
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.allgather import AllGather, PendingRows, RowReceiver, other_ranks, source_of, target_of
from attnmesh.parallel.executor import Executor, ExecutorConfig, pack, row_shape, unpack
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.parallel.ring import Ring
from attnmesh.plan.allgather import gather_plan
from attnmesh.plan.ring import ring_plan
from attnmesh.plan.shards import Shards, node_shards, pieces
from attnmesh.plan.ulysses import Segment, head_share, replicated


@dataclass(frozen=True)
class Ulysses(Executor):
    """The executor of "ulysses": the all-to-all is over all ranks, and no communication is left between them."""

    queries: HeadExchange
    keys: HeadExchange
    inner: Executor  # attends with all rows of some heads
    comm: NodeGroups  # all ranks, including those of other nodes
    return_lse: bool  # the lse and its gradient are sent only if it is returned

    within_nodes: ClassVar[bool] = False

    @classmethod
    def build(cls, config: ExecutorConfig) -> Ulysses:
        """The executor over all ranks."""
        groups = config.groups
        all_ranks = groups.all_ranks
        if cls.within_nodes:
            exchange, remaining = groups.intra_node, groups.inter_node
        else:
            exchange, remaining = all_ranks, SubComm(all_ranks, [all_ranks.rank])
        size = exchange.world
        shards = node_shards(config.shards, size)
        assert shards is not None, "the schedule refuses such shards"
        first = all_ranks.rank // size * size

        def head_exchange(held: tuple[Ranges, ...], whole: tuple[Ranges, ...]) -> HeadExchange:
            return HeadExchange(held[first : first + size], whole[remaining.rank], exchange)

        queries = head_exchange(config.shards.queries, shards.queries)
        keys = head_exchange(config.shards.keys, shards.keys)
        return cls(queries, keys, cls._inner(shards, config, remaining), groups, config.return_lse)

    @classmethod
    def _inner(cls, shards: Shards, config: ExecutorConfig, comm: Comm) -> Executor:
        return Ring(ring_plan(shards), config.backend, comm)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The calls of the inner executor."""
        return list(self.inner.calls(q, k, v, scores))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """All-to-all, attention, all-to-all. The exchanged tensors are saved, so that they are not exchanged again."""
        shares = _HeadShares.of(q, k, self.keys.comm)
        pending_q, pending_kv = self.queries.to_heads([q], shares.q), self.keys.to_heads([k, v], shares.kv)
        (q_all,), (k_all, v_all) = pending_q.wait(), pending_kv.wait()
        saved = [torch.empty_like(x[:, :, :0]) for x in (q, k, v)]  # for their shapes
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for heads, kv in shares.segments:
            mine = shares.head_slice(heads)
            state, more = self.inner.forward(
                _heads(q_all, heads), _heads(k_all, kv), _heads(v_all, kv), scores.of_heads(mine),
                None if sinks is None else sinks[mine],
            )  # fmt: skip
            outs.append(state.out)
            lses.append(state.lse)
            saved += (*state, *more)
        (out,) = self.queries.to_rows([self._joined(self.queries, outs, v, q.dtype)], shares.q, q.shape[1])
        dtype = accumulation_dtype(q.dtype)
        if not self.return_lse:
            return State(out, torch.empty(q.shape[0], 0, q.shape[2], dtype=dtype, device=q.device)), tuple(saved)
        columns = [lse.unsqueeze(-1) for lse in lses]
        (lse,) = self.queries.to_rows([self._joined(self.queries, columns, q[..., :1], dtype)], shares.q, q.shape[1])
        return State(out, lse.squeeze(-1)), tuple(saved)

    def recompute_saved(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, ...]:
        """Exchange the tensors again."""
        shares = _HeadShares.of(q, k, self.keys.comm)
        pending_q = self.queries.to_heads([q, state.out], shares.q)
        pending_lse = self.queries.to_heads([state.lse.unsqueeze(-1)], shares.q)
        pending_kv = self.keys.to_heads([k, v], shares.kv)
        (q_all, out), (lse,), (k_all, v_all) = pending_q.wait(), pending_lse.wait(), pending_kv.wait()
        saved = [torch.empty_like(x[:, :, :0]) for x in (q, k, v)]
        for heads, kv in shares.segments:
            part = State(_heads(out, heads), _heads(lse.squeeze(-1), heads))
            more = self.inner.recompute_saved(_heads(q_all, heads), _heads(k_all, kv), _heads(v_all, kv), part)
            saved += (*part, *more)
        return tuple(saved)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """The same two exchanges for the gradients."""
        q, k, v, *by_segment = saved
        shares = _HeadShares.of(q, k, self.keys.comm)
        (grad_out,) = self.queries.to_heads([result.grad_out], shares.q).wait()
        grad_lse = None
        if self.return_lse:  # even if nothing depends on it on this rank: on other ranks something may
            own = torch.zeros_like(result.lse) if result.grad_lse is None else result.grad_lse
            (grad_lse,) = self.queries.to_heads([own.unsqueeze(-1)], shares.q).wait()
            grad_lse = grad_lse.squeeze(-1)
        grads = []
        for at, (heads, _) in enumerate(shares.segments):
            size = len(by_segment) // len(shares.segments)
            out, lse, *more = by_segment[at * size : (at + 1) * size]
            part = Result.of(out, lse, _heads(grad_out, heads), None if grad_lse is None else _heads(grad_lse, heads))
            of_heads = scores.of_heads(shares.head_slice(heads))
            grads.append(self.inner.backward(tuple(more), part, of_heads, needs_grad))
        dq = dk = dv = None
        if needs_grad[0]:
            parts = [grad.q.finish() for grad in grads if grad.q is not None]
            (rows,) = self.queries.to_rows([self._joined(self.queries, parts, q, q.dtype)], shares.q, q.shape[1])
            dq = GradAccumulator.from_total(rows, q.dtype)
        if needs_grad[1] or needs_grad[2]:
            dk, dv = self._kv_grads(grads, k, v, shares)
        return Grads(dq, dk if needs_grad[1] else None, dv if needs_grad[2] else None)

    def _kv_grads(self, grads: Sequence[Grads], k: Tensor, v: Tensor, shares: _HeadShares) -> list[GradAccumulator]:
        """dk and dv of this rank's rows; zeros for one that is not needed."""
        # If several ranks read a kv head, its gradient is sent in parts: in float32, rounded after they are summed.
        dtype = accumulation_dtype(k.dtype) if shares.replicated else k.dtype
        rows = ranges.size(self.keys.whole)

        def joined(name: str, x: Tensor) -> Tensor:
            parts = []
            for of_segment, (_, heads) in zip(grads, shares.segments, strict=True):
                grad: GradAccumulator | None = getattr(of_segment, name)
                if grad is None:
                    shape = x.shape[0], len(heads), rows, x.shape[3]
                    parts.append(torch.zeros(shape, dtype=dtype, device=x.device))
                else:
                    parts.append(grad.total() if shares.replicated else grad.finish())
            return self._joined(self.keys, parts, x, dtype)

        returned = self.keys.to_rows([joined("k", k), joined("v", v)], shares.kv, k.shape[1])
        return [GradAccumulator.from_total(rows, k.dtype) for rows in returned]

    def _joined(self, exchange: HeadExchange, parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
        """The segments' results as one tensor [B, this rank's heads, all rows, width of `like`]; maybe of no heads."""
        rows = ranges.size(exchange.whole)
        empty = torch.empty(like.shape[0], 0, rows, like.shape[3], dtype=dtype, device=like.device)
        return torch.cat([empty, *parts], 1)


class UlyssesRing(Ulysses):
    """The executor of "ulysses+ring": the all-to-all is within a node, with a ring between nodes."""

    within_nodes = True


class UlyssesAllGather(Ulysses):
    """The executor of "ulysses+allgather": the all-to-all is within a node, with an all-gather between nodes."""

    within_nodes = True

    @classmethod
    def _inner(cls, shards: Shards, config: ExecutorConfig, comm: Comm) -> Executor:
        return AllGather(gather_plan(shards), config.backend, comm)


@dataclass(frozen=True)
class HeadExchange:
    """The all-to-all between rows and heads of ranks that hold the positions `held`, by rank.

    Together they hold the positions `whole`, in ascending order.
    """

    held: tuple[Ranges, ...]
    whole: Ranges
    comm: Comm

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[range]) -> PendingRows:
        """Start to gather all rows of this rank's heads, [B,h,rows,width], from shards [B,H,n,width].

        `heads` is by rank. Widths may differ.
        """
        rank, others = self.comm.rank, other_ranks(self.comm)
        gathered = self._message(ranges.size(self.whole), len(heads[rank]), tensors)
        receiver = RowReceiver(gathered, self.comm)
        for source in others:
            for piece in pieces(self.held[source], self.whole):
                receiver.expect(piece, source)
        own = pieces(self.held[rank], self.whole)
        sends = []
        for target in others:
            packed = pack([x[:, heads[target].start : heads[target].stop] for x in tensors])
            sends += [(source_of(piece, packed), target) for piece in own]
        pending = self.comm.exchange(sends, receiver.messages)
        for piece in own:
            for rows, x in zip(unpack(target_of(piece, gathered), tensors), tensors, strict=True):
                rows.copy_(x[:, heads[rank].start : heads[rank].stop, piece.rows.start : piece.rows.stop])
        return PendingRows(pending, receiver, tensors)

    def to_rows(self, tensors: Sequence[Tensor], heads: Sequence[range], all_heads: int) -> list[Tensor]:
        """This rank's rows of all heads, [B,H,n,width], from all rows of this rank's heads [B,h,rows,width].

        Heads that several ranks have are summed, in rank order; others are copied.
        """
        rank, others = self.comm.rank, other_ranks(self.comm)
        whole = pack(tensors)
        own = pieces(self.held[rank], self.whole)
        sends = [
            (target_of(piece, whole).contiguous(), target)
            for target in others
            for piece in pieces(self.held[target], self.whole)
        ]
        shards = [self._message(ranges.size(self.held[rank]), len(share), tensors) for share in heads]
        recvs = [(source_of(piece, shards[source]), source) for source in others for piece in own]
        pending = self.comm.exchange(sends, recvs)
        for piece in own:
            source_of(piece, shards[rank]).copy_(target_of(piece, whole))
        pending.wait()
        rows = ranges.size(self.held[rank])
        results = [
            torch.empty(x.shape[0], all_heads, rows, x.shape[3], dtype=x.dtype, device=x.device) for x in tensors
        ]
        assigned = 0  # heads below this one have a value already
        for share, shard in zip(heads, shards, strict=True):
            again = max(0, min(share.stop, assigned) - share.start)
            for result, part in zip(results, unpack(shard, tensors), strict=True):
                result[:, share.start : share.start + again] += part[:, :again]
                result[:, share.start + again : share.stop] = part[:, again:]
            assigned = max(assigned, share.stop)
        return results

    def _message(self, rows: int, heads: int, like: Sequence[Tensor]) -> Tensor:
        batch, _, width = row_shape(like)
        return self.comm.buffer((rows, batch, heads, width), dtype=like[0].dtype, device=like[0].device)


@dataclass(frozen=True)
class _HeadShares:
    """The heads of every rank after the all-to-all."""

    rank: int
    q: list[range]
    kv: list[range]
    segments: tuple[Segment, ...]  # of this rank
    replicated: bool  # whether some kv head is on several ranks

    def head_slice(self, heads: range) -> slice:
        """These query heads of this rank among all query heads."""
        first = self.q[self.rank].start
        return slice(first + heads.start, first + heads.stop)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, comm: Comm) -> _HeadShares:
        heads = q.shape[1], k.shape[1], comm.world
        shares = [head_share(*heads, rank) for rank in range(comm.world)]
        q_heads, kv_heads = [share.q for share in shares], [share.kv for share in shares]
        return cls(comm.rank, q_heads, kv_heads, shares[comm.rank].segments, replicated(*heads))


def _heads(x: Tensor, heads: range) -> Tensor:
    return x[:, heads.start : heads.stop]
