"""A CPU, measured as ranks will use it: a process of one thread for every core, all of them at work."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from typing import Any

from attnmesh.calibration.host import round_seconds, time_short_runs
from attnmesh.calibration.kernels import Run, empty_call, samples
from attnmesh.calibration.links import LinkFigures, time_exchanges
from attnmesh.calibration.sample import curves_of
from attnmesh.comm import Comm, launch
from attnmesh.planner.hardware import Device, Link

_MOST_PROCESSES = 16  # enough for what cores share, memory and its bandwidth, to be shared


def measure_cpu(name: str, source: str, *, quick: bool) -> tuple[Device, Link]:
    """This machine's cores, and the link between processes on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = min(cores, _MOST_PROCESSES)
    ranks = launch.run(_rank, max(busy, 2), threads=1, busy=busy, quick=quick)
    at_work = [rank["kernels"] for rank in ranks if rank["kernels"]]
    seconds = [statistics.mean(times) for times in zip(*at_work, strict=True)]
    timed = samples("cpu", quick=quick)
    device = Device(
        name, f"{source}; {busy} processes of one thread at work at once", _memory(cores), seconds[-1],
        curves_of(timed, seconds[:-1], square=False), cores, curves_of(timed, seconds[:-1], square=True),
    )  # fmt: skip
    figures = LinkFigures.of(ranks[0]["exchanges"])
    between = f"{source}; two processes that both send, over gloo"
    link = Link(f"{name}-processes", between, figures.latency, figures.bandwidth, figures.message, shared=True)
    short = [statistics.mean(times) for times in zip(*(rank["short_runs"] for rank in ranks), strict=True)]
    return replace(device, round=round_seconds(device, link, short, len(ranks))), link


def _rank(comm: Comm, busy: int, quick: bool) -> dict[str, Any]:
    """One process: the seconds of every sample, of an empty call, and of exchanges."""
    kernels = []
    budget = 0.08 if quick else 0.6
    for sample in samples("cpu", quick=quick):
        comm.barrier()
        if comm.rank < busy:
            seconds = _median(sample.make(), budget)
            if sample.before is not None:
                seconds = max(seconds - _median(sample.before(), budget), 0.1 * seconds)
            kernels.append(seconds)
    comm.barrier()
    if comm.rank < busy:
        kernels.append(_median(empty_call("cpu"), budget))
    exchanges = time_exchanges(comm, "cpu", quick=quick)
    return {"kernels": kernels, "exchanges": exchanges, "short_runs": time_short_runs(comm, quick=quick)}


def _median(run: Run, budget: float) -> float:
    """Median seconds of as many runs as fit a budget, three at least, after one that does not count.

    Seconds are those that this thread had a core: what else runs on the machine, now and then, is none of a kernel's.
    """
    run()
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 200):
        start = time.thread_time()
        run()
        samples.append(time.thread_time() - start)
    return statistics.median(samples)


def _memory(cores: int) -> float:
    """Bytes a rank, if there are as many as cores."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / cores
    except (AttributeError, ValueError, OSError):
        return 4e9
