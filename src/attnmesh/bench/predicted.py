"""Predicted and measured on the CPU: schedules as real processes over gloo, beside the simulation of their programs."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from attnmesh import launch
from attnmesh.comm import Comm
from attnmesh.layout import Zigzag
from attnmesh.mask import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.case import Case, Shape
from attnmesh.plan.hardware import Cluster
from attnmesh.plan.programs import program
from attnmesh.plan.simulate import Simulated, simulate
from attnmesh.plan.spread import spread

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SCHEDULES = ("ring", "allgather", "ulysses")
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Run:
    """Causal attention in float32, zigzag."""

    schedule: str
    length: int
    backward: bool


def runs_of(lengths: Sequence[int], schedules: Sequence[str] = SCHEDULES) -> list[Run]:
    """Every schedule at every length, forward, and forward with backward."""
    return [Run(*of) for of in product(schedules, lengths, (False, True))]


def measure_predicted_cpu(
    cluster: Cluster, runs: Sequence[Run], worlds: Sequence[int] = (2, 4), *, rounds: int = 9
) -> list[dict[str, object]]:
    """Measured over predicted seconds of every run, on every number of processes."""
    rows: list[dict[str, object]] = []
    for world in worlds:
        for run, seconds in zip(runs, measured(runs, world, rounds), strict=True):
            computed, whole = predicted(run, world, cluster)
            rows.append(
                {
                    "ranks": world, "schedule": run.schedule, "length": run.length,
                    "direction": "forward+backward" if run.backward else "forward",
                    "measured_over_predicted": seconds / whole, "predicted_share_computing": computed / whole,
                }
            )  # fmt: skip
    return rows


def predicted(run: Run, world: int, cluster: Cluster) -> tuple[float, float]:
    """Seconds that the busiest rank computes, and those of the whole, on one node of `world` ranks."""
    parts = simulated(run, world, cluster)
    return sum(float(part.computed.max()) for part in parts), sum(part.seconds for part in parts)


def simulated(run: Run, world: int, cluster: Cluster) -> list[Simulated]:
    """The forward, and the backward after it where there is one."""
    shape = Shape(1, HEADS, KV_HEADS, HEAD_DIM, itemsize=4, sum_itemsize=4)
    case = Case(spread(Causal(), Zigzag(), run.length, world), shape, world, device="cpu")
    ways = (False, True) if run.backward else (False,)
    return [simulate(program(run.schedule, case, backward=way), cluster.with_node(world)) for way in ways]


def measured(runs: Sequence[Run], world: int, rounds: int) -> list[float]:
    """Median seconds, from a barrier until the last rank is done, of every run; runs take turns."""
    with tempfile.TemporaryDirectory() as folder:
        launch.start(world, "cpu", _rank, folder, list(runs), rounds, threads=1)
        ranks = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    slowest = [[max(times) for times in zip(*of, strict=True)] for of in zip(*ranks, strict=True)]
    return [statistics.median(times) for times in slowest]


def _rank(comm: Comm, folder: str, runs: Sequence[Run], rounds: int) -> None:
    made = {name: ContextParallel(comm, layout=Zigzag(), schedule=name) for name in {run.schedule for run in runs}}
    inputs = {run: _inputs(Zigzag().local_length(run.length, comm.world, comm.rank), run.backward) for run in runs}
    times: list[list[float]] = [[] for _ in runs]
    for at in range(rounds + 1):
        for run, found in zip(runs, times, strict=True):
            seconds = _timed(comm, made[run.schedule], run, inputs[run])
            if at:  # the first agrees, plans and allocates
                found.append(seconds)
    Path(folder, str(comm.rank)).write_text(json.dumps(times))


def _timed(comm: Comm, cp: ContextParallel, run: Run, inputs: list[Tensor]) -> float:
    comm.barrier()
    start = time.perf_counter()
    out = cp.attention(*inputs[:3], mask=Causal(), length=run.length)
    if run.backward:
        torch.autograd.grad(out, inputs[:3], inputs[3])
    return time.perf_counter() - start


def _inputs(rows: int, backward: bool) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    drawn = [torch.randn(1, heads, rows, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [x.requires_grad_(backward) for x in drawn[:3]] + drawn[3:]
