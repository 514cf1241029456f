"""Runs of schedules on the CPU: executed on ranks, and simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.schedules import ScheduleName
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Program
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator.simulate import Simulated, simulate

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
