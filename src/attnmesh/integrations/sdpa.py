"""Context parallelism for models that call `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnmesh.comm import Comm, SharedValues
from attnmesh.core.layouts import dimension
from attnmesh.core.masks import Causal, Full, Mask, check_mask
from attnmesh.integrations.transformers_attention import autocast
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
    intersected with the mask of the call: with `mask=Documents(lengths)`, calls with `is_causal=True` attend under
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
    state = ShardedBuffers(buffers, buffer_seq_dims, length)
    if not all(state.has(buffer) for buffer in check_list("no_restore_buffers", no_restore_buffers, "tensors")):
        raise ValueError(f"no_restore_buffers must be among the buffers, got {shown(no_restore_buffers)}")
    if buffers and cp.world > 1:
        checks = ValueChecks(cp.comm.log, "buffers", first=1, every=100)
        values = state.compared(checks)
        cp.comm.agree("attention_context_parallel", values, force=True)
        checks.count()
    with state.sharded(cp, no_restore_buffers), _ContextParallelMode(cp, mask, state.length):
        yield cp


class ShardedBuffers:
    """Tensors that are sharded in place along a dimension each, and the whole tensors."""

    def __init__(self, buffers: Sequence[Tensor], dims: Sequence[int], length: int | None = None) -> None:
        for i, buffer in enumerate(check_list("buffers", buffers, "tensors")):
            check_tensor(f"buffers[{i}]", buffer)
        if len(buffers) != len(check_list("buffer_seq_dims", dims, "dimensions")):
            raise ValueError(
                f"buffer_seq_dims must have one entry for each of {len(buffers)} buffers, got {shown(dims)}"
            )
        self._dims = [
            dimension(x, dim, f"buffer_seq_dims[{i}]") for i, (x, dim) in enumerate(zip(buffers, dims, strict=True))
        ]
        self.buffers = list(buffers)
        self.wholes = [buffer.data for buffer in buffers]
        lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, self._dims, strict=True)}
        if length is not None:
            lengths.add(check_count("length", length))
        if len(lengths) > 1:
            raise ValueError(f"length and the buffers along buffer_seq_dims must be one length, got {sorted(lengths)}")
        self.length = lengths.pop() if lengths else None
        """The length of the whole sequence, as given or as the buffers have it."""

    def has(self, buffer: Tensor) -> bool:
        """Whether a tensor is one of the buffers."""
        return any(buffer is other for other in self.buffers)  # `in` would compare their elements

    def compared(self, checks: ValueChecks) -> SharedValues:
        """What must be equal on all ranks."""
        return {"length": self.length, **checks.compared(**{f"buffers[{i}]": x for i, x in enumerate(self.wholes)})}

    @contextmanager
    def sharded(self, cp: ContextParallel, kept: Iterable[Tensor]) -> Iterator[None]:
        """The buffers are this rank's shards. Afterwards they are whole again, except those to be `kept`."""
        shards = [cp.shard(x, dim).clone() for x, dim in zip(self.wholes, self._dims, strict=True)]
        for buffer, shard in zip(self.buffers, shards, strict=True):
            _put(buffer, shard)
        stay = {id(buffer) for buffer in kept}
        try:
            yield
        finally:
            for buffer, whole in zip(self.buffers, self.wholes, strict=True):
                if id(buffer) not in stay:
                    _put(buffer, whole)


class _ContextParallelMode(TorchFunctionMode):
    """Replaces torch's attention by the attention of a ContextParallel; other functions are unchanged."""

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
        q, k, v = autocast(query, key, value)
        mask = self._causal if is_causal else self._full
        return self._cp.attention(q, k, v, mask=mask, scale=scale, length=self._length)


# These have attention of their own: passed through, they would silently attend within a shard.
_OTHER_ATTENTION = frozenset({F.multi_head_attention_forward, torch.ops.higher_order.flex_attention})


def _put(buffer: Tensor, data: Tensor) -> None:
    buffer.data = data
    increment_version(buffer)  # so that a backward that still needs the other shape raises
