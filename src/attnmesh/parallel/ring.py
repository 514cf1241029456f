"""Ring context parallelism: K and V travel from rank to rank, and every block is merged into the state of the queries.

The algorithm is the two loops of `_RingPass`, forward and backward; `KVExchange` and `GradReturn` move the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.api import choose_fused, choose_fused_backward
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, Scores, contiguous_last_dim, kernel_span
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.ops.streams import SINGLE_STREAM, StreamPair
from attnmesh.parallel.executor import Executor, ExecutorConfig, message_rows, row_shape, two_buffers, unpack
from attnmesh.plan.ring import RingPlan, Stage, ring_plan


@dataclass(frozen=True)
class Ring(Executor):
    """The executor of "ring". `plan` is the plan of the forward."""

    plan: RingPlan
    backend: str
    comm: Comm
    _stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    _forward_backends: dict[object, list[Backend | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stages", self.plan.stages(self.comm.rank))

    @classmethod
    def build(cls, config: ExecutorConfig) -> Ring:
        """The executor over all ranks."""
        return cls(ring_plan(config.shards), config.backend, config.groups.all_ranks)

    def backward_plan(self, dtype: torch.dtype) -> RingPlan:
        """The plan of the backward: the same blocks, in the direction that moves fewer bytes including gradients."""
        return ring_plan(self.plan.shards, grad_weight=accumulation_dtype(dtype).itemsize / dtype.itemsize)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The call of every stage that computes."""
        return [Call(q, k, v, stage.patch, scores) for stage in self._stages if stage.patch.blocks]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """Once around the ring."""
        ring = _RingPass(self, self.plan, self._stages, q, k, v, scores)
        backends = self._backends(ring.calls, q, v, scores)
        streams, parts = _two_streams(ring.calls, backends, self.comm)
        total = StateAccumulator(q, v.shape[3], streams, parts)
        ring.forward(total, backends, streams)
        return total.finish(q.dtype, sinks), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """Once around the ring with K and V again, and their gradients back to the owners."""
        q, k, v = saved
        ring = self._backward_pass(q, k, v, scores)
        backends = self._backward_backends(ring.calls, result)
        streams, parts = _two_streams(ring.calls, backends, self.comm)
        dq = GradAccumulator(q, streams, parts) if needs_grad[0] else None
        dk, dv = (GradAccumulator(x) if need else None for x, need in zip((k, v), needs_grad[1:], strict=True))
        grads = Grads(dq, dk, dv)
        ring.backward(result, grads, backends, streams)
        return grads

    def forward_into(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, total: StateAccumulator) -> None:
        """Once around the ring, merging into a state to which other rings contribute as well."""
        ring = _RingPass(self, self.plan, self._stages, q, k, v, scores)
        ring.forward(total, self._backends(ring.calls, q, v, scores), SINGLE_STREAM)

    def backward_into(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Result, grads: Grads) -> None:
        """The backward of `forward_into`: adds to gradients to which other rings contribute as well."""
        ring = self._backward_pass(q, k, v, scores)
        ring.backward(result, grads, self._backward_backends(ring.calls, result), SINGLE_STREAM)

    def _backward_pass(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> _RingPass:
        plan = self.backward_plan(q.dtype)
        return _RingPass(self, plan, plan.stages(self.comm.rank), q, k, v, scores)

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

    def __init__(
        self, ring: Ring, plan: RingPlan, stages: tuple[Stage, ...], q: Tensor, k: Tensor, v: Tensor, scores: Scores
    ) -> None:
        q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
        self._ring, self._plan, self._own = ring, plan, (k, v)
        self._exchange = KVExchange(k, v, stages, ring.comm)
        self.calls = [
            Call(q, *self._exchange.visible_kv(at), stage.patch, scores) if stage.patch.blocks else None
            for at, stage in enumerate(stages)
        ]

    def forward(self, total: StateAccumulator, backends: Sequence[Backend | None], streams: StreamPair) -> None:
        recorder = self._ring.comm.recorder
        for at, (call, backend) in enumerate(zip(self.calls, backends, strict=True)):
            streams.wait_for_last_block()  # it reads the buffer into which the next K and V are received
            pending = self._exchange.start(at)  # the next K and V are in flight while these are computed
            if call and backend:
                with streams.next_stream(), kernel_span(recorder, "attention", backend, call):
                    backend.forward(call, total)
            pending.wait()
            streams.record_arrival()
        streams.join()

    def backward(self, result: Result, grads: Grads, backends: Sequence[Backend | None], streams: StreamPair) -> None:
        own, recorder = (grads.k, grads.v), self._ring.comm.recorder
        grad_return = None
        if any(grad is not None for grad in own):
            grad_return = GradReturn(*self._own, self._plan, self._ring.comm)
        for at, (call, backend) in enumerate(zip(self.calls, backends, strict=True)):
            streams.wait_for_last_block()
            pending = self._exchange.start(at)
            kv_grads: tuple[GradAccumulator | None, ...] = own  # gradients of this rank's own K and V stay here
            if call and backend:
                if at > 0:  # gradients of other ranks' K and V are sent on with them
                    kv_grads = grads_like(own, (call.k, call.v))
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
            grad_return.finish(*own)


class KVExchange:
    """K and V of each stage on this rank, received and sent on in exactly two buffers."""

    def __init__(self, k: Tensor, v: Tensor, stages: tuple[Stage, ...], comm: Comm) -> None:
        self.stages = stages
        self._own, self._comm = (k, v), comm
        rows = max([len(stages[0].next_keys), *(len(stage.keys) for stage in stages[1:])])
        self._buffers = two_buffers(comm, rows, (k, v), k.dtype)

    def start(self, at: int) -> Pending:
        """Start to send the K and V of stage `at` to the next rank and to receive those of stage `at + 1`."""
        stage, following = self.stages[at], self.stages[at + 1 : at + 2]
        sends = [(self._outgoing(at), stage.next_rank)] if stage.next_keys else []
        recvs = [(self._buffers[(at + 1) % 2][: len(s.keys)], s.came_from) for s in following if s.keys]
        return self._comm.exchange(sends, recvs)

    def visible_kv(self, at: int) -> tuple[Tensor, Tensor]:
        """K and V of a stage, [B, Hkv, rows, width]: the rows that this rank's queries attend to."""
        stage, (k, v) = self.stages[at], self._own
        if at > 0 and not stage.seen:
            return k[:, :, :0], v[:, :, :0]
        if at > 0:
            k, v = unpack(message_rows(self._buffers[at % 2], stage.keys, stage.seen), self._own)
        return k, v

    def _outgoing(self, at: int) -> Tensor:
        stage = self.stages[at]
        if at > 0:
            return message_rows(self._buffers[at % 2], stage.keys, stage.next_keys)
        packed = self._buffers[0][: len(stage.next_keys)]
        rows = slice(stage.next_keys.start, stage.next_keys.stop)
        for target, x in zip(unpack(packed, self._own), self._own, strict=True):  # the only copy a ring makes
            target.copy_(x[:, :, rows])
        return packed


class GradReturn:
    """Gradients of K and V on their way back to the owners, float32, in two buffers: one to send, one to receive."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, comm: Comm) -> None:
        self._kv, self._stages, self._comm = (k, v), plan.stages(comm.rank), comm
        self._last_stage, self._last_rank, self._own_rows = plan.returns(comm.rank)
        dtype = accumulation_dtype(k.dtype)
        rows = max(len(stage.grads_out) for stage in self._stages)
        self._buffers = two_buffers(comm, rows, self._kv, dtype)
        self._own = comm.buffer((len(self._own_rows), *row_shape(self._kv)), dtype=dtype, device=k.device)
        self._pending: list[Pending] = []

    def add(self, at: int, grads: tuple[GradAccumulator | None, ...]) -> None:
        """Add this rank's gradients of stage `at` to those that arrived from earlier ranks."""
        self._wait()
        stage = self._stages[at]
        if not stage.grads_out:
            return
        buffer = self._buffers[at % 2][: len(stage.grads_out)]
        received = stage.grads_in or range(stage.grads_out.start, stage.grads_out.start)
        buffer[: received.start - stage.grads_out.start].zero_()
        buffer[received.stop - stage.grads_out.start :].zero_()
        if stage.seen:
            rows = message_rows(buffer, stage.grads_out, stage.seen)
            for target, grad in zip(unpack(rows, self._kv), grads, strict=True):
                if grad is not None:
                    grad.add_to(target)

    def send(self, at: int) -> None:
        """Start to send the gradients of stage `at` to the next rank or the owner, and to receive those of the next."""
        stage, following = self._stages[at], self._stages[at + 1 : at + 2]
        sends = [(self._buffers[at % 2][: len(stage.grads_out)], stage.next_rank)] if stage.grads_out else []
        recvs = [
            (message_rows(self._buffers[(at + 1) % 2], s.grads_out, s.grads_in), s.came_from)
            for s in following
            if s.grads_in
        ]
        if at == self._last_stage and self._own_rows:
            recvs.append((self._own, self._last_rank))
        self._pending.append(self._comm.exchange(sends, recvs))

    def finish(self, dk: GradAccumulator | None, dv: GradAccumulator | None) -> None:
        """Add the returned gradients to those that this rank computed for its own K and V."""
        self._wait()
        if self._own_rows:
            for grad, part in zip((dk, dv), unpack(self._own, self._kv), strict=True):
                if grad is not None:
                    grad.add(part, self._own_rows.start)

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop().wait()


def grads_like(
    needed: Sequence[GradAccumulator | None], tensors: Sequence[Tensor]
) -> tuple[GradAccumulator | None, ...]:
    """New accumulators for gradients of tensors, for those that are needed."""
    return tuple(None if grad is None else GradAccumulator(x) for grad, x in zip(needed, tensors, strict=True))


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
