"""`Mask`: which keys a query attends to, and how masks combine.

`visible` defines a mask; plans and kernels use `intervals`, which is the same mask as a few disjoint intervals of key
positions per query. `a & b` allows what both allow, `a | b` what either allows.
`CustomMask` is a mask of one's own, defined by the interval of keys of each query.

`Intervals` gives every query position one half-open interval of key positions whose two ends never move back as the
query position grows. A tile of queries therefore reads one contiguous run of keys, and two integers per row describe
the interval to a kernel.

The intersection of such intervals is one again: from the largest first to the smallest end. A union is not one
interval, but it is a few of them. Between the positions where an edge turns, both ends are straight lines of slope 0 or
1, so that every mask is a list of trapezoids: `intersection` and `union` of such lists are exact, and no pair is
contained twice. `chains` arranges the result into as few `Intervals` as a greedy choice finds: often as many as a query
has intervals, and more where they move back.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.ranges import rows_between
from attnmesh.utils.text import see
from attnmesh.utils.validation import MAX_COUNT, check_count, check_tensor, shown

FAR = 1 << 60
"""A bound that no position reaches, on either side; far inside int64, so that arithmetic does not overflow."""


class Intervals(ABC):
    """The interval of key positions of every query position; both ends are non-decreasing in the query position."""

    contains_query = False
    """Whether every interval contains the position of its query, so that intervals of adjacent queries leave no gap."""

    @abstractmethod
    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """`first` and `end` of the interval of each query position; it is empty where `first >= end`."""

    @abstractmethod
    def key_range(self, q: int) -> tuple[int, int]:
        """`key_ranges` for one position, in plain integers, for planning without tensors."""

    def boundaries(self, q: range) -> list[int]:
        """The positions of `q` after its first at which an end may move by more than one: good places to split."""
        return []

    def rows_seen(self, q: range, k: range) -> list[range]:
        """The indices into the ascending range `k` that some query of `q` attends to, as disjoint ascending ranges."""
        if not q or not k or self.key_range(q[-1])[1] <= k[0] or self.key_range(q[0])[0] > k[-1]:
            return []
        if self.contains_query and q.step == 1:
            rows = rows_between(k, self.key_range(q[0])[0], self.key_range(q[-1])[1])
            return [rows] if rows else []
        begin, stop = self._rows(q, k)
        some = begin < stop
        begin, stop = begin[some], stop[some]
        if not begin.numel():
            return []
        gaps = (begin[1:] > stop[:-1]).nonzero().flatten()
        starts = [int(begin[0]), *begin[gaps + 1].tolist()]
        return [range(a, b) for a, b in zip(starts, [*stop[gaps].tolist(), int(stop[-1])], strict=True)]

    def pairs(self, q: range, k: range) -> int:
        """The number of pairs of the queries `q` and the keys `k` that are allowed."""
        begin, stop = self._rows(q, k)
        return int((stop - begin).clamp(min=0).sum())

    def _rows(self, q: range, k: range) -> tuple[Tensor, Tensor]:
        """The interval of every query in `q`, in rows of `k`."""
        first, end = self.key_ranges(torch.arange(q.start, q.stop, q.step, device="cpu"))
        begin, stop = ((-((k.start - bound) // k.step)).clamp(0, len(k)) for bound in (first, end))
        return begin, stop


@dataclass(frozen=True)
class Intersection(Intervals):
    """What all of `parts` allow."""

    parts: tuple[Intervals, ...]

    @property
    def contains_query(self) -> bool:  # type: ignore[override]
        return all(part.contains_query for part in self.parts)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.parts[0].key_ranges(q)
        for part in self.parts[1:]:
            other_first, other_end = part.key_ranges(q)
            first, end = torch.maximum(first, other_first), torch.minimum(end, other_end)
        return first, end

    def key_range(self, q: int) -> tuple[int, int]:
        intervals = [part.key_range(q) for part in self.parts]
        return max(first for first, _ in intervals), min(end for _, end in intervals)

    def boundaries(self, q: range) -> list[int]:
        return sorted({boundary for part in self.parts for boundary in part.boundaries(q)})


# Trapezoids and chains.


class Line(NamedTuple):
    """An end of intervals: `at + slope * q`, with a slope of 0 or 1."""

    at: int
    slope: int

    def __call__(self, q: int) -> int:
        return self.at + self.slope * q


class Trapezoid(NamedTuple):
    """The queries `start <= q < stop` attend to the keys `first(q) <= k < end(q)`, at least one for each query."""

    start: int
    stop: int
    first: Line
    end: Line


def trapezoids(start: int, stop: int, first: Line, end: Line) -> list[Trapezoid]:
    """The given queries that have a non-empty interval: one trapezoid or none."""
    # end - first = at + slope * q > 0
    at, slope = end.at - first.at, end.slope - first.slope
    if slope == 1:
        start = max(start, 1 - at)
    elif slope == -1:
        stop = min(stop, at)
    elif at <= 0:
        return []
    return [Trapezoid(start, stop, first, end)] if start < stop else []


def straight_pieces(intervals: Intervals, q: range) -> list[Trapezoid]:
    """Intervals whose edges turn at their boundaries only, as trapezoids over the queries `q`."""
    found = []
    for start, stop in pairwise([q.start, *intervals.boundaries(q), q.stop] if q else []):
        (first, end), (last_first, last_end) = intervals.key_range(start), intervals.key_range(stop - 1)
        slopes = int(last_first > first), int(last_end > end)
        lines = Line(first - slopes[0] * start, slopes[0]), Line(end - slopes[1] * start, slopes[1])
        found += trapezoids(start, stop, *lines)
    return found


def intersection(a: Sequence[Trapezoid], b: Sequence[Trapezoid]) -> list[Trapezoid]:
    """The pairs that some trapezoid of `a` and some trapezoid of `b` contain; each list is disjoint."""
    others = _ByQuery(b)
    return [piece for one in a for other in others.meeting(one) for piece in _both(one, other)]


def union(lists: Sequence[Sequence[Trapezoid]]) -> list[Trapezoid]:
    """The pairs that any of the lists contains, as disjoint trapezoids; each list is disjoint."""
    if len(lists) < 2:
        return [trapezoid for trapezoids in lists for trapezoid in trapezoids]
    half = len(lists) // 2
    found, more = union(lists[:half]), union(lists[half:])
    others = _ByQuery(found)
    for one in more:
        pieces = [one]
        for other in others.meeting(one):
            pieces = [rest for piece in pieces for rest in _without(piece, other)]
        found += pieces
    return found


class _ByQuery:
    """Trapezoids by their queries."""

    def __init__(self, trapezoids: Iterable[Trapezoid]) -> None:
        self._sorted = sorted(trapezoids, key=lambda trapezoid: trapezoid.start)
        self._starts = [trapezoid.start for trapezoid in self._sorted]
        self._stops = list(accumulate((trapezoid.stop for trapezoid in self._sorted), max))

    def meeting(self, one: Trapezoid) -> list[Trapezoid]:
        """Those that have a query in common with `one`."""
        begin, stop = bisect.bisect_right(self._stops, one.start), bisect.bisect_left(self._starts, one.stop)
        return [other for other in self._sorted[begin:stop] if other.stop > one.start]


def _both(a: Trapezoid, b: Trapezoid) -> list[Trapezoid]:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return [
        trapezoid
        for begin, middle, first in _pieces(start, stop, a.first, b.first, smaller=False)
        for x, y, end in _pieces(begin, middle, a.end, b.end, smaller=True)
        for trapezoid in trapezoids(x, y, first, end)
    ]


def _without(piece: Trapezoid, other: Trapezoid) -> list[Trapezoid]:
    """What `piece` allows and `other` does not."""
    start, stop = max(piece.start, other.start), min(piece.stop, other.stop)
    if start >= stop:
        return [piece]
    rest = []
    if piece.start < start:
        rest.append(piece._replace(stop=start))
    if stop < piece.stop:
        rest.append(piece._replace(start=stop))
    for a, b, end in _pieces(start, stop, piece.end, other.first, smaller=True):
        rest += trapezoids(a, b, piece.first, end)
    for a, b, first in _pieces(start, stop, piece.first, other.end, smaller=False):
        rest += trapezoids(a, b, first, piece.end)
    return rest


def _pieces(start: int, stop: int, a: Line, b: Line, *, smaller: bool) -> list[tuple[int, int, Line]]:
    """The smaller (or larger) of two lines over some queries, as straight pieces."""
    if a.slope == b.slope:
        return [(start, stop, min(a, b) if smaller else max(a, b))]
    flat, steep = (a, b) if a.slope == 0 else (b, a)
    cut = min(max(flat.at - steep.at, start), stop)  # they meet there; before it the steep line is smaller
    early, late = (steep, flat) if smaller else (flat, steep)
    return [(x, y, line) for x, y, line in ((start, cut, early), (cut, stop, late)) if x < y]


@dataclass(frozen=True)
class Chain(Intervals):
    """Trapezoids one after another in both directions; queries between them attend to nothing.

    Both ends of the intervals never move back from one trapezoid to the next; across queries that attend to nothing,
    the next interval starts at or after the end of the last one.
    """

    links: tuple[Trapezoid, ...]

    @cached_property
    def _pieces(self) -> tuple[tuple[int, Line, Line], ...]:
        """The first query, `first` and `end` of every piece, empty ones included; a piece reaches to the next one."""
        before = Line(self.links[0].first(self.links[0].start), 0)
        pieces = [(-FAR, before, before)]
        for at, link in enumerate(self.links):
            pieces.append((link.start, link.first, link.end))
            after = Line(link.end(link.stop - 1), 0)
            if at + 1 == len(self.links) or self.links[at + 1].start > link.stop:
                pieces.append((link.stop, after, after))
        return tuple(pieces)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(start for start, _, _ in self._pieces)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """The first query of every piece, and its lines."""
        lines = [(*first, *end) for _, first, end in self._pieces]
        starts, table = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (self._starts, lines))
        return starts, table

    def key_range(self, q: int) -> tuple[int, int]:
        _, first, end = self._pieces[bisect.bisect_right(self._starts, q) - 1]
        return first(q), end(q)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        starts, table = (x.to(q.device, non_blocking=True) for x in self._table)
        q = q.long()
        first, first_slope, end, end_slope = table[torch.bucketize(q.contiguous(), starts, right=True) - 1].unbind(-1)
        return first + first_slope * q, end + end_slope * q

    def rows_seen(self, q: range, k: range) -> list[range]:
        own = rows_between(q, self.links[0].start, self.links[-1].stop)  # of many chains, each has few queries
        return super().rows_seen(q[own.start : own.stop], k)

    def boundaries(self, q: range) -> list[int]:
        if not q:
            return []
        begin, stop = (bisect.bisect_right(self._starts, p) for p in (q[0], q[-1]))
        return list(self._starts[begin:stop])


def chains(found: Sequence[Trapezoid]) -> tuple[Chain, ...]:
    """Disjoint trapezoids arranged into few chains.

    A trapezoid continues a chain that ends at its first query, or else, among chains that end before its first query,
    the chain with the last keys.
    """
    links: list[list[Trapezoid]] = []
    near: list[int] = []  # chains that end at the first query of the next trapezoid or later
    ended: list[tuple[int, int]] = []  # where the keys of other chains end, and the chain
    for new in sorted(found, key=lambda trapezoid: (trapezoid.start, trapezoid.first(trapezoid.start))):
        for at in [at for at in near if links[at][-1].stop < new.start]:
            near.remove(at)
            bisect.insort(ended, (links[at][-1].end(links[at][-1].stop - 1), at))
        which = next((at for at in near if _continues(links[at][-1], new)), None)
        if which is None:
            before = bisect.bisect_right(ended, (new.first(new.start), len(links)))
            which = ended.pop(before - 1)[1] if before else len(links)
            near.append(which)
        if which == len(links):
            links.append([])
        chain = links[which]
        if chain and chain[-1] == (chain[-1].start, new.start, new.first, new.end):  # one straight piece
            chain[-1] = chain[-1]._replace(stop=new.stop)
        else:
            chain.append(new)
    return tuple(Chain(tuple(chain)) for chain in links)


def _continues(last: Trapezoid, new: Trapezoid) -> bool:
    """Whether `new` may follow a trapezoid that ends at its first query."""
    ends = last.first(last.stop - 1) <= new.first(new.start) and last.end(last.stop - 1) <= new.end(new.start)
    return last.stop == new.start and ends


def joined(found: Sequence[Trapezoid]) -> tuple[list[Trapezoid], int, int]:
    """The same pairs with touching intervals as one, the most intervals of a query, and the first query with them."""
    starts: dict[int, list[Trapezoid]] = {}
    for each in found:
        starts.setdefault(each.start, []).append(each)
    pieces: list[Trapezoid] = []
    some: list[Trapezoid] = []  # trapezoids of the queries from start to stop
    most, where = 0, 0
    for start, stop in pairwise(sorted({edge for each in found for edge in (each.start, each.stop)})):
        some = [each for each in some if each.stop > start] + starts.get(start, [])
        here: list[Trapezoid] = []
        for each in sorted(some, key=lambda each: each.first(start)):
            # Two lines that are equal at both ends are equal between them.
            if here and all(here[-1].end(q) == each.first(q) for q in (start, stop - 1)):
                here[-1] = here[-1]._replace(end=each.end)
            else:
                here.append(Trapezoid(start, stop, each.first, each.end))
        if len(here) > most:
            most, where = len(here), start
        pieces += here
    return pieces, most, where


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
