"""The cost of a schedule: seconds, operations, bytes, and the bottleneck.

Its program is simulated on a cluster, round by round: in every round a rank takes the longer of its
compute and of the communication that it waits for. No overlap is assumed beyond what the rounds allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Load, LoadCounter, Program
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator.network import Slowdown
from attnmesh.planner.simulator.simulate import run_rounds
from attnmesh.utils.validation import check_type

_SUMMED = ("seconds", "computed", "flops", "intra_node", "inter_node", "rounds")  # what the parts of a cost add up
_NEGLIGIBLE = 0.1  # fraction of the time spent waiting up to which a run is compute bound


@dataclass(frozen=True)
class Cost:
    """One run of a program; operations and bytes are the maximum over ranks.

    Attributes:
        seconds: until the last rank finishes.
        computed: seconds of compute on the busiest rank.
        flops: floating point operations.
        intra_node: bytes sent within the node.
        inter_node: bytes sent to other nodes.
        rounds: rounds of messages.
        bottleneck: what most of the time is spent on.

    Examples:
        >>> layer = schedule_cost("ring", workload, cluster("h200"), backward=False)
        >>> layer.times(32).rounds == 32 * layer.rounds, 0 <= layer.exposed < 1
        (True, True)
    """

    seconds: float
    computed: float
    flops: int
    intra_node: int
    inter_node: int
    rounds: int
    bottleneck: str

    @property
    def sent(self) -> int:
        """Bytes that one rank sends, at most."""
        return self.intra_node + self.inter_node

    @property
    def exposed(self) -> float:
        """The fraction of the time in which the busiest rank does not compute."""
        return 1 - self.computed / self.seconds if self.seconds else 0.0

    def times(self, count: int) -> Cost:
        """The cost of `count` runs in sequence, such as the layers of a model."""
        return replace(self, **{name: count * getattr(self, name) for name in _SUMMED})

    def __add__(self, other: Cost) -> Cost:
        """The cost of both in sequence, with the bottleneck of the longer one."""
        longer = max(self, other, key=lambda cost: cost.seconds)
        return replace(longer, **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED})


def schedule_cost(schedule: str, workload: Workload, cluster: Cluster, *, backward: bool) -> Cost:
    """The cost of one direction of a schedule that can serve the workload.

    Examples:
        >>> costs = [schedule_cost(name, workload, cluster("h200"), backward=False) for name in ("ring", "ulysses")]
        >>> [cost.sent for cost in costs]  # bytes
        [469762048, 293601280]
    """
    check_type("cluster", cluster, Cluster)
    return cost(program(schedule, workload, backward=backward), cluster.with_ranks_per_node(workload.ranks_per_node))


def cost(whole: Program, cluster: Cluster, limit: float = np.inf) -> Cost:
    """The cost of a program. Raises TooLongError, before its end, if it takes longer than `limit` seconds."""
    counter = LoadCounter(whole.world, cluster.ranks_per_node)
    ran = run_rounds(counter.counting(whole), cluster, Slowdown(), limit=limit)
    most = counter.maximum()
    seconds, computed = float(ran.finish.max(initial=0.0)), float(ran.computed.max(initial=0.0))
    why = _bottleneck(seconds, float(np.median(ran.computed)), most, cluster)
    return Cost(seconds, computed, most.flops, most.intra_node, most.inter_node, counter.rounds, why)


def _bottleneck(seconds: float, computed: float, most: Load, cluster: Cluster) -> str:
    """Where most of the time goes, for the median rank and the busiest port."""
    if not seconds:
        return "none"
    if computed >= (1 - _NEGLIGIBLE) * seconds:
        return "compute"
    intra_node = (
        most.intra_node * (cluster.ranks_per_node if cluster.intra_node.shared else 1) / cluster.intra_node.bandwidth
    )
    ports = 1 if cluster.inter_node.shared else cluster.rails
    sharing = -(-cluster.ranks_per_node // ports)  # ranks on the busiest port
    taken = {
        "compute": computed,
        f"{cluster.intra_node.name} intra-node bandwidth": intra_node,
        f"{cluster.inter_node.name} inter-node bandwidth": most.inter_node * sharing / cluster.inter_node.bandwidth,
    }
    most_taken = max(taken, key=lambda name: taken[name])
    return most_taken if taken[most_taken] >= seconds / 2 else f"waiting for other ranks, then {most_taken}"
