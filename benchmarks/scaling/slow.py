"""What one slow rank, or one slow link, costs all the others."""

from __future__ import annotations

from collections.abc import Iterator

from attnmesh.cli.output import Rows
from attnmesh.plan.schedules import SCHEDULES, refusal
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.network import Slowdown
from benchmarks.scaling.cases import Scope
from benchmarks.scaling.prefill import case_of
from benchmarks.scaling.watch import watched

RANK_FACTOR, LINK_FACTOR = 1.5, 4.0


def slow_rows(scope: Scope, cluster: Cluster) -> Iterator[Rows]:
    """A row for each schedule and number of ranks. The slow one is the last rank of the first node.

    In a ring it is the one whose messages go to the next node.
    """
    who = cluster.ranks_per_node - 1
    for world in scope.slow_worlds:
        workload = case_of(scope.slow_length, world, cluster)
        for schedule in SCHEDULES:
            if refusal(schedule, workload.shards, workload.ranks_per_node) is not None:
                continue
            usual, rank, link = (
                watched(schedule, workload, cluster, backward=False, slow=slow).ran.seconds
                for slow in (Slowdown(), Slowdown(ranks={who: RANK_FACTOR}), Slowdown(links={who: LINK_FACTOR}))
            )
            yield [
                {
                    "schedule": schedule,
                    "length": scope.slow_length,
                    "ranks": world,
                    "seconds": usual,
                    "slow_rank": rank / usual,
                    "slow_link": link / usual,
                }
            ]
