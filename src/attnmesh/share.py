"""Which positions of a sequence a rank holds when they are dealt out in turn, as pure index arithmetic.

    ranks = 2, run = 1     rank 0: 0 2 4 6 8 10 ...        rank 1: 1 3 5 7 9 11 ...
    ranks = 2, run = 4     rank 0: 0 1 2 3 8 9 ...         rank 1: 4 5 6 7 12 13 ...

A sequence that grows stays balanced within one run, whatever its length, and no position ever moves. A rank holds its
positions in ascending order, so what a query sees of them is an interval again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from attnmesh.counts import check_positive

N = TypeVar("N", int, Tensor)


@dataclass(frozen=True)
class Share:
    """The share of rank `rank` among `ranks`, dealt `run` positions at a time. Functions take integers or tensors."""

    ranks: int = 1
    rank: int = 0
    run: int = 1

    def __post_init__(self) -> None:
        check_positive(ranks=self.ranks, run=self.run)
        self._checked(self.rank)

    def owner(self, position: N) -> N:
        """The rank that holds a position."""
        return position // self.run % self.ranks

    def index(self, position: N) -> N:
        """Where its owner holds a position, counted from 0."""
        return position // (self.ranks * self.run) * self.run + position % self.run

    def length(self, length: N, rank: int | None = None) -> N:
        """How many of the first `length` positions a rank (this one) holds. No rank holds more than rank 0."""
        rank = self.rank if rank is None else self._checked(rank)
        rest = length % (self.ranks * self.run) - rank * self.run
        rest = rest.clamp(0, self.run) if isinstance(rest, Tensor) else min(max(rest, 0), self.run)
        return length // (self.ranks * self.run) * self.run + rest

    def position(self, index: N, rank: int | None = None) -> N:
        """The position that a rank (this one) holds at `index`."""
        rank = self.rank if rank is None else self._checked(rank)
        return index // self.run * (self.ranks * self.run) + rank * self.run + index % self.run

    def _checked(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be 0 to {self.ranks - 1}, got {rank!r}")
        return rank
