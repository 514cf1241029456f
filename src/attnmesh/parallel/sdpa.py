"""Context parallelism for models that call `torch.nn.functional.scaled_dot_product_attention`."""

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
from attnmesh.core.masks import Causal, Full, Mask, check_mask
from attnmesh.parallel.checksums import ValueChecks
from attnmesh.parallel.context import ContextParallel, UnnumberedContext
from attnmesh.utils.validation import check_count, check_list, check_tensor, shown


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
    """Context manager in which `scaled_dot_product_attention` on shards attends over the whole sequence of `length`.

    `group` is a ContextParallel, or the `group` argument of a new one, whose other arguments (layout, schedule,
    backend) are `options`. Yields the ContextParallel; rotary embeddings need its `positions(length)`. `mask` is
    intersected with that of the call: with `mask=Documents(lengths)`, calls with `is_causal=True` attend under
    `Causal() & Documents(lengths)`.

    Each of `buffers` is sharded in place along its dimension in `buffer_seq_dims`, and restored on exit unless it is in
    `no_restore_buffers`. Their length is used if `length` is None. Ranks compare a checksum of the buffers, as
    `shard_inputs` does.

    Tensors are [B,H,n,D], as `scaled_dot_product_attention` takes them.

    Only the thread that enters it is affected. Run the backward inside if there are buffers or activation checkpoints.

    Examples:
        >>> x = torch.randn(1, 2, 64, 16)
        >>> def rank(comm):
        ...     with am.attention_context_parallel(comm, length=64) as cp:
        ...         mine = cp.shard(x, dim=2)
        ...         out = torch.nn.functional.scaled_dot_product_attention(mine, mine, mine, is_causal=True)
        ...     return cp.unshard(out, dim=2, length=64)
        >>> whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(am.run_virtual(4, rank)[0], whole, atol=1e-5)
        True
    """
    if isinstance(group, ContextParallel):
        if options:
            raise ValueError(f"{', '.join(options)} must not be given with a ContextParallel, which has its own")
        cp = group
    else:
        cp = UnnumberedContext(group, **options)
    check_mask("mask", mask)
    dims = _checked_dims(buffers, buffer_seq_dims, no_restore_buffers)
    length = _length_with(buffers, dims, length)
    wholes = [buffer.data for buffer in buffers]
    if wholes and cp.world > 1:
        checks = ValueChecks(cp.comm.log, "buffers", first=1, every=100)
        values = checks.compared(**{f"buffers[{i}]": whole for i, whole in enumerate(wholes)})
        cp.comm.agree("attention_context_parallel", {"length": length, **values}, force=True)
        checks.count()
    try:
        for buffer, dim in zip(buffers, dims, strict=True):
            _put(buffer, cp.shard(buffer.data, dim).clone())
        with _ContextParallelMode(cp, mask, length):
            yield cp
    finally:
        for buffer, whole in zip(buffers, wholes, strict=True):
            if not _is_among(buffer, no_restore_buffers):
                _put(buffer, whole)


class _ContextParallelMode(TorchFunctionMode):
    """Replaces torch's attention by that of a ContextParallel; other functions are unchanged."""

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
                f"{func.__name__} is not supported over ranks (nor are its callers, such as nn.MultiheadAttention): "
                "call torch.nn.functional.scaled_dot_product_attention"
            )
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None:
            raise ValueError(
                "attn_mask must be None over ranks, which hold shards of the sequence: use is_causal=True, and pass "
                "windows and packed documents as attention_context_parallel(mask=...)"
            )
        if dropout_p > 0:
            raise ValueError(f"dropout_p must be 0: attention has no dropout over ranks, got {dropout_p}")
        if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"enable_gqa must be True for {query.shape[1]} query and {key.shape[1]} key heads, got False"
            )
        q, k, v = (_autocast(x) for x in (query, key, value))
        mask = self._causal if is_causal else self._full
        return self._cp.attention(q, k, v, mask=mask, scale=scale, length=self._length)


def _autocast(x: Tensor) -> Tensor:
    """The input in the dtype that autocast would cast it to, which it does only after function modes have run."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


# These have attention of their own: passed through, they would silently attend within a shard.
_OTHER_ATTENTION = frozenset({F.multi_head_attention_forward, torch.ops.higher_order.flex_attention})


def _checked_dims(buffers: Sequence[Tensor], dims: Sequence[int], no_restore: Collection[Tensor]) -> list[int]:
    for i, buffer in enumerate(check_list("buffers", buffers, "tensors")):
        check_tensor(f"buffers[{i}]", buffer)
    if len(buffers) != len(check_list("buffer_seq_dims", dims, "dimensions")):
        raise ValueError(f"buffer_seq_dims must have one entry for each of {len(buffers)} buffers, got {shown(dims)}")
    if not all(_is_among(buffer, buffers) for buffer in check_list("no_restore_buffers", no_restore, "tensors")):
        raise ValueError(f"no_restore_buffers must be among the buffers, got {shown(no_restore)}")
    return [
        dimension(buffer, dim, f"buffer_seq_dims[{i}]")
        for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True))
    ]


def _length_with(buffers: Sequence[Tensor], dims: Sequence[int], length: int | None) -> int | None:
    """The length of the whole sequence, as given or from the buffers."""
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if length is not None:
        lengths.add(check_count("length", length))
    if len(lengths) > 1:
        raise ValueError(f"length and the buffers along buffer_seq_dims must be one length, got {sorted(lengths)}")
    return lengths.pop() if lengths else None


def _put(buffer: Tensor, data: Tensor) -> None:
    buffer.data = data
    increment_version(buffer)  # so that a backward that still needs the other shape raises


def _is_among(buffer: Tensor, others: Collection[Tensor]) -> bool:
    return any(buffer is other for other in others)  # `in` would compare their elements
