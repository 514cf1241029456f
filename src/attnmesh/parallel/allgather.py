"""All-gather context parallelism: the keys that this rank's queries see come to it, a few kv heads at a time.

Groups of heads are independent, so the next group's keys travel while this group's attention is computed, and in the
backward the gradients of the group before travel home as well. Two buffers of a group's gathered keys are all the
memory this takes; the backward gathers again rather than keep them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense import blockwise
from attnmesh.ops.dense.call import Call, Grads, Result, contiguous_last_dim
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.arrivals import Arrivals, Arriving, other_ranks, place_of, rows_in
from attnmesh.parallel.message import message_row, sides
from attnmesh.parallel.schedule import KeepsInputs
from attnmesh.plan.allgather import GatherPlan, groups_that_fill, head_groups


@dataclass(frozen=True)
class AllGather(KeepsInputs):
    """The schedule that gathers keys."""

    plan: GatherPlan
    scale: float
    backend: str
    comm: Comm

    def calls(self, q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
        """What this rank would compute for one group of heads."""
        patch = self.plan.patch(self.comm.rank)
        return [Call(q, k, v, patch, self.scale)] if patch.blocks else []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[State, tuple[Tensor, ...]]:
        """Gather and attend, group by group."""
        states = [
            blockwise.forward(
                [call], self.backend, allow_two_streams=not self.comm.shares_stream, recorder=self.comm.recorder
            )
            for call, _, _ in self._groups(q, k, v)
        ]
        if len(states) == 1:
            return states[0], (q, k, v)
        return State(*(torch.cat(parts, 1) for parts in zip(*states, strict=True))), (q, k, v)

    def backward(self, kept: tuple[Tensor, ...], result: Result, needed: Sequence[bool]) -> Grads:
        """Gather again; gradients of keys go home in float32 while the next group is computed."""
        q, k, v = kept
        found = []
        homing = _GradReturn(k, self.plan, self.comm) if needed[1] or needed[2] else None
        for call, q_heads, kv_heads in self._groups(q, k, v):
            part = Result(
                result.out[:, q_heads], result.lse[:, q_heads], result.grad_out[:, q_heads],
                None if result.grad_lse is None else result.grad_lse[:, q_heads],
            )  # fmt: skip
            wanted = [x if need else None for x, need in zip((call.q, call.k, call.v), needed, strict=True)]
            (query,), grads = blockwise.backward(
                [call], part, self.backend, wanted, allow_two_streams=not self.comm.shares_stream,
                recorder=self.comm.recorder,
            )  # fmt: skip
            if needed[0]:
                found.append(query.finish())
            if homing is not None:
                homing.send(grads, kv_heads)
        dq = dk = dv = None
        if needed[0]:
            dq = GradAccumulator.from_total(torch.cat(found, 1) if len(found) > 1 else found[0], q.dtype)
        if homing is not None:
            dk, dv = (total if need else None for total, need in zip(homing.totals(k.dtype), needed[1:], strict=True))
        return Grads(dq, dk, dv)

    def _groups(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Call, slice, slice]]:
        """The call of every group of heads, its keys arrived, and its query and kv heads."""
        q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
        readers = q.shape[1] // k.shape[1]
        patch = self.plan.patch(self.comm.rank)
        groups = head_groups(k.shape[1])
        if q.is_cuda:
            groups = head_groups(k.shape[1], groups_that_fill(self.plan.shards, q.shape[0], q.shape[1]))
        gathering = _Gathering(k, v, max(map(len, groups)), self.plan, self.comm)
        arriving = gathering.start(0, groups[0])
        for at, heads in enumerate(groups):
            keys = sides(arriving.wait())
            if at + 1 < len(groups):
                arriving = gathering.start(at + 1, groups[at + 1])
            q_heads = slice(heads.start * readers, heads.stop * readers)
            yield Call(q[:, q_heads], *keys, patch, self.scale), q_heads, slice(heads.start, heads.stop)


class _Gathering:
    """The keys of one group of heads after another, in two buffers: one is computed on while the other fills."""

    def __init__(self, k: Tensor, v: Tensor, most_heads: int, plan: GatherPlan, comm: Comm) -> None:
        self._own, self._plan, self._comm = (k, v), plan, comm
        row = message_row(k[:, :most_heads])

        def pair_of(rows: int) -> list[Tensor]:
            return [comm.buffer((rows, *row), dtype=k.dtype, device=k.device) for _ in range(2)]

        self._gathered, self._outgoing = pair_of(plan.rows(comm.rank)), pair_of(k.shape[2])

    def start(self, turn: int, heads: range) -> Arriving:
        """Send this rank's keys of some heads to all who see them, and receive what it sees itself."""
        me, others = self._comm.rank, other_ranks(self._comm)
        gathered, outgoing = (_for_heads(two[turn % 2], len(heads)) for two in (self._gathered, self._outgoing))
        own = [x[:, heads.start : heads.stop] for x in self._own]
        sent = any(self._plan.pieces(me, target) for target in others)
        for side, x in zip(sides(outgoing), own, strict=True):
            if sent:
                side.copy_(x)
        for piece in self._plan.pieces(me, me):
            for side, x in zip(sides(place_of(piece, gathered)), own, strict=True):
                side.copy_(x[:, :, piece.rows.start : piece.rows.stop])
        arrivals = Arrivals(gathered, self._comm)
        for source in others:
            for piece in self._plan.pieces(source, me):
                arrivals.expect(piece, source)
        sends = [(rows_in(piece, outgoing), to) for to in others for piece in self._plan.pieces(me, to)]
        return Arriving(self._comm.exchange(sends, arrivals.messages), arrivals)


