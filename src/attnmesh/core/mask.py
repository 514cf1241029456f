"""`Mask`: which keys a query attends to, and how masks combine.

`visible` defines a mask; plans and kernels use `intervals`, which is the same mask as a few disjoint intervals of key
positions per query (see `attnmesh.core.intervals`). `a & b` allows what both allow, `a | b` what either allows.
`CustomMask` is a mask of one's own, defined by the interval of keys of each query.
"""

from __future__ import annotations

import enum
import itertools
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.intervals import (
    FAR,
    Intersection,
    Intervals,
    Line,
    Trapezoid,
    chains,
    intersection,
    joined,
    straight_pieces,
    trapezoids,
    union,
)
from attnmesh.core.ranges import rows_between
from attnmesh.utils.error_links import see
from attnmesh.utils.validation import MAX_COUNT, check_count, check_tensor, shown

MAX_INTERVALS = 64
"""The most intervals per query, and the most chains of intervals in one launch of a kernel, which reads the bounds of
every row in each of them."""


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "attnmesh"


class Coverage(enum.Enum):
    """How much of a range of keys a range of queries attends to: EMPTY, FULL or PARTIAL.

    Schedules skip what is empty, and compute what is full without a mask.

    Examples:
        >>> am.Causal().coverage(range(8, 16), range(0, 8))
        <Coverage.FULL: 'everything: compute it without a mask'>
        >>> am.Causal().coverage(range(0, 8), range(8, 16)).name
        'EMPTY'
    """

    EMPTY = "nothing: skip it"
    FULL = "everything: compute it without a mask"
    PARTIAL = "some of it: compute it with the mask"


