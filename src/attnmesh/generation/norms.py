"""RMSNorm of a model by one torch call, in the passes of an `Engine`.

Transformers computes RMSNorm by six calls or more, each of which reads and writes all tokens. For the few tokens of a
decode step a call takes longer than its numbers, and for a long prompt memory is what takes the time. In float32 on the
CPU one call has the same bits; in half precision it rounds once, and the model's own code twice.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_IN_PASS: ContextVar[bool] = ContextVar("in_pass", default=False)


@contextmanager
def one_call() -> Iterator[None]:
    """Within this, the norms that `use_one_call` has prepared take one call; elsewhere they run their own code."""
    before = _IN_PASS.set(True)
    try:
        yield
    finally:
        _IN_PASS.reset(before)


def in_pass() -> bool:
    """Whether this is within `one_call`."""
    return _IN_PASS.get()


def run_in_one_call(function: Callable[..., T], *args: Any) -> T:
    """Call a function within `one_call`, in a context of its own: an interruption leaves nothing behind."""

    def run() -> T:
        with one_call():
            return function(*args)

    return copy_context().run(run)


class _OneCall:
    """The forward of an RMSNorm."""

    def __init__(self, norm: nn.Module, eps: float) -> None:
        self._norm, self._eps = norm, eps

    def __call__(self, x: Tensor) -> Tensor:
        # A compiler fuses the model's own code, and cannot trace the variable. Autocast would make the result float32.
        if not torch.compiler.is_compiling() and _IN_PASS.get() and not torch.is_autocast_enabled(x.device.type):
            weight: Any = self._norm.weight
            if x.dtype == weight.dtype and (x.is_cuda or x.dtype == torch.float32):
                return F.rms_norm(x, weight.shape, weight, self._eps)
        out: Tensor = type(self._norm).forward(self._norm, x)
        return out


def use_one_call(model: nn.Module) -> None:
    """Prepare every RMSNorm of `model` whose code, in float32 on the CPU, computes the bits of `F.rms_norm`."""
    for module in model.modules():
        eps: Any = getattr(module, "variance_epsilon", None)
        weight: Any = getattr(module, "weight", None)
        if (
            isinstance(eps, float) and type(weight) in (Tensor, nn.Parameter) and weight.ndim == 1
            and weight.dtype in _DTYPES
            and len(inspect.signature(type(module).forward).parameters) == 2  # self and x, no gate
            and "forward" not in vars(module) and not weight.is_meta and not list(module.buffers())
            and [name for name, _ in module.named_parameters()] == ["weight"]
        ):  # fmt: skip
            probe = torch.linspace(-3, 5, len(weight), dtype=torch.float32, device="cpu").sin()[None, None]
            own = weight.detach().to("cpu", torch.float32)
            same = torch.equal(_forward(module, own, probe), F.rms_norm(probe, weight.shape, own, eps))
            narrow = probe.to(weight.dtype)
            if same and _forward(module, own.to(weight.dtype), narrow).dtype == weight.dtype:
                vars(module)["forward"] = _OneCall(module, eps)


@torch.no_grad()
def _forward(norm: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """The result of a norm's own code with another weight. Its hooks, which may refer to anything, do not run."""
    copied: Any = copy.copy(norm)
    copied._parameters = {**norm._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    out: Tensor = type(norm).forward(copied, x)
    return out
