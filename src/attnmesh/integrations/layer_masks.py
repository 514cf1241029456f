"""The mask that a layer of a Transformers model asks for, without a mask tensor.

Transformers describes a mask by a function that it composes (causal, with a window, in chunks, within packed
sequences), and calls the hook of an attention implementation to make a tensor of it. This hook recognizes the function
instead; a function that it does not know raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.masks import Causal, Chunked, Mask, Slices, SlidingWindow
from attnmesh.integrations.packing import Packing, check_gaps, document_starts, packing_of
from attnmesh.integrations.sharded_batch import ShardedMask
from attnmesh.integrations.transformers_models import check_config

_MODULE = "transformers.masking_utils"


class MaskReadError(ValueError, AttributeError):
    """An AttributeError, too, so that `hasattr` works."""


class LayerMask:
    """What Transformers passes to the attention of a layer as its mask: `kind` of the layer, and the batch's tensors.

    `padding` [B, keys] hides tokens of padding, and `packing` [B, keys] numbers the sequences that are packed in a row;
    either may be None. Queries and keys have the positions `queries` and `keys`. Tensors are read only if attention
    runs on one device (`on_one_device`), once for all layers.
    """

    def __init__(
        self, kind: Mask, padding: Tensor | ShardedMask | None, packing: Tensor | None, queries: range, keys: range
    ) -> None:
        self.kind, self.padding, self.packing, self.queries, self.keys = kind, padding, packing, queries, keys
        self._on_one_device: Mask | None = None

    def __getattr__(self, name: str) -> Any:
        raise MaskReadError(
            f"models must pass the masks that Transformers makes on to their attention as they are, got a model that "
            f"reads {name} of its mask: masks that a model changes are not supported"
        )

    def on_one_device(self, position_ids: Tensor | None) -> Mask:
        """The mask of the layer within the documents and without the padding of the batch."""
        if self._on_one_device is None:
            self._on_one_device = self._documents(position_ids).apply(self.kind)
        return self._on_one_device

    def _documents(self, position_ids: Tensor | None) -> Packing:
        real, starts = self.padding, None
        if real is not None:
            real = real.cpu().bool()
            if real.shape[1] < self.keys.stop:  # Transformers treats tokens beyond the mask as padding
                real = torch.nn.functional.pad(real, (0, self.keys.stop - real.shape[1]))
            real = real[:, : self.keys.stop]
            check_gaps(None, None, real)
        if self.packing is not None:
            numbers = self.packing.cpu()
            starts = torch.ones_like(numbers, dtype=torch.bool)
            starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        elif real is None and position_ids is not None and self.queries == self.keys:  # not every model passes them on
            starts = document_starts(position_ids.cpu())
        given = real if real is not None else starts
        if given is None:
            return Packing(None, (), self.keys.stop)
        return packing_of(starts, None if real is None or bool(real.all()) else real, (given.shape[0], self.keys.stop))


def layer_mask(
    *_: object,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | ShardedMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any,
    **__: object,
) -> LayerMask:
    """The hook that Transformers calls to make a mask, once per kind of layer in a forward pass."""
    check_config(config)
    if torch.compiler.is_compiling():
        kind, packing = _traced_kind(local_size, allow_is_causal_skip, config), None
    else:
        kind, packing = _kind(mask_function)
    if isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the KV cache must end with the last token, as a DynamicCache does, got {kv_length} keys from {kv_offset} "
            f"for {q_length} queries from {q_offset}: static caches are not supported"
        )
    queries, keys = range(q_offset, q_offset + q_length), range(kv_offset, kv_offset + kv_length)
    return LayerMask(kind, attention_mask, packing, queries, keys)


def _kind(function: Callable[..., Any]) -> tuple[Mask, Tensor | None]:
    """The mask of one layer, and the numbers of packed sequences."""
    found: dict[str, dict[str, Any]] = {}
    for name, cells in _conjunction(function):
        if name in found:
            raise ValueError(f"masks must not have two functions {name}")
        found[name] = cells
    if "causal_mask_function" not in found:
        raise ValueError(f"masks must be causal, got {', '.join(found)}: attnmesh serves decoders")
    packing = found.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    window, chunk = found.get("sliding_window_overlay"), found.get("chunked_overlay")
    if window is not None and chunk is not None:
        raise ValueError("masks must have a sliding window or chunks, got both")
    if window is not None:
        return _window(int(window["sliding_window"])), packing
    return (Causal() if chunk is None else Chunked(int(chunk["chunk_size"]))), packing


def _window(size: int) -> Mask:
    """A window of 0 tokens is that of layers that the model does not have: Qwen2-MoE makes a mask for them anyway."""
    return SlidingWindow(size - 1) if size else Slices([])


_KNOWN = ("causal_mask_function", "sliding_window_overlay", "chunked_overlay", "packed_sequence_mask_function")


def _conjunction(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that a mask function is the conjunction of: the name of each, and the values it was made with."""
    name = function.__qualname__.split(".")[0]
    names = function.__code__.co_freevars
    cells = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if function.__module__ == _MODULE and name == "and_masks":
        for part in cells["mask_functions"]:
            yield from _conjunction(part)
    elif function.__module__ == _MODULE and name in _KNOWN:
        yield name, cells
    else:
        raise ValueError(
            f"masks must be causal, with a sliding window, in chunks or of packed sequences, got the mask function "
            f"{function.__module__}.{function.__qualname__}"
        )


def _traced_kind(local_size: int | None, plain: bool, config: Any) -> Mask:
    """The mask of one layer in a graph that is being traced, where functions cannot be inspected."""
    if not plain:
        raise ValueError(
            "masks in a compiled graph must be causal, with a sliding window or in chunks: pass packed sequences to "
            "shard_inputs"
        )
    if local_size is None:
        return Causal()
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size == chunk and local_size != window:
        return Chunked(local_size)
    if local_size == window and local_size != chunk:
        return _window(local_size)
    raise ValueError(
        f"a compiled graph must tell a sliding window from chunks, got a mask of {local_size} tokens with "
        f"sliding_window={window} and attention_chunk_size={chunk}"
    )
