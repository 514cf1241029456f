"""Positions as spans: the ascending positions of a shard, written as a few arithmetic runs.

`(range(0, 4), range(12, 16))` is rank 0's shard of a zigzag over two ranks. Plans think in spans: a thousand positions
cost no more than one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attnmesh.core.validation import check_positive

Ranges = tuple[range, ...]

# More runs than this and positions count as irregular: a plan over them would cost more than it saves.
_MOST_RUNS = 1024


def size(ranges: Ranges) -> int:
    """How many positions the spans hold."""
    return sum(map(len, ranges))


def as_tensor(ranges: Ranges, device: torch.device | str | None = None) -> Tensor:
    """The positions themselves, int64."""
    runs = [torch.arange(run.start, run.stop, run.step, device=device) for run in ranges]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long, device=device)


def from_tensor(positions: Tensor) -> Ranges | None:
    """The spans of strictly ascending positions on the CPU; None if they do not ascend or have too many runs."""
    if not positions.numel():
        return ()
    steps = positions.diff()
    if (steps <= 0).any():
        return None
    # A run ends where the step changes. The position before a jump belongs to the run it ends.
    turns = (steps.diff() != 0).nonzero().flatten() + 1
    if turns.numel() > 2 * _MOST_RUNS:
        return None
    values, runs, at = positions.tolist(), [], 0
    for turn in itertools.chain(turns.tolist(), [len(values) - 1]):
        if turn <= at:  # the step into a run's first position: already behind us
            continue
        runs.append(range(values[at], values[turn] + 1, values[at + 1] - values[at]))
        at = turn + 1
    if at < len(values):
        runs.append(range(values[at], values[at] + 1))
    return tuple(runs) if len(runs) <= _MOST_RUNS else None


def rows_between(span: range, first: int, end: int) -> range:
    """The indices into an ascending span whose positions lie in `[first, end)`."""

    def index(position: int) -> int:  # of the first position >= the given one
        return min(len(span), max(0, -(-(position - span.start) // span.step)))

    return range(index(first), max(index(first), index(end)))


def narrow(ranges: Ranges, rows: range) -> Ranges:
    """The spans of the rows `rows.start`, ..., `rows.stop - 1` of a shard that holds `spans`."""
    kept, at = [], 0
    for run in ranges:
        part = run[max(0, rows.start - at) : max(0, rows.stop - at)]
        if part:
            kept.append(part)
        at += len(run)
    return tuple(kept)


def union(shards: Iterable[Ranges]) -> Ranges | None:
    """The positions of several shards together, ascending; None where they interleave and no few runs hold them."""
    # A run of one position may carry a step, and a stop that is not its end.
    given = (run if len(run) > 1 else range(run[0], run[0] + 1) for shard in shards for run in shard)
    runs = sorted(given, key=lambda run: run.start)
    if not runs:
        return ()
    first, end = runs[0].start, max(run[-1] for run in runs) + 1
    if sum(map(len, runs)) == end - first:  # no gap: shards do not overlap
        return (range(first, end),)
    joined: list[range] = []
    for run in runs:
        if run.step > 1:
            return None
        if joined and joined[-1].stop == run.start:
            run = range(joined.pop().start, run.stop)
        joined.append(run)
    return tuple(joined)


N = TypeVar("N", int, Tensor)


@dataclass(frozen=True)
class InterleavedShard:
    """The share of rank `rank` among `ranks`, dealt `run` positions at a time. Functions take integers or tensors."""

    ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        check_positive(ranks=self.ranks, interleave=self.interleave)
        self._checked(self.rank)

    def owner(self, position: N) -> N:
        """The rank that holds a position."""
        return position // self.interleave % self.ranks

    def index(self, position: N) -> N:
        """Where its owner holds a position, counted from 0."""
        return position // (self.ranks * self.interleave) * self.interleave + position % self.interleave

    def length(self, length: N, rank: int | None = None) -> N:
        """How many of the first `length` positions a rank (this one) holds. No rank holds more than rank 0."""
        rank = self.rank if rank is None else self._checked(rank)
        rest = length % (self.ranks * self.interleave) - rank * self.interleave
        rest = rest.clamp(0, self.interleave) if isinstance(rest, Tensor) else min(max(rest, 0), self.interleave)
        return length // (self.ranks * self.interleave) * self.interleave + rest

    def position(self, index: N, rank: int | None = None) -> N:
        """The position that a rank (this one) holds at `index`."""
        rank = self.rank if rank is None else self._checked(rank)
        return (
            index // self.interleave * (self.ranks * self.interleave) + rank * self.interleave + index % self.interleave
        )

    def _checked(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be 0 to {self.ranks - 1}, got {rank!r}")
        return rank
