"""A call in the terms of ring_flash_attn, checked and computed by a `ContextParallel`.

Tensors are [batch, seq, heads, head_dim], or packed documents [tokens, heads, head_dim]; k and v, or all three, may be
one tensor with a dimension before the heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SoloComm, comm_from
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.parallel.context import ContextParallel, UnnumberedContext
from attnmesh.parallel.executor import BackendName
from attnmesh.plan.shards import ScheduleName
from attnmesh.utils.validation import check_bool, check_count, check_number, check_tensor, is_number, shown

T = TypeVar("T")

Group = Comm | ProcessGroup | DeviceMesh | None
"""The ranks of a call. ring_flash_attn takes a ProcessGroup, or None for the default one."""
Result = Tensor | tuple[Tensor, Tensor, None]
"""Out, or (out, lse, None) with `return_attn_probs`."""
NOT_COMPILED = "functions of ring_flash_attn run eagerly: call ContextParallel.attention in a compiled graph"

_SOLO = SoloComm()


class Options(NamedTuple):
    """The arguments that all functions share, with FlashAttention's meanings."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    group: Group = None

    def check(self) -> None:
        """Raise ValueError for values that are invalid or not supported."""
        check_bool(causal=self.causal, deterministic=self.deterministic, return_attn_probs=self.return_attn_probs)
        if not is_number(self.dropout_p) or self.dropout_p != 0:
            raise ValueError(f"dropout_p must be 0: attention over ranks has no dropout, got {shown(self.dropout_p)}")
        if self.softmax_scale is not None:
            check_number("softmax_scale", self.softmax_scale)
        window = self.window_size
        widths = window if isinstance(window, tuple | list) else ()
        if len(widths) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in widths):
            raise ValueError(
                f"window_size must be two integers (left, right), each >= 0 or -1 for no limit, got {shown(window)}"
            )

    def mask(self, length: int, documents: tuple[int, ...] | None = None) -> Mask:
        """The mask of a sequence of `length` positions, which may consist of documents."""
        return _mask(self.causal, *self.window_size, length, documents)


@lru_cache(maxsize=256)
def _mask(causal: bool, left: int, right: int, length: int, documents: tuple[int, ...] | None) -> Mask:
    right = 0 if causal else right
    mask: Mask
    if left < 0 and right <= 0:
        mask = Full() if right < 0 else Causal()
    else:
        mask = SlidingWindow(length if left < 0 else left, length if right < 0 else right)
    return mask if documents is None else mask & Documents(documents)


def comm_of(group: Group) -> Comm:
    """The comm of a group; without torch.distributed, always the same single rank."""
    comm = comm_from(group)
    return _SOLO if type(comm) is SoloComm and group is None else comm


@lru_cache(maxsize=128)
def context(comm: Comm, layout: Layout, schedule: ScheduleName, backend: BackendName = "auto") -> ContextParallel:
    """The `ContextParallel` of a layout. It shares the comm with all others of the group and creates no group."""
    return UnnumberedContext(comm, layout=layout, schedule=schedule, backend=backend)


@contextmanager
def raised_on_all_ranks(comm: Comm, function: str) -> Iterator[None]:
    """Report a ValueError in the body, which checks arguments, to the other ranks, which then raise it too."""
    try:
        yield
    except ValueError as error:
        comm.agree(function, {}, str(error))
        raise


def split(tensors: Mapping[str, Tensor], *, varlen: bool) -> list[Tensor]:
    """Q, k and v as [batch, heads, seq, head_dim] from tensors named q, k, v, or packed as kv or qkv."""
    parts: list[Tensor] = []
    dim = 1 if varlen else 2
    for name, x in tensors.items():
        packed = len(name) > 1
        shape = ["tokens"] if varlen else ["batch", "seq"]
        shape += [str(len(name))] * packed + ["heads", "head_dim"]
        check_tensor(name, x)
        if x.ndim != len(shape) or (packed and x.shape[dim] != len(name)):
            raise ValueError(f"{name} must be [{', '.join(shape)}], got {shown(x)}")
        parts += x.unbind(dim) if packed else [x]
    return [x.transpose(0, 1)[None] if varlen else x.transpose(1, 2) for x in parts]


class Sharding(NamedTuple):
    """How a sequence of `length` positions lies on the ranks, and how they communicate."""

    layout: Layout
    length: int
    schedule: ScheduleName
    documents: tuple[int, ...] | None = None


def attend(comm: Comm, sharding: Sharding, qkv: list[Tensor], options: Options, *, varlen: bool) -> Result:
    """The result of a checked call."""
    q, k, v = qkv
    layout, length, schedule, documents = sharding
    # Of the backends for CUDA, only Triton's adds up gradients in a fixed order.
    backend = "triton" if options.deterministic and q.is_cuda else "auto"
    out, lse = context(comm, layout, schedule, backend).attention(
        q, k, v, mask=options.mask(length, documents), scale=options.softmax_scale, length=length,
        alibi_slopes=options.alibi_slopes, return_lse=True,
    )  # fmt: skip
    if varlen:
        out, lse = out[0].transpose(0, 1), lse[0]
    else:
        out = out.transpose(1, 2)
    out = out.contiguous()  # callers take a view of all heads
    return (out, lse, None) if options.return_attn_probs else out


# Cumulative lengths of packed documents, `cu_seqlens`: read once per tensor, and checked.


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