class _GradReturn:
    """Gradients of gathered keys on their way to the owners, float32, one group of heads at a time."""

    def __init__(self, k: Tensor, plan: GatherPlan, comm: Comm) -> None:
        self._plan, self._comm = plan, comm
        self._dtype = accumulation_dtype(k.dtype)
        self._total = torch.zeros((k.shape[2], *message_row(k)), dtype=self._dtype, device=k.device)
        self._travelling: tuple[Pending, list[tuple[Tensor, Tensor]]] | None = None

    def send(self, grads: Grads, heads: slice) -> None:
        """Send what this rank found for some heads home; what was sent before has arrived by now."""
        self.wait()
        me, others = self._comm.rank, other_ranks(self._comm)
        total = self._total[:, :, :, heads]
        row = (*total.shape[1:3], total.shape[3], total.shape[4])
        found = self._buffer(self._plan.rows(me), row).zero_()
        for side, grad in zip(sides(found), (grads.k, grads.v), strict=True):
            if grad is not None:
                grad.add_to(side)
        sends = [
            (place_of(piece, found).contiguous(), source)
            for source in others
            for piece in self._plan.pieces(source, me)
        ]
        recvs, sums = [], []
        for target in range(self._comm.world):  # in rank order, so that the sum is the same in every run
            for piece in self._plan.pieces(me, target):
                if target == me:
                    sums.append((rows_in(piece, total), place_of(piece, found)))
                    continue
                landing = self._buffer(len(piece.rows), row)
                recvs.append((landing, target))
                sums.append((rows_in(piece, total), landing))
        self._travelling = self._comm.exchange(sends, recvs), sums

    def wait(self) -> None:
        """Add what has come home."""
        if self._travelling is not None:
            pending, sums = self._travelling
            pending.wait()
            for total, came in sums:
                total += came
            self._travelling = None

    def totals(self, dtype: torch.dtype) -> list[GradAccumulator]:
        """The sums of dk and dv, to be rounded to `dtype`."""
        self.wait()
        return [GradAccumulator.from_total(side, dtype) for side in sides(self._total)]

    def _buffer(self, rows: int, row: tuple[int, ...]) -> Tensor:
        return self._comm.buffer((rows, *row), dtype=self._dtype, device=self._total.device)


def _for_heads(buffer: Tensor, heads: int) -> Tensor:
    """The memory of a buffer as a message of fewer heads: rows stay contiguous."""
    rows, two, batch, most, head_dim = buffer.shape
    if heads == most:
        return buffer
    return buffer.view(-1)[: rows * two * batch * heads * head_dim].view(rows, two, batch, heads, head_dim)
