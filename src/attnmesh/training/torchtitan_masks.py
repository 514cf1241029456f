"""The masks that torchtitan builds, as masks of attnmesh: mask functions of FlexAttention, and varlen metadata.

A mask function of torchtitan is a closure. Its code says which mask it is, and what it closes over has the documents,
the window or the chunks: no pairs of tokens are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import pairwise
from operator import and_
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask

from attnmesh.core.masks import Causal, Chunked, Documents, Full, Mask, SlidingWindow, number_starts, packing_of
from attnmesh.utils.optional import require
from attnmesh.utils.text import see
from attnmesh.utils.validation import shown

attention = require("torchtitan.models.common.attention", extra="torchtitan")

_PAGE = "stacks.md#torchtitan"
_MASKS = (
    "get_causal_mask_mod, get_document_mask_mod, get_efficient_causal_mask_mod_for_packed_document, "
    "get_sliding_window_mask_mod, get_fixed_block_mask_mod"
)


def mask_of_blocks(mask: BlockMask) -> Mask:
    """The mask of a BlockMask whose mask function is one of torchtitan's, or several that `and_masks` combines.

    Raises ValueError for others, by name.
    """
    queries, keys = mask.seq_lengths
    if queries != keys:
        raise ValueError(f"attention_masks must have as many queries as keys, got {queries} and {keys}{see(_PAGE)}")
    functions = list(_combined(mask.mask_mod))
    kinds = [_kind(function) for function in functions]
    causal = any(kind in (_CAUSAL, _WINDOW) for kind in kinds)
    parts = []
    for function, kind in zip(functions, kinds, strict=True):
        values = _closure(function)
        if kind == _PACKED and not causal:
            raise ValueError(
                f"attention_masks must combine get_efficient_causal_mask_mod_for_packed_document with a causal mask, "
                f"got it without one{see(_PAGE)}"
            )
        parts.append(_READERS[kind](values, queries, causal))
    return _all_of(parts)


def mask_of_metadata(metadata: Any, shape: tuple[int, int]) -> Mask:
    """The documents of a batch [rows, tokens] from the metadata of varlen attention. They are not causal by themselves.

    Raises ValueError for queries and keys with different documents, and for documents that cross rows.
    """
    rows, length = shape
    bounds = metadata.cu_seq_q.detach().cpu()
    if metadata.cu_seq_k is not metadata.cu_seq_q and not torch.equal(bounds, metadata.cu_seq_k.detach().cpu()):
        raise ValueError(f"attention_masks.cu_seq_k must be equal to cu_seq_q, got other values{see(_PAGE)}")
    found = bounds.tolist()
    if not found or found[-1] != rows * length or any(a > b for a, b in pairwise(found)):
        raise ValueError(
            f"attention_masks.cu_seq_q must ascend to the {rows} x {length} tokens of the batch, got {shown(found)}"
            f"{see(_PAGE)}"
        )
    starts = torch.zeros(rows * length, dtype=torch.bool, device="cpu")
    starts[[at for at in found if at < rows * length]] = True
    return _documents(starts.view(rows, length))


def window_mask(window_size: tuple[int, int]) -> Mask:
    """The mask of `VarlenAttention.Config.window_size`, (left, right), where -1 is unlimited."""
    left, right = window_size
    if (left, right) == (-1, 0):
        return Causal()
    if (left, right) == (-1, -1):
        return Full()
    if left < 0 or right < 0:
        raise ValueError(
            f"window_size must be (-1, 0), (-1, -1) or two numbers >= 0, got {shown(window_size)}{see(_PAGE)}"
        )
    return SlidingWindow(left, right)


def masks_under(mask: Mask, layer: Mask) -> Mask:
    """The mask of a layer within documents; without `Full`, which allows everything."""
    return _all_of([layer, mask])


# Mask functions of FlexAttention.

_CAUSAL, _WINDOW, _CHUNKS, _DOCUMENTS, _PACKED, _FULL = "causal", "window", "chunks", "documents", "packed", "full"


def _codes(function: Callable[..., Any]) -> list[CodeType]:
    """The code of the functions that a function defines."""
    return [constant for constant in function.__code__.co_consts if isinstance(constant, CodeType)]


_AND = _codes(and_masks)
_KINDS: dict[CodeType, str] = {
    code: kind
    for maker, kind in (
        (attention.get_causal_mask_mod, _CAUSAL),
        (attention.get_sliding_window_mask_mod, _WINDOW),
        (attention.get_fixed_block_mask_mod, _CHUNKS),
        (attention.get_document_mask_mod, _DOCUMENTS),
        (attention.get_efficient_causal_mask_mod_for_packed_document, _PACKED),
    )
    for code in _codes(maker)
}
_KINDS[noop_mask.__code__] = _FULL


def _combined(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The mask functions that `and_masks` combined; else the function itself."""
    if getattr(function, "__code__", None) in _AND:
        for part in _closure(function)["mask_mods"]:
            yield from _combined(part)
    else:
        yield function


