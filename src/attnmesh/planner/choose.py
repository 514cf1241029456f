"""Which schedule to use: the one whose slowest rank is done first, by the cost of its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attnmesh.plan.programs import SCHEDULES
from attnmesh.plan.workload import Workload, refusal
from attnmesh.planner.cost import Cost, schedule_cost
from attnmesh.planner.hardware import Cluster

# A ring meets every shard run by run; with more runs than these (packed documents) its blocks become crumbs.
_MOST_RUNS_OF_A_RING = 4


@dataclass(frozen=True)
class Choice:
    """A schedule, and the costs it was chosen by, forward and backward together; or why others cannot serve."""

    schedule: str
    costs: dict[str, Cost]
    refusals: dict[str, str]

    @property
    def seconds(self) -> dict[str, float]:
        """Estimated seconds by schedule."""
        return {name: cost.seconds for name, cost in self.costs.items()}


@lru_cache(maxsize=256)
def choose_schedule(workload: Workload, cluster: Cluster) -> Choice:
    """The fastest schedule by estimate; the simplest of those that tie.

    Forward and backward count, also where no gradient is asked for: the bits of a forward must not depend on that, or
    what activation checkpointing computes again would not be what it was.
    """
    costs, refusals = {}, {}
    for schedule in SCHEDULES:
        why = refusal(schedule, workload.shards, workload.ranks_per_node) or _unwise(schedule, workload)
        if why is not None:
            refusals[schedule] = why
            continue
        there, back = (schedule_cost(schedule, workload, cluster, backward=way) for way in (False, True))
        costs[schedule] = there + back
    return Choice(min(costs, key=lambda name: costs[name].seconds), costs, refusals)


def _unwise(schedule: str, workload: Workload) -> str | None:
    runs = max((len(held) for side in (workload.shards.queries, workload.shards.keys) for held in side), default=0)
    if schedule.split("+")[-1] == "ring" and runs > _MOST_RUNS_OF_A_RING:
        return f"shards of {runs} runs would cut a ring's blocks small"
    return None
