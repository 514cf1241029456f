"""What holds a simulated run up, in a few words."""

from __future__ import annotations

import numpy as np

from attnmesh.planner.hardware import Cluster
from benchmarks.scaling.watch import Watched

LITTLE = 0.1  # of the time: what is not worth a word
IDLE = 0.75  # of what the busiest rank computes: below it, the mean rank has too little to do


def holding_up(run: Watched, ideal: float, cluster: Cluster) -> str:
    """What most of the time goes to. `ideal` is what a rank would compute if nothing were lost by dividing the work."""
    seconds, computed = run.ran.seconds, run.ran.computed
    busiest = float(computed.max())
    if busiest >= (1 - LITTLE) * seconds:
        if float(computed.mean()) < IDLE * busiest:
            return "ranks without heads"
        return "small kernels, merging" if busiest * (1 - 2 * LITTLE) > ideal else "computing"
    farther = cluster.inter_node if run.most.inter_node else cluster.intra_node
    taken = {
        "computing": busiest,
        f"{cluster.intra_node.name} bytes": run.most.intra_node / cluster.intra_node.bandwidth,
        f"{cluster.inter_node.name} bytes": run.most.inter_node
        * max(1, cluster.ranks_per_node // cluster.rails)
        / cluster.inter_node.bandwidth,
        "latency": run.exchanges * farther.latency,
        "messages to start": run.sends * farther.message,
    }
    first, second = sorted(taken, key=lambda name: -taken[name])[:2]
    alone = taken[first] >= (1 - 2 * LITTLE) * seconds or taken[second] < 2 * LITTLE * seconds
    if float(np.mean(computed)) < IDLE * busiest:
        first, second = ("ranks without heads" if name == "computing" else name for name in (first, second))
    return first if alone else f"{first}, then {second}"