class Mask(ABC):
    """Which keys a query attends to. Immutable and hashable; combine masks with `&` and `|`.

    A mask of your own is a subclass of `CustomMask`. A class outside of this package that overrides what plans and
    kernels read raises ValueError when it is defined: several of these must agree, or results are wrong.

    Examples:
        >>> (am.Causal() & am.Documents([3, 5])).visible(torch.tensor(4), torch.arange(8)).tolist()
        [False, False, False, True, True, False, False, False]
    """

    allows_everything = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not _is_ours(cls):
            _check_subclass(cls)

    @property
    def is_interval(self) -> bool:
        """Whether the mask of every sequence is one interval per query, which contains the query, at any length."""
        return False

    @abstractmethod
    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        """The definition of a mask of one sequence, elementwise with broadcasting; int64 positions."""

    @abstractmethod
    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """The mask of one sequence over queries at `positions`, as disjoint trapezoids."""

    def intervals(self, positions: range) -> tuple[Intervals, ...]:
        """The mask of one sequence as disjoint intervals: a query attends to the keys in its interval of any of them.

        They hold for queries and keys at `positions`, an ascending range without gaps.
        """
        return _resolved(self, positions)

    @property
    def sequences(self) -> int | None:
        """The batch size that this mask is made for; None if it is the same for all sequences of any batch."""
        return None

    def of_sequence(self, index: int) -> Mask:
        """The mask of one sequence of the batch."""
        check_count("index", index, most=MAX_COUNT if self.sequences is None else self.sequences - 1)
        return self

    @property
    def length(self) -> int | None:
        """The length of sequence that this mask is made for; None if it fits any."""
        return None

    def check(self, length: int) -> None:
        """Raises ValueError if this mask does not fit a sequence of `length` positions."""
        check_count("length", length)

    def visible(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Whether the query at `q_pos` attends to the key at `k_pos`, elementwise with broadcasting.

        The result of a mask with `sequences` has a leading dimension of that size.
        """
        _check_positions(q_pos, k_pos)
        q, k = q_pos.long(), k_pos.long()
        if self.sequences is None:
            return self._visible(q, k)
        return torch.stack([self.of_sequence(i)._visible(q, k) for i in range(self.sequences)])

    def coverage(self, q: range, k: range) -> Coverage:
        """How much of the keys at positions `k` the queries at positions `q` attend to (ascending ranges, any step).

        Exact: EMPTY if and only if no pair is allowed, FULL if and only if all are; of all sequences together.
        """
        if self.sequences is not None:
            each = {same.coverage(q, k) for _, same in sequence_groups(self)} or {Coverage.EMPTY}
            return each.pop() if len(each) == 1 else Coverage.PARTIAL
        if not q or not k:
            return Coverage.EMPTY
        ((_, parts),) = sequence_intervals(self, max(q[-1], k[-1]) + 1, min(0, q[0], k[0]))
        found = [coverage(part, q, k) for part in parts]
        if Coverage.FULL in found:
            return Coverage.FULL
        some = [part for part, its in zip(parts, found, strict=True) if its is Coverage.PARTIAL]
        if len(some) > 1 and sum(part.pairs(q, k) for part in some) == len(q) * len(k):
            return Coverage.FULL
        return Coverage.PARTIAL if some else Coverage.EMPTY

    def draw(self, length: int | None = None, size: int = 24) -> str:
        """A small drawing in text, queries from top to bottom: `#` all keys of a cell, `+` some, `.` none.

        `length` is the length of the sequence: the length of the mask, or `size` if the mask fits any. Longer sequences
        are drawn in `size` x `size` cells. A mask with `sequences` is drawn once for each.
        """
        check_count("size", size, least=1, most=1000)
        length = (size if self.length is None else self.length) if length is None else check_count("length", length)
        self.check(length)
        if self.sequences is not None:
            drawings = [self.of_sequence(i).draw(length, size) for i in range(self.sequences)]
            return "\n".join(f"sequence {i}\n{drawing}" for i, drawing in enumerate(drawings))
        edges = [length * i // size for i in range(size + 1)] if length > size else list(range(length + 1))
        cells = [range(a, b) for a, b in itertools.pairwise(edges)]
        marks = {Coverage.FULL: "#", Coverage.PARTIAL: "+", Coverage.EMPTY: "."}
        return "\n".join(" ".join(marks[self.coverage(q, k)] for k in cells) for q in cells)

    def __and__(self, other: Mask) -> Mask:
        return _combined(And, self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return _combined(Or, self, other) if isinstance(other, Mask) else NotImplemented

    def __bool__(self) -> bool:
        # Otherwise `Causal() and Documents(lengths)` would be one of the two.
        raise TypeError(f"a mask has no truth value: combine masks with & and |, not `and` and `or`, got {shown(self)}")


class IntervalMask(Mask, Intervals):
    """A mask of one interval per query, which contains the query."""

    contains_query = True

    @property
    def is_interval(self) -> bool:
        return True

    def intervals(self, positions: range) -> tuple[Intervals, ...]:
        return (self,)

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """The mask over queries at `positions`, as disjoint trapezoids."""
        return straight_pieces(self, positions)


@dataclass(frozen=True)
class _Combined(Mask):
    """Masks combined by `&` or `|`."""

    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        sizes = {part.sequences for part in self.parts} - {None}
        if len(sizes) > 1:
            raise ValueError(f"masks for different numbers of sequences cannot be combined, got {shown(self.parts)}")

    @property
    def sequences(self) -> int | None:  # not cached: a cached property cannot be compiled
        return next((part.sequences for part in self.parts if part.sequences is not None), None)

    def of_sequence(self, index: int) -> Mask:
        """The mask of one sequence of the batch."""
        super().of_sequence(index)
        return self if self.sequences is None else type(self)(tuple(part.of_sequence(index) for part in self.parts))

    @property
    def length(self) -> int | None:
        """The largest length of the parts."""
        return max((part.length for part in self.parts if part.length is not None), default=None)

    def check(self, length: int) -> None:
        for part in self.parts:
            part.check(length)


class And(_Combined):
    """The pairs that all `parts` allow. Created by `&`."""

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(operator.and_, (part._visible(q, k) for part in self.parts))

    def intervals(self, positions: range) -> tuple[Intervals, ...]:
        if self.is_interval and self.sequences is None:
            return (Intersection(tuple(interval for part in self.parts for interval in part.intervals(positions))),)
        return super().intervals(positions)

    @cached_property
    def is_interval(self) -> bool:
        return all(part.is_interval for part in self.parts)

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """What all parts contain."""
        return reduce(intersection, (part.trapezoids(positions) for part in self.parts))


class Or(_Combined):
    """The pairs that any of `parts` allows. Created by `|`."""

    def __repr__(self) -> str:
        return " | ".join(f"({part})" if isinstance(part, And) else str(part) for part in self.parts)

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return reduce(operator.or_, (part._visible(q, k) for part in self.parts))

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """What any part contains, once."""
        return union([part.trapezoids(positions) for part in self.parts])


@lru_cache(maxsize=256)
def _resolved(mask: Mask, positions: range) -> tuple[Intervals, ...]:
    keys = [Trapezoid(positions.start, positions.stop, Line(positions.start, 0), Line(positions.stop, 0))]
    pieces = intersection(mask.trapezoids(positions), keys)
    found = chains(pieces)
    if len(found) <= MAX_INTERVALS:
        return found
    pieces, most, where = joined(pieces)
    if most > MAX_INTERVALS:
        raise ValueError(
            f"a mask must have at most {MAX_INTERVALS} intervals per query, and {shown(mask)} has {most} for the query "
            f"at position {where}"
        )
    return min(found, chains(pieces), key=len)


def _combined(kind: type[_Combined], a: Mask, b: Mask) -> Mask:
    sides = ((mask.parts if isinstance(mask, _Combined) and type(mask) is kind else (mask,)) for mask in (a, b))
    parts = itertools.chain(*sides)
    distinct = tuple(dict.fromkeys(parts))
    if kind is And:  # a mask that allows everything changes nothing
        distinct = tuple(part for part in distinct if not part.allows_everything) or distinct[:1]
    return distinct[0] if len(distinct) == 1 else kind(distinct)


def coverage(part: Intervals, q: range, k: range) -> Coverage:
    """`Mask.coverage` of one interval per query."""
    if not q or not k:
        return Coverage.EMPTY
    first, end = part.key_range(q[-1])[0], part.key_range(q[0])[1]
    if first <= k[0] and k[-1] < end:  # the latest start and the earliest end hold for every query between
        return Coverage.FULL
    some = any(rows_between(k, *part.key_range(query)) for query in (q[-1], q[0])) or part.rows_seen(q, k)
    return Coverage.PARTIAL if some else Coverage.EMPTY


@lru_cache(maxsize=256)
def sequence_intervals(mask: Mask, stop: int, start: int = 0) -> tuple[tuple[range | None, tuple[Intervals, ...]], ...]:
    """The intervals of consecutive sequences that have the same mask, with these sequences; None is any batch.

    They hold for queries and keys at positions from `start` to `stop` and possibly some more.
    """
    size = 1 << max(stop - start - 1, 0).bit_length()  # of a power of two, so that few lengths are resolved
    return tuple((sequences, same.intervals(range(start, start + size))) for sequences, same in sequence_groups(mask))


@lru_cache(maxsize=256)
def sequence_groups(mask: Mask) -> tuple[tuple[range | None, Mask], ...]:
    """The masks of consecutive sequences that have the same one, with these sequences; None is any batch."""
    if mask.sequences is None:
        return ((None, mask),)
    groups: list[tuple[range | None, Mask]] = []
    for same, members in itertools.groupby(range(mask.sequences), key=mask.of_sequence):
        found = list(members)
        groups.append((range(found[0], found[-1] + 1), same))
    return tuple(groups)


def check_mask(name: str, mask: object) -> None:
    """Raise ValueError unless `mask` is a mask."""
    if isinstance(mask, Mask):
        if not _is_ours(type(mask)):
            try:
                hash(mask)
            except TypeError as error:
                raise ValueError(f"{name} must have hashable fields ({error}), got {shown(mask)}") from None
        return
    hint = ""
    if isinstance(mask, Tensor) or (callable(mask) and not isinstance(mask, type)):  # as FlexAttention and SDPA take
        hint = (
            ". A mask depends on positions only: write any mask of positions as rectangles, Slices([(queries, keys, "
            "kind), ...]), and one per sequence of the batch as PerSequence([mask, ...])"
        )
    hint += see("masks.md#masks-and-scores")
    raise ValueError(f"{name} must be an attnmesh mask (Full(), Causal(), ...), got {shown(mask)}{hint}")


_OVERRIDABLE = {"length", "check"}  # all else that a mask defines must agree with the rest


def _check_subclass(cls: type[Mask]) -> None:
    """Raise ValueError if a class outside of this package, or a mixin of it, overrides what plans and kernels read."""
    ours = [base for base in cls.__mro__ if _is_ours(base)]
    defined = {name for base in ours for name in vars(base) if not name.startswith(("__", "_abc_"))}
    fixed = (defined | {"__and__", "__or__", "allows"}) - _OVERRIDABLE
    custom = any(base.__name__ == "CustomMask" for base in ours)
    theirs = {name for base in cls.__mro__ if not _is_ours(base) and base is not object for name in vars(base)}
    wrong = sorted((theirs & fixed) - ({"key_ranges"} if custom else set()))
    if wrong:
        raise ValueError(
            f"{cls.__name__} must not define {', '.join(wrong)}: derive a mask of your own from attnmesh.CustomMask "
            "and define key_ranges(q) -> (first, end), or combine masks with & and |"
        )


def _check_positions(q_pos: object, k_pos: object) -> None:
    q, k = check_tensor("q_pos", q_pos), check_tensor("k_pos", k_pos)
    for name, x in (("q_pos", q), ("k_pos", k)):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
    if q.device != k.device:
        raise ValueError(f"q_pos and k_pos must be on the same device, got {q.device} and {k.device}")
    if any(a != b and 1 not in (a, b) for a, b in zip(reversed(q.shape), reversed(k.shape), strict=False)):
        raise ValueError(f"q_pos and k_pos must broadcast, got {list(q.shape)} and {list(k.shape)}")


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
