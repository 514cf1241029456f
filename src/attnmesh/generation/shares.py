"""Who holds which positions of one sequence. Every rank keeps the books of all, and so decides like the others."""

from __future__ import annotations

from collections.abc import Sequence

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.generation.held import Held


class Shares:
    """What each rank holds, of which `own` is this rank's."""

    def __init__(self, ranks: Sequence[Held], rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    @classmethod
    def nothing(cls, world: int, rank: int) -> Shares:
        """Of a sequence without tokens."""
        return cls([Held() for _ in range(world)], rank)

    @property
    def own(self) -> Held:
        """What this rank holds."""
        return self.ranks[self.rank]

    @property
    def counts(self) -> list[int]:
        """How many positions each rank holds."""
        return [len(held) for held in self.ranks]

    def extend(self, parts: Sequence[Ranges]) -> None:
        """Hold these, too, `parts[r]` on rank r; all of them come after."""
        for held, part in zip(self.ranks, parts, strict=True):
            if part:
                held.extend(part)

    def truncated(self, length: int) -> Shares:
        """Those of a sequence that is cut off at `length` tokens."""
        return Shares([held.truncated(length) for held in self.ranks], self.rank)


def in_turn(positions: range, world: int) -> list[Ranges]:
    """A few positions, dealt out one by one: to each rank those that divide by `world` with its number left."""
    parts = [positions[(rank - positions.start) % world :: world] for rank in range(world)]
    return [(part,) if part else () for part in parts]


def evened(positions: range, counts: Sequence[int]) -> list[Ranges]:
    """Positions, at least one a rank, for ranks that hold `counts`: those with fewer get more, a run each.

    What was cut off may have been one rank's more than another's. Without this, cuts would add up.
    """
    level = min(counts)  # to which all are filled up that have less: found by halves
    above = max(counts) + len(positions) + 1
    while above - level > 1:
        middle = (level + above) // 2
        level, above = (middle, above) if sum(_up_to(middle, counts)) <= len(positions) else (level, middle)
    sizes = _up_to(level, counts)
    left = len(positions) - sum(sizes)
    for rank in [rank for rank, count in enumerate(counts) if count < level][:left]:
        sizes[rank] += 1
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return [(positions[end - size : end],) for end, size in zip(ends, sizes, strict=True)]


def _up_to(level: int, counts: Sequence[int]) -> list[int]:
    return [max(1, level - count) for count in counts]


def grown(counts: Sequence[int], parts: Sequence[Ranges]) -> list[int]:
    """How many positions each rank holds with these, too."""
    return [count + ranges.size(part) for count, part in zip(counts, parts, strict=True)]
