"""All-gather context parallelism: each rank receives the K and V that its queries attend to, a few kv heads at a time.

Groups of heads are independent: the K and V of the next group are in flight while attention over this group is
computed, and in the backward so are the gradients of the previous group. This takes two buffers for the gathered K and
V of one group; the backward gathers them again instead of saving them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.comm.base import Message
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense import blockwise
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, contiguous_last_dim
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.executor import Executor, ExecutorConfig, row_shape, two_buffers, unpack
from attnmesh.plan.allgather import GatherPlan, gather_plan, groups_that_fill, head_groups
from attnmesh.plan.shards import Piece


@dataclass(frozen=True)
class AllGather(Executor):
    """The executor of "allgather"."""

    plan: GatherPlan
    backend: str
    comm: Comm

    @classmethod
    def build(cls, config: ExecutorConfig) -> AllGather:
        """The executor over all ranks."""
        return cls(gather_plan(config.shards), config.backend, config.groups.all_ranks)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The call for one group of heads."""
        patch = self.plan.patch(self.comm.rank)
        return [Call(q, k, v, patch, scores)] if patch.blocks else []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """Gather and attend, one group of heads after another."""
        states = [
            blockwise.forward(
                [call], self.backend, allow_two_streams=not self.comm.shares_stream, recorder=self.comm.recorder,
                sinks=None if sinks is None else sinks[heads],
            )
            for call, heads, _ in self._groups(q, k, v, scores)
        ]  # fmt: skip
        if len(states) == 1:
            return states[0], (q, k, v)
        return State(*(torch.cat(parts, 1) for parts in zip(*states, strict=True))), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """Gather again; gradients of K and V return in float32 while the next group is computed."""
        q, k, v = saved
        q_grads = []
        grad_return = _GradReturn(k, v, self.plan, self.comm) if needs_grad[1] or needs_grad[2] else None
        for call, q_heads, kv_heads in self._groups(q, k, v, scores):
            part = Result(
                result.out[:, q_heads], result.lse[:, q_heads], result.grad_out[:, q_heads],
                None if result.grad_lse is None else result.grad_lse[:, q_heads],
            )  # fmt: skip
            wanted = [x if need else None for x, need in zip((call.q, call.k, call.v), needs_grad, strict=True)]
            (q_grad,), kv_grads = blockwise.backward(
                [call], part, self.backend, wanted, allow_two_streams=not self.comm.shares_stream,
                recorder=self.comm.recorder,
            )  # fmt: skip
            if needs_grad[0]:
                q_grads.append(q_grad.finish())
            if grad_return is not None:
                grad_return.send(kv_grads, kv_heads)
        dq = dk = dv = None
        if needs_grad[0]:
            dq = GradAccumulator.from_total(torch.cat(q_grads, 1) if len(q_grads) > 1 else q_grads[0], q.dtype)
        if grad_return is not None:
            totals = grad_return.finish(k.dtype)
            dk, dv = (total if need else None for total, need in zip(totals, needs_grad[1:], strict=True))
        return Grads(dq, dk, dv)

    def _groups(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Iterator[tuple[Call, slice, slice]]:
        """The call of every group of heads, once its K and V have arrived, with its query and kv heads."""
        q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
        q_per_kv = q.shape[1] // k.shape[1]
        patch = self.plan.patch(self.comm.rank)
        groups = head_groups(k.shape[1])
        if q.is_cuda:
            groups = head_groups(k.shape[1], groups_that_fill(self.plan.shards, q.shape[0], q.shape[1]))
        gather = _KVGather(k, v, max(map(len, groups)), self.plan, self.comm)
        pending = gather.start(0, groups[0])
        for at, heads in enumerate(groups):
            gathered_k, gathered_v = pending.wait()
            if at + 1 < len(groups):
                pending = gather.start(at + 1, groups[at + 1])
            q_heads = slice(heads.start * q_per_kv, heads.stop * q_per_kv)
            call = Call(q[:, q_heads], gathered_k, gathered_v, patch, scores.of_heads(q_heads))
            yield call, q_heads, slice(heads.start, heads.stop)


class _KVGather:
    """K and V of one group of heads after another, in two buffers: one to compute on, one to receive into."""

    def __init__(self, k: Tensor, v: Tensor, max_heads: int, plan: GatherPlan, comm: Comm) -> None:
        self._own, self._plan, self._comm = (k, v), plan, comm
        largest = [x[:, :max_heads] for x in (k, v)]
        rows = plan.rows(comm.rank), k.shape[2]
        self._gathered, self._outgoing = (two_buffers(comm, n, largest, k.dtype) for n in rows)

    def start(self, at: int, heads: range) -> PendingRows:
        """Start to send this rank's K and V of some heads to all ranks that need them, and to receive its own."""
        rank, others = self._comm.rank, other_ranks(self._comm)
        gathered, outgoing = (_first_heads(two[at % 2], len(heads)) for two in (self._gathered, self._outgoing))
        own = [x[:, heads.start : heads.stop] for x in self._own]
        if any(self._plan.pieces(rank, target) for target in others):
            for target_rows, x in zip(unpack(outgoing, own), own, strict=True):
                target_rows.copy_(x)
        for piece in self._plan.pieces(rank, rank):
            for target_rows, x in zip(unpack(target_of(piece, gathered), own), own, strict=True):
                target_rows.copy_(x[:, :, piece.rows.start : piece.rows.stop])
        receiver = RowReceiver(gathered, self._comm)
        for source in others:
            for piece in self._plan.pieces(source, rank):
                receiver.expect(piece, source)
        sends = [(source_of(piece, outgoing), target) for target in others for piece in self._plan.pieces(rank, target)]
        return PendingRows(self._comm.exchange(sends, receiver.messages), receiver, own)


class _GradReturn:
    """Gradients of gathered K and V on their way back to the owners, float32, one group of heads at a time."""

    def __init__(self, k: Tensor, v: Tensor, plan: GatherPlan, comm: Comm) -> None:
        self._kv, self._plan, self._comm = (k, v), plan, comm
        self._dtype = accumulation_dtype(k.dtype)
        self._total = torch.zeros((k.shape[2], *row_shape(self._kv)), dtype=self._dtype, device=k.device)
        self._pending: tuple[Pending, list[tuple[Tensor, Tensor]]] | None = None

    def send(self, grads: Grads, heads: slice) -> None:
        """Start to send the gradients of some heads to the owners, after those sent before have arrived."""
        self._wait()
        rank, others = self._comm.rank, other_ranks(self._comm)
        total = self._total[:, :, heads]
        row = total.shape[1:]
        gathered = self._buffer(self._plan.rows(rank), row).zero_()
        for target_rows, grad in zip(unpack(gathered, self._kv), (grads.k, grads.v), strict=True):
            if grad is not None:
                grad.add_to(target_rows)
        sends = [
            (target_of(piece, gathered).contiguous(), source)
            for source in others
            for piece in self._plan.pieces(source, rank)
        ]
        recvs, sums = [], []
        for reader in range(self._comm.world):  # in rank order, so that the sum is the same in every run
            for piece in self._plan.pieces(rank, reader):
                if reader == rank:
                    sums.append((source_of(piece, total), target_of(piece, gathered)))
                    continue
                received = self._buffer(len(piece.rows), row)
                recvs.append((received, reader))
                sums.append((source_of(piece, total), received))
        self._pending = self._comm.exchange(sends, recvs), sums

    def finish(self, dtype: torch.dtype) -> list[GradAccumulator]:
        """The sums of dk and dv, to be rounded to `dtype`."""
        self._wait()
        return [GradAccumulator.from_total(part, dtype) for part in unpack(self._total, self._kv)]

    def _wait(self) -> None:
        """Add the gradients that have arrived."""
        if self._pending is not None:
            pending, sums = self._pending
            pending.wait()
            for total, part in sums:
                total += part
            self._pending = None

    def _buffer(self, rows: int, row: tuple[int, ...]) -> Tensor:
        return self._comm.buffer((rows, *row), dtype=self._dtype, device=self._total.device)


def _first_heads(buffer: Tensor, heads: int) -> Tensor:
    """The memory of a message as one of fewer heads, with contiguous rows."""
    rows, batch, max_heads, width = buffer.shape
    if heads == max_heads:
        return buffer
    return buffer.view(-1)[: rows * batch * heads * width].view(rows, batch, heads, width)


# Receiving rows of several ranks into one buffer.


class RowReceiver:
    """Receives pieces into `buffer`, rows first: in place where the rows of a piece are consecutive there."""

    def __init__(self, buffer: Tensor, comm: Comm) -> None:
        self.messages: list[Message] = []
        self.buffer, self._comm = buffer, comm
        self._copies: list[tuple[Tensor, Tensor]] = []

    def expect(self, piece: Piece, peer: int) -> None:
        """Add a message for a piece that `peer` sends."""
        target = target_of(piece, self.buffer)
        if piece.in_place:
            self.messages.append((target, peer))
            return
        received = self._comm.buffer(target.shape, dtype=target.dtype, device=target.device)
        self.messages.append((received, peer))
        self._copies.append((target, received))

    def finish(self) -> None:
        """Copy pieces that could not be received in place. Call it after the messages have arrived."""
        for target, received in self._copies:
            target.copy_(received)


@dataclass(frozen=True)
class PendingRows:
    """A message whose rows are in flight; its tensors have the widths of `like`."""

    pending: Pending
    receiver: RowReceiver
    like: Sequence[Tensor]

    def wait(self) -> list[Tensor]:
        """The tensors of the message, as views [B, H, rows, width], with all rows in place."""
        self.pending.wait()
        self.receiver.finish()
        return unpack(self.receiver.buffer, self.like)


def target_of(piece: Piece, buffer: Tensor) -> Tensor:
    """The rows of the target buffer that a piece fills, as a view."""
    return buffer[piece.to.start : piece.to.stop : piece.to.step]


def source_of(piece: Piece, shard: Tensor) -> Tensor:
    """The rows of the source shard that a piece holds, as a view."""
    return shard[piece.rows.start : piece.rows.stop]


def other_ranks(comm: Comm) -> list[int]:
    """The other ranks, starting with the right neighbor, so that no rank is the first target of all others."""
    return [(comm.rank + step) % comm.world for step in range(1, comm.world)]
