"""What every way of spreading attention over ranks is to autograd: a forward, a backward, and what is kept between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm, RankGroups
from attnmesh.comm.subgroups import propagate_failure
from attnmesh.core.state import State
from attnmesh.ops.dense.call import Call, Grads, Result

BACKENDS = ("auto", "aten", "triton")  # the reference would hold every score in memory


class Schedule(Protocol):
    """One way to attend from this rank's queries to the keys of all ranks. q, k and v are this rank's shards."""

    @property
    def comm(self) -> Comm | RankGroups:
        """The ranks that take part."""

    def calls(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Call]:
        """What this rank would compute, on tensors that stand for the real ones: is there a kernel for all of it?"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[State, tuple[Tensor, ...]]:
        """The state of this rank's queries, and what the backward wants to find again."""

    def kept_again(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, ...]:
        """What the forward kept, from what it was given and what it returned: a compiled graph keeps no more."""

    def backward(self, kept: tuple[Tensor, ...], result: Result, needed: Sequence[bool]) -> Grads:
        """The sums of the gradients of q, k and v; None where they are not `needed`."""


class KeepsInputs:
    """A schedule whose backward wants q, k and v as the forward had them, and nothing else."""

    def kept_again(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, ...]:
        """What the forward kept."""
        return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule) -> State:
    """The state of this rank's queries over the keys of all ranks, differentiable."""
    out, lse = _Attend.apply(q, k, v, schedule)  # type: ignore[no-untyped-call]
    return State(out, lse)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
        with propagate_failure(schedule.comm), torch.autocast(q.device.type, enabled=False):
            state, kept = schedule.forward(q, k, v)
        ctx.save_for_backward(*state, *kept)
        ctx.schedule = schedule
        ctx.set_materialize_grads(False)
        return state.out, state.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *kept = ctx.saved_tensors
        with propagate_failure(ctx.schedule.comm), torch.autocast(out.device.type, enabled=False):
            result = Result.of(out, lse, grad_out, grad_lse)
            grads = ctx.schedule.backward(tuple(kept), result, ctx.needs_input_grad[:3])
        return *(None if grad is None else grad.finish() for grad in (grads.q, grads.k, grads.v)), None
