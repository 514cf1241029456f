"""Queries and keys spread over ranks under a mask: the question every schedule answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Mask
from attnmesh.core.ranges import Ranges, rows_between
from attnmesh.plan.blocks import Patch


@dataclass(frozen=True)
class Shards:
    """Which positions of the queries and of the keys each rank holds, and who sees whom."""

    mask: Mask
    queries: tuple[Ranges, ...]  # by rank
    keys: tuple[Ranges, ...]  # by rank
    _patches: dict[object, Patch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.queries)

    def patch(self, rank: int, block: int, rows: range | None = None) -> Patch:
        """What the queries of `rank` see of the keys of the rank `block`, or of those `rows` of them."""
        at = rank, block, rows
        if at not in self._patches:
            held = self.keys[block]
            kept = held if rows is None else ranges.narrow(held, rows)
            self._patches[at] = Patch(self.mask, self.queries[rank], kept)
        return self._patches[at]


@lru_cache(maxsize=256)
def shards(
    mask: Mask, layout: Layout, length: int, world: int, key_layout: Layout | None = None, key_length: int | None = None
) -> Shards:
    """The spread that layouts describe; keys lie as the queries do unless said otherwise."""

    def held(layout: Layout, length: int) -> tuple[Ranges, ...]:
        return tuple(layout.ranges(length, world, rank) for rank in range(world))

    keys = key_layout or layout, length if key_length is None else key_length
    return Shards(mask, held(layout, length), held(*keys))


@lru_cache(maxsize=64)
def between_nodes(shards: Shards, ranks_per_node: int) -> Shards | None:
    """The same with the shards of `ranks_per_node` neighbouring ranks taken together; None where they interleave."""

    def together(shards: tuple[Ranges, ...]) -> list[Ranges | None]:
        return [ranges.union(shards[first : first + ranks_per_node]) for first in range(0, len(shards), ranks_per_node)]

    queries, keys = together(shards.queries), together(shards.keys)
    known_queries, known_keys = ([held for held in side if held is not None] for side in (queries, keys))
    if len(known_queries) < len(queries) or len(known_keys) < len(keys):
        return None
    return Shards(shards.mask, tuple(known_queries), tuple(known_keys))


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
