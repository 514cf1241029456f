"""Masks and layouts encoded as lists of integers, because a compiled graph holds numbers but not objects.

Dynamo runs `encode` while it traces. It guards on the type of every object and on the integers read from it, and may
turn these into inputs of the graph. So another mask leads to another graph or other inputs, and never to a wrong mask.

The documents of a batch are another mask for every batch. `TracedMask` has them in a tensor, an input of the graph that
is only read when the graph runs, so that one graph serves every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, cast

from torch import Tensor

from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import (
    And,
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Or,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
    packing_of_numbers,
)

_KINDS: tuple[type, ...] = (
    Full, Causal, SlidingWindow, Documents, Prefix, Chunked, BlockCausal, Global, Slices, PerSequence, Padding, And, Or,
    Contiguous, Striped, Zigzag, Balanced, Joint,
)  # fmt: skip
"""What can be encoded: dataclasses whose fields are integers, flags, words, ranges, None, and tuples of such values."""

_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS}
_INTEGER, _FLAG, _WORD, _RANGE, _NONE, _TUPLE, _FIRST_KIND = range(7)  # the tags with which values start

_Value = int | str | range | tuple[Any, ...] | Mask | Layout | None


class TracedMask(NamedTuple):
    """The mask of a layer in a graph that is being traced, within documents: see `Packing.numbers`."""

    layer: Mask
    documents: Tensor | None


def traced_mask(layer: Mask, documents: Tensor | None) -> Mask:
    """A TracedMask, which compiled operators take in place of a mask."""
    return cast(Mask, TracedMask(layer, documents))


def encode_mask(mask: Mask | TracedMask) -> tuple[list[int], Tensor | None]:
    """A mask as integers, and the documents within which it holds."""
    if isinstance(mask, TracedMask):
        return encode(mask.layer), mask.documents
    return encode(mask), None


def decode_mask(codes: Sequence[int], documents: Tensor | None) -> Mask:
    """The mask that `encode_mask` encoded."""
    layer: Mask = decode(codes)
    return layer if documents is None else packing_of_numbers(documents).apply(layer)


def encode(value: _Value) -> list[int]:
    """A mask or a layout as integers."""
    if value is None:
        return [_NONE]
    if isinstance(value, bool):
        return [_FLAG, 1 if value else 0]
    if isinstance(value, int):
        return [_INTEGER, value]
    if isinstance(value, str):
        return [_WORD, len(value), *(ord(character) for character in value)]
    if isinstance(value, range):
        return [_RANGE, value.start, value.stop, value.step]
    if isinstance(value, tuple):
        return [_TUPLE, len(value), *(code for item in value for code in encode(item))]
    kind = type(value)  # the exact type: a subclass may have another meaning
    if kind not in _FIELDS:
        raise ValueError(f"torch.compile supports the masks and layouts of attnmesh only, got {kind.__name__}")
    codes = [_FIRST_KIND + _KINDS.index(kind)]
    for name in _FIELDS[kind]:
        codes += encode(getattr(value, name))
    return codes


def decode(codes: Sequence[int]) -> Any:
    """The mask or layout that `encode` encoded."""
    return _decode_next(iter(codes))


def _decode_next(codes: Iterator[int]) -> _Value:
    tag = next(codes)
    if tag == _NONE:
        return None
    if tag == _FLAG:
        return next(codes) == 1
    if tag == _INTEGER:
        return next(codes)
    if tag == _WORD:
        return "".join(chr(next(codes)) for _ in range(next(codes)))
    if tag == _RANGE:
        return range(next(codes), next(codes), next(codes))
    if tag == _TUPLE:
        return tuple(_decode_next(codes) for _ in range(next(codes)))
    kind = _KINDS[tag - _FIRST_KIND]
    value: Mask | Layout = object.__new__(kind)  # without its constructor: it was checked when it was first constructed
    for name in _FIELDS[kind]:
        object.__setattr__(value, name, _decode_next(codes))
    return value
