"""The all-gather schedule: every rank gathers the keys that its queries see, in sequence order.

Only those: a rank of a causal zigzag needs three quarters of all keys on average, one with a sliding window its halo.
The owner of a key row sends it directly to the ranks that see it, and it is received at its place in the sequence, so
that one patch covers everything: each run of queries with its own range of keys, none of them twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

from attnmesh.core import ranges
from attnmesh.core.mask import sequence_intervals
from attnmesh.core.ranges import Ranges
from attnmesh.core.visibility import Patch
from attnmesh.plan.shards import Piece, Shards, pieces


@dataclass(frozen=True)
class GatherPlan:
    """The keys that every rank gathers, and from whom."""

    shards: Shards
    _patches: dict[int, Patch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world

    def needed(self, rank: int) -> Ranges:
        """The key positions that the rank's queries see, as runs without gaps."""
        return self._needed[rank]

    def rows(self, rank: int) -> int:
        """The number of keys the rank gathers, its own included."""
        return ranges.size(self.needed(rank))

    def patch(self, rank: int) -> Patch:
        """The rank's queries against the keys that it gathers."""
        if rank not in self._patches:
            self._patches[rank] = Patch(self.shards.mask, self.shards.queries[rank], self.needed(rank))
        return self._patches[rank]

    def pieces(self, source: int, target: int) -> tuple[Piece, ...]:
        """The rows of the shard of `source` that `target` gathers, and where it receives them."""
        return pieces(self.shards.keys[source], self.needed(target))

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        return self.patch(rank).pairs

    def rows_sent(self, source: int, target: int) -> int:
        """The rows of keys that one rank sends to another in a forward; the gradients of these rows come back."""
        return sum(len(piece.rows) for piece in self.pieces(source, target))

    @cached_property
    def _needed(self) -> list[Ranges]:
        return [keys_seen(self.shards, queries) for queries in self.shards.queries]


@lru_cache(maxsize=256)
def gather_plan(shards: Shards) -> GatherPlan:
    """The plan of these shards; cached."""
    return GatherPlan(shards)


def keys_seen(shards: Shards, queries: Ranges) -> Ranges:
    """The key positions that some of these queries see, as runs without gaps.

    Where every query attends to itself, a run of queries sees one run of keys. Runs with a step are then treated as
    runs without: the keys in between are gathered too.
    """
    end = max((run[-1] + 1 for shard in shards.keys for run in shard), default=0)
    views: list[range] = []
    stop = max([end, *(run[-1] + 1 for run in queries)])
    for _, intervals in sequence_intervals(shards.mask, stop):
        for part in intervals:
            for run in queries:
                whole = range(run[0], run[-1] + 1) if part.contains_query else run
                views += part.rows_seen(whole, range(end))
    return ranges.merged(views)


_MAX_HEAD_GROUPS = 4  # nothing overlaps the first group's keys; more groups leave kernels too small
_TILE, _TILES_PER_GROUP = 128, 256  # rows of a kernel's tile; tiles that keep a large GPU busy for two waves


def head_groups(kv_heads: int, groups: int = _MAX_HEAD_GROUPS) -> list[range]:
    """The kv heads whose keys are gathered together, group by group."""
    groups = min(groups, kv_heads)
    edges = [kv_heads * at // groups for at in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def groups_that_fill(shards: Shards, batch: int, q_heads: int, *, reproducible: bool = False) -> int:
    """How many groups of heads keep a GPU busy in each; the same on every rank.

    With reproducible=True every leaf of rows is a launch of its own, for which more groups leave too few heads.
    """
    rows = sum(map(ranges.size, shards.queries)) // shards.world
    most = 2 if reproducible else _MAX_HEAD_GROUPS
    return max(1, min(most, batch * q_heads * rows // (_TILE * _TILES_PER_GROUP)))
