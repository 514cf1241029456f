"""RMSNorm over the last dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: `x / sqrt(mean(x ** 2) + eps)`, times a weight where there is one."""

    eps: float

    def __post_init__(self) -> None:
        if not (isinstance(self.eps, float | int) and math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps must be a positive number, got {self.eps!r}")


def rms_norm(x: Tensor, weight: Tensor | None, norm: Norm) -> Tensor:
    """x normed in float32 (float64 for float64), and rounded once to its own dtype, after the weight."""
    shape = (x.shape[-1],)
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, shape, weight, norm.eps)  # on a GPU one kernel
    wide = widened(x)
    return F.rms_norm(wide, shape, weight.to(wide.dtype), norm.eps).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x as what is computed in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()
