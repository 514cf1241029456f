"""What a backend is asked to do: one patch of attention, forward or backward."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.core.optional import require
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.plan.blocks import Visibility
from attnmesh.trace.recorder import Recorder


def contiguous_last_dim(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous in memory, as kernels need, else a copy that is."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class Call:
    """Queries [B,Hq,Sq,D] against keys and values [B,Hkv,Sk,D], unexpanded, under a visibility."""

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    scale: float


@dataclass(frozen=True)
class Result:
    """What the forward of the whole softmax (all keys, all ranks) left, and the gradients that came back."""

    out: Tensor  # in the dtype of q
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    _laid: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None) -> Result:
        """From what autograd hands to a backward: None where nothing depends on an output."""
        return cls(out, lse, torch.zeros_like(out) if grad_out is None else contiguous_last_dim(grad_out), grad_lse)

    def laid_like(self, q: Tensor, rows: range) -> tuple[Tensor, Tensor]:
        """These rows of out and grad_out in the memory layout of `torch.empty_like(q)`; copied once, if at all."""
        strides = torch.empty_like(q, device="meta").stride()
        at = rows, strides
        if at not in self._laid:
            parts = [x[:, :, rows.start : rows.stop] for x in (self.out, self.grad_out)]
            out, grad_out = (x if _strided(x, strides) else torch.empty_like(q).copy_(x) for x in parts)
            self._laid[at] = out, grad_out
        return self._laid[at]

    @cached_property
    def delta(self) -> Tensor:
        """rowsum(out * grad_out) - grad_lse, float32: what every score's gradient subtracts. Once for all blocks."""
        delta: Tensor = require("attnmesh.ops.dense.triton_backward", extra="triton").delta(
            self.out, self.grad_out, self.grad_lse
        )
        return delta


def _strided(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether x has these strides, as far as they matter."""
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


@dataclass(frozen=True)
class Grads:
    """Where the gradients of a call are summed; None where nobody asked."""

    q: GradAccumulator | None
    k: GradAccumulator | None
    v: GradAccumulator | None


class Backend(Protocol):
    """One way to compute a call. It serves the call or says what it cannot do."""

    name: str

    def refusal(self, call: Call) -> str | None:
        """Why it cannot serve the forward of this call; None if it can."""

    def backward_refusal(self, call: Call, result: Result) -> str | None:
        """Why it cannot serve the backward of this call; None if it can."""

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merge the attention of this call into the rows' running state."""

    def prepare(self, call: Call, result: Result) -> None:
        """Make what several blocks of a backward share, before they take lanes."""

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Add this call's part of the gradients."""


def input_error(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """What is wrong with the inputs of attention, in words; None if nothing."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            return f"{name} must be a tensor, got {type(x).__name__}"
        if x.ndim != 4:
            return f"{name} must be [batch, heads, seq, head_dim], got shape {tuple(x.shape)}"
        if not x.dtype.is_floating_point:
            return f"{name} must be floating point, got {x.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    if not q.device == k.device == v.device:
        return f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
    if k.shape != v.shape:
        return f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"q and k must have one batch and one head_dim, got {tuple(q.shape)} and {tuple(k.shape)}"
    if not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"the {k.shape[1]} kv heads must divide the {q.shape[1]} query heads"
    if not q.shape[3]:
        return "head_dim must be at least 1, got 0"
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        return f"scale must be a finite number, got {scale!r}"
    return None


def resolve_scale(q: Tensor, scale: float | None) -> float:
    """The given scale, or 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def kernel_span(
    recorder: Recorder | None, name: str, backend: Backend, call: Call
) -> AbstractContextManager[None]:  # fmt: skip
    """Records a kernel call as a "compute" span; does nothing if `recorder` is None."""
    if recorder is None:
        return nullcontext()
    return recorder.span(
        "compute", name, call.q.device, backend=backend.name, blocks=len(call.visibility.blocks),
        queries=call.q.shape[2], keys=call.k.shape[2], heads=call.q.shape[1],
    )  # fmt: skip
