"""What the sparse family refuses, with names and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmesh.ops.sparse.mask import Rows, SparseMask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_indices(indices: object, s_q: int | None = None) -> Tensor:
    """`indices` as [s_q, topk] int32, or ValueError. [s_q, 1, topk] is taken too: one kv head."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices must be an int32 tensor, got {got}")
    shape = list(indices.shape)
    if indices.ndim == 3 and shape[1] == 1:
        indices = indices[:, 0]
    if indices.ndim != 2 or not indices.shape[1] or (s_q is not None and indices.shape[0] != s_q):
        rows = "s_q" if s_q is None else s_q
        raise ValueError(f"indices must be [{rows}, topk] or [{rows}, 1, topk] with topk >= 1, got {shape}")
    return indices if indices.stride(1) == 1 or indices.shape[1] == 1 else indices.contiguous()


def check_queries(name: str, q: object) -> Tensor:
    """`q` as it is, [s_q, heads, d], or ValueError."""
    if not isinstance(q, Tensor) or q.ndim != 3 or not q.shape[1] or not q.shape[2]:
        got = list(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"{name} must be a tensor [s_q, heads, d], got {got}")
    if q.dtype not in _DTYPES:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {q.dtype}")
    return _packed_columns(q)


def check_keys(name: str, k: object, q: Tensor, width: int | None) -> Tensor:
    """`k` as [s_kv, width] like `q`, or ValueError. [s_kv, 1, width] is taken too."""
    if not isinstance(k, Tensor):
        raise ValueError(f"{name} must be a tensor [s_kv, d], got {type(k).__name__}")
    shape = list(k.shape)
    if k.ndim == 3 and shape[1] == 1:
        k = k[:, 0]
    if k.ndim != 2 or not k.shape[1] or (width is not None and k.shape[1] != width):
        d = "d" if width is None else width
        raise ValueError(f"{name} must be [s_kv, {d}] or [s_kv, 1, {d}] (one kv head), got {shape}")
    if k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"{name} must be {q.dtype} on {q.device} as its queries are, got {k.dtype} on {k.device}")
    return _packed_columns(k)


def check_per_head(name: str, x: object, q: Tensor) -> Tensor:
    """A number for each row and head of `q`, [s_q, heads] on its device, or ValueError."""
    if not isinstance(x, Tensor) or x.shape != q.shape[:2]:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [s_q, heads] = {list(q.shape[:2])}, got {got}")
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(f"{name} must be floating point on {q.device}, got {x.dtype} on {x.device}")
    return x


def check_scale(name: str, scale: object) -> float:
    """A finite number, or ValueError."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"{name} must be a finite number, got {scale!r}")
    return float(scale)


def check_mask(mask: object) -> SparseMask:
    """A mask of this family, or ValueError."""
    if not isinstance(mask, SparseMask):
        raise ValueError(f"mask must be a SparseMask, got {type(mask).__name__}")
    return mask


def rows_of(mask: object, q: Tensor, s_kv: int, topk: int) -> Rows:
    """The mask as kernels take it, or ValueError."""
    return check_mask(mask).rows(q.shape[0], s_kv, topk, q.device)


def check_sink(sinks: object, q: Tensor) -> None:
    """Raise ValueError unless there is a sink for each head, or none."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.shape != q.shape[1:2]:
        got = list(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(f"sinks must be [heads] = [{q.shape[1]}], got {got}")
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(f"sinks must be floating point on {q.device}, got {sinks.dtype} on {sinks.device}")


def same_device(indices: Tensor, q: Tensor) -> Tensor:
    """Indices where the queries are, or ValueError."""
    if indices.device != q.device:
        raise ValueError(f"indices must be on {q.device} as q is, got {indices.device}")
    return indices


def _packed_columns(x: Tensor) -> Tensor:
    """Kernels read whole rows of features; everything else may be strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
