"""Ring context parallelism: keys travel, queries stay, every block met is merged into the rows' state.

The whole algorithm is two loops over a rank's stages, forward and backward; `journey.py` moves the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense import recorded
from attnmesh.ops.dense.api import choose_fused, choose_fused_backward
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, contiguous_last_dim
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.ops.streams import SINGLE_STREAM, StreamPair
from attnmesh.parallel.journey import GradReturn, Journey
from attnmesh.parallel.schedule import KeepsInputs
from attnmesh.plan.ring import RingPlan, ring_plan


@dataclass(frozen=True)
class Ring(KeepsInputs):
    """The schedule of one ring. `plan` is the forward's."""

    plan: RingPlan
    scale: float
    backend: str
    comm: Comm

    def backward_plan(self, dtype: torch.dtype) -> RingPlan:
        """The plan of the backward: the same blocks, turning whichever way moves fewer bytes with gradients along."""
        return ring_plan(self.plan.shards, grad_weight=accumulation_dtype(dtype).itemsize / dtype.itemsize)

    def calls(self, q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
        """What this rank would compute, stage by stage."""
        stages = self.plan.stages(self.comm.rank)
        return [Call(q, k, v, stage.patch, self.scale) for stage in stages if stage.patch.blocks]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[State, tuple[Tensor, ...]]:
        """Once around; the backward goes around again with the same keys."""
        turn = _Turn(self, self.plan, q, k, v)
        backends = turn.backends()
        streams, parts = _two_streams(turn.calls, backends, self.comm)
        total = StateAccumulator(q, streams, parts)
        turn.forward(total, backends, streams)
        return total.finish(q.dtype), (q, k, v)

    def backward(self, kept: tuple[Tensor, ...], result: Result, needed: Sequence[bool]) -> Grads:
        """Once around with the keys, and their gradients home."""
        q, k, v = kept
        turn = _Turn(self, self.backward_plan(q.dtype), q, k, v)
        backends = turn.backends(result)
        streams, parts = _two_streams(turn.calls, backends, self.comm)
        dq = GradAccumulator(q, streams, parts) if needed[0] else None
        grads = Grads(dq, *(GradAccumulator(x) if need else None for x, need in zip((k, v), needed[1:], strict=True)))
        turn.backward(result, grads, backends, streams)
        return grads

    def forward_into(self, q: Tensor, k: Tensor, v: Tensor, total: StateAccumulator) -> None:
        """Once around, merging into a state that more keys than these will add to."""
        turn = _Turn(self, self.plan, q, k, v)
        turn.forward(total, turn.backends(), SINGLE_STREAM)

    def backward_into(self, q: Tensor, k: Tensor, v: Tensor, result: Result, grads: Grads) -> None:
        """The backward of `forward_into`: adds to gradients that more keys than these add to."""
        turn = _Turn(self, self.backward_plan(q.dtype), q, k, v)
        turn.backward(result, grads, turn.backends(result), SINGLE_STREAM)


class _Turn:
    """One way around the ring: the two loops that are the whole algorithm."""

    def __init__(self, ring: Ring, plan: RingPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
        q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
        self._ring, self._plan, self._own = ring, plan, (k, v)
        self._journey = Journey(k, v, plan, ring.comm)
        self.calls = [
            Call(q, *self._journey.seen(at), stage.patch, ring.scale) if stage.patch.blocks else None
            for at, stage in enumerate(self._journey.stages)
        ]

    def backends(self, result: Result | None = None) -> list[Backend | None]:
        """Who serves each stage's call: forward, or backward where there is a `result`."""
        name = self._ring.backend

        def serving(call: Call) -> Backend:
            if result is None:
                return choose_fused(call, name)
            backend = choose_fused_backward(call, result, name)
            backend.prepare(call, result)
            return backend

        return [serving(call) if call else None for call in self.calls]

    def forward(self, total: StateAccumulator, backends: Sequence[Backend | None], streams: StreamPair) -> None:
        recorder = self._ring.comm.recorder
        for at, (call, backend) in enumerate(zip(self.calls, backends, strict=True)):
            streams.wait_for_last_block()  # it reads the buffer that the next keys go to
            travelling = self._journey.send_on(at)  # the next keys travel while these are computed
            if call and backend:
                with streams.next_stream():
                    recorded.forward(backend, call, total, recorder)
            travelling.wait()
            streams.record_arrival()
        streams.join()

    def backward(self, result: Result, grads: Grads, backends: Sequence[Backend | None], streams: StreamPair) -> None:
        own, recorder = (grads.k, grads.v), self._ring.comm.recorder
        homing = (
            GradReturn(self._own[0], self._plan, self._ring.comm) if any(grad is not None for grad in own) else None
        )
        for at, (call, backend) in enumerate(zip(self.calls, backends, strict=True)):
            streams.wait_for_last_block()
            travelling = self._journey.send_on(at)
            mine: tuple[GradAccumulator | None, ...] = own  # gradients of the own keys stay here
            if call and backend:
                if at > 0:  # those of visiting keys travel on with them
                    mine = tuple(None if grad is None else GradAccumulator(call.k) for grad in own)
                with streams.next_stream():
                    recorded.backward(backend, call, result, replace(grads, k=mine[0], v=mine[1]), recorder)
            travelling.wait()
            streams.record_arrival()
            if homing is not None and at > 0:
                streams.wait_for_last_block()
                homing.join(at, mine)  # what the visitors before found arrived while this stage computed
                homing.send_on(at)
        streams.join()
        if homing is not None:
            homing.arrive(*own)


def _two_streams(
    calls: Sequence[Call | None], backends: Sequence[Backend | None], comm: Comm
) -> tuple[StreamPair, int | None]:
    """Two lanes where torch's fused kernels make all the parts, and how many; Triton's kernels continue one state."""
    work = [(call, backend) for call, backend in zip(calls, backends, strict=True) if call and backend]
    if (
        len(work) < 2
        or comm.shares_stream
        or not all(call.q.is_cuda and isinstance(backend, Aten) for call, backend in work)
    ):
        return SINGLE_STREAM, None
    return StreamPair(enabled=True), sum(len(call.visibility.blocks) for call, _ in work)
