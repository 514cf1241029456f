"""Which positions of one sequence a rank holds, as a few arithmetic runs: they ascend, in the order of its tokens."""

from __future__ import annotations

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
        return Held(ranges.narrowed(self.runs, range(self.below(length))))


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
