"""What a schedule costs: seconds, operations, bytes and memory, and what holds it up.

Seconds are those of its program on a cluster, a round at a time: in every round a rank takes the longer of what it
computes and what it waits for, whoever is late. Nothing is assumed to be hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Load, LoadCounter, Program
from attnmesh.plan.schedules import program
from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.network import Slow
from attnmesh.planner.simulator.rounds import run_waves

_LITTLE = 0.1  # of the time: waiting that does not hold a run up


@dataclass(frozen=True)
class Cost:
    """One run of a program; operations and bytes are those of the rank that has most."""

    seconds: float  # until the last rank is done
    computed: float  # seconds that the busiest rank computes
    flops: int
    intra_node: int  # bytes sent within the node
    inter_node: int  # bytes sent to other nodes
    rounds: int
    bottleneck: str  # in words

    @property
    def sent(self) -> int:
        """All bytes that one rank sends, at most."""
        return self.intra_node + self.inter_node

    @property
    def exposed(self) -> float:
        """The share of the time in which the busiest rank does not compute."""
        return 1 - self.computed / self.seconds if self.seconds else 0.0

    def times(self, count: int) -> Cost:
        """As often, one after the other: the layers of a model."""
        return Cost(
            self.seconds * count, self.computed * count, self.flops * count, self.intra_node * count, self.inter_node * count,
            self.rounds * count, self.bottleneck,
        )  # fmt: skip

    def __add__(self, other: Cost) -> Cost:
        """One after the other; what holds up the longer one holds up both."""
        longer = max(self, other, key=lambda cost: cost.seconds)
        return Cost(
            self.seconds + other.seconds, self.computed + other.computed, self.flops + other.flops,
            self.intra_node + other.intra_node, self.inter_node + other.inter_node, self.rounds + other.rounds, longer.bottleneck,
        )  # fmt: skip


def schedule_cost(schedule: str, workload: Workload, cluster: Cluster, *, backward: bool) -> Cost:
    """The cost of a schedule that can serve the case, in one direction. The case says how many ranks a node has."""
    return cost(program(schedule, workload, backward=backward), cluster.with_ranks_per_node(workload.ranks_per_node))


def cost(whole: Program, cluster: Cluster) -> Cost:
    """The cost of a program."""
    counter = LoadCounter(whole.world, cluster.ranks_per_node)
    ran = run_waves(counter.counting(whole), cluster, Slow())
    most = counter.maximum()
    seconds, computed = float(ran.finish.max(initial=0.0)), float(ran.computed.max(initial=0.0))
    why = _bottleneck(seconds, float(np.median(ran.computed)), most, cluster)
    return Cost(seconds, computed, most.flops, most.intra_node, most.inter_node, counter.rounds, why)


def _bottleneck(seconds: float, computed: float, most: Load, cluster: Cluster) -> str:
    """What most of the time goes to, on the rank in the middle and on the port with most to send."""
    if not seconds:
        return "nothing to do"
    if computed >= (1 - _LITTLE) * seconds:
        return "computing"
    intra_node = (
        most.intra_node * (cluster.ranks_per_node if cluster.intra_node.shared else 1) / cluster.intra_node.bandwidth
    )
    ports = 1 if cluster.inter_node.shared else cluster.rails
    sharing = -(-cluster.ranks_per_node // ports)  # ranks on the port that most of them use
    taken = {
        "computing": computed,
        f"{cluster.intra_node.name} within nodes": intra_node,
        f"{cluster.inter_node.name} between nodes": most.inter_node * sharing / cluster.inter_node.bandwidth,
    }
    most_taken = max(taken, key=lambda name: taken[name])
    return most_taken if taken[most_taken] >= seconds / 2 else f"waiting for one another, then {most_taken}"
