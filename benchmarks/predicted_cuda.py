"""Predicted and measured on one GPU: what a rank computes under each schedule, its messages not sent."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import torch

from attnmesh.calibration.timing import Run, interleaved
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.program import Floats
from attnmesh.plan.schedules import program
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.simulate import simulate
from benchmarks.alone import AloneComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS, inputs
from benchmarks.ring import run_rank

SCHEDULES = ("ring", "allgather", "ulysses")
LENGTHS, WORLDS = (16384, 32768, 65536, 131072), (4, 8)


def measure_predicted_cuda(
    cluster: Cluster, lengths: Sequence[int] = LENGTHS, worlds: Sequence[int] = WORLDS, *, rounds: int = 3
) -> list[dict[str, object]]:
    """The first, middle and last rank's milliseconds beside those that its program computes: bf16, causal, zigzag."""
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
            shard = inputs(Zigzag().local_length(length, world, rank), backward)
            comm = AloneComm(rank, world)
            cp = ContextParallel(comm, layout=Zigzag(), schedule=schedule)
            runs[schedule, rank] = partial(run_rank, comm, cp, length, *shard)
    times = interleaved(runs, rounds)
    del runs
    gc.collect()
    torch.cuda.empty_cache()
    computed = {name: 1e3 * computing(name, length, world, backward, cluster) for name in SCHEDULES}
    return [
        {
            "length": length, "world": world, "direction": "forward+backward" if backward else "forward",
            "schedule": schedule, "rank": rank, "measured_ms": ms, "predicted_ms": float(computed[schedule][rank]),
            "measured_over_predicted": ms / float(computed[schedule][rank]),
        }
        for (schedule, rank), ms in times.items()
    ]  # fmt: skip


def computing(schedule: str, length: int, world: int, backward: bool, cluster: Cluster) -> Floats:
    """Seconds that every rank computes, forward and, if asked for, backward after it."""
    shape = Shape(1, HEADS, KV_HEADS, HEAD_DIM, itemsize=2, sum_itemsize=4)
    workload = Workload(shards(Causal(), Zigzag(), length, world), shape, world, device="cuda")
    ways = (False, True) if backward else (False,)
    parts = [simulate(program(schedule, workload, backward=way), cluster.with_ranks_per_node(world)) for way in ways]
    total: Floats = parts[0].computed if len(parts) == 1 else parts[0].computed + parts[1].computed
    return total
