"""What a round of a schedule takes besides its kernels on the CPU: Python, planning, posting; from short runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from attnmesh.calibration.runs import made_by, runs_of
from attnmesh.comm import Comm
from attnmesh.planner.hardware import Cluster, Device, Link

_ROWS = 128  # of every rank: short, but kernels of such calls are among those that are timed


def time_short_runs(comm: Comm, *, quick: bool) -> list[float]:
    """Median seconds that this rank's thread has a core, in every schedule."""
    times: list[list[float]] = []
    for run in made_by(comm, runs_of((_ROWS * comm.world,))):
        samples = []
        for at in range(7 if quick else 25):
            comm.barrier()
            start = time.thread_time()
            run()
            if at >= 2:  # the first agrees, plans and allocates
                samples.append(time.thread_time() - start)
        times.append(samples)
    return [statistics.median(samples) for samples in times]


def round_seconds(device: Device, link: Link, times: Sequence[float], world: int) -> float:
    """What rounds take on average besides kernels and messages; `times` are the ranks' average of every short run."""
    # A core for every rank: it is the time of its own core that a rank has noted.
    alone = Cluster(replace(device, cores=max(world, device.cores or 1), round=0.0), link, link, world, world)
    counting = replace(alone, device=replace(alone.device, round=1.0))
    runs = runs_of((_ROWS * world,))
    computed, counted = (
        sum(float(part.computed.mean()) for run in runs for part in run.simulated(world, cluster))
        for cluster in (alone, counting)
    )
    rounds = counted - computed  # a second each
    return max(sum(times) - computed, 0.0) / rounds
