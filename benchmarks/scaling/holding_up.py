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
    farther = cluster.far if run.most.far else cluster.near
    taken = {
        "computing": busiest,
        f"{cluster.near.name} bytes": run.most.near / cluster.near.bandwidth,
        f"{cluster.far.name} bytes": run.most.far * max(1, cluster.node // cluster.rails) / cluster.far.bandwidth,
        "latency": run.exchanges * farther.latency,
        "messages to start": run.sends * farther.message,
    }
    first, second = sorted(taken, key=lambda name: -taken[name])[:2]
    alone = taken[first] >= (1 - 2 * LITTLE) * seconds or taken[second] < 2 * LITTLE * seconds
    if float(np.mean(computed)) < IDLE * busiest:
        first, second = ("ranks without heads" if name == "computing" else name for name in (first, second))
    return first if alone else f"{first}, then {second}"
