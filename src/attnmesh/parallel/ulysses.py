"""Ulysses: an all-to-all gives each rank all rows of some heads; a second one returns the results.

Head counts need not divide by the number of ranks: shares of query heads differ by at most one, and a kv head whose
query heads are on several ranks goes to each of them. Attention between the two exchanges is an executor of its own: on
one level no communication is left; on two levels it is a ring or an all-gather between ranks with the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm, SubComm
from attnmesh.comm.base import post
from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Call, Grads, Result, Scores
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.allgather import AllGather, PendingRows, ReceivedRows, other_ranks, receive
from attnmesh.parallel.executor import Executor, ExecutorConfig, RowLayout, View, copy_rows
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
    comm: NodeGroups  # all ranks, of other nodes too
    return_lse: bool  # the lse and its gradient are sent only if it is returned

    within_nodes: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = False

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
        shares = self._head_shares(q, k)
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
        shares = self._head_shares(q, k)
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
        segments = self._segments(saved, result, scores)
        grads = [self.inner.backward(more, part, of_heads, needs_grad) for more, part, of_heads, _ in segments]
        return self._returned(grads, saved, needs_grad)

    def _head_shares(self, q: Tensor, k: Tensor) -> _HeadShares:
        comm = self.keys.comm
        return _head_shares(q.shape[1], k.shape[1], comm.world, comm.rank, self.whole_groups)

    def _segments(self, saved: tuple[Tensor, ...], result: Result, scores: Scores) -> list[_SegmentResult]:
        """What each segment of heads saved, and its result, once the gradients of out and lse have been exchanged."""
        q, k, _, *by_segment = saved
        shares = self._head_shares(q, k)
        (grad_out,) = self.queries.to_heads([result.grad_out], shares.q).wait()
        grad_lse = None
        if self.return_lse:  # even if nothing depends on it on this rank: on other ranks something may
            own = torch.zeros_like(result.lse) if result.grad_lse is None else result.grad_lse
            (grad_lse,) = self.queries.to_heads([own.unsqueeze(-1)], shares.q).wait()
            grad_lse = grad_lse.squeeze(-1)
        found = []
        for at, (heads, _) in enumerate(shares.segments):
            size = len(by_segment) // len(shares.segments)
            out, lse, *more = by_segment[at * size : (at + 1) * size]
            part = Result.of(out, lse, _heads(grad_out, heads), None if grad_lse is None else _heads(grad_lse, heads))
            mine = shares.head_slice(heads)
            found.append(_SegmentResult(tuple(more), part, scores.of_heads(mine), mine))
        return found

    def _returned(self, grads: Sequence[Grads], saved: tuple[Tensor, ...], needs_grad: Sequence[bool]) -> Grads:
        """The gradients of this rank's rows from the gradients of its segments of heads."""
        q, k, v = saved[:3]
        shares = self._head_shares(q, k)
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
        if len(parts) == 1:
            return parts[0]
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


class _Shards(NamedTuple):
    """The rows of this rank, of the heads of every rank, in one buffer: the shards of ranks one after another."""

    size: int  # elements
    layouts: tuple[RowLayout, ...]
    begins: tuple[int, ...]  # elements
    parts: tuple[tuple[tuple[slice | tuple[int, ...], View], ...], ...]
    """Of every tensor [B, H, n, width]: some heads, or another shape of all of it, and where that is in the buffer."""

    @classmethod
    def of(cls, layout: RowLayout, heads: tuple[range, ...], rows: int) -> _Shards:
        """The shards of messages of all heads in a layout, for the heads of every rank."""
        layouts = tuple(layout.with_heads(len(share)) for share in heads)
        *begins, size = accumulate((rows * each.elements for each in layouts), initial=0)
        width, each = sum(layout.widths), len(heads[0])
        parts: list[tuple[tuple[slice | tuple[int, ...], View], ...]] = []
        for i, part in enumerate(layout.widths):
            views = [_moved(one.parts(range(rows))[i], begin) for one, begin in zip(layouts, begins, strict=True)]
            if heads == tuple(range(at * each, (at + 1) * each) for at in range(len(heads))):  # one copy for all
                shape = layout.batch, len(heads), each, rows, part
                strides = each * width, rows * layouts[0].elements, width, layouts[0].elements, 1
                parts.append(((shape, (shape, strides, views[0][2])),))
            else:
                parts.append(tuple((_slice(share), view) for share, view in zip(heads, views, strict=True)))
        return cls(size, layouts, tuple(begins), tuple(parts))

    def rows(self, rank: int, rows: range) -> View:
        """Some rows of the shard of a rank."""
        return _moved(self.layouts[rank].rows(rows), self.begins[rank])


