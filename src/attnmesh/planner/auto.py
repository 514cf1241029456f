"""Which schedule to use: the one whose slowest rank is done first, by the cost of its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attnmesh.plan.decode import COMBINES, Combine, DecodeShape, DecodeSharding, bytes_sent
from attnmesh.plan.schedules import SCHEDULES, refusal
from attnmesh.plan.workload import Workload
from attnmesh.planner.cost import Cost, schedule_cost
from attnmesh.planner.hardware import Cluster, Device, Link

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


@lru_cache(maxsize=256)
def pick_combine(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> Combine:
    """The cheapest combine by estimate; all ranks come to the same answer, since the largest rank's bytes count."""
    seconds = combine_seconds(sharding, shape, link)
    return min(COMBINES, key=lambda combine: seconds[combine])


def combine_seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[Combine, float]:
    """Estimated seconds of every combine. Estimates rank, they do not predict."""
    return {combine: _seconds(sharding, shape, link, combine) for combine in COMBINES}


def _seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link, combine: Combine) -> float:
    halvings = (sharding.cp - 1).bit_length()  # log2, rounded up
    if combine == "all_to_all":
        rounds, messages = min(1, sharding.cp - 1), sharding.cp - 1
    else:
        rounds = messages = halvings * (2 if combine == "reduce_scatter" else 3)
    loads = [bytes_sent(sharding, shape, rank, combine=combine) for rank in range(sharding.ranks)]
    nbytes = max(load["cp lse"] + load["cp out"] for load in loads)
    return rounds * link.latency + messages * link.message + nbytes / link.bandwidth


@lru_cache(maxsize=1024)
def own_rows_pay(spared: int, weights: int, device: Device) -> bool:
    """Whether `spared` rows less through `weights` numbers of W_k and W_v are worth one more operation.

    Fused with the queries' projection, keys and values of all sequences cost no launch, and the weights are read either
    way: with few rows nothing is to be won.
    """
    return float(device.curve("matmul").seconds(2.0 * spared * weights)) > device.launch
