"""All-gather context parallelism: each rank receives the K and V that its queries attend to, a few kv heads at a time.

Groups of heads are independent: the K and V of the next group are in flight while attention over this group is
computed, and in the backward so are the gradients of the previous group. This takes two buffers for the gathered K and
V of one group; the backward gathers them again instead of saving them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.comm.base import Message, post
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense import blockwise
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, Scores, contiguous_last_dim, kernel_span
from attnmesh.ops.dense.dispatch import choose_fused, choose_fused_backward
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.parallel.executor import Executor, ExecutorConfig, RowLayout, View, Views
from attnmesh.plan.allgather import GatherPlan, gather_plan, groups_that_fill, head_groups


@dataclass(frozen=True)
class AllGather(Executor):
    """The executor of "allgather"."""

    reproducible: ClassVar[bool] = False
    plan: GatherPlan
    backend: str
    comm: Comm
    _programs: dict[object, _Program] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        program, recorder = self._program(q, k, v, scores), self.comm.recorder
        states = []
        for call, group in self._gathered(program, q, k, v, scores):
            sinks_here = None if sinks is None else sinks[group.q_heads]
            backend = program.backend(group, call, None)
            if backend is None:
                states.append(
                    blockwise.forward(
                        [call], self.backend, allow_two_streams=True, recorder=recorder, sinks=sinks_here
                    )
                )  # fmt: skip
                continue
            total = StateAccumulator(call.q, v.shape[3], sinks=sinks_here, last_call=True)
            if recorder is None:
                backend.forward(call, total)
            else:
                with kernel_span(recorder, "attention", backend, call):
                    backend.forward(call, total)
            states.append(total.finish(q.dtype))
        if len(states) == 1:
            return states[0], (q, k, v)
        return State(*(torch.cat(parts, 1) for parts in zip(*states, strict=True))), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """Gather again; gradients of K and V return in float32 while the next group is computed."""
        q, k, v = saved
        program = self._program(q, k, v, scores)
        q_grads = []
        grad_return = _GradReturn(program, k, self.comm) if needs_grad[1] or needs_grad[2] else None
        for call, group in self._gathered(program, q, k, v, scores):
            part = result
            if len(program.groups) > 1:
                part = Result(
                    result.out[:, group.q_heads], result.lse[:, group.q_heads], result.grad_out[:, group.q_heads],
                    None if result.grad_lse is None else result.grad_lse[:, group.q_heads],
                )  # fmt: skip
            grads = self._backward(program, group, call, part, needs_grad, grad_return)
            if grads.q is not None:
                q_grads.append(grads.q.finish())
            if grad_return is not None:
                grad_return.send(group, grads)
        dq = dk = dv = None
        if needs_grad[0]:
            dq = GradAccumulator.from_total(torch.cat(q_grads, 1) if len(q_grads) > 1 else q_grads[0], q.dtype)
        if grad_return is not None:
            totals = grad_return.finish(k.dtype)
            dk, dv = (total if need else None for total, need in zip(totals, needs_grad[1:], strict=True))
        return Grads(dq, dk, dv)

    def _backward(
        self, program: _Program, group: _HeadGroup, call: Call, result: Result, needs_grad: Sequence[bool],
        grad_return: _GradReturn | None,
    ) -> Grads:  # fmt: skip
        """The gradients of a group of heads."""
        backend, recorder = program.backend(group, call, result), self.comm.recorder
        if backend is None:
            wanted = [x if need else None for x, need in zip((call.q, call.k, call.v), needs_grad, strict=True)]
            (dq,), sums = blockwise.backward(
                [call], result, self.backend, wanted, allow_two_streams=True, recorder=recorder
            )
            return Grads(dq if needs_grad[0] else None, sums.k, sums.v)
        dk = dv = None
        if grad_return is not None:
            dk, dv = grad_return.accumulators(group, call.k, call.v, needs_grad)
        grads = Grads(GradAccumulator(call.q) if needs_grad[0] else None, dk, dv)
        if recorder is None:
            backend.backward(call, result, grads)
        else:
            with kernel_span(recorder, "attention backward", backend, call):
                backend.backward(call, result, grads)
        return grads

    def _program(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> _Program:
        key = q.shape, k.shape, v.shape, q.dtype, q.device, scores.softcap is None, scores.alibi_slopes is None
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(self, q, k, v)
        return program

    def _gathered(
        self, program: _Program, q: Tensor, k: Tensor, v: Tensor, scores: Scores
    ) -> Iterator[tuple[Call, _HeadGroup]]:  # fmt: skip
        """The call of every group of heads, once its K and V have arrived."""
        q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
        groups, patch = program.groups, program.patch
        gather = _KVGather(k, v, program, self.comm)
        pending = gather.start(groups[0])
        for group, following in zip(groups, (*groups[1:], None), strict=True):
            gathered_k, gathered_v = pending.wait()
            if following is not None:
                pending = gather.start(following)
            if len(groups) == 1:
                yield Call(q, gathered_k, gathered_v, patch, scores), group
            else:
                heads = group.q_heads
                yield Call(q[:, heads], gathered_k, gathered_v, patch, scores.of_heads(heads)), group


class _HeadGroup(NamedTuple):
    """Some heads, and the messages of their K and V and of their gradients, as views of buffers."""

    at: int
    is_part: bool  # there are other groups
    kv_heads: slice
    q_heads: slice
    outgoing: tuple[View, ...]  # this rank's K and V; none if they are not sent
    local: tuple[tuple[tuple[View, ...], slice], ...]  # where this rank's own rows are gathered
    sends: tuple[tuple[View, int], ...]
    recvs: tuple[ReceivedRows, ...]
    gathered: tuple[View, ...]  # K and V
    nbytes: int  # sent
    shape: tuple[int, ...]  # of the gathered rows
    grad_sends: tuple[tuple[View, bool, int], ...]  # of the gathered rows, and whether these are contiguous
    grad_sums: tuple[tuple[View, View | None, int], ...]  # own rows, and what is added: gathered here, or by a peer
    grad_nbytes: int  # sent


class _Program:
    """What an all-gather does for inputs of some shapes, dtype and device."""

    def __init__(self, executor: AllGather, q: Tensor, k: Tensor, v: Tensor) -> None:
        plan, comm = executor.plan, executor.comm
        self.patch, self._backend = plan.patch(comm.rank), executor.backend
        self._is_on_two_streams = q.is_cuda and not comm.shares_stream
        self._backends: dict[object, Backend | None] = {}
        most: tuple[int, ...] = ()
        if q.is_cuda:
            most = (groups_that_fill(plan.shards, q.shape[0], q.shape[1], reproducible=executor.reproducible),)
        groups = head_groups(k.shape[1], *most)
        self.layout, self.own_rows = RowLayout.of(k, v), k.shape[2]
        largest = self.layout.with_heads(max(map(len, groups)))
        self.gathered_shape, self.outgoing_shape = (largest.shape(n) for n in (plan.rows(comm.rank), self.own_rows))
        self.dtype, self.device, self.grad_dtype = k.dtype, k.device, accumulation_dtype(k.dtype)
        q_per_kv = q.shape[1] // k.shape[1]
        self.groups = tuple(self._group(at, heads, q_per_kv, plan, comm) for at, heads in enumerate(groups))

    def _group(self, at: int, heads: range, q_per_kv: int, plan: GatherPlan, comm: Comm) -> _HeadGroup:
        rank, layout = comm.rank, self.layout.with_heads(len(heads))
        others = other_ranks(comm) if layout.elements else []  # messages without elements are not sent
        sent = [(piece, target) for target in others for piece in plan.pieces(rank, target)]
        received = [(piece, source) for source in others for piece in plan.pieces(source, rank)]
        own = plan.pieces(rank, rank)
        sums: list[tuple[View, View | None, int]] = []
        for reader in range(comm.world):  # in rank order, so that the sum is the same in every run
            for piece in plan.pieces(rank, reader) if layout.elements else ():
                added = layout.rows(piece.to) if reader == rank else None
                sums.append((self.layout.rows(piece.rows, heads), added, reader))
        row_bytes = layout.elements * self.dtype.itemsize
        return _HeadGroup(
            at, is_part=len(heads) < self.layout.heads, kv_heads=slice(heads.start, heads.stop),
            q_heads=slice(heads.start * q_per_kv, heads.stop * q_per_kv),
            outgoing=layout.parts(range(self.own_rows)) if sent else (),
            local=tuple((layout.parts(piece.to), slice(piece.rows.start, piece.rows.stop)) for piece in own),
            sends=tuple((layout.rows(piece.rows), target) for piece, target in sent),
            recvs=tuple(ReceivedRows(layout.rows(piece.to), piece.in_place, source) for piece, source in received),
            gathered=layout.parts(range(plan.rows(rank))),
            nbytes=sum(len(piece.rows) for piece, _ in sent) * row_bytes,
            shape=layout.shape(plan.rows(rank)),
            grad_sends=tuple((layout.rows(piece.to), piece.in_place, source) for piece, source in received),
            grad_sums=tuple(sums),
            grad_nbytes=sum(len(piece.rows) for piece, _ in received) * layout.elements * self.grad_dtype.itemsize,
        )  # fmt: skip

    def backend(self, group: _HeadGroup, call: Call, result: Result | None) -> Backend | None:
        """The backend of a forward, or of the backward of a result; None if blocks run on two streams.

        It depends only on the plan, on what programs differ in, and on whether there is a gradient of the lse.
        """
        key: object = group.at
        if result is not None:
            key = group.at, result.grad_lse is None, torch.are_deterministic_algorithms_enabled()
        try:
            return self._backends[key]
        except KeyError:
            name = self._backend
            chosen = choose_fused(call, name) if result is None else choose_fused_backward(call, result, name)
            on_two = self._is_on_two_streams and isinstance(chosen, Aten)
            return self._backends.setdefault(key, None if on_two else chosen)


class _KVGather:
    """K and V of one group of heads after another, in two buffers: one to compute on, one to receive into."""

    def __init__(self, k: Tensor, v: Tensor, program: _Program, comm: Comm) -> None:
        self._own, self._comm = (k, v), comm
        dtype, device = program.dtype, program.device
        self._gathered = [comm.buffer(program.gathered_shape, dtype=dtype, device=device) for _ in range(2)]
        self._outgoing = [Views(comm.buffer(program.outgoing_shape, dtype=dtype, device=device)) for _ in range(2)]

    def start(self, group: _HeadGroup) -> PendingRows:
        """Start to send this rank's K and V of some heads to all ranks that need them, and to receive its own."""
        gathered, outgoing = self._gathered[group.at % 2], self._outgoing[group.at % 2]
        own: Sequence[Tensor] = self._own
        if group.is_part:
            own = [x[:, group.kv_heads] for x in own]
        for view, x in zip(group.outgoing, own, strict=False):
            torch.as_strided(outgoing.buffer, *view).copy_(x)
        for views, rows in group.local:
            for view, x in zip(views, own, strict=True):
                torch.as_strided(gathered, *view).copy_(x[:, :, rows])
        recvs, copies = receive(group.recvs, gathered, self._comm)
        sends = [(outgoing[view], peer) for view, peer in group.sends]  # the same rows to several ranks
        return PendingRows(post(self._comm, sends, recvs, group.nbytes), copies, gathered, group.gathered)


