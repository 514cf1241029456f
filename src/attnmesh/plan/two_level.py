"""Two rings in one: ranks within a node pass keys around among themselves, nodes hand them on once.

Rank `node x ranks_per_node + i` is the i-th of its node. An outer ring connects the i-th ranks of all nodes: a block crosses
each slow link once, as a whole and in parallel with those of its neighbours, while the keys that the node holds at that
stage turn on an inner ring. At outer stage t a node holds the keys of one node, all of it.

Rows nobody sees are left out as in a single ring: a block goes on to a node only if some rank of that node or of one
further on sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnmesh.core.ranges import narrow
from attnmesh.plan.ring import RingPlan, both_ways, needed_offsets, ring_plan
from attnmesh.plan.shards import Shards


@dataclass(frozen=True)
class TwoLevelPlan:
    """The journeys of all keys: between nodes, and at every outer stage within each node."""

    shards: Shards
    ranks_per_node: int  # ranks a node
    outer_offsets: tuple[int, ...]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.shards.world

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.world // self.ranks_per_node

    def outer(self, i: int) -> RingPlan:
        """The ring of the i-th ranks of all nodes. Only what travels counts in it, not who computes."""
        return self._outer[i]

    def inner_ring(self, node: int, stage: int, grad_weight: float = 0.0) -> RingPlan:
        """The ring within a node at an outer stage."""
        return ring_plan(self._visits[node][stage], grad_weight=grad_weight)

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        node, i = divmod(rank, self.ranks_per_node)
        return sum(self.inner_ring(node, stage).pairs(i) for stage in range(len(self.outer_offsets)))

    @cached_property
    def _outer(self) -> list[RingPlan]:
        return [RingPlan(between, self.outer_offsets) for between in _between_nodes(self.shards, self.ranks_per_node)]

    @cached_property
    def _visits(self) -> list[list[Shards]]:
        return [[self._visit(node, stage) for stage in range(len(self.outer_offsets))] for node in range(self.nodes)]

    def _visit(self, node: int, stage: int) -> Shards:
        """The ranks of a node and the keys they hold between them at an outer stage."""
        ranks = range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        stages = [self.outer(i).stages(node)[stage] for i in range(self.ranks_per_node)]
        return Shards(
            self.shards.mask,
            tuple(self.shards.queries[rank] for rank in ranks),
            tuple(narrow(self.shards.keys[s.block * self.ranks_per_node + i], s.seen) for i, s in enumerate(stages)),
        )


@lru_cache(maxsize=64)
def two_level_plan(shards: Shards, ranks_per_node: int, *, grad_weight: float = 0.0) -> TwoLevelPlan:
    """The two-level ring whose outer rings, all turning the same way, move the fewest bytes."""
    between = _between_nodes(shards, ranks_per_node)
    needed = sorted({offset for ring in between for offset in needed_offsets(ring)})
    ways = zip(*(both_ways(ring, needed) for ring in between), strict=True)
    best = min(ways, key=lambda way: sum(plan.moved(grad_weight) for plan in way))
    return TwoLevelPlan(shards, ranks_per_node, best[0].offsets)


def _between_nodes(shards: Shards, ranks_per_node: int) -> list[Shards]:
    """For every i, the keys of the i-th ranks against the queries of whole nodes (unordered: only who sees counts)."""
    nodes = range(shards.world // ranks_per_node)
    queries = tuple(
        tuple(run for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node) for run in shards.queries[rank])
        for node in nodes
    )
    return [
        Shards(shards.mask, queries, tuple(shards.keys[node * ranks_per_node + i] for node in nodes))
        for i in range(ranks_per_node)
    ]
