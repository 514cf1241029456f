"""Measures a CPU as ranks use it: one single-threaded process per core, all of them busy at once.

Messages between two processes are timed through the library's own exchange. Runs of schedules are executed on ranks
and simulated.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from attnmesh import launch
from attnmesh.calibration.kernels import Run, empty_call, kernel_curves, kernel_samples
from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.shards import ScheduleName, Shape, Workload, shards
from attnmesh.planner.hardware import Cluster, Device, Link
from attnmesh.planner.program import Program
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Simulated, simulate

_SMALL = 64  # bytes of a message whose time is its latency
_MANY = 17  # messages in one exchange


@dataclass(frozen=True)
class LinkFigures:
    """A link between two ranks that both send and receive at once."""

    latency: float  # seconds of a small message
    message: float  # seconds of each further message in the same exchange
    bandwidth: float  # bytes per second, of both directions together

    @staticmethod
    def from_times(seconds: dict[tuple[int, int], float]) -> LinkFigures:
        """The figures from the seconds of exchanges, by (messages per direction, bytes per message)."""
        latency = seconds[1, _SMALL]
        message = max((seconds[_MANY, _SMALL] - latency) / (_MANY - 1), 1e-8)
        large = [(nbytes, time) for (count, nbytes), time in seconds.items() if count == 1 and nbytes > _SMALL]
        rates = [2 * nbytes / max(time - latency, 1e-2 * time) for nbytes, time in large]
        return LinkFigures(latency, message, statistics.median(rates))


def time_exchanges(comm: Comm, device: str, *, quick: bool) -> dict[tuple[int, int], float]:
    """Seconds of exchanges between ranks 0 and 1, by (messages per direction, bytes per message).

    The lower decile of several rounds, since other programs on the machine only add to the time.
    """
    sizes = [2**18, 2**21] if quick else [2**16, 2**18, 2**20, 2**22, 2**24]
    cases = [(1, _SMALL), (_MANY, _SMALL), *((1, nbytes) for nbytes in sizes)]
    times = {}
    for count, nbytes in cases:
        comm.barrier()
        if comm.rank < 2:
            times[count, nbytes] = _exchange_seconds(comm, device, count, nbytes, rounds=10 if quick else 40)
    return times


def _exchange_seconds(comm: Comm, device: str, count: int, nbytes: int, rounds: int) -> float:
    peer = 1 - comm.rank
    sends, recvs = (
        [(torch.zeros(nbytes, dtype=torch.uint8, device=device), peer) for _ in range(count)] for _ in range(2)
    )
    samples = []
    for step in range(rounds + 2):
        start = time.perf_counter()
        comm.exchange(sends, recvs).wait()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= 2:
            samples.append(time.perf_counter() - start)
    return statistics.quantiles(samples, n=10)[0]


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SCHEDULES: tuple[ScheduleName, ...] = ("ring", "allgather", "ulysses")


@dataclass(frozen=True)
class ScheduleRun:
    """Causal attention in float32 under a schedule, in the zigzag layout."""

    schedule: ScheduleName
    length: int
    backward: bool

    def programs(self, world: int) -> list[Program]:
        """The programs of the forward and, if there is one, of the backward."""
        shape = Shape(1, HEADS, KV_HEADS, HEAD_DIM, itemsize=4, sum_itemsize=4)
        workload = Workload(shards(Causal(), Zigzag(), self.length, world), shape, world, device="cpu")
        return [
            program(self.schedule, workload, backward=way) for way in ((False, True) if self.backward else (False,))
        ]

    def simulate(self, world: int, cluster: Cluster) -> list[Simulated]:
        """The simulated forward and backward on one node of `world` ranks."""
        return [simulate(whole, cluster.with_ranks_per_node(world)) for whole in self.programs(world)]


def all_runs(lengths: Sequence[int], schedules: Sequence[ScheduleName] = SCHEDULES) -> list[ScheduleRun]:
    """Every schedule at every length, forward and forward+backward."""
    return [ScheduleRun(*of) for of in product(schedules, lengths, (False, True))]


def rank_runs(comm: Comm, runs: Sequence[ScheduleRun]) -> list[Callable[[], object]]:
    """One function per run that executes this rank's part of it."""
    names = dict.fromkeys(run.schedule for run in runs)  # no set: every rank makes the objects in the same order
    by_name = {name: ContextParallel(comm, layout=Zigzag(), schedule=name) for name in names}
    return [_rank_run(run, by_name[run.schedule]) for run in runs]


def _rank_run(run: ScheduleRun, cp: ContextParallel) -> Callable[[], object]:
    rows = Zigzag().local_length(run.length, cp.world, cp.rank)
    shapes = [(1, heads, rows, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = [torch.randn(shape, dtype=torch.float32, device="cpu") for shape in shapes]
    q, k, v = (x.requires_grad_(run.backward) for x in drawn[:3])

    def forward() -> Tensor:
        return cp.attention(q, k, v, mask=Causal(), length=run.length)

    return (lambda: torch.autograd.grad(forward(), (q, k, v), drawn[3])) if run.backward else forward


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
