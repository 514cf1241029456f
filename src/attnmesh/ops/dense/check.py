"""The one place that says what q, k and v may be."""

from __future__ import annotations

import math

from torch import Tensor


def problem_with(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
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


def scale_for(q: Tensor, scale: float | None) -> float:
    """The given scale, or 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
