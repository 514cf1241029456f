"""Ring context parallelism: K and V travel from rank to rank, and every block is merged into the state of the queries.

The algorithm is the two loops of `_RingPass`, forward and backward; `KVExchange` and `GradReturn` move the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.core.ranges import Ranges, difference, rows_of, size
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, Scores, contiguous_last_dim, kernel_span
from attnmesh.ops.dense.dispatch import choose_fused, choose_fused_backward
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.ops.streams import SINGLE_STREAM, StreamPair
from attnmesh.parallel.executor import Executor, ExecutorConfig, copy_rows, message_rows, row_shape, two_buffers, unpack
from attnmesh.plan.ring import RingPlan, Stage, Transfer, Transfers, ring_plan


@dataclass(frozen=True)
class Ring(Executor):
    """The executor of "ring"."""

    plan: RingPlan
    backend: str
    comm: Comm
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    _forward_backends: dict[object, list[Backend | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", self.plan.stages(self.comm.rank))

    @classmethod
    def build(cls, config: ExecutorConfig) -> Ring:
        """The executor over all ranks."""
        return cls(ring_plan(config.shards), config.backend, config.groups.all_ranks)

    @property
    def computes(self) -> bool:
        """Whether this rank's queries see any key of the ring."""
        return any(stage.patch.blocks for stage in self.stages)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The call of every stage that computes."""
        return [Call(q, k, v, stage.patch, scores) for stage in self.stages if stage.patch.blocks]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """Once around the ring."""
        ring = _RingPass(self, q, k, v, scores)
        backends = self._backends(ring.calls, q, v, scores)
        streams, parts = _two_streams(ring.calls, backends, self.comm)
        total = StateAccumulator(q, v.shape[3], streams, parts, sinks=sinks)
        ring.forward(total, backends, streams, last=True)
        return total.finish(q.dtype), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """Once around the ring with K and V again, and their gradients back to the owners."""
        q, k, v = saved
        ring = _RingPass(self, q, k, v, scores)
        backends = self._backward_backends(ring.calls, result)
        streams, parts = _two_streams(ring.calls, backends, self.comm)
        dq = GradAccumulator(q, streams, parts) if needs_grad[0] else None
        dk, dv = (GradAccumulator(x, streams) if need else None for x, need in zip((k, v), needs_grad[1:], strict=True))
        grads = Grads(dq, dk, dv)
        ring.backward(result, grads, backends, streams)
        return grads

    def forward_into(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, total: StateAccumulator, *, last: bool
    ) -> None:  # fmt: skip
        """Once around the ring, merging into a state to which other rings contribute as well, this one as the last."""
        ring = _RingPass(self, q, k, v, scores)
        ring.forward(total, self._backends(ring.calls, q, v, scores), SINGLE_STREAM, last=last)

    def backward_into(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Result, grads: Grads) -> None:
        """The backward of `forward_into`: adds to gradients to which other rings contribute as well."""
        ring = _RingPass(self, q, k, v, scores)
        ring.backward(result, grads, self._backward_backends(ring.calls, result), SINGLE_STREAM)

    def _backends(
        self, calls: Sequence[Call | None], q: Tensor, v: Tensor, scores: Scores
    ) -> list[Backend | None]:  # fmt: skip
        """The backend of every stage of the forward. It depends on the plan and on these properties only."""
        key = q.dtype, q.device, q.shape[-1], v.shape[-1], scores.plain
        if key not in self._forward_backends:
            self._forward_backends[key] = [choose_fused(call, self.backend) if call else None for call in calls]
        return self._forward_backends[key]

    def _backward_backends(self, calls: Sequence[Call | None], result: Result) -> list[Backend | None]:
        """The backend of every stage of the backward, with its shared inputs prepared."""
        backends: list[Backend | None] = []
        for call in calls:
            backend = choose_fused_backward(call, result, self.backend) if call else None
            if call and backend:
                backend.prepare(call, result)
            backends.append(backend)
        return backends


class _RingPass:
    """One pass around the ring."""

    def __init__(self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> None:
        q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
        self._ring, self._stages, self._own = ring, ring.stages, (k, v)
        self._exchange = KVExchange(k, v, self._stages, ring.comm)
        self.calls = [
            Call(q, *self._exchange.visible_kv(at), stage.patch, scores) if stage.patch.blocks else None
            for at, stage in enumerate(self._stages)
        ]

    def forward(
        self, total: StateAccumulator, backends: Sequence[Backend | None], streams: StreamPair, *, last: bool
    ) -> None:  # fmt: skip
        recorder = self._ring.comm.recorder
        last_computing = max((at for at, call in enumerate(self.calls) if call), default=0)
        for at, (call, backend) in enumerate(zip(self.calls, backends, strict=True)):
            streams.wait_for_last_block()  # it reads the buffer into which the next K and V are received
            pending = self._exchange.start(at)  # the next K and V are in flight while these are computed
            if call and backend:
                total.last_call = last and at == last_computing
                with streams.next_stream(), kernel_span(recorder, "attention", backend, call):
                    backend.forward(call, total)
            pending.wait()
            streams.record_arrival()
        streams.join()

    def backward(self, result: Result, grads: Grads, backends: Sequence[Backend | None], streams: StreamPair) -> None:
        own, recorder = (grads.k, grads.v), self._ring.comm.recorder
        grad_return = None
        if any(grad is not None for grad in own):
            grad_return = GradReturn(*self._own, self._stages, own, self._ring.comm)
        for at, (call, backend) in enumerate(zip(self.calls, backends, strict=True)):
            streams.wait_for_last_block()
            pending = self._exchange.start(at)
            kv_grads: tuple[GradAccumulator | None, ...] = own  # gradients of this rank's own K and V stay here
            if at > 0:  # those of other ranks' K and V are sent on with them
                kv_grads = (None, None)
            if call and backend:
                if at > 0 and grad_return is not None:
                    kv_grads = grad_return.accumulators(at, (call.k, call.v))
                with streams.next_stream(), kernel_span(recorder, "attention backward", backend, call):
                    backend.backward(call, result, replace(grads, k=kv_grads[0], v=kv_grads[1]))
            pending.wait()
            streams.record_arrival()
            if grad_return is not None and at > 0:
                streams.wait_for_last_block()
                grad_return.add(at, kv_grads)  # the gradients of earlier ranks arrived while this stage computed
                grad_return.send(at)
        streams.join()
        if grad_return is not None:
            grad_return.finish()


class KVExchange:
    """K and V of each stage on this rank, received and sent on in exactly two buffers.

    Rows that this rank sends of its own K and V are packed into a third one, except at the first stage.
    """

    def __init__(self, k: Tensor, v: Tensor, stages: tuple[Stage, ...], comm: Comm) -> None:
        self.stages = stages
        self._own, self._comm = (k, v), comm
        own = [sum(transfer.size for transfer in stage.own_sent) for stage in stages]
        self._buffers = two_buffers(comm, max([own[0], *(size(s.keys) for s in stages[1:])]), (k, v), k.dtype)
        self._packed = self._buffers[0]
        if any(own[1:]):
            self._packed = comm.buffer((max(own[1:]), *row_shape(self._own)), dtype=k.dtype, device=k.device)

    def start(self, at: int) -> Pending:
        """Start to send the K and V that the next stage needs, and to receive those of stage `at + 1`."""
        stage, following = self.stages[at], self.stages[at + 1 : at + 2]
        here, there = self._buffers[at % 2], self._buffers[(at + 1) % 2]
        sends = [(message_rows(here, transfer.rows), transfer.target) for transfer in stage.sent]
        packed = self._packed if at else self._buffers[0]
        for transfer, rows in packed_rows(stage.own_sent):
            self._pack(packed[rows], transfer.rows)
            sends.append((packed[rows], transfer.target))
        recvs = [(message_rows(there, t.to), t.source) for s in following for t in (*s.received, *s.from_owner)]
        return self._comm.exchange(sends, recvs)

    def visible_kv(self, at: int) -> tuple[Tensor, Tensor]:
        """K and V of a stage, [B, Hkv, rows, width]: the rows that this rank's queries attend to."""
        if at == 0:
            return self._own
        k, v = unpack(self._buffers[at % 2][: size(self.stages[at].keys)], self._own)
        return k, v

    def _pack(self, packed: Tensor, rows: Ranges) -> None:
        """Copies rows of this rank's own K and V: the only copy that a ring makes."""
        for target, x in zip(unpack(packed, self._own), self._own, strict=True):
            begin = 0
            for run in rows:
                copy_rows(target[:, :, begin : begin + len(run)], x[:, :, run.start : run.stop])
                begin += len(run)


