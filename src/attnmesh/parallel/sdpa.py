"""For models that call `torch.nn.functional.scaled_dot_product_attention`: inside a context, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnmesh.comm import Comm
from attnmesh.core.layouts import dimension
from attnmesh.core.masks import Causal, Full, Mask
from attnmesh.parallel.context import ContextParallel


@contextmanager
def attention_context_parallel(
    group: ContextParallel | Comm | ProcessGroup | DeviceMesh | None = None,
    *,
    length: int | None = None,
    mask: Mask = Full(),  # noqa: B008  (immutable)
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] = (),
    **options: Any,
) -> Iterator[ContextParallel]:
    """Inside, `scaled_dot_product_attention` on shards is exact attention over the whole sequence of `length`.

    `group` is a ContextParallel, or what ContextParallel takes, as are the `options` (layout, schedule, backend).
    Yields the ContextParallel: rotary embeddings take its `positions(length)`. A call sees what both `is_causal` and
    `mask` let it see: with `mask=Documents(lengths)`, causal calls are `Causal() & Documents(lengths)`.

    Each of `buffers` is sharded in place along its one of `buffer_seq_dims`, and whole again afterwards unless it is
    in `no_restore_buffers`. They tell the length where `length` does not.

    It holds for the thread that enters it. Run the backward inside it if there are buffers or activation checkpoints.
    """
    if isinstance(group, ContextParallel):
        if options:
            raise ValueError(f"{', '.join(options)}: the ContextParallel has its own, make one that has these")
        cp = group
    else:
        cp = ContextParallel(group, **options)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be an attnmesh mask (Documents(...), SlidingWindow(...), ...), got {mask!r}")
    dims = _checked_dims(buffers, buffer_seq_dims, no_restore_buffers)
    length = _length_with(buffers, dims, length)
    wholes = [buffer.data for buffer in buffers]
    try:
        for buffer, dim in zip(buffers, dims, strict=True):
            _put(buffer, cp.shard(buffer.data, dim).clone())
        with _OverAllRanks(cp, mask, length):
            yield cp
    finally:
        for buffer, whole in zip(buffers, wholes, strict=True):
            if not _is_among(buffer, no_restore_buffers):
                _put(buffer, whole)


class _OverAllRanks(TorchFunctionMode):
    """Answers torch's attention with that of a ContextParallel, and leaves every other function as it is."""

    def __init__(self, cp: ContextParallel, mask: Mask, length: int | None) -> None:
        super().__init__()
        self._cp, self._length = cp, length
        self._causal, self._full = Causal() & mask, mask

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _OTHER_ATTENTION:
            raise ValueError(
                f"{func.__name__} does not attend over ranks (nor does what calls it, as nn.MultiheadAttention does): "
                "call torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None:
            raise ValueError(
                "attn_mask must be None over ranks, which hold no row of it whole: use is_causal=True, and give "
                "windows and packed documents to attention_context_parallel(mask=...)"
            )
        if dropout_p > 0:
            raise ValueError(f"dropout_p must be 0 over ranks, got {dropout_p}: set the model's attention dropout to 0")
        if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"query and key have {query.shape[1]} and {key.shape[1]} heads: pass enable_gqa=True to share keys"
            )
        q, k, v = (_autocast(x) for x in (query, key, value))
        mask = self._causal if is_causal else self._full
        return self._cp.attention(q, k, v, mask=mask, scale=scale, length=self._length)


def _autocast(x: Tensor) -> Tensor:
    """What autocast hands to torch's attention: it comes after us, and would come too late."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


# These have attention of their own: passed through, they would attend within a shard and say nothing.
_OTHER_ATTENTION = frozenset({F.multi_head_attention_forward, torch.ops.higher_order.flex_attention})


def _checked_dims(buffers: Sequence[Tensor], dims: Sequence[int], no_restore: Collection[Tensor]) -> list[int]:
    if len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims must have one entry for each of {len(buffers)} buffers, got {len(dims)}")
    if not all(_is_among(buffer, buffers) for buffer in no_restore):
        raise ValueError("no_restore_buffers must be among the buffers")
    return [dimension(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]


def _length_with(buffers: Sequence[Tensor], dims: Sequence[int], length: int | None) -> int | None:
    """The length of the whole sequence, as given or as the buffers have it."""
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if length is not None:
        lengths.add(length)
    if len(lengths) > 1:
        raise ValueError(f"length and the buffers along buffer_seq_dims must be one length, got {sorted(lengths)}")
    return lengths.pop() if lengths else None


def _put(buffer: Tensor, data: Tensor) -> None:
    buffer.data = data
    increment_version(buffer)  # a backward that still needs the other shape complains


def _is_among(buffer: Tensor, others: Collection[Tensor]) -> bool:
    return any(buffer is other for other in others)  # `in` would compare their elements
