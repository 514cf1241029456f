"""`ScheduleSpec`: what describes a schedule, its communication rounds, its peak memory and its tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from attnmesh.plan.shards import Workload
from attnmesh.plan.ulysses import HeadShare
from attnmesh.planner.program import Floats, Round
from attnmesh.planner.sizes import GroupedWorkload

T = TypeVar("T")


class Tile(NamedTuple):
    """A rank computes the queries of some shards against the keys of some shards, for some query heads."""

    rank: int
    heads: range  # query heads
    queries: range  # the ranks whose queries these are
    keys: range  # the ranks whose keys these are
    pairs: int  # visible (query, key) pairs per head


class GroupTile(NamedTuple):
    """A tile of a rank group: places in the group instead of ranks, and key heads of the group instead of all."""

    rank: int
    kv_heads: range
    query: int  # the place in the group whose queries these are
    keys: range  # the places whose keys these are
    pairs: int

    def placed(self, share: HeadShare, queries_per_key: int, ranks: int) -> Tile:
        """The tile of ranks, where the rank has the heads `share` and a place of the group is `ranks` ranks."""
        first = max(share.q.start, (share.kv.start + self.kv_heads.start) * queries_per_key)
        stop = min(share.q.stop, (share.kv.start + self.kv_heads.stop) * queries_per_key)
        queries = range(self.query * ranks, (self.query + 1) * ranks)
        keys = range(self.keys.start * ranks, self.keys.stop * ranks)
        return Tile(self.rank, range(first, stop), queries, keys, self.pairs)


class NamedTiles(NamedTuple, Generic[T]):
    """The tiles of one step."""

    name: str
    tiles: list[T]


class ScheduleSpec(ABC):
    """The description of one schedule. It requires that the schedule can serve the workload."""

    @abstractmethod
    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """What all ranks compute and send, round by round."""

    @abstractmethod
    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """Peak bytes by rank, see `schedules.peak_bytes`."""

    @abstractmethod
    def tiles(self, workload: Workload) -> list[NamedTiles[Tile]]:
        """The tiles of a forward: one entry for every round for which `schedules.is_step` is true."""


class GroupSpec(ScheduleSpec):
    """A schedule that several rank groups can run at once, each over the same shards: a ring, an all-gather."""

    @abstractmethod
    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """The rounds of all groups."""

    @abstractmethod
    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Peak bytes by rank."""

    @abstractmethod
    def group_tiles(self, grouped: GroupedWorkload) -> list[NamedTiles[GroupTile]]:
        """The tiles of a forward of all groups."""

    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """The rounds of one group of all ranks."""
        return self.group_rounds(GroupedWorkload.of(workload), backward=backward)

    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """Peak bytes of one group of all ranks."""
        return self.group_memory(GroupedWorkload.of(workload), backward=backward)

    def tiles(self, workload: Workload) -> list[NamedTiles[Tile]]:
        """The tiles of one group of all ranks."""
        shape = workload.shape
        share = HeadShare(range(shape.q_heads), range(shape.kv_heads), ())
        return [
            NamedTiles(name, [each.placed(share, shape.q_heads // shape.kv_heads, 1) for each in tiles if each.pairs])
            for name, tiles in self.group_tiles(GroupedWorkload.of(workload))
        ]


def single(rank: int) -> range:
    """A range of one rank."""
    return range(rank, rank + 1)
