"""Queries and keys sharded over ranks under a mask, and the rows that move between shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout, check_layout
from attnmesh.core.masks import Mask, check_mask
from attnmesh.core.ranges import Ranges, rows_between
from attnmesh.core.visibility import Patch
from attnmesh.utils.validation import MAX_RANKS, check_count


@dataclass(frozen=True)
class Shards:
    """The positions of the queries and of the keys that each rank holds, and the mask."""

    mask: Mask
    queries: tuple[Ranges, ...]  # by rank
    keys: tuple[Ranges, ...]  # by rank
    _patches: dict[object, Patch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.queries)

    def patch(self, rank: int, block: int, rows: Ranges | None = None) -> Patch:
        """The queries of `rank` against the keys of the rank `block`, or against those `rows` of them."""
        at = rank, block, rows
        if at not in self._patches:
            keys = self.keys[block]
            kept = keys if rows is None else ranges.select(keys, rows)
            self._patches[at] = Patch(self.mask, self.queries[rank], kept)
        return self._patches[at]


def shards(
    mask: Mask, layout: Layout, length: int, world: int, key_layout: Layout | None = None, key_length: int | None = None
) -> Shards:
    """The shards that layouts describe; keys have the layout and length of the queries unless given.

    `queries[rank]` and `keys[rank]` are ascending ranges of positions, none for a rank that holds nothing.

    Examples:
        >>> shards(am.Causal(), am.Zigzag(), 16, 4).queries[0]  # the positions of rank 0
        (range(0, 2), range(14, 16))
    """
    check_mask("mask", mask)
    check_layout("layout", layout)
    check_count("length", length)
    check_count("world", world, least=1, most=MAX_RANKS)
    if key_layout is not None:
        check_layout("key_layout", key_layout)
    if key_length is not None:
        check_count("key_length", key_length)
    return _shards(mask, layout, length, world, key_layout, key_length)


@lru_cache(maxsize=256)
def _shards(
    mask: Mask, layout: Layout, length: int, world: int, key_layout: Layout | None, key_length: int | None
) -> Shards:
    def positions(layout: Layout, length: int) -> tuple[Ranges, ...]:
        return tuple(layout.ranges(length, world, rank) for rank in range(world))

    keys = key_layout or layout, length if key_length is None else key_length
    return Shards(mask, positions(layout, length), positions(*keys))


@lru_cache(maxsize=64)
def node_shards(shards: Shards, ranks_per_node: int) -> Shards | None:
    """The shards of whole nodes of `ranks_per_node` consecutive ranks; None where the shards of a node interleave."""

    def joined(shards: tuple[Ranges, ...]) -> list[Ranges | None]:
        return [ranges.union(shards[first : first + ranks_per_node]) for first in range(0, len(shards), ranks_per_node)]

    queries, keys = joined(shards.queries), joined(shards.keys)
    known_queries, known_keys = ([shard for shard in side if shard is not None] for side in (queries, keys))
    if len(known_queries) < len(queries) or len(known_keys) < len(keys):
        return None
    return Shards(shards.mask, tuple(known_queries), tuple(known_keys))


class Piece(NamedTuple):
    """Contiguous rows of a shard and the rows of the target that they become (with a step for striped shards)."""

    rows: range
    to: range

    @property
    def in_place(self) -> bool:
        """Whether the target rows are contiguous too: a message can then be received in place."""
        return self.to.step == 1


@lru_cache(maxsize=4096)
def pieces(held: Ranges, needed: Ranges) -> tuple[Piece, ...]:
    """The rows of a shard of the positions `held` that are `needed`. Runs of `needed` have no gaps."""
    found = []
    row = 0
    for run in held:
        at = 0
        for run_needed in needed:
            rows = rows_between(run, run_needed.start, run_needed.stop)
            if rows:
                first = at + run[rows.start] - run_needed.start
                step = run.step if len(rows) > 1 else 1
                to = range(first, first + (len(rows) - 1) * step + 1, step)
                found.append(Piece(range(row + rows.start, row + rows.stop), to))
            at += len(run_needed)
        row += len(run)
    return tuple(found)
