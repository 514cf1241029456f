"""Ring context parallelism: keys travel, queries stay, every block met is merged into the rows' state.

The whole algorithm is two loops over a rank's stages, forward and backward. Rows of a message lie first, `[rows, 2, B,
Hkv, D]` with K and V together, so that any stretch of rows is contiguous: what is sent on is a slice of what was
received, never a copy. Kernels read the same memory as strided `[B, Hkv, rows, D]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm, CommError, Pending
from attnmesh.ops.accumulate import GradSum, StateSum
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, unit_strided
from attnmesh.ops.dense.choose import choose_fused, fused_for_backward
from attnmesh.ops.lanes import ONE_LANE, Lanes
from attnmesh.plan.context import RingPlan, ring_plan
from attnmesh.state import State, accumulation_dtype


@dataclass(frozen=True)
class RingProblem:
    """What all ranks must agree on before a ring turns. `plan` is the forward's."""

    plan: RingPlan
    scale: float
    backend: str
    comm: Comm

    def backward_plan(self, dtype: torch.dtype) -> RingPlan:
        """The plan of the backward: the same blocks, turning whichever way moves fewer bytes with gradients along."""
        plan = self.plan
        weight = accumulation_dtype(dtype).itemsize / dtype.itemsize
        return ring_plan(plan.mask, plan.layout, plan.length, plan.world, grad_weight=weight)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, problem: RingProblem) -> State:
    """The state of this rank's queries over the keys of all ranks; q, k, v are this rank's shards."""
    out, lse = _Ring.apply(q, k, v, problem)  # type: ignore[no-untyped-call]
    return State(out, lse)


def check_backend(q: Tensor, k: Tensor, v: Tensor, problem: RingProblem) -> None:
    """Raise ValueError if the backend cannot serve what this rank would compute."""
    for stage in problem.plan.stages(problem.comm.rank):
        if stage.patch.blocks:
            choose_fused(Call(q, k, v, stage.patch, problem.scale), problem.backend)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: RingProblem) -> tuple[Tensor, Tensor]:
        with _telling_the_others(problem.comm):
            state = _forward(unit_strided(q), unit_strided(k), unit_strided(v), problem)
        ctx.save_for_backward(q, k, v, *state)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return state.out, state.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        result = Result.of(out, lse, grad_out, grad_lse)
        q, k, v = unit_strided(q), unit_strided(k), unit_strided(v)
        with _telling_the_others(ctx.problem.comm):
            grads = _backward(q, k, v, result, ctx.problem, ctx.needs_input_grad)
        return *grads, None


@contextmanager
def _telling_the_others(comm: Comm) -> Iterator[None]:
    """A rank that fails in the middle of a ring leaves the others waiting: their errors can at least say why."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        comm.fail(f"{type(error).__name__}: {error}")
        raise


def _forward(q: Tensor, k: Tensor, v: Tensor, problem: RingProblem) -> State:
    journey = _Journey(k, v, problem.plan, problem.comm)
    calls = journey.calls(q, problem.scale)
    backends = [choose_fused(call, problem.backend) if call else None for call in calls]
    lanes, parts = _lanes(calls, backends, problem.comm)
    total = StateSum(q, lanes, parts)
    for at, (call, backend) in enumerate(zip(calls, backends, strict=True)):
        lanes.wait_for_last_block()  # it reads the buffer that the next keys go to
        travelling = journey.send_on(at)  # the next keys travel while these are computed
        if call and backend:
            with lanes.lane():
                backend.forward(call, total)
        travelling.wait()
        lanes.arrived()
    lanes.join()
    return total.finish(q.dtype)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, result: Result, problem: RingProblem, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    plan = problem.backward_plan(q.dtype)
    journey = _Journey(k, v, plan, problem.comm)
    calls = journey.calls(q, problem.scale)
    backends = [fused_for_backward(call, result, problem.backend) if call else None for call in calls]
    lanes, parts = _lanes(calls, backends, problem.comm)
    dq = GradSum(q, lanes, parts) if needed[0] else None
    dk, dv = (GradSum(x) if need else None for x, need in zip((k, v), needed[1:], strict=False))
    homing = _Homing(k, plan, problem.comm) if dk is not None or dv is not None else None
    for at, (call, backend) in enumerate(zip(calls, backends, strict=True)):
        lanes.wait_for_last_block()
        travelling = journey.send_on(at)
        mine: tuple[GradSum | None, ...] = (dk, dv)  # gradients of the own keys stay here
        if call and backend:
            if at > 0:  # those of visiting keys travel on with them
                mine = tuple(None if grad is None else GradSum(call.k) for grad in mine)
            with lanes.lane():
                backend.backward(call, result, Grads(dq, *mine))
        travelling.wait()
        lanes.arrived()
        if homing is not None and at > 0:
            lanes.wait_for_last_block()
            homing.join(at, mine)  # what the visitors before found arrived while this stage computed
            homing.send_on(at)
    lanes.join()
    if homing is not None:
        homing.arrive(dk, dv)
    return [None if grad is None else grad.finish() for grad in (dq, dk, dv)]


def _lanes(calls: Sequence[Call | None], backends: Sequence[Backend | None], comm: Comm) -> tuple[Lanes, int | None]:
    """Two lanes where torch's fused kernels make all the parts, and how many; Triton's kernels continue one state."""
    work = [(call, backend) for call, backend in zip(calls, backends, strict=True) if call and backend]
    if (
        len(work) < 2
        or comm.shares_stream
        or not all(call.q.is_cuda and isinstance(backend, Aten) for call, backend in work)
    ):
        return ONE_LANE, None
    return Lanes(enabled=True), sum(len(call.sight.blocks) for call, _ in work)


class _Journey:
    """Keys and values on their way: what this rank holds at each stage, in exactly two buffers."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, comm: Comm) -> None:
        self.stages = plan.stages(comm.rank)
        self._own, self._comm = (k, v), comm
        rows = max([len(self.stages[0].next_keys), *(len(stage.keys) for stage in self.stages[1:])])
        self._buffers = _two_buffers(comm, rows, k, k.dtype)

    def send_on(self, at: int) -> Pending:
        """Post the exchange that takes these keys on and brings those of the next stage."""
        stage, after = self.stages[at], self.stages[at + 1 : at + 2]
        sends = [(self._outgoing(at), stage.next_rank)] if stage.next_keys else []
        recvs = [(self._buffers[(at + 1) % 2][: len(a.keys)], a.came_from) for a in after if a.keys]
        return self._comm.exchange(sends, recvs)

    def calls(self, q: Tensor, scale: float) -> list[Call | None]:
        """What there is to compute at each stage, once its keys are there; None where nothing is seen."""
        return [
            Call(q, *self._seen(at), stage.patch, scale) if stage.patch.blocks else None
            for at, stage in enumerate(self.stages)
        ]

    def _seen(self, at: int) -> tuple[Tensor, Tensor]:
        """K and V of a stage, the rows this rank's queries see, [B, Hkv, rows, D]."""
        stage = self.stages[at]
        return self._own if at == 0 else _sides(_rows_of(self._buffers[at % 2], stage.keys, stage.seen))

    def _outgoing(self, at: int) -> Tensor:
        stage = self.stages[at]
        if at > 0:
            return _rows_of(self._buffers[at % 2], stage.keys, stage.next_keys)
        packed = self._buffers[0][: len(stage.next_keys)]
        rows = slice(stage.next_keys.start, stage.next_keys.stop)
        for side, x in zip(_sides(packed), self._own, strict=True):  # the one copy a ring makes
            side.copy_(x[:, :, rows])
        return packed


