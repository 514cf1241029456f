"""The mask that a layer of a Transformers model asks for, without a mask tensor.

Transformers describes a mask by a function that it composes (causal, with a window, in chunks, within packed
sequences), and calls the hook of an attention implementation to make a tensor of it. This hook recognizes the function
instead; a function that it does not know raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.mask_encoding import traced_mask
from attnmesh.core.masks import Causal, Chunked, Mask, Slices, SlidingWindow
from attnmesh.core.packing import Packing, check_gaps, document_starts, number_starts, packing_of
from attnmesh.integrations.sharded_batch import ShardedMask
from attnmesh.integrations.transformers_models import check_config, check_head, counts_positions_from_mask
from attnmesh.utils.validation import shown

_MODULE = "transformers.masking_utils"


class Span(NamedTuple):
    """Positions `start <= p < stop`: not a range, whose ends torch.compile would make constants."""

    start: int
    stop: int


class MaskReadError(ValueError, AttributeError):
    """An AttributeError, too, so that `hasattr` works."""


class LayerMask:
    """What Transformers passes to the attention of a layer as its mask: `kind` of the layer, and the batch's tensors.

    `padding` [B, keys] hides tokens of padding, and `packing` [B, keys] numbers the sequences that are packed in a row;
    either may be None. Queries and keys have the positions `queries` and `keys`. Tensors are read only if attention
    runs on one device (`on_one_device`), once for all layers.
    """

    def __init__(
        self, kind: Mask, padding: Tensor | ShardedMask | None, packing: Tensor | None, queries: Span, keys: Span
    ) -> None:
        self.kind, self.padding, self.packing, self.queries, self.keys = kind, padding, packing, queries, keys
        self._on_one_device: Mask | None = None

    def __getattr__(self, name: str) -> Any:
        raise MaskReadError(
            f"models must pass the masks that Transformers makes on to their attention as they are, got a model that "
            f"reads {name} of its mask: masks that a model changes are not supported"
        )

    def on_one_device(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None = None) -> Mask:
        """The mask of the layer within the documents and without the padding of the batch.

        `cu_seq_lens` are the bounds of the documents, as FlashAttention takes them. Documents are found by their
        positions, which must begin anew at the same tokens.
        """
        if self._on_one_device is None:
            if torch.compiler.is_compiling():
                self._on_one_device = traced_mask(self.kind, self._traced_documents(position_ids))
            else:
                self._on_one_device = self._documents(position_ids, cu_seq_lens).apply(self.kind)
        return self._on_one_device

    def _traced_documents(self, position_ids: Tensor | None) -> Tensor | None:
        """The numbers of the documents, as an operator of the graph that is being traced."""
        packing = self.packing
        if packing is None and self.padding is None and position_ids is not None and self.queries == self.keys:
            packing = (~_follows(position_ids)).cumsum(-1)
        if packing is None and self.padding is None:
            return None
        padding: Any = self.padding
        numbers: Tensor = _number_documents(packing, padding, self.keys.stop)
        return numbers

    def _documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Packing:
        real, starts = self.padding, None
        if real is not None:
            real = _real(real, self.keys.stop)
            check_gaps(None, None, real)
        if self.packing is not None:
            starts = number_starts(self.packing.cpu())
        elif real is None and position_ids is not None and self.queries == self.keys:  # not every model passes them on
            starts = document_starts(position_ids.cpu())
        given = real if real is not None else starts
        if cu_seq_lens is not None:
            begins = None if starts is None or len(starts) != 1 else starts[0].nonzero().flatten()
            if begins is None or not torch.equal(begins, cu_seq_lens.cpu().long()[:-1]):
                raise ValueError(
                    f"cu_seq_lens_q must be the documents of position_ids, one row that begins anew with each, got "
                    f"{shown(cu_seq_lens.tolist())}"
                )
        if given is None:
            return Packing(None, (), self.keys.stop)
        return packing_of(starts, None if real is None or bool(real.all()) else real, (given.shape[0], self.keys.stop))


def _follows(position_ids: Tensor) -> Tensor:
    """Whether the position of each token [B, S] is the one after that of the token before."""
    return F.pad(position_ids[:, 1:] == position_ids[:, :-1] + 1, (1, 0), value=True)


@torch.library.custom_op("attnmesh::number_documents", mutates_args=())
def _number_documents(packing: Tensor | None, padding: Tensor | None, length: int) -> Tensor:
    """`Packing.numbers` of a batch whose tensors are known when the graph runs."""
    numbers = None if packing is None else packing.cpu().int()
    if numbers is not None and bool((numbers == _NOT_CAUSAL).any()):
        raise ValueError("masks must be causal, got a mask of tokens that attend to later tokens")
    if padding is None:
        assert numbers is not None
        return numbers.clone()
    real = _real(padding, length)
    check_gaps(None, None, real)
    numbers = torch.zeros_like(real, dtype=torch.int32) if numbers is None else numbers
    return numbers.masked_fill(~real, -1)


@_number_documents.register_fake
def _(packing: Tensor | None, padding: Tensor | None, length: int) -> Tensor:
    given = packing if packing is not None else padding
    assert given is not None
    return torch.empty(given.shape[0], length, dtype=torch.int32, device="cpu")


def _real(padding: Tensor | ShardedMask, length: int) -> Tensor:
    """The tokens that are not padding, on the host. Transformers treats tokens beyond the mask as padding."""
    real = padding.cpu().bool()
    return F.pad(real, (0, length - real.shape[1]))[:, :length] if real.shape[1] < length else real[:, :length]


def layer_mask(
    *_: object,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | ShardedMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device,
    config: Any,
    **__: object,
) -> LayerMask:
    """The hook that Transformers calls to make a mask, once per kind of layer in a forward pass."""
    check_config(config)
    if isinstance(attention_mask, ShardedMask) and not torch.compiler.is_compiling():
        check_head()
        if attention_mask.mesh.counts_padding and counts_positions_from_mask(config):
            raise ValueError(
                f"position_ids must be given to shard_inputs for rows with padding before their tokens: the code of "
                f"{type(config).__name__} may derive them from attention_mask, got None"
            )
    if torch.compiler.is_compiling():
        packed = not allow_is_causal_skip and attention_mask is None and q_length == kv_length
        kind = _traced_kind(local_size, not use_vmap and (allow_is_causal_skip or packed), config)
        packing = _traced_packing(mask_function, batch_size, q_length, device) if packed else None
    else:
        kind, packing = _kind(mask_function)
    if isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the KV cache must end with the last token, as a DynamicCache does, got {kv_length} keys from {kv_offset} "
            f"for {q_length} queries from {q_offset}: static caches are not supported"
        )
    queries, keys = Span(q_offset, q_offset + q_length), Span(kv_offset, kv_offset + kv_length)
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


_NOT_CAUSAL = -2  # in place of a number


def _traced_packing(function: Callable[..., Any], rows: int, tokens: int, device: torch.device) -> Tensor:
    """The numbers of packed sequences [B, tokens] in a graph that is being traced, where functions can only be called.

    A sequence begins with a token that does not attend to the one before it.
    """
    row, token = torch.arange(rows, device=device)[:, None], torch.arange(1, tokens, device=device)
    follows, ahead = (
        function(row, row, *pair).expand(rows, -1) for pair in ((token, token - 1), (token - 1, token))
    )  # fmt: skip
    numbers = F.pad((~follows).cumsum(-1), (1, 0))
    return numbers.masked_fill(F.pad(ahead, (1, 0)), _NOT_CAUSAL)


def _traced_kind(local_size: int | None, served: bool, config: Any) -> Mask:
    """The mask of one layer in a graph that is being traced, where functions cannot be inspected."""
    if not served:
        raise ValueError(
            "masks in a compiled graph must be causal, with a sliding window, in chunks or of packed sequences, got "
            "another mask function"
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
