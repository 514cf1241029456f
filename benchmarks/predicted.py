"""Predicted and measured on the CPU: schedules as real processes over gloo, beside the simulation of their programs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from attnmesh.calibration.runs import ScheduleRun, rank_runs
from attnmesh.comm import Comm, launch
from attnmesh.planner.hardware import Cluster
from benchmarks.others import Others

LENGTHS = (1024, 4096)


def measure_predicted_cpu(
    cluster: Cluster,
    runs: Sequence[ScheduleRun],
    worlds: Sequence[int] = (2, 4),
    *,
    rounds: int = 9,
    best: bool = False,
) -> list[dict[str, object]]:
    """Measured over predicted seconds of every run, on every number of processes.

    Beside it the share of the cores that others had meanwhile: where that is more than little, the figure is theirs.
    """
    rows: list[dict[str, object]] = []
    for world in worlds:
        others = Others()
        times = measured(runs, world, rounds, best=best)
        busy = others.share()
        for run, seconds in zip(runs, times, strict=True):
            parts = run.simulate(world, cluster)
            predicted = sum(part.seconds for part in parts)
            rows.append(
                {
                    "ranks": world, "schedule": run.schedule, "length": run.length,
                    "direction": "forward+backward" if run.backward else "forward",
                    "measured_over_predicted": seconds / predicted,
                    "predicted_share_waiting": sum(float(part.waited.max()) for part in parts) / predicted,
                    "share_of_others": "unknown" if busy is None else round(busy, 3),
                }
            )  # fmt: skip
    return rows


def measured(runs: Sequence[ScheduleRun], world: int, rounds: int, *, best: bool = False) -> list[float]:
    """Seconds from a barrier until the last rank is done, of every run; runs take turns.

    The lower quartile of the rounds, or the `best` of them: whatever else runs on the machine only ever adds.
    """
    ranks = launch.run(_rank, world, threads=1, runs=list(runs), rounds=rounds)
    slowest = [[max(times) for times in zip(*of, strict=True)] for of in zip(*ranks, strict=True)]
    return [min(times) if best else statistics.quantiles(times, n=4)[0] for times in slowest]


def _rank(comm: Comm, runs: Sequence[ScheduleRun], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in runs]
    made = rank_runs(comm, runs)
    for at in range(rounds + 1):
        for run, found in zip(made, times, strict=True):
            comm.barrier()
            start = time.perf_counter()
            run()
            if at:  # the first agrees, plans and allocates
                found.append(time.perf_counter() - start)
    return times
