"""How the states of a recurrent layer reach the ranges of all ranks.

A range of consecutive positions is a segment `(A, B)` (`attnmesh.core.segment`), and the state that comes into a range
is the exclusive prefix of the segments before it, in the order of positions, whichever rank holds them. Heads are
independent, so every rank scans the segments of all ranges for some of the heads:

    forward    1. every rank sends (A, B) of its ranges to the ranks that scan their heads
               2. these send back the state that comes into each range, and the final state to all ranks if it is wanted
    backward   1. the gradient of the state that comes into each range, and of the final state
               2. the gradient of the state that goes out of each range

Two all-to-alls each, for any number of ranks. A rank sends at most (A, B) once and a state once for each of its ranges
and final states, where an all-gather would send (A, B) to every other rank. What is known is not sent: the first range
sends its outgoing state instead of (A, B) and needs no incoming one; the last range sends nothing unless the final
state is wanted.

A short convolution has no segments: a range needs the last inputs before it (`HaloPlan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout
from attnmesh.core.ranges import Ranges
from attnmesh.plan.shards import Piece, pieces


class PlannedSegment(NamedTuple):
    """A range of consecutive positions and the rank that holds it."""

    rank: int
    positions: range


class SegmentSizes(NamedTuple):
    """The elements of a segment per head, for all rows of the batch."""

    transition: int
    state: int


@dataclass(frozen=True)
class ScanPlan:
    """The segments of all ranks in the order of positions, and the heads that every rank scans."""

    segments: tuple[PlannedSegment, ...]
    heads: tuple[range, ...]  # by rank
    final: bool  # whether every rank gets the final state

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.heads)

    def held(self, rank: int) -> list[int]:
        """The numbers of the segments that a rank holds."""
        return [number for number, segment in enumerate(self.segments) if segment.rank == rank]

    @property
    def scanned(self) -> range:
        """The numbers of the segments whose outgoing state somebody needs."""
        return range(len(self.segments) if self.final else len(self.segments) - 1)

    @property
    def incoming(self) -> range:
        """The numbers of the segments whose incoming state comes from the scan."""
        return range(1, len(self.segments))

    def bytes_sent(self, rank: int, sizes: SegmentSizes, itemsize: int, *, backward: bool = False) -> int:
        """The bytes that a rank sends to others in the forward or the backward of a layer."""
        elsewhere = sum(len(heads) for other, heads in enumerate(self.heads) if other != rank)
        out = [number for number in self.held(rank) if number in self.scanned]
        into = [number for number in self.held(rank) if number in self.incoming]
        if backward:
            first = (len(into) + self.final) * sizes.state
        else:
            first = len(out) * sizes.state + sum(number > 0 for number in out) * sizes.transition
        needed = self.scanned if backward else self.incoming
        others = sum(self.segments[number].rank != rank for number in needed)
        if not backward and self.final:
            others += self.world - 1
        return (elsewhere * first + len(self.heads[rank]) * others * sizes.state) * itemsize


@dataclass(frozen=True)
class HaloPlan:
    """The positions before each range, which other ranks hold in part.

    `needed[rank]` are all positions of halos that the rank needs, its own included, as ascending ranges.
    """

    held: tuple[Ranges, ...]  # by rank
    needed: tuple[Ranges, ...]  # by rank

    def pieces(self, source: int, target: int) -> tuple[Piece, ...]:
        """The rows of the shard of `source` that are in the halos of `target`, and the rows that they become."""
        return pieces(self.held[source], self.needed[target])

    def rows_sent(self, source: int, target: int) -> int:
        """The rows that one rank sends to another in a forward; their gradients come back."""
        return sum(len(piece.rows) for piece in self.pieces(source, target))

    def bytes_sent(self, rank: int, row_bytes: int, *, backward: bool = False) -> int:
        """The bytes that a rank sends to others in the forward or the backward of a layer."""
        others = [other for other in range(len(self.held)) if other != rank]
        rows = (self.rows_sent(*((other, rank) if backward else (rank, other))) for other in others)
        return sum(rows) * row_bytes


def runs(layout: Layout, length: int, world: int) -> tuple[Ranges, ...]:
    """The positions of every rank as ranges of consecutive positions; ValueError for a layout without them."""
    every = []
    for rank in range(world):
        shard = layout.ranges(length, world, rank)
        if any(run.step > 1 and len(run) > 1 for run in shard):
            raise ValueError(
                f"layout must give ranks ranges of consecutive positions for a recurrent layer (Contiguous, Zigzag, "
                f"Balanced), got {layout}"
            )
        every.append(ranges.merged(range(run[0], run[-1] + 1) for run in shard))
    return tuple(every)


@lru_cache(maxsize=256)
def scan_plan(layout: Layout, length: int, world: int, heads: int, final: bool) -> ScanPlan:
    """The plan of a layer with so many heads; cached."""
    segments = [PlannedSegment(rank, run) for rank, shard in enumerate(runs(layout, length, world)) for run in shard]
    edges = [heads * at // world for at in range(world + 1)]
    divided = tuple(range(a, b) for a, b in pairwise(edges))
    return ScanPlan(tuple(sorted(segments, key=lambda segment: segment.positions.start)), divided, final)


@lru_cache(maxsize=256)
def halo_plan(layout: Layout, length: int, world: int, before: int, final: bool) -> HaloPlan:
    """The plan of a convolution that looks back `before` positions; with `final`, all ranks need the last of them."""
    held = runs(layout, length, world)
    return HaloPlan(held, tuple(_halos(shard, length, before, final) for shard in held))


def _halos(shard: Ranges, length: int, before: int, final: bool) -> Ranges:
    begins: Sequence[int] = [run.start for run in shard] + ([length] if final else [])
    return ranges.merged(range(max(0, begin - before), begin) for begin in begins)
