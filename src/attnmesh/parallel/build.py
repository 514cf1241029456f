"""From the name of a schedule to the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from attnmesh.comm import SubComm
from attnmesh.core.ranges import Ranges
from attnmesh.parallel.allgather import AllGather
from attnmesh.parallel.heads import HeadExchange
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.parallel.ring import Ring
from attnmesh.parallel.schedule import Schedule
from attnmesh.parallel.two_level import TwoLevelRing
from attnmesh.parallel.ulysses import Ulysses
from attnmesh.plan.allgather import gather_plan
from attnmesh.plan.ring import ring_plan
from attnmesh.plan.schedules import check_schedule
from attnmesh.plan.shards import Shards, node_shards
from attnmesh.plan.two_level import two_level_plan


@dataclass(frozen=True)
class Builder:
    """What all schedules of one call share."""

    shards: Shards
    scale: float
    backend: str
    ranks: NodeGroups
    lse: bool  # whether it is asked for

    def build(self, schedule: str) -> Schedule:
        """The schedule of that name; ValueError where it cannot serve."""
        check_schedule(schedule, self.shards, self.ranks.ranks_per_node)
        everyone = self.ranks.all_ranks
        if schedule == "ring":
            return Ring(ring_plan(self.shards), self.scale, self.backend, everyone)
        if schedule == "allgather":
            return AllGather(gather_plan(self.shards), self.scale, self.backend, everyone)
        if schedule == "ulysses":
            return self._ulysses(everyone.world, "ring")
        if schedule == "ring+ring":
            plan = two_level_plan(self.shards, self.ranks.ranks_per_node)
            return TwoLevelRing(plan, self.scale, self.backend, self.ranks)
        return self._ulysses(self.ranks.ranks_per_node, schedule.removeprefix("ulysses+"))

    def _ulysses(self, ranks: int, then: str) -> Schedule:
        """Rows traded for heads among `ranks` neighbours; then a schedule between those who have the same heads."""
        between = node_shards(self.shards, ranks)
        assert between is not None, "see refusal"
        alone = ranks == self.ranks.all_ranks.world
        everyone = self.ranks.all_ranks
        nobody_else = SubComm(everyone, [everyone.rank])
        inside, outside = (everyone, nobody_else) if alone else (self.ranks.intra_node, self.ranks.inter_node)
        first = everyone.rank // ranks * ranks

        def trade(held: tuple[Ranges, ...], whole: tuple[Ranges, ...]) -> HeadExchange:
            return HeadExchange(held[first : first + ranks], whole[outside.rank], inside)

        if then == "ring":
            after: Schedule = Ring(ring_plan(between), self.scale, self.backend, outside)
        else:
            after = AllGather(gather_plan(between), self.scale, self.backend, outside)
        queries, keys = trade(self.shards.queries, between.queries), trade(self.shards.keys, between.keys)
        return Ulysses(queries, keys, after, self.ranks, self.lse)
