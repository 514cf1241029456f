"""Ascending positions of a shard as a few arithmetic ranges.

`(range(0, 4), range(12, 16))` is the shard of rank 0 of a zigzag layout over two ranks. Plans work with ranges, whose
cost does not depend on the number of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.utils.validation import check_index, check_positive

Ranges = tuple[range, ...]

# Positions with more ranges are irregular: a plan over them would cost more than it saves.
_MAX_RANGES = 1024


def size(ranges: Ranges) -> int:
    """The number of positions."""
    return sum(map(len, ranges))


def as_tensor(ranges: Ranges, device: torch.device | str = "cpu") -> Tensor:
    """The positions as an int64 tensor."""
    runs = [torch.arange(run.start, run.stop, run.step, device=device) for run in ranges]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long, device=device)


def from_tensor(positions: Tensor) -> Ranges | None:
    """The ranges of strictly ascending positions on the CPU; None if they do not ascend or have too many ranges."""
    if not positions.numel():
        return ()
    steps = positions.diff()
    if (steps <= 0).any():
        return None
    # A range ends where the step changes. The position before a jump belongs to the range that it ends.
    turns = (steps.diff() != 0).nonzero().flatten() + 1
    if turns.numel() > 2 * _MAX_RANGES:
        return None
    values, runs, at = positions.tolist(), [], 0
    for turn in itertools.chain(turns.tolist(), [len(values) - 1]):
        if turn <= at:  # the step to the first position of a range, already handled
            continue
        runs.append(range(values[at], values[turn] + 1, values[at + 1] - values[at]))
        at = turn + 1
    if at < len(values):
        runs.append(range(values[at], values[at] + 1))
    return tuple(runs) if len(runs) <= _MAX_RANGES else None


def rows_between(run: range, first: int, end: int) -> range:
    """The indices into an ascending range whose positions are in `[first, end)`."""

    def index(position: int) -> int:  # of the first position >= the given one
        return min(len(run), max(0, -(-(position - run.start) // run.step)))

    return range(index(first), max(index(first), index(end)))


def narrow(ranges: Ranges, rows: range) -> Ranges:
    """The positions of the rows `rows.start`, ..., `rows.stop - 1` of a shard with the given ranges."""
    kept, at = [], 0
    for run in ranges:
        part = run[max(0, rows.start - at) : max(0, rows.stop - at)]
        if part:
            kept.append(part)
        at += len(run)
    return tuple(kept)


def select(ranges: Ranges, rows: Ranges) -> Ranges:
    """The positions of several ranges of rows of a shard with the given ranges."""
    return tuple(run for part in rows for run in narrow(ranges, part))


def union(shards: Iterable[Ranges]) -> Ranges | None:
    """The ascending positions of several shards together; None if they interleave without a short description."""
    # A range of one position may have any step, and a stop that is not its end.
    given = (run if len(run) > 1 else range(run[0], run[0] + 1) for shard in shards for run in shard)
    runs = sorted(given, key=lambda run: run.start)
    if not runs:
        return ()
    first, end = runs[0].start, max(run[-1] for run in runs) + 1
    if sum(map(len, runs)) == end - first:  # no gaps, since shards do not overlap
        return (range(first, end),)
    joined: list[range] = []
    for run in runs:
        if run.step > 1:
            return None
        if joined and joined[-1].stop == run.start:
            run = range(joined.pop().start, run.stop)
        joined.append(run)
    return tuple(joined)


def merged(ranges: Iterable[range]) -> Ranges:
    """Ranges of step 1 as disjoint ascending ranges that do not touch."""
    joined: list[range] = []
    for run in sorted((run for run in ranges if run), key=lambda run: run.start):
        if joined and run.start <= joined[-1].stop:
            run = range(joined[-1].start, max(joined.pop().stop, run.stop))
        joined.append(run)
    return tuple(joined)


def hull(ranges: Iterable[range]) -> range:
    """The range from the first to the last position of some ranges of step 1."""
    some = [run for run in ranges if run]
    return range(min((run.start for run in some), default=0), max((run.stop for run in some), default=0))


def rows_of(ranges: Ranges) -> Ranges:
    """All rows of a shard with the given ranges."""
    rows = size(ranges)
    return (range(rows),) if rows else ()


# Disjoint ascending ranges of step 1 that do not touch, as `merged` returns them.


def intersection(a: Ranges, b: Ranges) -> Ranges:
    """What is in both."""
    if a == b:
        return a
    shared = (range(max(x.start, y.start), min(x.stop, y.stop)) for x in a for y in b)
    return tuple(run for run in shared if run)


def difference(a: Ranges, b: Ranges) -> Ranges:
    """What is in `a` and not in `b`."""
    left = a
    for y in b:
        sides = (
            part for x in left for part in (range(x.start, min(x.stop, y.start)), range(max(x.start, y.stop), x.stop))
        )
        left = tuple(part for part in sides if part)
    return left


def common(a: Ranges, b: Ranges) -> Ranges:
    """The positions that are in both, of ascending ranges with any steps; not in ascending order."""
    shared = (_common(x, y) for x in a for y in b if x[0] <= y[-1] and y[0] <= x[-1])
    return tuple(run for run in shared if run)


def _common(x: range, y: range) -> range:
    """The positions that are in two ascending ranges: one range, whose step is a multiple of both."""
    divisor = math.gcd(x.step, y.step)
    if (y[0] - x[0]) % divisor:
        return range(0)
    steps = y.step // divisor
    first = x[0] + x.step * ((y[0] - x[0]) // divisor * pow(x.step // divisor, -1, steps) % steps)
    step = x.step * steps
    first += max(0, -(-(y[0] - first) // step)) * step
    return range(first, min(x[-1], y[-1]) + 1, step)


def at_most(count: int, ranges: Ranges) -> Ranges:
    """The same ranges, or if there are more than `count`, with the smallest gaps between them closed."""
    if len(ranges) <= count:
        return ranges
    gaps = sorted(range(1, len(ranges)), key=lambda i: (ranges[i - 1].stop - ranges[i].start, i))
    starts = [0, *sorted(gaps[: count - 1])]  # the largest gaps stay
    return tuple(
        range(ranges[i].start, ranges[j - 1].stop) for i, j in zip(starts, [*starts[1:], len(ranges)], strict=True)
    )


N = TypeVar("N", int, Tensor)


@dataclass(frozen=True)
class InterleavedShard:
    """The positions of `rank` when positions are assigned round-robin to `ranks` ranks, `interleave` at a time.

    Methods take integers or tensors.
    """

    ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        check_positive(ranks=self.ranks, interleave=self.interleave)
        self._checked(self.rank)

    def owner(self, position: N) -> N:
        """The rank that has a position."""
        return position // self.interleave % self.ranks

    def index(self, position: N) -> N:
        """The local index of a position on its owner."""
        return position // (self.ranks * self.interleave) * self.interleave + position % self.interleave

    def length(self, length: N, rank: int | None = None) -> N:
        """The number of the first `length` positions on a rank (default: this one). Rank 0 has the most."""
        rank = self.rank if rank is None else self._checked(rank)
        rest = length % (self.ranks * self.interleave) - rank * self.interleave
        rest = rest.clamp(0, self.interleave) if isinstance(rest, Tensor) else min(max(rest, 0), self.interleave)
        return length // (self.ranks * self.interleave) * self.interleave + rest

    def position(self, index: N, rank: int | None = None) -> N:
        """The position at local `index` on a rank (default: this one)."""
        rank = self.rank if rank is None else self._checked(rank)
        return (
            index // self.interleave * (self.ranks * self.interleave) + rank * self.interleave + index % self.interleave
        )

    def ranges(self, length: int, begin: int = 0) -> Ranges:
        """The positions from `begin` to `length` of this rank as few arithmetic ranges, each ascending."""
        period = self.ranks * self.interleave
        own = self.rank * self.interleave
        if self.ranks == 1:
            runs = [range(begin, length)]
        elif self.interleave <= -(-(length - begin) // period):  # one range for each position of an interleave
            offsets = ((own + offset - begin) % period for offset in range(self.interleave))
            runs = [range(begin + offset, length, period) for offset in offsets]
        else:
            starts = range(begin // period * period + own, length, period)
            runs = [range(max(begin, start), min(length, start + self.interleave)) for start in starts]
        return tuple(run for run in runs if run)

    def _checked(self, rank: int) -> int:
        return check_index("rank", rank, self.ranks)
