"""Masks and layouts as lists of integers, and back: a compiled graph holds numbers, not objects.

Dynamo runs `in_numbers` while it traces. It guards on the type of every object and on the integers read from it, and
may turn these into inputs of the graph. So another mask is another graph or other inputs, and never the wrong mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import And, Causal, Documents, Full, Mask, SlidingWindow

_FIELDS: dict[type, tuple[str, ...]] = {
    Full: (), Causal: (), SlidingWindow: ("left", "right"), Documents: ("lengths",), And: ("parts",),
    Contiguous: (), Striped: (), Zigzag: ("pairs",), Balanced: ("mask",), Joint: ("parts",),
}  # fmt: skip
_KINDS = list(_FIELDS)
_INTEGER, _TUPLE, _FIRST_KIND = range(3)  # a value starts with what it is

_Value = int | tuple[Any, ...] | Mask | Layout


def in_numbers(value: _Value) -> list[int]:
    """The integers that tell a mask or a layout."""
    if isinstance(value, int):
        return [_INTEGER, value]
    if isinstance(value, tuple):
        return [_TUPLE, len(value), *(number for item in value for number in in_numbers(item))]
    kind = type(value)  # the very type: a subclass may mean something else
    if kind not in _FIELDS:
        raise ValueError(f"torch.compile takes the masks and layouts of attnmesh as they are, not a {kind.__name__}")
    told = [_FIRST_KIND + _KINDS.index(kind)]
    for name in _FIELDS[kind]:
        told += in_numbers(getattr(value, name))
    return told


def from_numbers(told: Sequence[int]) -> Any:
    """What `in_numbers` told."""
    return _next_value(iter(told))


def _next_value(numbers: Iterator[int]) -> _Value:
    what = next(numbers)
    if what == _INTEGER:
        return next(numbers)
    if what == _TUPLE:
        return tuple(_next_value(numbers) for _ in range(next(numbers)))
    kind = _KINDS[what - _FIRST_KIND]
    made: Mask | Layout = object.__new__(kind)  # past the constructors: it was checked when it was first made
    for name in _FIELDS[kind]:
        object.__setattr__(made, name, _next_value(numbers))
    return made
