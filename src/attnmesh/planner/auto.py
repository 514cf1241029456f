"""What `auto` resolves to at run time: the schedule, the merge of CP ranks, the rows of the K and V projection.

The schedule is the one whose slowest rank finishes first by estimate. For the merge of CP ranks in a decode step:

| combine | rounds | messages per rank | bytes |
|---|---|---|---|
| all_to_all | 1 | cp - 1 | the fewest: each result once, to the rank that needs it |
| reduce_scatter | 2 x log2(cp) | as many | the lse of all heads to all ranks, then each result once |
| all_reduce | 3 x log2(cp) | as many | the same, then all results to all ranks |

An all-to-all is one round, but its cp - 1 messages are started one after another. The other two use recursive doubling
and halving, one message per round: better with many ranks and few bytes. An all-reduce also returns all heads to every
rank, which is not needed, so it always costs more than a reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attnmesh.core.progress import reported
from attnmesh.plan.decode import COMBINES, Combine, DecodeShape, DecodeSharding, bytes_sent
from attnmesh.plan.schedules import SCHEDULES, refusal
from attnmesh.plan.workload import Workload
from attnmesh.planner.cost import Cost, schedule_cost
from attnmesh.planner.hardware import Cluster, Device, Link
from attnmesh.planner.units import readable_seconds

# A ring computes run by run; with more runs per shard than this (packed documents) its blocks become too small.
_MAX_RING_RUNS = 4


@dataclass(frozen=True)
class Choice:
    """The chosen schedule, the cost of each (forward plus backward), and why others were not considered."""

    schedule: str
    costs: dict[str, Cost]
    refusals: dict[str, str]

    @property
    def seconds(self) -> dict[str, float]:
        """Estimated seconds by schedule."""
        return {name: cost.seconds for name, cost in self.costs.items()}

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {readable_seconds(seconds)}" for name, seconds in self.seconds.items())
        others = "".join(f"; {name} cannot: {why}" for name, why in self.refusals.items())
        return f"{self.schedule}, the fastest by estimate ({costs}){others}"


@lru_cache(maxsize=256)
def choose_schedule(workload: Workload, cluster: Cluster) -> Choice:
    """The fastest schedule by estimate; the simplest of those that tie.

    The cost of forward and backward counts even where no gradient is required: otherwise activation checkpointing,
    which recomputes a forward with gradients, could get other bits.
    """
    costs, refusals = {}, {}
    for schedule in reported(SCHEDULES, len(SCHEDULES)):
        why = refusal(schedule, workload.shards, workload.ranks_per_node) or _unsuitable(schedule, workload)
        if why is not None:
            refusals[schedule] = why
            continue
        forward, backward = (schedule_cost(schedule, workload, cluster, backward=way) for way in (False, True))
        costs[schedule] = forward + backward
    return Choice(min(costs, key=lambda name: costs[name].seconds), costs, refusals)


def _unsuitable(schedule: str, workload: Workload) -> str | None:
    runs = max((len(shard) for side in (workload.shards.queries, workload.shards.keys) for shard in side), default=0)
    if schedule.split("+")[-1] == "ring" and runs > _MAX_RING_RUNS:
        return f"shards of {runs} runs would make the blocks of a ring too small"
    return None


@lru_cache(maxsize=256)
def pick_combine(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> Combine:
    """The fastest combine by estimate; the same on all ranks, since the bytes of the largest rank count."""
    seconds = combine_seconds(sharding, shape, link)
    return min(COMBINES, key=lambda combine: seconds[combine])


def combine_seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[Combine, float]:
    """Estimated seconds of every combine, for ranking only."""
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
    """Whether a KVDP rank should project K and V of its own sequences only, in a kernel of its own.

    That spares `spared` rows of a product with `weights` elements of W_k and W_v, and costs one more launch. The
    weights are read either way, so with few rows there is nothing to gain.
    """
    return float(device.curve("matmul").seconds(2.0 * spared * weights)) > device.launch