class _Homing:
    """Gradients of keys on their way home, float32, in two buffers: one leaves while the next arrives."""

    def __init__(self, k: Tensor, plan: RingPlan, comm: Comm) -> None:
        self._stages, self._comm = plan.stages(comm.rank), comm
        self._last_stage, self._last_rank, self._home_rows = plan.returns(comm.rank)
        dtype = accumulation_dtype(k.dtype)
        rows = max(len(stage.grads_out) for stage in self._stages)
        self._buffers = _two_buffers(comm, rows, k, dtype)
        self._home = comm.buffer((len(self._home_rows), *_row(k)), dtype=dtype, device=k.device)
        self._travelling: list[Pending] = []

    def join(self, at: int, mine: tuple[GradSum | None, ...]) -> None:
        """Add what this rank found at stage `at` to what arrived from the visitors before it."""
        self._wait()
        stage = self._stages[at]
        if not stage.grads_out:
            return
        grads = self._buffers[at % 2][: len(stage.grads_out)]
        came = stage.grads_in or range(stage.grads_out.start, stage.grads_out.start)
        grads[: came.start - stage.grads_out.start].zero_()
        grads[came.stop - stage.grads_out.start :].zero_()
        if stage.seen:
            sides = _sides(_rows_of(grads, stage.grads_out, stage.seen))
            for side, grad in zip(sides, mine, strict=True):
                if grad is not None:
                    grad.pour(side)

    def send_on(self, at: int) -> None:
        """Post the gradients of stage `at` to the next visitor or home, and receive those of the next stage."""
        stage, after = self._stages[at], self._stages[at + 1 : at + 2]
        sends = [(self._buffers[at % 2][: len(stage.grads_out)], stage.next_rank)] if stage.grads_out else []
        recvs = [
            (_rows_of(self._buffers[(at + 1) % 2], a.grads_out, a.grads_in), a.came_from) for a in after if a.grads_in
        ]
        if at == self._last_stage and self._home_rows:
            recvs.append((self._home, self._last_rank))
        self._travelling.append(self._comm.exchange(sends, recvs))

    def arrive(self, dk: GradSum | None, dv: GradSum | None) -> None:
        """Add what came home to the gradients of this rank's own keys."""
        self._wait()
        if self._home_rows:
            for grad, side in zip((dk, dv), _sides(self._home), strict=True):
                if grad is not None:
                    grad.add(side, self._home_rows.start)

    def _wait(self) -> None:
        while self._travelling:
            self._travelling.pop().wait()


def _two_buffers(comm: Comm, rows: int, k: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One is computed on and sent from while the other is received into. None where nothing travels."""
    return [comm.buffer((rows, *_row(k)), dtype=dtype, device=k.device) for _ in range(2 if rows else 0)]


def _row(k: Tensor) -> tuple[int, int, int, int]:
    """The shape of one row of a message: K and V together."""
    return 2, k.shape[0], k.shape[1], k.shape[3]


def _sides(message: Tensor) -> tuple[Tensor, Tensor]:
    """K and V (or their gradients) of a message, as views [B, Hkv, rows, D]."""
    k, v = message.permute(1, 2, 3, 0, 4)
    return k, v


def _rows_of(message: Tensor, holds: range, rows: range) -> Tensor:
    """The rows `rows` of a message whose first row is `holds.start`."""
    return message[rows.start - holds.start : rows.stop - holds.start]
