"""How the states of a recurrent layer reach the ranges of all ranks.

A range of consecutive positions is a segment `(A, B)` (`attnmesh.core.segment`), and the state that comes into a range
is the exclusive prefix of the segments before it, in the order of positions, whichever rank holds them. Heads are
independent, so every rank scans the segments of all ranges for some of the heads:

    forward    1. every rank sends (A, B) of its ranges to the ranks that scan their heads
               2. these send back the state that comes into each range, and the final state to all ranks if it is wanted
    backward   1. the gradient of the state that comes into each range, and of the final state
               2. the gradient of the state that goes out of each range

Two all-to-alls each, for any number of ranks. A rank sends at most (A, B) once and a state once for each of its ranges
and final states. What is known is not sent: the first range sends its outgoing state instead of (A, B) and needs no
incoming one; the last range sends nothing unless the final state is wanted.

Two ranks, or small states, are served faster by an all-gather: every rank scans all heads, and there is no second
exchange (`ScanPlan.gathered`). With more ranks than heads, the columns of a state are divided too (`ScanPlan.parts`):
they are independent, but share A.

A short convolution has no segments: a range needs the last inputs before it (`HaloPlan`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    """The bytes of a segment per head, for all rows of the batch."""

    transition: int
    state: int


LATENCY_BYTES = 2**19
"""What a link sends in the time that a message takes to arrive: 0.25 to 0.9 MB on usual links."""


@dataclass(frozen=True)
class ScanPlan:
    """The segments of all ranks in the order of positions, and the heads that every rank scans.

    With `parts` above 1, `heads` and `sizes` count a head as `parts` heads, each with a part of its columns.
    """

    segments: tuple[PlannedSegment, ...]
    heads: tuple[range, ...]  # by rank
    sizes: SegmentSizes
    final: bool  # whether every rank gets the final state
    gathered: bool = False  # every rank scans all heads: one exchange instead of two
    parts: int = 1  # of the columns of a head

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.heads)

    @cached_property
    def _held(self) -> list[list[int]]:
        numbers: list[list[int]] = [[] for _ in self.heads]
        for number, segment in enumerate(self.segments):
            numbers[segment.rank].append(number)
        return numbers

    def held(self, rank: int) -> list[int]:
        """The numbers of the segments that a rank holds."""
        return self._held[rank]

    @property
    def scanned(self) -> range:
        """The numbers of the segments whose outgoing state somebody needs."""
        return range(len(self.segments) if self.final else len(self.segments) - 1)

    @property
    def incoming(self) -> range:
        """The numbers of the segments whose incoming state comes from the scan."""
        return range(1, len(self.segments))

    def out(self, rank: int) -> list[int]:
        """The segments that a rank holds whose outgoing state somebody needs."""
        return [number for number in self.held(rank) if number in self.scanned]

    def into(self, rank: int) -> list[int]:
        """The segments that a rank holds whose incoming state comes from the scan."""
        return [number for number in self.held(rank) if number in self.incoming]

    @property
    def rounds(self) -> int:
        """The exchanges of a forward, and of a backward."""
        return 1 if self.gathered else 2

    def given(self, rank: int, *, backward: bool = False) -> int:
        """The bytes per head that a rank sends to each rank that scans the head."""
        if backward:
            return (len(self.into(rank)) + self.final) * self.sizes.state
        out = self.out(rank)
        return len(out) * self.sizes.state + sum(number > 0 for number in out) * self.sizes.transition

    def returned(self, rank: int, *, backward: bool = False) -> int:
        """The bytes per head that a rank gets back from the rank that scans the head."""
        if self.gathered:
            return 0
        return (len(self.out(rank)) if backward else len(self.into(rank)) + self.final) * self.sizes.state

    def bytes_sent(self, rank: int, *, backward: bool = False) -> int:
        """The bytes that a rank sends to others in the forward or the backward of a layer."""
        others = [other for other in range(self.world) if other != rank]
        there = sum(len(self.heads[other]) for other in others) * self.given(rank, backward=backward)
        return there + len(self.heads[rank]) * sum(self.returned(other, backward=backward) for other in others)

    @property
    def cost(self) -> int:
        """Bytes of the slowest rank, forward and backward; a round counts as the bytes that are sent in its time."""
        most = 0
        for backward in (False, True):
            every = [self.returned(rank, backward=backward) for rank in range(self.world)]
            heads, whole = sum(map(len, self.heads)), sum(every)
            most += self.rounds * LATENCY_BYTES + max(
                (heads - len(mine)) * self.given(rank, backward=backward) + len(mine) * (whole - every[rank])
                for rank, mine in enumerate(self.heads)
            )
        return most


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

    @cached_property
    def sent(self) -> dict[tuple[int, int], int]:
        """The rows that a rank sends to another in a forward, by both ranks; their gradients come back."""
        found: dict[tuple[int, int], int] = {}
        every = sorted((run.start, run.stop, rank) for rank, shard in enumerate(self.held) for run in shard)
        begins = [begin for begin, _, _ in every]
        for target, shard in enumerate(self.needed):
            for run in shard:
                for begin, end, source in every[max(0, bisect_right(begins, run.start) - 1) :]:
                    if begin >= run.stop:
                        break
                    rows = min(end, run.stop) - max(begin, run.start)
                    found[source, target] = found.get((source, target), 0) + max(0, rows)
        return found

    def rows_sent(self, source: int, target: int) -> int:
        """The rows that one rank sends to another in a forward."""
        return self.sent.get((source, target), 0)

    def bytes_sent(self, rank: int, row_bytes: int, *, backward: bool = False) -> int:
        """The bytes that a rank sends to others in the forward or the backward of a layer."""
        end = 1 if backward else 0
        return row_bytes * sum(n for ends, n in self.sent.items() if ends[end] == rank != ends[1 - end])


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
def scan_plan(
    layout: Layout, length: int, world: int, heads: int, sizes: SegmentSizes, columns: int, final: bool
) -> ScanPlan:
    """The fastest plan of a layer with so many heads, whose states have so many columns; cached.

    The backward counts even where no gradient is required: the forward of activation checkpointing must have the same
    bits.
    """
    segments = planned_segments(layout, length, world)
    halvings = (2**i for i in range(1, columns.bit_length()) if columns % 2**i == 0 and heads * 2**i <= world)
    divided = [divided_plan(segments, world, heads, sizes, parts, final) for parts in (1, *halvings)]
    plans = [gathered_plan(segments, world, heads, sizes, final), *divided]
    return min(plans, key=lambda plan: plan.cost)


def planned_segments(layout: Layout, length: int, world: int) -> tuple[PlannedSegment, ...]:
    """The segments of all ranks in the order of positions."""
    segments = [PlannedSegment(rank, run) for rank, shard in enumerate(runs(layout, length, world)) for run in shard]
    return tuple(sorted(segments, key=lambda segment: segment.positions.start))


def gathered_plan(
    segments: tuple[PlannedSegment, ...], world: int, heads: int, sizes: SegmentSizes, final: bool
) -> ScanPlan:
    """The plan in which every rank scans all heads."""
    return ScanPlan(segments, (range(heads),) * world, sizes, final, gathered=True)


def divided_plan(
    segments: tuple[PlannedSegment, ...], world: int, heads: int, sizes: SegmentSizes, parts: int, final: bool
) -> ScanPlan:
    """The plan in which ranks divide the heads, each in some parts."""
    edges = [heads * parts * at // world for at in range(world + 1)]
    divided = tuple(range(a, b) for a, b in pairwise(edges))
    return ScanPlan(segments, divided, SegmentSizes(sizes.transition, sizes.state // parts), final, parts=parts)


@lru_cache(maxsize=256)
def halo_plan(layout: Layout, length: int, world: int, before: int, final: bool) -> HaloPlan:
    """The plan of a convolution that looks back `before` positions; with `final`, all ranks need the last of them."""
    held = runs(layout, length, world)
    return HaloPlan(held, tuple(_halos(shard, length, before, final) for shard in held))


def _halos(shard: Ranges, length: int, before: int, final: bool) -> Ranges:
    begins: Sequence[int] = [run.start for run in shard] + ([length] if final else [])
    return ranges.merged(range(max(0, begin - before), begin) for begin in begins)