class GradReturn:
    """Gradients of K and V on their way back to the owners, float32, in two buffers: one to send, one to receive.

    A third one receives gradients of this rank's own K and V, which are added to `own`. Kernels compute a stage's in
    a fourth one, laid out alike: one addition of whole rows adds it to what arrived.
    """

    def __init__(
        self, k: Tensor, v: Tensor, stages: tuple[Stage, ...], own: Sequence[GradAccumulator | None], comm: Comm
    ) -> None:
        self._kv, self._stages, self._own, self._comm = (k, v), stages, own, comm
        dtype = accumulation_dtype(k.dtype)
        rows = max([0, *(size(stage.keys) for stage in stages[1:])])
        self._buffers = two_buffers(comm, rows, self._kv, dtype)
        rows = max(sum(transfer.size for transfer in stage.own_returned) for stage in stages)
        self._returned = comm.buffer((rows, *row_shape(self._kv)), dtype=dtype, device=k.device)
        self._computed: Tensor | None = None
        self._pending: list[tuple[Pending, Transfers]] = []

    def accumulators(self, at: int, tensors: Sequence[Tensor]) -> tuple[GradAccumulator | None, ...]:
        """Accumulators for the gradients of stage `at`, for those that are needed. One call computes both."""
        return tuple(
            None if grad is None else GradAccumulator(x, memory=partial(self._memory, at, i))
            for i, (grad, x) in enumerate(zip(self._own, tensors, strict=True))
        )

    def _memory(self, at: int, i: int) -> Tensor:
        """Where kernels compute the gradient of K (0) or V (1) of stage `at`: where it is sent from, if possible."""
        rows = size(self._stages[at].keys)
        if self._first(at):
            return unpack(self._buffers[at % 2][:rows], self._kv)[i]
        if self._computed is None:
            self._computed = torch.empty_like(self._buffers[0])
        return unpack(self._computed[:rows], self._kv)[i]

    def _first(self, at: int) -> bool:
        """Whether the buffer of a stage was never used, and this rank is the first to add to its gradients."""
        return at <= 2 and not self._stages[at].received

    def add(self, at: int, grads: Sequence[GradAccumulator | None]) -> None:
        """Add this rank's gradients of stage `at` to those that arrived from earlier ranks."""
        self._wait(last=False)
        stage = self._stages[at]
        if not stage.keys:
            return
        rows = size(stage.keys)
        buffer = self._buffers[at % 2][:rows]
        needed = [grad for grad in grads if grad is not None]
        in_memory = bool(needed) and all(grad.in_memory for grad in needed)
        if in_memory and self._first(at):
            return
        for run in difference(rows_of(stage.keys), tuple(run for transfer in stage.received for run in transfer.to)):
            buffer[run.start : run.stop].zero_()
        if in_memory and self._computed is not None:
            buffer += self._computed[:rows]
            return
        for target, grad in zip(unpack(buffer, self._kv), grads, strict=True):
            if grad is not None:
                grad.add_to(target)

    def send(self, at: int) -> None:
        """Start to send the gradients of stage `at` to the next rank or the owner, and to receive those of the next."""
        stage, following = self._stages[at], self._stages[at + 1 : at + 2]
        here, there = self._buffers[at % 2], self._buffers[(at + 1) % 2]
        sends = [(message_rows(here, t.rows), t.target) for t in (*stage.sent, *stage.returned)]
        recvs = [(message_rows(there, t.to), t.source) for s in following for t in s.received]
        recvs += [(self._returned[rows], t.source) for t, rows in packed_rows(stage.own_returned)]
        self._pending.append((self._comm.exchange(sends, recvs), stage.own_returned))

    def finish(self) -> None:
        """Add the last returned gradients to those that this rank computed for its own K and V."""
        self._wait(last=True)

    def _wait(self, *, last: bool) -> None:
        while self._pending:
            pending, returned = self._pending.pop()
            pending.wait()
            for transfer, rows in packed_rows(returned):
                self._add_returned(self._returned[rows], transfer.to)
            if returned and not last:  # the buffer is reused
                for grad in self._own:
                    if grad is not None:
                        grad.total()

    def _add_returned(self, message: Tensor, to: Ranges) -> None:
        for grad, x in zip(self._own, unpack(message, self._kv), strict=True):
            begin = 0
            for run in to:
                if grad is not None:
                    grad.add(x[:, :, begin : begin + len(run)], run.start)
                begin += len(run)


def packed_rows(transfers: Transfers) -> Iterator[tuple[Transfer, slice]]:
    """Transfers and the rows of a buffer in which they lie one after another."""
    begin = 0
    for transfer in transfers:
        yield transfer, slice(begin, begin + transfer.size)
        begin += transfer.size


def _two_streams(
    calls: Sequence[Call | None], backends: Sequence[Backend | None], comm: Comm
) -> tuple[StreamPair, int | None]:
    """Two streams if torch's fused kernels compute all blocks, and the number of blocks.

    Triton's kernels continue a single state and stay on one stream.
    """
    work = [(call, backend) for call, backend in zip(calls, backends, strict=True) if call and backend]
    if (
        len(work) < 2
        or comm.shares_stream
        or not all(call.q.is_cuda and isinstance(backend, Aten) for call, backend in work)
    ):
        return SINGLE_STREAM, None
    return StreamPair(enabled=True), sum(len(call.visibility.blocks) for call, _ in work)