class _GradReturn:
    """Gradients of gathered K and V on their way back to the owners, float32, one group of heads at a time."""

    def __init__(self, program: _Program, k: Tensor, comm: Comm) -> None:
        self._comm, self._dtype, self._device = comm, program.grad_dtype, k.device
        self._parts = program.layout.parts(range(program.own_rows))
        self._total = torch.zeros(program.layout.shape(program.own_rows), dtype=self._dtype, device=self._device)
        self._gathered: Tensor | None = None
        self._pending: tuple[Pending, list[tuple[Tensor, Tensor]]] | None = None

    def accumulators(
        self, group: _HeadGroup, k: Tensor, v: Tensor, needs_grad: Sequence[bool]
    ) -> list[GradAccumulator | None]:  # fmt: skip
        """Accumulators for the gradients of a group, for those that are needed: kernels compute what is sent."""
        return [
            GradAccumulator(x, memory=partial(self._memory, group.shape, view)) if need else None
            for x, view, need in zip((k, v), group.gathered, needs_grad[1:], strict=True)
        ]

    def _memory(self, shape: Sequence[int], view: View) -> Tensor:
        """Where kernels compute the gradient of K or V of a group."""
        if self._gathered is None:
            self._gathered = self._buffer(shape)
        return torch.as_strided(self._gathered, *view)

    def send(self, group: _HeadGroup, grads: Grads) -> None:
        """Start to send the gradients of some heads to the owners, after those sent before have arrived."""
        self._wait()
        gathered = self._buffer(group.shape) if self._gathered is None else self._gathered
        self._gathered = None
        sums = [(grad, view) for grad, view in zip((grads.k, grads.v), group.gathered, strict=True) if grad is not None]
        if not all(grad.in_memory for grad, _ in sums):
            gathered.zero_()
            for grad, view in sums:
                grad.add_to(torch.as_strided(gathered, *view))
        sends = []
        for view, is_contiguous, peer in group.grad_sends:
            rows = torch.as_strided(gathered, *view)
            sends.append((rows if is_contiguous else rows.contiguous(), peer))
        recvs, additions = [], []
        for own, view_here, peer in group.grad_sums:
            if view_here is not None:
                added = torch.as_strided(gathered, *view_here)
            else:
                added = self._buffer(own[0])
                recvs.append((added, peer))
            additions.append((torch.as_strided(self._total, *own), added))
        self._pending = post(self._comm, sends, recvs, group.grad_nbytes), additions

    def finish(self, dtype: torch.dtype) -> list[GradAccumulator]:
        """The sums of dk and dv, to be rounded to `dtype`."""
        self._wait()
        parts = [torch.as_strided(self._total, *view) for view in self._parts]
        return [GradAccumulator.from_total(part, dtype) for part in parts]

    def _wait(self) -> None:
        """Add the gradients that have arrived."""
        if self._pending is not None:
            pending, additions = self._pending
            pending.wait()
            for total, part in additions:
                total += part
            self._pending = None

    def _buffer(self, shape: Sequence[int]) -> Tensor:
        return self._comm.buffer(shape, dtype=self._dtype, device=self._device)


