"""What all executors share: their interface, the autograd function around them, and the layout of their messages.

K and V are sent together, as `[rows, B, Hkv, D + Dv]`: any range of rows is contiguous, so what is forwarded to the
next rank is a slice of what was received, never a copy. Kernels read the same memory as strided `[B, Hkv, rows, D]` and
`[B, Hkv, rows, Dv]`. Gradients of K and V, and the tensors of an all-to-all, have the same layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm, RankGroups, report_failure
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Mask
from attnmesh.core.state import State
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, resolve_scores
from attnmesh.parallel.checksums import ValueChecks
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.plan.shards import Shards

BackendName = Literal["auto", "aten", "triton", "gluon", "torch"]  # not "reference", which would hold every score
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


def score_checks(comm: Comm) -> ValueChecks:
    """When ranks compare the values of sinks and slopes. Each layer of a model has its own: 251 visits all of them."""
    return ValueChecks(comm.log, "sinks and alibi_slopes", first=128, every=251)


class AttentionOptions(NamedTuple):
    """The arguments of `ContextParallel.attention` besides its tensors."""

    mask: Mask
    scale: float | None
    softcap: float | None
    length: int | None
    key_length: int | None
    key_layout: Layout | None
    return_lse: bool
    needs_grad: tuple[bool, ...]  # of q, k, v and sinks

    def scores(self, inputs: Inputs) -> Scores:
        """The score function of a call."""
        return resolve_scores(inputs.q, self.scale, self.softcap, inputs.alibi_slopes)


@dataclass(frozen=True)
class ExecutorConfig:
    """What an executor is built from."""

    shards: Shards
    backend: str
    groups: NodeGroups
    return_lse: bool
    key_row: int  # bytes of K and V per position
    device: str = "cpu"  # its type


class Executor(ABC):
    """Attention of this rank's queries over the keys of all ranks. q, k and v are this rank's shards.

    Sinks are merged once, into the state over all keys.
    """

    comm: Comm | RankGroups

    @abstractmethod
    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Sequence[Call]:
        """This rank's kernel calls, to check that a backend serves them; the tensors only give dtype and device."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """The state of this rank's queries, and the tensors to save for the backward."""

    @abstractmethod
    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """The gradients of q, k and v, not rounded yet; None for those that are not needed."""

    def gradients(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, sinks: Tensor | None,
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of q, k, v and sinks; None for those that are not needed."""
        grads: list[Tensor | None] = [None] * 4
        if needs_grad[0] or needs_grad[1] or needs_grad[2]:
            sums = self.backward(saved, result, scores, needs_grad[:3])
            grads[:3] = [None if grad is None else grad.finish() for grad in (sums.q, sums.k, sums.v)]
        if needs_grad[3] and sinks is not None:
            grads[3] = result.sink_gradient(sinks).to(sinks.dtype)
        return grads

    def recompute_saved(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, ...]:
        """The tensors that the forward saved, from its inputs and outputs: a compiled graph keeps nothing else."""
        return q, k, v


class ExecutorFactory(ABC):
    """Builds the executor of a call: a `ContextParallel`, as a compiled operator knows it."""

    @abstractmethod
    def agreed_executor(self, inputs: Inputs, options: AttentionOptions) -> Executor:
        """The executor of a call, after all ranks agreed on its arguments; ValueError on every rank otherwise."""

    @abstractmethod
    def executor(self, inputs: Inputs, options: AttentionOptions) -> Executor:
        """The executor of a call that ranks agreed on before."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, executor: Executor, scores: Scores, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of this rank's queries over the keys of all ranks. Differentiable.

    The gradient of the sinks is what this rank's queries contribute to it.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _Attention.apply(q, k, v, sinks, executor, scores)  # type: ignore[no-any-return, no-untyped-call]
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        return _apply(q, k, v, sinks, executor, scores)  # type: ignore[no-any-return, no-untyped-call]
    return forward(executor, q, k, v, scores, sinks)[0]


def forward(
    executor: Executor, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
) -> tuple[State, tuple[Tensor, ...]]:  # fmt: skip
    """`Executor.forward` in the dtype of its inputs; a failure is reported to the other ranks."""
    try:
        if torch.is_autocast_enabled(q.device.type):
            with torch.autocast(q.device.type, enabled=False):
                return executor.forward(q, k, v, scores, sinks)
        return executor.forward(q, k, v, scores, sinks)
    except Exception as error:
        report_failure(executor.comm, error)
        raise


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, executor: Executor, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        state, saved = forward(executor, q, k, v, scores, sinks)
        ctx.save_for_backward(*state, sinks, *saved)
        ctx.executor, ctx.scores = executor, scores
        ctx.call = executor.comm.calls
        ctx.set_materialize_grads(False)
        return state.out, state.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (_refused_twice if torch.is_grad_enabled() else _backward)(ctx, *grads)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, sinks, *saved = ctx.saved_tensors
    ctx.executor.comm.note("backward of attention", ctx.call)
    result = Result.of(out, lse, grad_out, grad_lse)
    return *backward(ctx.executor, saved, result, ctx.scores, sinks, ctx.needs_input_grad), None, None


_refused_twice = once_differentiable(_backward)  # what it returns has no gradient of its own
_apply = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without what it does for transforms of torch.func, which takes longer than the function itself."""


