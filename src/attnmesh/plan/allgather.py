"""All-gather context parallelism as plain data: the keys that a rank's queries see come to it, in sequence order.

Only those: a rank of a causal zigzag needs three quarters of all keys on average, one with a sliding window its halo.
Every key row is sent by its owner straight to the ranks that see it, and arrives where the sequence has it, so that one
patch covers all: each run of queries with its own range of keys, none of them twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.plan.blocks import Patch
from attnmesh.plan.shards import Piece, Shards, pieces


@dataclass(frozen=True)
class GatherPlan:
    """Which keys every rank gathers, and from whom."""

    shards: Shards
    _patches: dict[int, Patch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.shards.world

    def needed(self, rank: int) -> Ranges:
        """The key positions that the rank's queries see, as runs without gaps."""
        return self._needed[rank]

    def rows(self, rank: int) -> int:
        """How many keys the rank gathers, its own among them."""
        return ranges.size(self.needed(rank))

    def patch(self, rank: int) -> Patch:
        """What the rank's queries see of the keys it gathered."""
        if rank not in self._patches:
            self._patches[rank] = Patch(self.shards.mask, self.shards.queries[rank], self.needed(rank))
        return self._patches[rank]

    def pieces(self, source: int, target: int) -> tuple[Piece, ...]:
        """The rows of the shard of `source` that `target` gathers, and where they go."""
        return pieces(self.shards.keys[source], self.needed(target))

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        return self.patch(rank).pairs

    def rows_sent(self, source: int, target: int) -> int:
        """The rows of keys that one rank sends to another in a forward; as many rows of gradients come back."""
        return sum(len(piece.rows) for piece in self.pieces(source, target))

    @cached_property
    def _needed(self) -> list[Ranges]:
        keys = [run for held in self.shards.keys for run in held]
        end = max((run[-1] + 1 for run in keys), default=0)
        return [_seen(self.shards, rank, end) for rank in range(self.world)]


@lru_cache(maxsize=256)
def gather_plan(shards: Shards) -> GatherPlan:
    """The plan of a spread; made once."""
    return GatherPlan(shards)


def _seen(shards: Shards, rank: int, end: int) -> Ranges:
    """The key positions below `end` that some query of the rank sees.

    Neighbours' views leave no gap between them, since each holds its own query; so a run of neighbours sees one run of
    keys. Runs with a step are taken for runs without: what lies between comes along.
    """
    views = []
    for run in shards.queries[rank]:
        first, stop = max(0, shards.mask.key_range(run[0])[0]), min(end, shards.mask.key_range(run[-1])[1])
        if first < stop:
            views.append(range(first, stop))
    joined: list[range] = []
    for view in sorted(views, key=lambda view: view.start):
        if joined and view.start <= joined[-1].stop:
            view = range(joined[-1].start, max(joined.pop().stop, view.stop))
        joined.append(view)
    return tuple(joined)


_GROUPS = 4  # the first group's keys travel before anything is computed; more groups leave kernels too small
_TILE, _TILES_A_GROUP = 128, 256  # rows of a kernel's tile; tiles that keep a large GPU busy for two waves


def head_groups(kv_heads: int, groups: int = _GROUPS) -> list[range]:
    """The kv heads whose keys travel together, group by group."""
    groups = min(groups, kv_heads)
    edges = [kv_heads * at // groups for at in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def groups_that_fill(shards: Shards, batch: int, q_heads: int) -> int:
    """How many groups leave a GPU enough to do in each; the same on every rank."""
    rows = sum(map(ranges.size, shards.queries)) // shards.world
    return max(1, min(_GROUPS, batch * q_heads * rows // (_TILE * _TILES_A_GROUP)))