# Receiving rows of several ranks into one buffer.


class ReceivedRows(NamedTuple):
    """Rows of a buffer that a peer sends. They are received in place if they are consecutive."""

    view: View
    in_place: bool
    peer: int


def receive(
    received: Sequence[ReceivedRows], buffer: Tensor, comm: Comm
) -> tuple[list[Message], list[tuple[Tensor, Tensor]]]:
    """The messages for rows of a buffer, and those that are to be copied to their place once they have arrived."""
    messages, copies = [], []
    for view, in_place, peer in received:
        rows = torch.as_strided(buffer, *view)
        if not in_place:
            target, rows = rows, comm.buffer(view[0], dtype=buffer.dtype, device=buffer.device)
            copies.append((target, rows))
        messages.append((rows, peer))
    return messages, copies


class PendingRows(NamedTuple):
    """A message whose rows are in flight."""

    pending: Pending
    copies: list[tuple[Tensor, Tensor]]  # to the first from the second, once they have arrived
    buffer: Tensor
    parts: tuple[View, ...]

    def wait(self) -> list[Tensor]:
        """The tensors of the message, as views [B, H, rows, width], with all rows in place."""
        self.pending.wait()
        for target, received in self.copies:
            target.copy_(received)
        return [torch.as_strided(self.buffer, *view) for view in self.parts]


def other_ranks(comm: Comm) -> list[int]:
    """The other ranks, starting with the right neighbor, so that no rank is the first target of all others."""
    return [(comm.rank + step) % comm.world for step in range(1, comm.world)]
