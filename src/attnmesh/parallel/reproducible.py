"""The executors of reproducible=True: the bits of their results are the same for any ranks, layout and schedule.

Keys are gathered, and every row visits them in ascending order (`ops.dense.reproducible`). A rank computes whole leaves
of queries, which ranks exchange first where a layout divides leaves, and sends gradients of keys as nodes of the tree
over leaves (`plan.leaves`). Ulysses has all rows of a head, and all query heads of a kv head, on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.comm.base import post
from attnmesh.core import ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.tree import Node, total
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, contiguous_last_dim
from attnmesh.ops.dense.reproducible import gradients, sink_gradients, sum_of_sequences
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.allgather import AllGather, PendingRows, ReceivedRows, other_ranks, receive
from attnmesh.parallel.executor import Executor, ExecutorConfig, RowLayout, copy_rows
from attnmesh.parallel.ulysses import Ulysses, UlyssesAllGather
from attnmesh.plan.allgather import gather_plan
from attnmesh.plan.leaves import LeafPlan, leaf_plan, leaf_size
from attnmesh.plan.shards import Piece, Shards, pieces


@dataclass(frozen=True)
class ReproducibleAllGather(AllGather):
    """The executor of "allgather" with reproducible=True. Its gradient of sinks is on rank 0, and 0 on other ranks."""

    reproducible = True
    leaves: LeafPlan = field(kw_only=True)
    return_lse: bool = field(kw_only=True)

    @classmethod
    def build(cls, config: ExecutorConfig) -> ReproducibleAllGather:
        """The executor over all ranks."""
        return cls.over(config.shards, config, config.groups.all_ranks)

    @classmethod
    def over(cls, shards: Shards, config: ExecutorConfig, comm: Comm) -> ReproducibleAllGather:
        """The executor over the ranks of a group, which hold these shards."""
        leaves = leaf_plan(shards, leaf_size(config.device))
        plan = gather_plan(leaves.shards)
        return cls(plan, config.backend, comm, leaves=leaves, return_lse=config.return_lse)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """Exchange queries, gather keys and attend, and exchange the results."""
        (rows,) = self._to_leaves([q])
        state, _ = super().forward(rows, k, v, scores, sinks)
        if not self.leaves.moves:
            return state, (q, k, v)
        count = q.shape[2]
        (out,) = self._to_shards([state.out], count)
        if self.return_lse:
            (lse,) = self._to_shards([state.lse.unsqueeze(-1)], count)
        else:
            lse = state.lse.new_empty(q.shape[0], 0, count, 1)
        return State(out, lse.squeeze(-1)), (rows, k, v, *state)

    def recompute_saved(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, ...]:
        """Exchange the tensors again."""
        if not self.leaves.moves:
            return q, k, v
        (rows,), (out,) = self._to_leaves([q]), self._to_leaves([state.out])
        (lse,) = self._to_leaves([state.lse.unsqueeze(-1)])
        return rows, k, v, out, lse.squeeze(-1)

    def gradients(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, sinks: Tensor | None,
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of q, k, v and sinks; None for those that are not needed."""
        count = result.grad_out.shape[2]
        if self.leaves.moves:
            result = self._result_in_leaves(saved[3:], result)
        grads = self.backward(saved[:3], result, scores, needs_grad[:3])
        found = [None if grad is None else grad.finish() for grad in (grads.q, grads.k, grads.v)]
        if found[0] is not None and self.leaves.moves:
            (found[0],) = self._to_shards([found[0]], count)
        wants_sinks = needs_grad[3] and sinks is not None
        return [
            *found,
            self._sink_gradient(saved, result, scores, sinks) if wants_sinks and sinks is not None else None,
        ]

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """The gradients of the queries in whole leaves, and of this rank's keys."""
        q, k, v = saved
        if not any(needs_grad):
            return Grads(None, None, None)
        program = self._program(q, k, v, scores)
        nodes = self.leaves.nodes[self.comm.rank]
        dtype = accumulation_dtype(k.dtype)
        dqs, keys = [], torch.zeros(RowLayout.of(k, v).shape(k.shape[2]), dtype=dtype, device=k.device)
        for call, group in self._gathered(program, q, k, v, scores):
            heads = group.q_heads
            part = Result(
                result.out[:, heads], result.lse[:, heads], result.grad_out[:, heads],
                None if result.grad_lse is None else result.grad_lse[:, heads],
            )  # fmt: skip
            found = gradients(call, part, needs_grad, nodes)
            if found.q is not None:
                dqs.append(found.q)
            if needs_grad[1] or needs_grad[2]:
                keys[:, :, group.kv_heads] = self._sum_of_nodes(call, found.k, found.v, k.shape[2])
        dq = GradAccumulator.from_total(torch.cat(dqs, 1), q.dtype) if needs_grad[0] else None
        width = k.shape[3]
        dk, dv = (
            GradAccumulator.from_total(part.permute(1, 2, 0, 3), k.dtype) if need else None
            for part, need in zip((keys[..., :width], keys[..., width:]), needs_grad[1:], strict=True)
        )
        return Grads(dq, dk, dv)

    def _sum_of_nodes(
        self, call: Call, dk: Sequence[Tensor | None], dv: Sequence[Tensor | None], own_rows: int
    ) -> Tensor:  # fmt: skip
        """Send each node of this rank to the owners of the keys; the sum of the nodes of all ranks for own keys."""
        comm, messages = self.comm, self._node_messages
        layout, dtype, device = RowLayout.of(call.k, call.v), accumulation_dtype(call.k.dtype), call.k.device
        sends, recvs, nbytes = [], [], 0
        parts: list[dict[Node, Tensor]] = [{} for _ in messages.runs]  # for each run of own keys

        def add(node: Node, rows: range, value: Tensor) -> None:
            for run, nodes in zip(messages.runs, parts, strict=True):
                if rows == run:
                    nodes[node] = value
                elif rows.start in run:
                    if node not in nodes:
                        nodes[node] = torch.zeros(layout.shape(len(run)), dtype=dtype, device=device)
                    nodes[node][rows.start - run.start : rows.stop - run.start] = value

        for sent, *sums in zip(messages.sent, dk, dv, strict=True):
            seen = torch.empty(layout.shape(sent.rows), dtype=dtype, device=device)
            for view, x in zip(layout.parts(range(sent.rows)), sums, strict=True):
                part, at = torch.as_strided(seen, *view), 0
                if x is None:
                    part.zero_()
                    continue
                for rows in sent.seen:
                    copy_rows(part[:, :, at : at + len(rows)], x[:, :, rows.start : rows.stop : rows.step])
                    at += len(rows)
            for piece in sent.kept:
                add(sent.node, piece.rows, torch.as_strided(seen, *layout.rows(piece.to)))
            for piece, target in sent.pieces if layout.elements else ():
                value = torch.as_strided(seen, *layout.rows(piece.to))
                sends.append((value.contiguous(), target))
                nbytes += value.numel() * dtype.itemsize
        arriving = []
        for node, rows, source in messages.received if layout.elements else ():
            buffer = comm.buffer(layout.shape(len(rows)), dtype=dtype, device=device)
            recvs.append((buffer, source))
            arriving.append((node, rows, buffer))
        post(comm, sends, recvs, nbytes).wait()
        for node, rows, buffer in arriving:
            add(node, rows, buffer)
        found = torch.zeros(layout.shape(own_rows), dtype=dtype, device=device)
        for run, nodes in zip(messages.runs, parts, strict=True):
            if nodes:  # 0.0 for -0.0, which depends on the nodes that have rows of zeros
                torch.add(total(nodes), 0.0, out=found[run.start : run.stop])
        return found

    @cached_property
    def _node_messages(self) -> _NodeMessages:
        plan, rank = self.leaves, self.comm.rank
        keys, gathered = plan.given.keys, self.plan.needed(rank)
        sent = []
        for node in plan.nodes[rank]:
            seen = plan.seen(node)
            rows = ranges.merged(piece.to for piece in pieces(seen, gathered))
            to = [(piece, target) for target in other_ranks(self.comm) for piece in pieces(keys[target], seen)]
            sent.append(_SentNode(node, rows, pieces(keys[rank], seen), tuple(to)))
        received = (
            (node, piece.rows, source)
            for source in other_ranks(self.comm)
            for node in plan.nodes[source]
            for piece in pieces(keys[rank], plan.seen(node))
        )
        ends = list(accumulate(map(len, keys[rank]), initial=0))
        runs = tuple(range(start, stop) for start, stop in pairwise(ends))
        return _NodeMessages(runs, tuple(sent), tuple(received))

    def _sink_gradient(self, saved: tuple[Tensor, ...], result: Result, scores: Scores, sinks: Tensor) -> Tensor:
        """The whole gradient on rank 0, and 0 on other ranks, so that any sum over ranks has the same bits."""
        q, k, v = (contiguous_last_dim(x) for x in saved[:3])
        comm, rank, nodes = self.comm, self.comm.rank, self.leaves.all_nodes
        counts = [len(nodes[source]) for source in range(comm.world)]
        call = Call(q, k, v, self.plan.patch(rank), scores)
        found = sink_gradients(call, result, sinks, nodes[rank]) if counts[rank] else []
        dtype = accumulation_dtype(q.dtype)
        mine = torch.stack(found) if found else torch.zeros(0, *q.shape[:2], dtype=dtype, device=q.device)
        shape = mine.shape[1:]
        buffers = [comm.buffer((count, *shape), dtype=dtype, device=q.device) for count in counts]
        if rank:
            post(comm, [(mine, 0)] if mine.numel() else [], [], mine.numel() * dtype.itemsize).wait()
            return torch.zeros_like(sinks)
        post(comm, [], [(x, source) for source, x in enumerate(buffers) if source and x.numel()], 0).wait()
        parts = {
            node: value
            for source, values in enumerate([mine, *buffers[1:]])
            for node, value in zip(nodes[source], values.unbind(0), strict=True)
        }
        if not parts:
            return torch.zeros_like(sinks)
        return sum_of_sequences(total(parts).add_(0.0)).to(sinks.dtype)

    def _result_in_leaves(self, saved: Sequence[Tensor], result: Result) -> Result:
        out, lse = saved
        (grad_out,) = self._to_leaves([result.grad_out])
        grad_lse = None
        if self.return_lse:  # even if nothing depends on it on this rank: on other ranks something may
            own = torch.zeros_like(result.lse) if result.grad_lse is None else result.grad_lse
            (grad_lse,) = self._to_leaves([own.unsqueeze(-1)])
            grad_lse = grad_lse.squeeze(-1)
        return Result(out, lse, grad_out, grad_lse)

    # Rows of queries between the shards of the layout and whole leaves.

    def _to_leaves(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        plan, rank = self.leaves, self.comm.rank
        if not plan.moves:
            return tensors
        every = range(self.comm.world)
        sent = [(piece.rows, peer) for peer in every for piece in plan.row_pieces(rank, peer)]
        received = [(piece.to, peer) for peer in every for piece in plan.row_pieces(peer, rank)]
        return self._exchange(tensors, sent, received, ranges.size(plan.shards.queries[rank]))

    def _to_shards(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        plan, rank = self.leaves, self.comm.rank
        every = range(self.comm.world)
        sent = [(piece.to, peer) for peer in every for piece in plan.row_pieces(peer, rank)]
        received = [(piece.rows, peer) for peer in every for piece in plan.row_pieces(rank, peer)]
        return self._exchange(tensors, sent, received, count)

    def _exchange(
        self, tensors: Sequence[Tensor], sent: Sequence[tuple[range, int]], received: Sequence[tuple[range, int]],
        count: int,
    ) -> list[Tensor]:  # fmt: skip
        """Rows of tensors [B, H, n, width] of this rank and others: `sent` of own ones, `received` of the results."""
        first, comm, layout = tensors[0], self.comm, RowLayout.of(*tensors)
        packed = first.new_empty(layout.shape(first.shape[2]))
        for view, x in zip(layout.parts(range(first.shape[2])), tensors, strict=True):
            torch.as_strided(packed, *view).copy_(x)
        found = comm.buffer(layout.shape(count), dtype=first.dtype, device=first.device)
        messages = [
            ReceivedRows(layout.rows(rows), rows.step == 1, peer) for rows, peer in received if peer != comm.rank
        ]
        recvs, copies = receive(messages if layout.elements else [], found, comm)
        sends = [
            (torch.as_strided(packed, *layout.rows(rows)).contiguous(), peer)
            for rows, peer in sent if peer != comm.rank and layout.elements
        ]  # fmt: skip
        pending = post(comm, sends, recvs, sum(x.numel() for x, _ in sends) * first.dtype.itemsize)
        own = ([rows for rows, peer in each if peer == comm.rank] for each in (received, sent))
        for target, source in zip(*own, strict=True):
            rows_here = torch.as_strided(packed, *layout.rows(source))
            torch.as_strided(found, *layout.rows(target)).copy_(rows_here)
        return PendingRows(pending, copies, found, layout.parts(range(count))).wait()


class ReproducibleUlysses(Ulysses):
    """The executor of "ulysses" with reproducible=True."""

    whole_groups = True

    @classmethod
    def _inner(cls, shards: Shards, config: ExecutorConfig, comm: Comm) -> Executor:
        return ReproducibleAllGather.over(shards, config, comm)

    def gradients(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, sinks: Tensor | None,
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of q, k, v and sinks. The gradient of a sink is on the rank with its head, and 0 elsewhere."""
        wants_sinks = needs_grad[3] and sinks is not None
        d_sinks = torch.zeros_like(sinks) if wants_sinks and sinks is not None else None
        parts = []
        for more, part, of_heads, heads in self._segments(saved, result, scores):
            mine = None if sinks is None else sinks[heads]
            *grads, d_mine = self.inner.gradients(more, part, of_heads, mine, needs_grad)
            parts.append(Grads(*(None if x is None else GradAccumulator.from_total(x, x.dtype) for x in grads)))
            if d_sinks is not None and d_mine is not None:
                d_sinks[heads] = d_mine
        found: list[Tensor | None] = [None] * 3
        if any(needs_grad[:3]):
            sums = self._returned(parts, saved, needs_grad[:3])
            found = [None if grad is None else grad.finish() for grad in (sums.q, sums.k, sums.v)]
        return [*found, d_sinks]


class ReproducibleUlyssesAllGather(ReproducibleUlysses, UlyssesAllGather):
    """The executor of "ulysses+allgather" with reproducible=True."""


class _SentNode(NamedTuple):
    """A node of this rank: the gathered keys that its queries see, and which of them whom belong to."""

    node: Node
    seen: tuple[range, ...]
    kept: tuple[Piece, ...]
    pieces: tuple[tuple[Piece, int], ...]

    @property
    def rows(self) -> int:
        """The number of keys."""
        return sum(map(len, self.seen))


class _NodeMessages(NamedTuple):
    """The nodes that a rank sends, and the rows of its own keys, which are in runs, that it receives nodes for."""

    runs: tuple[range, ...]
    sent: tuple[_SentNode, ...]
    received: tuple[tuple[Node, range, int], ...]