def _kind(function: Callable[..., Any]) -> str:
    kind = _KINDS.get(getattr(function, "__code__", None))  # type: ignore[arg-type]
    if kind is None:
        name = getattr(function, "__qualname__", None) or shown(function)
        raise ValueError(
            f"attention_masks must be made of torchtitan's mask functions ({_MASKS}) and and_masks, got {name}"
            f"{see(_PAGE)}"
        )
    return kind


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, by name."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def _window(values: dict[str, Any], length: int, causal: bool) -> Mask:
    return SlidingWindow(int(values["window_size"]) - 1)


def _chunks(values: dict[str, Any], length: int, causal: bool) -> Mask:
    size = int(values["fixed_block_size"])
    if causal:
        return Chunked(size)
    whole, rest = divmod(length, size)
    return Documents([size] * whole + [rest] * bool(rest))


def _numbered(values: dict[str, Any], length: int, causal: bool) -> Mask:
    """get_document_mask_mod: the number of the document of each token."""
    return _documents(number_starts(_host(values["doc_ids"])))


def _packed(values: dict[str, Any], length: int, causal: bool) -> Mask:
    """get_efficient_causal_mask_mod_for_packed_document: numbers of a single row, or the ends of documents of rows."""
    if "document_id" not in values:
        return _documents(number_starts(_host(values["doc_end_by_token"])))
    numbers = _host(values["document_id"])[None]
    if numbers.numel() and int(numbers[0, 0]) < 0:
        raise ValueError(f"positions must be 0 in the first token of a row, got {shown(numbers[0, :4])}{see(_PAGE)}")
    return _documents(number_starts(numbers))


_READERS: dict[str, Callable[[dict[str, Any], int, bool], Mask]] = {
    _CAUSAL: lambda values, length, causal: Causal(),
    _FULL: lambda values, length, causal: Full(),
    _WINDOW: _window,
    _CHUNKS: _chunks,
    _DOCUMENTS: _numbered,
    _PACKED: _packed,
}


def _host(x: Tensor) -> Tensor:
    return x.detach().cpu()


def _documents(starts: Tensor) -> Mask:
    """The documents of rows from their first tokens, bool [rows, tokens]."""
    if not bool(starts[:, :1].all()):
        raise ValueError(
            f"positions must be 0 in the first token of every row: documents do not cross rows{see(_PAGE)}"
        )
    mask = packing_of(starts, None, (starts.shape[0], starts.shape[1])).mask
    return Full() if mask is None else mask


def _all_of(parts: list[Mask]) -> Mask:
    """The intersection, without parts that others contain."""
    limits = [part for part in parts if not isinstance(part, Full)]
    if any(isinstance(part, Chunked) or (isinstance(part, SlidingWindow) and not part.right) for part in limits):
        limits = [part for part in limits if not isinstance(part, Causal)]
    return reduce(and_, limits) if limits else Full()
