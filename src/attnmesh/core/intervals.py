"""One interval of key positions per query: what masks are made of.

`Intervals` gives every query position one half-open interval of key positions whose two ends never move back as the
query position grows. A tile of queries therefore reads one contiguous run of keys, and two integers per row describe
the interval to a kernel.

Such intervals are closed under three operations, which is all that `&` and `|` of masks need:

    Intersection   [max of the firsts, min of the ends)
    Before         the part of an interval before another one: [first, min(end, first of the other))
    After          the part after it:                          [max(first, end of the other), end)

`disjoint` resolves a union with the last two: what a later interval adds is what it has before and after the earlier
ones. `Chain` is an arbitrary list of pieces with straight edges (trapezoids), as long as neither end moves back, and
`chains` arranges any trapezoids into as few chains as a greedy choice finds.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.ranges import rows_between

FAR = 1 << 60
"""A bound that no position reaches, on either side; far inside int64, so that arithmetic does not overflow."""

_MOST = 1 << 40  # no position is larger


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

    @property
    def is_never(self) -> bool:
        """Whether the interval is certainly empty for every query."""
        return self.key_range(_MOST)[1] <= self.key_range(-_MOST)[0]

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
        return _joined_boundaries(self.parts, q)


@dataclass(frozen=True)
class Before(Intervals):
    """What `part` allows before the interval of `other`."""

    part: Intervals
    other: Intervals

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.part.key_ranges(q)
        return first, torch.minimum(end, self.other.key_ranges(q)[0])

    def key_range(self, q: int) -> tuple[int, int]:
        first, end = self.part.key_range(q)
        return first, min(end, self.other.key_range(q)[0])

    def boundaries(self, q: range) -> list[int]:
        return _joined_boundaries((self.part, self.other), q)


@dataclass(frozen=True)
class After(Intervals):
    """What `part` allows after the interval of `other`; if that is empty, after its first."""

    part: Intervals
    other: Intervals

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.part.key_ranges(q)
        return torch.maximum(first, torch.maximum(*self.other.key_ranges(q))), end

    def key_range(self, q: int) -> tuple[int, int]:
        first, end = self.part.key_range(q)
        return max(first, *self.other.key_range(q)), end

    def boundaries(self, q: range) -> list[int]:
        return _joined_boundaries((self.part, self.other), q)


def _joined_boundaries(parts: Iterable[Intervals], q: range) -> list[int]:
    return sorted({boundary for part in parts for boundary in part.boundaries(q)})


def disjoint(parts: Iterable[Intervals], most: int) -> tuple[Intervals, ...] | None:
    """Disjoint intervals that together allow what any of `parts` allows; None if there are more than `most`."""
    found: list[Intervals] = []
    for part in parts:
        pieces = [part]
        for other in found:
            cut: list[Intervals] = [side for piece in pieces for side in (Before(piece, other), After(piece, other))]
            pieces = [piece for piece in cut if not piece.is_never]
            if len(found) + len(pieces) > most:
                return None
        found += pieces
    return tuple(found)


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
    """The given queries without those whose interval is empty: one trapezoid or none."""
    # end - first = at + slope * q > 0
    at, slope = end.at - first.at, end.slope - first.slope
    if slope == 1:
        start = max(start, 1 - at)
    elif slope == -1:
        stop = min(stop, at)
    elif at <= 0:
        return []
    return [Trapezoid(start, stop, first, end)] if start < stop else []


def add_trapezoids(found: list[Trapezoid], new: Iterable[Trapezoid]) -> None:
    """Adds what `new` trapezoids allow and those found so far do not: all of them stay disjoint."""
    for trapezoid in new:
        pieces = [trapezoid]
        for other in found:
            pieces = [rest for piece in pieces for rest in _without(piece, other)]
        found += pieces


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

    def key_range(self, q: int) -> tuple[int, int]:
        _, first, end = self._pieces[bisect.bisect_right(self._starts, q) - 1]
        return first(q), end(q)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.tensor([(*first, *end) for _, first, end in self._pieces], dtype=torch.int64, device=q.device)
        starts = torch.tensor(self._starts, dtype=torch.int64, device=q.device)
        q = q.long()
        first, first_slope, end, end_slope = table[torch.bucketize(q.contiguous(), starts, right=True) - 1].unbind(-1)
        return first + first_slope * q, end + end_slope * q

    def boundaries(self, q: range) -> list[int]:
        return [start for start in self._starts if q and q[0] < start <= q[-1]]


def chains(found: Sequence[Trapezoid]) -> tuple[Chain, ...]:
    """Disjoint trapezoids arranged into few chains: each joins the first chain that it can continue."""
    links: list[list[Trapezoid]] = []
    for new in sorted(found, key=lambda trapezoid: (trapezoid.start, trapezoid.first(trapezoid.start))):
        chain = next((chain for chain in links if _continues(chain[-1], new)), None)
        if chain is None:
            links.append([new])
        else:
            chain.append(new)
    return tuple(Chain(tuple(chain)) for chain in links)


def _continues(last: Trapezoid, new: Trapezoid) -> bool:
    first, end = new.first(new.start), new.end(new.start)
    if last.stop == new.start:
        return last.first(last.stop - 1) <= first and last.end(last.stop - 1) <= end
    return last.stop < new.start and last.end(last.stop - 1) <= first
