"""Cumulative lengths of packed documents, `cu_seqlens`: read once per tensor, and checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.utils.validation import check_count, check_tensor, shown

T = TypeVar("T")


def once_per_tensor(x: Tensor, key: Hashable, compute: Callable[[], T]) -> T:
    """`compute()`, remembered with the tensor until its contents change: one read per batch, not one per layer."""
    if x.is_inference():  # has no version
        return compute()
    version, known = getattr(x, "_attnmesh_known", (None, None))
    if known is None or version != x._version:
        known = {}
        x._attnmesh_known = (x._version, known)  # type: ignore[attr-defined]
    if key not in known:
        known[key] = compute()
    value: T = known[key]
    return value


def bounds(name: str, cu_seqlens: Tensor) -> tuple[int, ...]:
    """The values of cu_seqlens; ValueError unless they ascend from 0."""
    check_tensor(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or not cu_seqlens.numel():
        raise ValueError(f"{name} must be int32 or int64 [documents + 1], got {shown(cu_seqlens)}")
    found: tuple[int, ...] = once_per_tensor(cu_seqlens, "values", lambda: tuple(cu_seqlens.tolist()))
    if found[0] != 0 or any(a > b for a, b in itertools.pairwise(found)):
        raise ValueError(f"{name} must begin with 0 and not decrease, got {shown(found)}")
    return found


def lengths_of(found: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of the documents between bounds."""
    return tuple(b - a for a, b in itertools.pairwise(found))


def check_max_seqlen(name: str, max_seqlen: int | Tensor, longest: int) -> None:
    """Raise ValueError unless `max_seqlen` is an integer that no document exceeds."""
    if isinstance(max_seqlen, Tensor) and not max_seqlen.numel() == 1:
        raise ValueError(f"{name} must be an integer, got {shown(max_seqlen)}")
    n = max_seqlen.item() if isinstance(max_seqlen, Tensor) else max_seqlen
    if check_count(name, n) < longest:
        raise ValueError(f"{name} must be at least the longest document of this rank, {longest}, got {n}")
