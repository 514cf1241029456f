"""The two-level ring schedule: ranks within a node pass keys around among themselves, nodes send them on once.

Rank `node x ranks_per_node + i` is the i-th of its node. An outer ring connects the i-th ranks of all nodes: a block
crosses each slow link once, as a whole and in parallel with the blocks of its neighbours, while the keys that the node
has at that stage circulate on an inner ring. At outer stage t a node has the keys of exactly one node.

A row is sent to exactly the nodes of which some rank sees it, and within a node to exactly the ranks that do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnmesh.core import ranges
from attnmesh.plan.ring import RingPlan, both_directions, needed_offsets, ring_plan
from attnmesh.plan.shards import Shards


@dataclass(frozen=True)
class TwoLevelPlan:
    """The routes of all keys: between nodes, and at every outer stage within each node."""

    shards: Shards
    ranks_per_node: int
    outer_offsets: tuple[int, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.world // self.ranks_per_node

    def outer(self, i: int) -> RingPlan:
        """The ring of the i-th ranks of all nodes: it moves keys and computes nothing."""
        return self._outer[i]

    def inner_ring(self, node: int, stage: int) -> RingPlan:
        """The ring within a node at an outer stage."""
        return ring_plan(self._node_shards[node][stage])

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        node, i = divmod(rank, self.ranks_per_node)
        return sum(self.inner_ring(node, stage).pairs(i) for stage in range(len(self.outer_offsets)))

    @cached_property
    def _outer(self) -> list[RingPlan]:
        return [RingPlan(between, self.outer_offsets) for between in _outer_shards(self.shards, self.ranks_per_node)]

    @cached_property
    def _node_shards(self) -> list[list[Shards]]:
        return [
            [self._shards_at(node, stage) for stage in range(len(self.outer_offsets))] for node in range(self.nodes)
        ]

    def _shards_at(self, node: int, stage: int) -> Shards:
        """The ranks of a node and the keys they have at an outer stage."""
        ranks = range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        stages = [self.outer(i).stages(node)[stage] for i in range(self.ranks_per_node)]
        return Shards(
            self.shards.mask,
            tuple(self.shards.queries[rank] for rank in ranks),
            tuple(
                ranges.select(self.shards.keys[s.blocks[0].owner * self.ranks_per_node + i], s.blocks[0].rows)
                for i, s in enumerate(stages)
            ),
        )


@lru_cache(maxsize=64)
def two_level_plan(shards: Shards, ranks_per_node: int) -> TwoLevelPlan:
    """The two-level ring whose outer rings, all in the same direction, have the fewest messages."""
    outer = _outer_shards(shards, ranks_per_node)
    needed = sorted({offset for ring in outer for offset in needed_offsets(ring)})
    directions = zip(*(both_directions(ring, needed) for ring in outer), strict=True)
    best = min(directions, key=lambda plans: sum(plan.connections for plan in plans))
    return TwoLevelPlan(shards, ranks_per_node, best[0].offsets)


def _outer_shards(shards: Shards, ranks_per_node: int) -> list[Shards]:
    """For every i, the keys of the i-th ranks against the queries of whole nodes, unordered."""
    nodes = range(shards.world // ranks_per_node)
    queries = tuple(
        tuple(run for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node) for run in shards.queries[rank])
        for node in nodes
    )
    return [
        Shards(shards.mask, queries, tuple(shards.keys[node * ranks_per_node + i] for node in nodes))
        for i in range(ranks_per_node)
    ]
