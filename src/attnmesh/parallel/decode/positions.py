"""Which positions of one sequence a rank holds, as a few arithmetic runs: they ascend, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges


class Held:
    """Positions that only grow at the end, and are cut off there again."""

    def __init__(self, runs: Ranges = ()) -> None:
        self.runs = runs

    def __len__(self) -> int:
        return ranges.size(self.runs)

    def below(self, position: int) -> int:
        """How many of them come before a position."""
        return sum(ranges.rows_between(run, run.start, position).stop for run in self.runs)

    def extend(self, more: Ranges) -> None:
        """Hold these, too, all of which come after."""
        self.runs = _joined((*self.runs, *(run for run in more if run)))

    def truncated(self, length: int) -> Held:
        """Those of a sequence that is cut off at `length` tokens."""
        return Held(ranges.narrow(self.runs, range(self.below(length))))


def _joined(runs: Ranges) -> Ranges:
    """Neighbours in one run, where they are: tokens that come one by one would else be a run each."""
    joined: list[range] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and (whole := _one_run(last, run)) is not None:
            joined[-1] = whole
        else:
            joined.append(run)
    return tuple(joined)


def _one_run(a: range, b: range) -> range | None:
    step = b[0] - a[-1]
    if (len(a) == 1 or a.step == step) and (len(b) == 1 or b.step == step):
        return range(a[0], b[-1] + 1, step)
    return None


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
