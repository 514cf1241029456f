"""Norms and linear layers of a model in the passes of an `Engine`.

Norms. Transformers computes RMSNorm by six calls or more, each of which reads and writes all tokens. For the few tokens
of a decode step a call takes longer than its numbers, and for a long prompt memory is what takes the time. In float32
on the CPU one call has the same bits; in half precision it rounds once, and the model's own code twice.

Linear layers over few tokens on the CPU. A decode step of a few sequences takes as long as reading the weights, but
MKL's product of 4 to 47 rows with a weight [out, in] in float32 takes two to four times as long. Two other ways to ask
for the same product read the weight at nearly the speed of one row: a batched product with blocks of its rows, and,
from 12 rows on, the transposed product.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_IN_PASS: ContextVar[bool] = ContextVar("in_pass", default=False)
_BLOCKED = range(4, 12)  # rows of a batched product
_TRANSPOSED = range(12, 48)  # rows of a transposed product; MKL's own is as fast below and above
_BLOCKS = range(16, 97)  # rows of the weight in a block


@contextmanager
def one_call() -> Iterator[None]:
    """Within this, the norms that `use_one_call` has prepared take one call; elsewhere they run their own code."""
    before = _IN_PASS.set(True)
    try:
        yield
    finally:
        _IN_PASS.reset(before)


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [.., in] with a weight [out, in], rounded in another order where another product is faster."""
    rows = x.numel() // max(1, x.shape[-1])
    if not (rows in _BLOCKED or rows in _TRANSPOSED) or not _is_served(x, weight):
        return F.linear(x, weight, bias)
    flat, size = x.reshape(rows, -1), _block(weight.shape[0]) if rows in _BLOCKED else None
    if size is None:
        out = torch.mm(weight, flat.t()).t()
    else:
        blocks = weight.view(-1, size, weight.shape[1])
        out = torch.bmm(flat.expand(len(blocks), -1, -1), blocks.transpose(1, 2)).transpose(0, 1)
    out = out.reshape(*x.shape[:-1], -1).contiguous()  # some models take a view of it
    return out if bias is None else out + bias


def _is_served(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
        and weight.numel() > 0 and torch.backends.mkl.is_available()
        and not torch.is_autocast_enabled("cpu")
    )  # fmt: skip


@cache
def _block(rows: int) -> int | None:
    """The number of rows of a block, which divides all rows; None if none does."""
    return next((size for size in reversed(_BLOCKS) if rows % size == 0), None)


class StepLinear:
    """The forward of a linear layer."""

    def __init__(self, module: nn.Linear) -> None:
        self._linear = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        # A compiler cannot trace the variable.
        product = F.linear if torch.compiler.is_compiling() or not _IN_PASS.get() else linear
        return product(x, weight, bias)


def is_plain(module: object) -> bool:
    """Whether a module is an `nn.Linear` itself, with its own forward or that of this file."""
    return type(module) is nn.Linear and isinstance(vars(module).get("forward"), StepLinear | None)


def use_linear(model: nn.Module) -> None:
    """Let every plain linear layer of a model on the CPU compute by `linear` in passes."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module) and module.weight.device.type == "cpu":
            vars(module)["forward"] = StepLinear(module)
