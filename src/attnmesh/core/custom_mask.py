"""`CustomMask`: a mask of one's own, defined by the interval of keys of each query."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.intervals import FAR, Line, Trapezoid, trapezoids
from attnmesh.core.mask import Mask
from attnmesh.utils.validation import check_count, shown


class CustomMask(Mask):
    """A base class for masks: a subclass is a frozen dataclass and defines `key_ranges`, from which all else follows.

    The intervals of consecutive queries may move forward, back, or by any number of positions. Several intervals per
    query, at most 64, are a union of masks (`|`), another mask for each sequence is `PerSequence`. A subclass may also
    define the property `length`, if it is made for one length of sequence: `key_ranges` then gets positions below it
    only.

    Fields must be hashable (numbers, strings, tuples): equal masks share plans, and ranks compare them as text.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class EveryOtherBlock(am.CustomMask):
        ...     size: int
        ...     def key_ranges(self, q):
        ...         return q // self.size // 2 * 2 * self.size, q + 1
        >>> print(EveryOtherBlock(1).draw(5))
        # . . . .
        # # . . .
        . . # . .
        . . # # .
        . . . . #
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> CustomMask:
        parameters = vars(cls).get("__dataclass_params__")
        if parameters is None or not (parameters.frozen and parameters.eq):
            raise ValueError(f"{cls.__name__} must be a frozen dataclass: decorate it with @dataclass(frozen=True)")
        return super().__new__(cls)

    @abstractmethod
    def key_ranges(self, q: Tensor) -> tuple[Tensor | int, Tensor | int]:
        """`first` and `end` of the interval `first <= k < end` of each query position `q`; empty where first >= end.

        A pure function of each position, elementwise; `q` is int64 and the results are integers.
        """

    def check(self, length: int) -> None:
        check_count("length", length)
        if self.length not in (None, length):
            raise ValueError(f"{shown(self)} is a mask of sequences of {self.length} positions, got {length}")

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        if self.length is None:
            first, end = self._checked_ranges(q)
            return (first <= k) & (k < end)
        inside = (q >= 0) & (q < self.length)
        # Positions that the mask is not made for are not given to it; one in the middle stands for them.
        first, end = self._checked_ranges(q.clamp(0, max(self.length - 1, 0))) if self.length else (q, q)
        return inside & (first <= k) & (k < end)

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """Runs of queries between which both ends stay, or move by one per query."""
        if self.length is not None:
            positions = range(max(positions.start, 0), min(positions.stop, self.length))
        if not positions:
            return []
        q = torch.arange(positions.start, positions.stop, dtype=torch.int64, device="cpu")
        first, end = self._checked_ranges(q)
        halves = [self._checked_ranges(half) for half in q.flip(0).tensor_split(2) if len(half)]
        again = [torch.cat(bounds).flip(0) for bounds in zip(*halves, strict=True)]
        if not torch.equal(first, again[0]) or not torch.equal(end, again[1]):
            raise ValueError(
                f"key_ranges of {shown(self)} must give each position its own interval, whatever the other positions "
                "are and in whatever order"
            )
        empty = first >= end
        ends = torch.stack([first.masked_fill(empty, 0), end.masked_fill(empty, 0)])
        steps = ends.diff(dim=1)
        straight = ((steps == 0) | (steps == 1)).all(0)
        turns = (steps[:, 1:] != steps[:, :-1]).any(0) & straight[:-1]
        cuts = ~straight
        cuts[1:] |= turns
        starts = [0, *(cuts.nonzero().flatten() + 1).tolist()]
        found = []
        for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
            lines = []
            for bound in ends:
                slope = int(bound[start + 1] - bound[start]) if stop - start > 1 else 0
                lines.append(Line(int(bound[start]) - slope * positions[start], slope))
            found += trapezoids(positions[start], positions[stop - 1] + 1, *lines)
        return found

    def _checked_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        found: Any = self.key_ranges(q)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ValueError(f"key_ranges of {shown(self)} must return (first, end), got {shown(found)}")
        bounds = []
        for name, bound in zip(("first", "end"), found, strict=True):
            if isinstance(bound, int) and not isinstance(bound, bool):
                bound = torch.full_like(q, min(max(bound, -FAR), FAR))
            if not isinstance(bound, Tensor) or bound.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"key_ranges of {shown(self)} must return integers as {name}, got {shown(bound)}")
            if bound.shape != q.shape:
                raise ValueError(
                    f"key_ranges of {shown(self)} must return {name} in the shape of q, {list(q.shape)}, got "
                    f"{list(bound.shape)}"
                )
            bounds.append(bound.to(q.device, torch.int64).clamp(-FAR, FAR))
        return bounds[0], bounds[1]