def backward(
    executor: Executor, saved: Sequence[Tensor], result: Result, scores: Scores, sinks: Tensor | None,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k, v and sinks; None for those that are not needed."""
    kind = result.out.device.type
    try:
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return executor.gradients(tuple(saved), result, scores, sinks, needs_grad)
        return executor.gradients(tuple(saved), result, scores, sinks, needs_grad)
    except Exception as error:
        report_failure(executor.comm, error)
        raise


def unshard(x: Tensor, dim: int, length: int, layout: Layout, comm: Comm) -> Tensor:
    """The whole tensor, on every rank, from the shards along `dim` (>= 0). Gradients are summed over ranks."""
    whole: Tensor = _Unshard.apply(x, dim, length, layout, comm)  # type: ignore[no-untyped-call]
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm, ctx.call = dim, layout, comm, comm.calls
        shapes = []
        for rank in range(comm.world):
            shape = list(x.shape)
            shape[dim] = layout.local_length(length, comm.world, rank)
            shapes.append(shape)
        return layout.unshard(comm.all_gather(x.contiguous(), shapes), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.comm.note("backward of unshard", ctx.call)
        total = ctx.comm.all_reduce(grad.contiguous())
        return ctx.layout.shard(total, ctx.dim, ctx.comm.world, ctx.comm.rank), None, None, None, None


# Messages.

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a buffer as the arguments of `torch.as_strided`: size, strides and offset."""


class Views(dict[View, Tensor]):
    """Parts of a buffer, each of which is made when it is first asked for: a view costs as much as a small kernel."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.buffer = buffer

    def __missing__(self, view: View) -> Tensor:
        part = self[view] = torch.as_strided(self.buffer, *view)
        return part


class RowLayout(NamedTuple):
    """Rows of tensors [B, H, rows, width] in a message [rows, B, H, sum of widths]."""

    batch: int
    heads: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> RowLayout:
        """The layout of messages of these tensors."""
        batch, heads, _, _ = tensors[0].shape
        return cls(batch, heads, tuple(x.shape[3] for x in tensors))

    @property
    def elements(self) -> int:
        """The elements of a row."""
        return self.batch * self.heads * sum(self.widths)

    def with_heads(self, heads: int) -> RowLayout:
        """The layout of messages of some heads."""
        return RowLayout(self.batch, heads, self.widths)

    def shape(self, rows: int) -> tuple[int, int, int, int]:
        """The shape of a message."""
        return rows, self.batch, self.heads, sum(self.widths)

    def rows(self, rows: range, heads: range | None = None) -> View:
        """Some rows of a message, which are contiguous if they are consecutive; or some heads of them."""
        width = sum(self.widths)
        shape = len(rows), self.batch, self.heads if heads is None else len(heads), width
        strides = self.elements * rows.step, self.heads * width, width, 1
        return shape, strides, rows.start * self.elements + (0 if heads is None else heads.start * width)

    def parts(self, rows: range) -> tuple[View, ...]:
        """The tensors [B, H, rows, width] of some rows of a message."""
        width, at, views = sum(self.widths), rows.start * self.elements, []
        for part in self.widths:
            shape = self.batch, self.heads, len(rows), part
            views.append((shape, (self.heads * width, width, self.elements * rows.step, 1), at))
            at += part
        return tuple(views)


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Copies rows [..., width], 16 bytes at a time where both are aligned: torch copies strided rows by elements."""
    if _is_in_words(target) and _is_in_words(source):
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


def _is_in_words(x: Tensor) -> bool:
    """Whether rows [..., width] consist of whole words of 16 bytes, at multiples of 16 bytes."""
    *outer, last = x.stride()
    step = 16 // x.dtype.itemsize
    if last != 1 or x.data_ptr() % 16 or x.shape[-1] % step or x.storage_offset() % step:
        return False
    for stride in outer:  # noqa: SIM110  (any() and a generator would take twice as long)
        if stride % step:
            return False
    return True
