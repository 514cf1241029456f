"""One layer's attention over a long sequence, under every schedule, on 8 to 4,096 GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from attnmesh.cli.output import Rows
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.schedules import SCHEDULES, refusal
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.config import causal_pairs
from attnmesh.planner.ranking import RESERVED_MEMORY
from benchmarks.scaling.cases import SHAPE, Scope
from benchmarks.scaling.holding_up import holding_up
from benchmarks.scaling.watch import Watched, watched

DIRECTIONS = ("forward", "forward+backward")


def prefill_rows(scope: Scope, cluster: Cluster) -> Iterator[Rows]:
    """A row at a time, the smallest worlds first; forward+backward last, since it takes longest."""
    for direction in DIRECTIONS:
        for world in scope.worlds:
            for length in scope.lengths if direction == "forward" else (scope.both_ways,):
                for schedule in SCHEDULES:
                    workload = case_of(length, world, cluster)
                    if refusal(schedule, workload.shards, workload.ranks_per_node) is None:
                        yield [_row(schedule, workload, length, direction, cluster)]


def case_of(length: int, world: int, cluster: Cluster) -> Workload:
    """A causal sequence in zigzag over whole nodes."""
    return Workload(shards(Causal(), Zigzag(), length, world), SHAPE, min(cluster.ranks_per_node, world))


def one_device(length: int, cluster: Cluster, *, backward: bool) -> float:
    """Seconds of one device that has the whole sequence, if it could hold it."""
    product = 2.0 * SHAPE.batch * SHAPE.q_heads * SHAPE.head_dim * causal_pairs(length)
    if backward:
        return float(cluster.device.seconds("attention backward", 5 * product))
    return float(cluster.device.seconds("attention", 2 * product))


def _row(schedule: str, workload: Workload, length: int, direction: str, cluster: Cluster) -> dict[str, object]:
    world = workload.shards.world
    ways = (False,) if direction == "forward" else (False, True)
    runs = [watched(schedule, workload, cluster, backward=way) for way in ways]
    ideals = [one_device(length, cluster, backward=way) / world for way in ways]
    seconds = sum(run.ran.seconds for run in runs)
    computed = sum(float(run.ran.computed.max()) for run in runs)
    longest = max(range(len(runs)), key=lambda i: runs[i].ran.seconds)
    held = _held(workload, length, runs, direction)
    return {
        "schedule": schedule,
        "direction": direction,
        "length": length,
        "ranks": world,
        "seconds": seconds,
        "computed": computed,
        "exposed": 1 - computed / seconds,
        "efficiency": sum(ideals) / seconds,
        "near": sum(run.most.intra_node for run in runs),
        "far": sum(run.most.inter_node for run in runs),
        "exchanges": sum(run.exchanges for run in runs),
        "held": held,
        "fits": held <= (1 - RESERVED_MEMORY) * cluster.device.memory,
        "held_up_by": holding_up(runs[longest], ideals[longest], cluster),
        "method": runs[longest].ran.method,
        "simulated_in": sum(run.wall for run in runs),
    }


def _held(workload: Workload, length: int, runs: list[Watched], direction: str) -> int:
    """Bytes of one layer on the rank that has most: its own q, k, v and out, and what came from others."""
    rows = -(-length // workload.shards.world)
    own = rows * (2 * workload.shape.query_row + workload.shape.key_row)
    if direction != "forward":
        own += rows * (2 * workload.shape.query_row + workload.shape.key_grad_row)
    return own + max(run.arrived for run in runs)
