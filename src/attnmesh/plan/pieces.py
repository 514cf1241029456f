"""Rows that move from one rank's shard to a place in another rank's memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from attnmesh.core.ranges import Ranges, rows_between


class Piece(NamedTuple):
    """Neighbouring rows of a shard, and the rows of the target that they become (a step there for striped shards)."""

    rows: range
    to: range

    @property
    def in_place(self) -> bool:
        """Whether the target rows are neighbours too: a message can then arrive right where it belongs."""
        return self.to.step == 1


@lru_cache(maxsize=4096)
def pieces(held: Ranges, wanted: Ranges) -> tuple[Piece, ...]:
    """What of the positions `held` by a shard is `wanted`, row by row. Runs of `wanted` have no gaps."""
    found = []
    row = 0
    for run in held:
        at = 0
        for want in wanted:
            rows = rows_between(run, want.start, want.stop)
            if rows:
                first = at + run[rows.start] - want.start
                step = run.step if len(rows) > 1 else 1
                to = range(first, first + (len(rows) - 1) * step + 1, step)
                found.append(Piece(range(row + rows.start, row + rows.stop), to))
            at += len(want)
        row += len(run)
    return tuple(found)
