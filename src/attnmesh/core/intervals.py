"""One interval of key positions per query: what masks are made of.

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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.ranges import rows_between

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