def _moved(view: View, by: int) -> View:
    return view[0], view[1], view[2] + by


class _ToHeads(NamedTuple):
    """The messages of rows of all heads for all rows of some heads, as views of buffers."""

    shape: tuple[int, ...]  # of the gathered rows
    gathered: tuple[View, ...]
    packed: _Shards
    sends: tuple[tuple[View, int], ...]
    recvs: tuple[ReceivedRows, ...]
    local: tuple[tuple[View, View], ...]  # where this rank's own rows are gathered, and where they are packed
    elements: int  # sent


class _ToRows(NamedTuple):
    """The messages of all rows of some heads for rows of all heads, as views of buffers."""

    shape: tuple[int, ...]  # of this rank's heads
    packed: tuple[View, ...]
    sends: tuple[tuple[View, bool, int], ...]  # with whether the rows are contiguous
    received: _Shards
    recvs: tuple[tuple[View, int], ...]
    local: tuple[tuple[View, View], ...]  # of this rank's heads: where they are received, and packed
    results: tuple[tuple[int, ...], ...]  # shapes
    again: tuple[int, ...]  # how many heads of every rank have been received from ranks before it
    elements: int  # sent


@dataclass(frozen=True)
class HeadExchange:
    """The all-to-all between rows and heads of ranks that hold the positions `held`, by rank.

    Together they hold the positions `whole`, in ascending order.
    """

    held: tuple[Ranges, ...]
    whole: Ranges
    comm: Comm
    _routes: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to_heads(self, tensors: Sequence[Tensor], heads: tuple[range, ...]) -> PendingRows:
        """Start to gather all rows of this rank's heads, [B,h,rows,width], from shards [B,H,n,width].

        `heads` is by rank. Widths may differ.
        """
        first, comm, as_strided = tensors[0], self.comm, torch.as_strided
        key = "heads", heads, first.shape[:2], *(x.shape[3] for x in tensors)
        route: _ToHeads = self._routes.get(key) or self._routes.setdefault(key, self._to_heads(tensors, heads))
        gathered = comm.buffer(route.shape, dtype=first.dtype, device=first.device)
        recvs, copies = receive(route.recvs, gathered, comm)
        packed = torch.empty(route.packed.size, dtype=first.dtype, device=first.device)
        for x, parts in zip(tensors, route.packed.parts, strict=True):
            for which, view in parts:
                copy_rows(as_strided(packed, *view), x[:, which] if isinstance(which, slice) else x.view(which))
        sends = [(as_strided(packed, *view), peer) for view, peer in route.sends]
        pending = post(comm, sends, recvs, route.elements * first.dtype.itemsize)
        for target, source in route.local:
            as_strided(gathered, *target).copy_(as_strided(packed, *source))
        return PendingRows(pending, copies, gathered, route.gathered)

    def _to_heads(self, tensors: Sequence[Tensor], heads: tuple[range, ...]) -> _ToHeads:
        rank, others, layout = self.comm.rank, other_ranks(self.comm), RowLayout.of(*tensors)
        mine, own = layout.with_heads(len(heads[rank])), pieces(self.held[rank], self.whole)
        rows = ranges.size(self.whole)
        packed = _Shards.of(layout, heads, ranges.size(self.held[rank]))
        received = [(piece, source) for source in others for piece in pieces(self.held[source], self.whole)]
        sent = [(piece.rows, peer) for peer in others for piece in own if packed.layouts[peer].elements]
        return _ToHeads(
            mine.shape(rows), mine.parts(range(rows)), packed,
            sends=tuple((packed.rows(peer, sent_rows), peer) for sent_rows, peer in sent),
            recvs=tuple(
                ReceivedRows(mine.rows(piece.to), piece.in_place, source)
                for piece, source in received if mine.elements
            ),
            local=tuple((mine.rows(piece.to), packed.rows(rank, piece.rows)) for piece in own),
            elements=sum(len(sent_rows) * packed.layouts[peer].elements for sent_rows, peer in sent),
        )  # fmt: skip

    def to_rows(self, tensors: Sequence[Tensor], heads: tuple[range, ...], all_heads: int) -> list[Tensor]:
        """This rank's rows of all heads, [B,H,n,width], from all rows of this rank's heads [B,h,rows,width].

        Heads that several ranks have are summed, in rank order; others are copied.
        """
        first, comm, as_strided = tensors[0], self.comm, torch.as_strided
        key = "rows", heads, first.shape[:2], all_heads, *(x.shape[3] for x in tensors)
        route: _ToRows = self._routes.get(key) or self._routes.setdefault(key, self._to_rows(tensors, heads, all_heads))
        dtype, device = first.dtype, first.device
        packed = torch.empty(route.shape, dtype=dtype, device=device)
        for view, x in zip(route.packed, tensors, strict=True):
            copy_rows(as_strided(packed, *view), x)
        sends = [
            (as_strided(packed, *view) if is_contiguous else as_strided(packed, *view).contiguous(), peer)
            for view, is_contiguous, peer in route.sends
        ]
        received = comm.buffer((route.received.size,), dtype=dtype, device=device)
        recvs = [(as_strided(received, *view), peer) for view, peer in route.recvs]
        pending = post(comm, sends, recvs, route.elements * first.dtype.itemsize)
        for target, source in route.local:
            as_strided(received, *target).copy_(as_strided(packed, *source))
        pending.wait()
        results = [torch.empty(shape, dtype=dtype, device=device) for shape in route.results]
        for result, parts in zip(results, route.received.parts, strict=True):
            for (which, view), again in zip(parts, route.again, strict=False):
                part = as_strided(received, *view)
                if not isinstance(which, slice):
                    result.view(which).copy_(part)
                elif not again:
                    result[:, which].copy_(part)
                else:
                    first_new = which.start + again
                    result[:, which.start : first_new] += part[:, :again]
                    result[:, first_new : which.stop] = part[:, again:]
        return results

    def _to_rows(self, tensors: Sequence[Tensor], heads: tuple[range, ...], all_heads: int) -> _ToRows:
        rank, others, layout = self.comm.rank, other_ranks(self.comm), RowLayout.of(*tensors)
        own, rows = pieces(self.held[rank], self.whole), ranges.size(self.held[rank])
        received = _Shards.of(layout.with_heads(all_heads), heads, rows)
        sent = [(piece, peer) for peer in others for piece in pieces(self.held[peer], self.whole) if layout.elements]
        again, assigned = [], 0  # heads below this one have a value already
        for share in heads:
            again.append(max(0, min(share.stop, assigned) - share.start))
            assigned = max(assigned, share.stop)
        return _ToRows(
            layout.shape(ranges.size(self.whole)), layout.parts(range(ranges.size(self.whole))),
            sends=tuple((layout.rows(piece.to), piece.in_place, peer) for piece, peer in sent),
            received=received,
            recvs=tuple(
                (received.rows(peer, piece.rows), peer)
                for peer in others for piece in own if received.layouts[peer].elements
            ),
            local=tuple((received.rows(rank, piece.rows), layout.rows(piece.to)) for piece in own),
            results=tuple((x.shape[0], all_heads, rows, x.shape[3]) for x in tensors),
            again=tuple(again), elements=sum(len(piece.rows) for piece, _ in sent) * layout.elements,
        )  # fmt: skip


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)


