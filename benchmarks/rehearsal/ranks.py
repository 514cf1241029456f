"""What the ranks of a rehearsal run under torchrun: attention under every schedule, checked, counted and timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from attnmesh import attention, launch
from attnmesh.calibration.cpu import LinkFigures, time_exchanges
from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.node_groups import node_groups
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.program import Program
from attnmesh.planner.schedules import program
from attnmesh.testing.errors import relative_error
from benchmarks.rehearsal.links import Counters
from benchmarks.rehearsal.nodes import INTERFACE

SHAPE = Shape(batch=8, q_heads=8, kv_heads=4, head_dim=64, itemsize=4, sum_itemsize=4)


@dataclass(frozen=True)
class Case:
    """Causal attention in float32 under a schedule, in the zigzag layout."""

    schedule: str
    length: int
    backward: bool

    @property
    def name(self) -> str:
        """What is run."""
        return "training step" if self.backward else "prefill"

    def programs(self, world: int, ranks_per_node: int) -> list[Program]:
        """The programs of the forward and, if there is one, of the backward."""
        workload = Workload(shards(Causal(), Zigzag(), self.length, world), SHAPE, ranks_per_node, device="cpu")
        return [
            program(self.schedule, workload, backward=way) for way in ((False, True) if self.backward else (False,))
        ]


@dataclass(frozen=True)
class Outcome:
    """One case on all ranks."""

    case: Case
    seconds: list[float]  # of every run: from a barrier until the last rank is done
    counters: list[Counters]  # of every node, over all of these runs
    error: float  # the largest relative error of a rank, against a single process


@dataclass(frozen=True)
class Report:
    """What rank 0 writes: the link between two nodes as messages see it, and every case."""

    link: LinkFigures
    outcomes: list[Outcome]

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Report:
        """Read it."""
        facts = json.loads(path.read_text())
        outcomes = [
            Outcome(Case(**each["case"]), each["seconds"], [Counters(**c) for c in each["counters"]], each["error"])
            for each in facts["outcomes"]
        ]
        return Report(LinkFigures(**facts["link"]), outcomes)


def rehearse_cases(comm: Comm, *, cases: Sequence[Case], runs: int, path: Path) -> None:
    """Run all cases on this rank; rank 0 writes the report."""
    per_node, figures = int(os.environ["LOCAL_WORLD_SIZE"]), link_figures(comm)
    single = {length: _single_process(length) for length in {case.length for case in cases}}
    outcomes = []
    for case in cases:
        run, check = _rank_case(comm, per_node, case, single[case.length])
        error = check(run())  # the first run also agrees, plans and allocates
        comm.barrier()
        before = Counters.read(INTERFACE)
        seconds = []
        for _ in range(runs):
            comm.barrier()
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        comm.barrier()
        counted = Counters.read(INTERFACE).since(before)
        mine = torch.tensor([*seconds, error, *astuple(counted)], dtype=torch.float64, device="cpu")
        gathered = torch.stack(comm.all_gather(mine, [mine.shape] * comm.world))
        slowest, worst = gathered[:, :runs].max(0).values.tolist(), float(gathered[:, runs].max())
        nodes = [Counters(*map(int, row)) for row in gathered[::per_node, runs + 1 :].tolist()]
        outcomes.append(Outcome(case, slowest, nodes, worst))
    if comm.rank == 0:
        Report(figures, outcomes).save(path)


def link_figures(comm: Comm) -> LinkFigures:
    """The link between the first ranks of two nodes, as rank 0 sees it."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    groups = node_groups(comm, per_node)
    figures = LinkFigures(0.0, 0.0, 0.0)
    if comm.rank % per_node == 0:
        times = time_exchanges(groups.inter_node, "cpu", quick=True)
        if times:
            figures = LinkFigures.from_times(times)
    comm.barrier()
    return figures


def _inputs(length: int) -> list[Tensor]:
    """q, k, v and the gradient of out, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads, SHAPE.q_heads
    shapes = [(SHAPE.batch, count, length, SHAPE.head_dim) for count in heads]
    return [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]


def _single_process(length: int) -> list[Tensor]:
    """out, dq, dk and dv of the whole sequence."""
    q, k, v, grad = _inputs(length)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask=Causal())
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _rank_case(
    comm: Comm, per_node: int, case: Case, single: Sequence[Tensor]
) -> tuple[Callable[[], list[Tensor]], Callable[[Sequence[Tensor]], float]]:
    """A function that runs this rank's part of a case, and one that returns the relative error of its results."""
    cp = ContextParallel(comm, layout=Zigzag(), schedule=case.schedule, ranks_per_node=per_node)
    q, k, v, grad = (cp.shard(x, 2) for x in _inputs(case.length))
    leaves = [x.requires_grad_(case.backward) for x in (q, k, v)]

    def run() -> list[Tensor]:
        out = cp.attention(*leaves, mask=Causal(), length=case.length)
        return [out.detach(), *(torch.autograd.grad(out, leaves, grad) if case.backward else ())]

    def check(results: Sequence[Tensor]) -> float:
        own = [cp.shard(x, 2) for x in single[: len(results)]]
        return max(relative_error(result, exact) for result, exact in zip(results, own, strict=True))

    return run, check


def main() -> None:
    """Run the cases of a file, and write the report to another: `python -m benchmarks.rehearsal.ranks JOB REPORT`."""
    import sys

    job = json.loads(Path(sys.argv[1]).read_text())
    cases = [Case(**case) for case in job["cases"]]
    launch.run(rehearse_cases, timeout=60, cases=cases, runs=job["runs"], path=Path(sys.argv[2]))


if __name__ == "__main__":
    main()
