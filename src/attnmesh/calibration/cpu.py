"""Measures a CPU as ranks use it: one single-threaded process per core, all of them busy at once."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attnmesh import launch
from attnmesh.calibration.kernels import Run, empty_call, kernel_curves, kernel_samples
from attnmesh.calibration.links import LinkFigures, time_exchanges
from attnmesh.calibration.runs import all_runs, rank_runs
from attnmesh.comm import Comm
from attnmesh.planner.hardware import Cluster, Device, Link

Progress = Callable[[str, int, int], None]
"""Called with what is measured next, the steps done and their total."""

_MAX_PROCESSES = 16  # enough to share memory bandwidth and caches
_SHORT_ROWS = 128  # rows per rank of a short run; kernels of this size are timed


@dataclass(frozen=True)
class _RankTimes:
    kernels: list[float]  # seconds of every sample and of an empty call; empty on a rank that only exchanges
    exchanges: dict[tuple[int, int], float]
    short_runs: list[float]


def measure_cpu(name: str, source: str, *, quick: bool, progress: Progress | None = None) -> tuple[Device, Link]:
    """The cores of this machine as a device, and the link between processes on it.

    `progress` is called in another process and must be picklable.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = min(cores, _MAX_PROCESSES)
    ranks = launch.run(_measure_rank, max(busy, 2), threads=1, busy=busy, quick=quick, progress=progress)
    seconds = [statistics.mean(times) for times in zip(*(rank.kernels for rank in ranks if rank.kernels), strict=True)]
    samples = kernel_samples("cpu", quick=quick)
    device = Device(
        name,
        f"{source}; {busy} single-threaded processes at once",
        _memory_per_core(cores),
        seconds[-1],
        kernel_curves(samples, seconds[:-1], causal=False),
        cores,
        kernel_curves(samples, seconds[:-1], causal=True),
    )
    figures = LinkFigures.from_times(ranks[0].exchanges)
    origin = f"{source}; two processes that both send, over gloo"
    link = Link(f"{name}-processes", origin, figures.latency, figures.bandwidth, figures.message, shared=True)
    short = [statistics.mean(times) for times in zip(*(rank.short_runs for rank in ranks), strict=True)]
    return replace(device, round=round_seconds(device, link, short, len(ranks))), link


def _measure_rank(comm: Comm, *, busy: int, quick: bool, progress: Progress | None) -> _RankTimes:
    """One process; only the first `busy` ranks time kernels."""
    kernels = []
    budget = 0.08 if quick else 0.6
    samples = kernel_samples("cpu", quick=quick)
    total = len(samples) + 2

    def report(what: str, done: int) -> None:
        if progress is not None and comm.rank == 0:
            progress(what, done, total)

    for done, sample in enumerate(samples):
        report(sample.kind, done)
        comm.barrier()
        if comm.rank < busy:
            seconds = _median_seconds(sample.make(), budget)
            if sample.before is not None:
                seconds = max(seconds - _median_seconds(sample.before(), budget), 0.1 * seconds)
            kernels.append(seconds)
    comm.barrier()
    if comm.rank < busy:
        kernels.append(_median_seconds(empty_call("cpu"), budget))
    report("messages", len(samples))
    exchanges = time_exchanges(comm, "cpu", quick=quick)
    report("short runs of every schedule", len(samples) + 1)
    short_runs = _time_short_runs(comm, quick=quick)
    report("done", total)
    return _RankTimes(kernels, exchanges, short_runs)


def _median_seconds(run: Run, budget: float) -> float:
    """Median seconds of the runs that fit into the budget, at least three, after one warm-up.

    Thread time, so that other programs on the machine do not count.
    """
    run()
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 200):
        start = time.thread_time()
        run()
        samples.append(time.thread_time() - start)
    return statistics.median(samples)


def _time_short_runs(comm: Comm, *, quick: bool) -> list[float]:
    """Median thread seconds of this rank for a short run of every schedule."""
    times: list[list[float]] = []
    for run in rank_runs(comm, all_runs((_SHORT_ROWS * comm.world,))):
        samples = []
        for step in range(7 if quick else 25):
            comm.barrier()
            start = time.thread_time()
            run()
            if step >= 2:  # the first calls compare arguments, plan and allocate
                samples.append(time.thread_time() - start)
        times.append(samples)
    return [statistics.median(samples) for samples in times]


def round_seconds(device: Device, link: Link, times: Sequence[float], world: int) -> float:
    """Mean seconds of a communication round besides its kernels and messages: Python, planning, posting messages.

    `times` are the seconds of every short run, averaged over the ranks.
    """
    # One core per rank, since `times` were measured on a rank's own core.
    without = Cluster(replace(device, cores=max(world, device.cores or 1), round=0.0), link, link, world, world)
    counting = replace(without, device=replace(without.device, round=1.0))
    runs = all_runs((_SHORT_ROWS * world,))
    computed, counted = (
        sum(float(part.computed.mean()) for run in runs for part in run.simulate(world, cluster))
        for cluster in (without, counting)
    )
    rounds = counted - computed  # one second each
    return max(sum(times) - computed, 0.0) / rounds


def _memory_per_core(cores: int) -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / cores
    except (AttributeError, ValueError, OSError):
        return 4e9
