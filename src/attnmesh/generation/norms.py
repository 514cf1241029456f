"""RMSNorm of a model by one torch call, in the passes of an `Engine`.

Transformers computes RMSNorm by six calls or more, each of which reads and writes all tokens. For the few tokens of a
decode step a call takes longer than its numbers, and for a long prompt memory is what takes the time. In float32 on the
CPU one call has the same bits; in half precision it rounds once, and the model's own code twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_IN_PASS: ContextVar[bool] = ContextVar("in_pass", default=False)


@contextmanager
def one_call() -> Iterator[None]:
    """Within this, the norms that `use_one_call` has prepared take one call; elsewhere they run their own code."""
    before = _IN_PASS.set(True)
    try:
        yield
    finally:
        _IN_PASS.reset(before)


class _OneCall:
    """The forward of an RMSNorm."""

    def __init__(self, norm: nn.Module, eps: float) -> None:
        self._norm, self._eps = norm, eps

    def __call__(self, x: Tensor) -> Tensor:
        weight: Any = self._norm.weight
        if _IN_PASS.get() and x.dtype == weight.dtype and (x.is_cuda or x.dtype == torch.float32):
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
            and "forward" not in vars(module) and len(list(module.parameters())) == 1 and not weight.is_meta
        ):  # fmt: skip
            twin: Any = copy.deepcopy(module).to("cpu", torch.float32)
            probe = torch.linspace(-3, 5, len(weight), dtype=torch.float32, device="cpu").sin()[None, None]
            with torch.no_grad():
                same = torch.equal(twin(probe), F.rms_norm(probe, weight.shape, twin.weight, eps))
            if same:
                vars(module)["forward"] = _OneCall(module, eps)
