"""A call in the terms of ring_flash_attn, checked and computed by a `ContextParallel`.

Tensors are [batch, seq, heads, head_dim], or packed documents [tokens, heads, head_dim]; k and v, or all three, may be
one tensor with a dimension before the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SoloComm, comm_from
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.parallel.context import ContextParallel, UnnumberedContext
from attnmesh.utils.validation import check_bool, check_number, check_tensor, is_number, shown

Group = Comm | ProcessGroup | DeviceMesh | None
"""The ranks of a call. ring_flash_attn takes a ProcessGroup, or None for the default one."""
Result = Tensor | tuple[Tensor, Tensor, None]
"""Out, or (out, lse, None) with `return_attn_probs`."""
NOT_COMPILED = "functions of ring_flash_attn run eagerly: call ContextParallel.attention in a compiled graph"

_SOLO = SoloComm()


class Options(NamedTuple):
    """The arguments that all functions share, with FlashAttention's meanings."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool

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
def context(comm: Comm, layout: Layout, schedule: str, backend: str = "auto") -> ContextParallel:
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
    schedule: str
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