class _SegmentResult(NamedTuple):
    """A segment of heads in the backward."""

    saved: tuple[Tensor, ...]
    result: Result
    scores: Scores
    heads: slice  # among all query heads


class _HeadShares(NamedTuple):
    """The heads of every rank after the all-to-all."""

    q: tuple[range, ...]
    kv: tuple[range, ...]
    own_q: range
    segments: tuple[Segment, ...]  # of this rank
    replicated: bool  # whether some kv head is on several ranks

    def head_slice(self, heads: range) -> slice:
        """These query heads of this rank among all query heads."""
        return slice(self.own_q.start + heads.start, self.own_q.start + heads.stop)


@lru_cache(maxsize=256)
def _head_shares(q_heads: int, kv_heads: int, world: int, rank: int, whole_groups: bool) -> _HeadShares:
    shares = [head_share(q_heads, kv_heads, world, each, whole_groups=whole_groups) for each in range(world)]
    of_all = tuple(share.q for share in shares), tuple(share.kv for share in shares)
    is_replicated = not whole_groups and replicated(q_heads, kv_heads, world)
    return _HeadShares(*of_all, shares[rank].q, shares[rank].segments, is_replicated)


def _heads(x: Tensor, heads: range) -> Tensor:
    return x[:, heads.start : heads.stop]
