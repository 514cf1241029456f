"""The all-gather with reproducible=True: every rank computes whole leaves of queries, and sends sums of them.

A leaf is a fixed number of consecutive query positions, aligned to multiples of it. Where the shards of a layout end
within leaves, ranks first exchange queries, so that each has whole leaves. What the queries of a rank add to the
gradient of a key is sent as nodes of the tree over leaves (see `core.tree`), never as one sum: a sum over the leaves
that a rank happens to have would round differently for another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnmesh.core import ranges
from attnmesh.core.layouts import Zigzag
from attnmesh.core.ranges import Ranges
from attnmesh.core.tree import Node, cover
from attnmesh.plan.allgather import keys_seen
from attnmesh.plan.shards import Piece, Shards, pieces

VERSION = 1
"""Of the bits on each kind of device: only results of equal versions are the same."""
_LEAVES = {"cpu": 128, "cuda": 2048}
_MAX_RUNS = 4  # of leaves per rank: nodes of many short runs would be many messages of all keys


def leaf_size(device: str) -> int:
    """The positions of a leaf on a type of device: a part of the contract, since it decides the order of sums."""
    return _LEAVES.get(device, _LEAVES["cpu"])


@dataclass(frozen=True)
class LeafPlan:
    """The queries that every rank computes, and the sums over them that it sends."""

    given: Shards
    leaf: int

    @cached_property
    def shards(self) -> Shards:
        """The shards with whole leaves of queries: the given ones if they have them, else a zigzag of leaves."""
        length = max((run[-1] + 1 for queries in self.given.queries for run in queries), default=0)
        queries = tuple(ranges.union([held]) for held in self.given.queries)
        if all(held is not None and self._has_whole_leaves(held, length) for held in queries):
            return self.given
        count, world = -(-length // self.leaf), self.given.world
        leaves = (ranges.merged(Zigzag().ranges(count, world, rank)) for rank in range(world))
        aligned = tuple(tuple(self._positions(run, length) for run in runs) for runs in leaves)
        return Shards(self.given.mask, aligned, self.given.keys)

    @property
    def moves(self) -> bool:
        """Whether ranks exchange queries."""
        return self.shards is not self.given

    def row_pieces(self, source: int, target: int) -> tuple[Piece, ...]:
        """The query rows that `source` holds and `target` computes: rows of the shard, and of those computed."""
        return pieces(self.given.queries[source], self.shards.queries[target])

    @cached_property
    def all_nodes(self) -> tuple[tuple[Node, ...], ...]:
        """By rank, the nodes over its leaves, in ascending order."""
        found = []
        for queries in self.shards.queries:
            runs = [range(run.start // self.leaf, -(-run.stop // self.leaf)) for run in ranges.merged(queries)]
            found.append(tuple(node for run in runs for node in cover(run)))
        return tuple(found)

    @cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """By rank, the nodes over its leaves whose queries see a key, in ascending order."""
        return tuple(tuple(node for node in nodes if self.seen(node)) for nodes in self.all_nodes)

    def seen(self, node: Node) -> Ranges:
        """The key positions that the queries of a node see, as runs without gaps."""
        return _seen(self, node)

    def rows_moved(self, source: int, target: int) -> int:
        """The query rows that one rank sends to another."""
        return sum(len(piece.rows) for piece in self.row_pieces(source, target)) if self.moves else 0

    def rows_returned(self, source: int, target: int) -> int:
        """The rows of gradients of keys that one rank sends to the owner of the keys: one for each node."""
        nodes = self.nodes[source]
        return sum(len(piece.rows) for node in nodes for piece in pieces(self.given.keys[target], self.seen(node)))

    def _has_whole_leaves(self, queries: Ranges, length: int) -> bool:
        return len(queries) <= _MAX_RUNS and all(
            run.step == 1 and run.start % self.leaf == 0 and (run.stop % self.leaf == 0 or run.stop == length)
            for run in queries
        )

    def _positions(self, leaves: range, length: int) -> range:
        return range(leaves.start * self.leaf, min(leaves.stop * self.leaf, length))


@lru_cache(maxsize=256)
def leaf_plan(shards: Shards, leaf: int) -> LeafPlan:
    """The plan of these shards; cached."""
    return LeafPlan(shards, leaf)


@lru_cache(maxsize=4096)
def _seen(plan: LeafPlan, node: Node) -> Ranges:
    leaves = node.leaves
    rows = range(leaves.start * plan.leaf, leaves.stop * plan.leaf)
    queries = ranges.intersection(ranges.merged(run for held in plan.shards.queries for run in held), (rows,))
    return keys_seen(plan.shards, queries)
