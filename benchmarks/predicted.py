"""Predicted and measured times: processes over gloo on the CPU, one rank's program on a GPU."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from attnmesh import launch
from attnmesh.calibration.cpu import ScheduleRun, all_runs, rank_runs
from attnmesh.calibration.timing import Run, interleaved
from attnmesh.cli.calibrate import calibrate
from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.catalog import load
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Floats
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import simulate
from benchmarks.common import HardwareFileOption, JsonOption, QuickOption, make_app, publish
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS, random_inputs
from benchmarks.ring import run_rank


class OtherProcesses:
    """CPU time of other processes since creation. Child processes that have ended count as our own."""

    def __init__(self) -> None:
        self._wall, self._busy_seconds, self._own_seconds = time.perf_counter(), _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """Return the share of all cores that other processes used; None where the system does not report it."""
        before, now = self._busy_seconds, _busy_seconds()
        if before is None or now is None:
            return None
        wall = (time.perf_counter() - self._wall) * (os.cpu_count() or 1)
        return max(now - before - (_own_seconds() - self._own_seconds), 0.0) / wall


def _busy_seconds() -> float | None:
    """Return the busy seconds of all cores together."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, soft, steal = map(int, fields)
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


CPU_LENGTHS = (1024, 4096)


def measure_predicted_cpu(
    cluster: Cluster,
    runs: Sequence[ScheduleRun],
    worlds: Sequence[int] = (2, 4),
    *,
    rounds: int = 9,
    best: bool = False,
) -> list[dict[str, object]]:
    """Return measured over predicted seconds of every run, on every number of processes.

    Each row has the share of the cores that other processes used: where it is not small, the ratio is unreliable.
    """
    rows: list[dict[str, object]] = []
    for world in worlds:
        others = OtherProcesses()
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
                    "cpu_share_of_other_processes": "unknown" if busy is None else round(busy, 3),
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
    programs = rank_runs(comm, runs)
    for at in range(rounds + 1):
        for run, found in zip(programs, times, strict=True):
            comm.barrier()
            start = time.perf_counter()
            run()
            if at:  # the first agrees, plans and allocates
                found.append(time.perf_counter() - start)
    return times


SCHEDULES = ("ring", "allgather", "ulysses")
CUDA_LENGTHS, WORLDS = (16384, 32768, 65536, 131072), (4, 8)


def measure_predicted_cuda(
    cluster: Cluster, lengths: Sequence[int] = CUDA_LENGTHS, worlds: Sequence[int] = WORLDS, *, rounds: int = 3
) -> list[dict[str, object]]:
    """Return measured and predicted milliseconds of the first, middle and last rank: bf16, causal, zigzag."""
    return [
        row
        for length in lengths
        for backward in (False, True)
        for world in worlds
        for row in _rows(cluster, length, world, backward, rounds)
    ]


def _rows(cluster: Cluster, length: int, world: int, backward: bool, rounds: int) -> list[dict[str, object]]:
    ranks = sorted({0, world // 2, world - 1})
    runs: dict[tuple[str, int], Run] = {}
    for schedule in SCHEDULES:
        for rank in ranks:
            shard = random_inputs(Zigzag().local_length(length, world, rank), backward)
            comm = OneRankComm(rank, world)
            cp = ContextParallel(comm, layout=Zigzag(), schedule=schedule)
            runs[schedule, rank] = partial(run_rank, comm, cp, length, *shard)
    times = interleaved(runs, rounds)
    del runs
    gc.collect()
    torch.cuda.empty_cache()
    computed = {name: 1e3 * computing(name, length, world, backward, cluster) for name in SCHEDULES}
    return [
        {
            "length": length, "ranks": world, "direction": "forward+backward" if backward else "forward",
            "schedule": schedule, "rank": rank, "measured_ms": ms, "predicted_ms": float(computed[schedule][rank]),
            "measured_over_predicted": ms / float(computed[schedule][rank]),
        }
        for (schedule, rank), ms in times.items()
    ]  # fmt: skip


def computing(schedule: str, length: int, world: int, backward: bool, cluster: Cluster) -> Floats:
    """Return the predicted compute seconds of every rank, forward and optionally backward."""
    shape = Shape(1, HEADS, KV_HEADS, HEAD_DIM, itemsize=2, sum_itemsize=4)
    workload = Workload(shards(Causal(), Zigzag(), length, world), shape, world, device="cuda")
    ways = (False, True) if backward else (False,)
    parts = [simulate(program(schedule, workload, backward=way), cluster.with_ranks_per_node(world)) for way in ways]
    total: Floats = parts[0].computed if len(parts) == 1 else parts[0].computed + parts[1].computed
    return total


def main(
    hardware_file: HardwareFileOption = None,
    hardware: Annotated[str, typer.Option(help="Name of the device in the file.")] = "this-machine",
    device: MeasuredDeviceOption = None,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Compare predicted with measured times: processes over gloo on the CPU, one rank's program on a GPU.

    Without --hardware-file this machine is calibrated first.
    """
    chosen = default_device(device)
    try:
        cluster = _cluster(chosen, hardware_file, hardware, quick)
    except ValueError as error:
        typer.echo(f"benchmarks.predicted: {error}", err=True)
        raise typer.Exit(2) from None
    if chosen == "cuda":
        title = "one rank's program, measured and predicted (bf16, causal, zigzag, 32/8 heads, D=128)"
        rows = measure_predicted_cuda(cluster, (16384, 65536) if quick else CUDA_LENGTHS)
    else:
        title = "measured over predicted time of processes (gloo, float32, causal, zigzag, 4/2 heads, D=64)"
        lengths, rounds = ((512,), 5) if quick else (CPU_LENGTHS, 9)
        rows = measure_predicted_cpu(cluster, all_runs(lengths), rounds=rounds)
    publish("predicted", chosen, [(title, rows)], json)


def _cluster(device: str, hardware_file: Path | None, hardware: str, quick: bool) -> Cluster:
    if hardware_file is not None:
        return load(hardware_file).cluster(hardware)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hardware.toml")
        path.write_text(calibrate(device, "this-machine", quick=quick), encoding="utf-8")
        return load(path).cluster("this-machine")


app = make_app(main)

if __name__ == "__main__":
    app()
