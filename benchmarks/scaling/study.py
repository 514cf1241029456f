"""What is studied: lengths, ranks and models."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from attnmesh.cli.output import Rows
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards, why_not
from attnmesh.planner.catalog import cluster
from attnmesh.planner.cost import RESERVED_MEMORY, Option, Ranking
from attnmesh.planner.decode import DecodeRequest, decode_ranking
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models import model as model_named
from attnmesh.planner.program import Ints, Load, LoadCounter, Messages, MessageTotals, Program, Round
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Simulated, Slowdown, simulate

HARDWARE = "h200"
SHAPE = Shape(batch=1, q_heads=64, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)  # a layer of Llama-3.1-70B
CONTEXT = 1 << 20  # of token generation


@dataclass(frozen=True)
class Scope:
    """How far the studies go."""

    lengths: tuple[int, ...]
    worlds: tuple[int, ...]
    backward_length: int  # the length at which gradients are simulated, too
    slow_worlds: tuple[int, ...]  # with one slow rank or link
    slow_length: int
    models: tuple[str, ...]
    batches: tuple[int, ...]
    devices: tuple[int, ...]


FULL = Scope(
    lengths=(128 << 10, 1 << 20, 10 << 20, 100 << 20),
    worlds=(8, 16, 64, 256, 1024, 4096),
    backward_length=1 << 20,
    slow_worlds=(64, 1024),
    slow_length=1 << 20,
    models=("gpt-oss-120b", "llama-3.1-70b"),
    batches=(1, 8, 64),
    devices=(8, 16, 32, 64),
)
QUICK = Scope(
    lengths=(128 << 10,),
    worlds=(8, 16),
    backward_length=128 << 10,
    slow_worlds=(16,),
    slow_length=128 << 10,
    models=("gpt-oss-120b",),
    batches=(1,),
    devices=(8, 16),
)


# The exchanges of Ulysses: inputs stay in memory until the end; outputs leave as results of other ranks' rows.
KEPT = ("queries, keys and values", "output gradients")
RESULTS = ("outputs", "gradients")


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run, and the most that one rank has of each count."""

    ran: Simulated
    most: Load
    exchanges: int  # rounds in which something is sent
    sends: int
    arrived: int  # bytes in use at once that are from others, or of others' rows
    wall: float  # seconds that the simulation itself took


def simulate_run(
    schedule: str, workload: Workload, cluster: Cluster, *, backward: bool, slow: Slowdown | None = None
) -> SimulatedRun:
    """Simulate a schedule that supports the workload, and count its messages."""
    whole = program(schedule, workload, backward=backward)
    counter, watch = LoadCounter(whole.world, workload.ranks_per_node), _MessageCounter(whole.world)

    def counted() -> Iterator[Round]:
        for part in whole.rounds():
            counter.add(part)
            watch.add(part)
            yield part

    begin = time.perf_counter()
    ran = simulate(
        Program(whole.name, whole.world, counted), cluster.with_ranks_per_node(workload.ranks_per_node), slow=slow
    )
    wall = time.perf_counter() - begin
    return SimulatedRun(ran, counter.maximum(), watch.exchanges, int(watch.sends.max()), watch.most_arrived, wall)


class _MessageCounter:
    """What arrives stays until the round after the one that waits for it: that round computes on it."""

    def __init__(self, world: int) -> None:
        self.world, self.exchanges, self.most_arrived = world, 0, 0
        self.sends = np.zeros(world, dtype=np.int64)
        self.here = np.zeros(world, dtype=np.int64)
        self.coming: dict[str, Ints] = {}
        self.used: list[Ints] = []  # by the round that comes next

    def add(self, part: Round) -> None:
        """Count one round."""
        posted = 0
        for name, exchange in part.starts.items():
            arriving, leaving, sends = _ends(exchange, self.world)
            posted += int(sends.sum())
            self.sends += sends
            self.coming[name] = leaving if name in RESULTS else arriving
            self.here = self.here + self.coming[name]
        self.most_arrived = max(self.most_arrived, int(self.here.max(initial=0)))
        for arrived in self.used:
            self.here = self.here - arrived
        self.used = [self.coming.pop(name) for name in part.waits if name in self.coming and name not in KEPT]
        self.exchanges += posted > 0


def _ends(exchange: Messages | MessageTotals, world: int) -> tuple[Ints, Ints, Ints]:
    """Bytes that come in, bytes that go out, and messages that go out, by rank."""
    if isinstance(exchange, MessageTotals):
        return (
            exchange.intra_node_in + exchange.inter_node_in,
            exchange.intra_node_out + exchange.inter_node_out,
            exchange.sends,
        )
    into, out = (
        np.bincount(ranks, exchange.nbytes, world).astype(np.int64) for ranks in (exchange.target, exchange.source)
    )
    return into, out, np.bincount(exchange.source, minlength=world).astype(np.int64)


LITTLE = 0.1  # of the time: what is not worth a word
IDLE = 0.75  # of what the busiest rank computes: below it, the mean rank has too little to do


def find_bottleneck(run: SimulatedRun, ideal: float, cluster: Cluster) -> str:
    """Return what takes most of the time. `ideal` is a rank's compute time if dividing the work cost nothing."""
    seconds, computed = run.ran.seconds, run.ran.computed
    busiest = float(computed.max())
    if busiest >= (1 - LITTLE) * seconds:
        if float(computed.mean()) < IDLE * busiest:
            return "ranks without heads"
        return "small kernels, merging" if busiest * (1 - 2 * LITTLE) > ideal else "computing"
    farther = cluster.inter_node if run.most.inter_node else cluster.intra_node
    taken = {
        "computing": busiest,
        f"{cluster.intra_node.name} bytes": run.most.intra_node / cluster.intra_node.bandwidth,
        f"{cluster.inter_node.name} bytes": run.most.inter_node
        * max(1, cluster.ranks_per_node // cluster.rails)
        / cluster.inter_node.bandwidth,
        "latency": run.exchanges * farther.latency,
        "messages to start": run.sends * farther.message,
    }
    first, second = sorted(taken, key=lambda name: -taken[name])[:2]
    alone = taken[first] >= (1 - 2 * LITTLE) * seconds or taken[second] < 2 * LITTLE * seconds
    if float(np.mean(computed)) < IDLE * busiest:
        first, second = ("ranks without heads" if name == "computing" else name for name in (first, second))
    return first if alone else f"{first}, then {second}"


DIRECTIONS = ("forward", "forward+backward")


def prefill_rows(scope: Scope, cluster: Cluster) -> Iterator[Rows]:
    """A row at a time, the smallest worlds first; forward+backward last, since it takes longest."""
    for direction in DIRECTIONS:
        for world in scope.worlds:
            for length in scope.lengths if direction == "forward" else (scope.backward_length,):
                for schedule in SCHEDULES:
                    workload = workload_for(length, world, cluster)
                    if why_not(schedule, workload.shards, workload.ranks_per_node) is None:
                        yield [_prefill_row(schedule, workload, length, direction, cluster)]


def workload_for(length: int, world: int, cluster: Cluster) -> Workload:
    """A causal sequence in zigzag over whole nodes."""
    return Workload(shards(Causal(), Zigzag(), length, world), SHAPE, min(cluster.ranks_per_node, world))


def one_device_seconds(length: int, cluster: Cluster, *, backward: bool) -> float:
    """Seconds of one device that has the whole sequence, if it could hold it."""
    product = 2.0 * SHAPE.batch * SHAPE.q_heads * SHAPE.head_dim * length * (length + 1) / 2
    if backward:
        return float(cluster.device.seconds("attention backward", 5 * product))
    return float(cluster.device.seconds("attention", 2 * product))


def _prefill_row(schedule: str, workload: Workload, length: int, direction: str, cluster: Cluster) -> dict[str, object]:
    world = workload.shards.world
    ways = (False,) if direction == "forward" else (False, True)
    runs = [simulate_run(schedule, workload, cluster, backward=way) for way in ways]
    ideals = [one_device_seconds(length, cluster, backward=way) / world for way in ways]
    seconds = sum(run.ran.seconds for run in runs)
    computed = sum(float(run.ran.computed.max()) for run in runs)
    longest = max(range(len(runs)), key=lambda i: runs[i].ran.seconds)
    held = _bytes_per_rank(workload, length, runs, direction)
    return {
        "schedule": schedule,
        "direction": direction,
        "length": length,
        "ranks": world,
        "seconds": seconds,
        "computed": computed,
        "exposed_communication": 1 - computed / seconds,
        "efficiency": sum(ideals) / seconds,
        "intra_node_bytes": sum(run.most.intra_node for run in runs),
        "inter_node_bytes": sum(run.most.inter_node for run in runs),
        "exchanges": sum(run.exchanges for run in runs),
        "bytes_per_rank": held,
        "fits": held <= (1 - RESERVED_MEMORY) * cluster.device.memory,
        "bottleneck": find_bottleneck(runs[longest], ideals[longest], cluster),
        "simulated_in": sum(run.wall for run in runs),
    }


def _bytes_per_rank(workload: Workload, length: int, runs: list[SimulatedRun], direction: str) -> int:
    """Bytes of one layer on the rank that has most: its own q, k, v and out, and what came from others."""
    rows = -(-length // workload.shards.world)
    own = rows * (2 * workload.shape.query_row + workload.shape.key_row)
    if direction != "forward":
        own += rows * (2 * workload.shape.query_row + workload.shape.key_grad_row)
    return own + max(run.arrived for run in runs)


SHARDING_KINDS = ("TP", "TP-CP", "TP-KVDP", "TP-KVDP-CP", "replicas")


def decode_rows(scope: Scope, cluster: Cluster) -> Iterator[Rows]:
    """The best of each kind for every model, batch and number of devices, the fastest that fits first."""
    for name, batch, devices in product(scope.models, scope.batches, scope.devices):
        ranking = decode_ranking(DecodeRequest(model_named(name), CONTEXT, batch, devices, cluster))
        best: dict[str, Option] = {}
        for option in ranking.options:
            best.setdefault(sharding_kind(option.name), option)
        yield [_decode_row(name, batch, devices, kind, option, ranking) for kind, option in best.items()]


def sharding_kind(way: str) -> str:
    """What a way divides: copies of the model, or heads (TP), sequences (KVDP) and positions (CP) of one."""
    if " x " in way:
        return "replicas"
    return "-".join(["TP", *(part for part in ("KVDP", "CP") if part in way)])


def _decode_row(model: str, batch: int, devices: int, kind: str, option: Option, ranking: Ranking) -> dict[str, object]:
    return {
        "model": model,
        "length": CONTEXT,
        "batch": batch,
        "devices": devices,
        "kind": kind,
        "sharding": option.name,
        "seconds": option.seconds,
        "tokens_per_second": batch / option.seconds,
        "compute_share": sum(s for part, s in option.parts.items() if part != "communication") / option.seconds,
        "weights": option.memory.weights,
        "cache": option.memory.cache,
        "total": option.memory.total,
        "fits": option.fits(ranking.device_memory),
        "bottleneck": option.bottleneck,
        "why": ranking.why(option),
    }


RANK_FACTOR, LINK_FACTOR = 1.5, 4.0


def slow_rows(scope: Scope, cluster: Cluster) -> Iterator[Rows]:
    """A row for each schedule and number of ranks. The slow one is the last rank of the first node.

    In a ring it is the one whose messages go to the next node.
    """
    who = cluster.ranks_per_node - 1
    for world in scope.slow_worlds:
        workload = workload_for(scope.slow_length, world, cluster)
        for schedule in SCHEDULES:
            if why_not(schedule, workload.shards, workload.ranks_per_node) is not None:
                continue
            usual, rank, link = (
                simulate_run(schedule, workload, cluster, backward=False, slow=slow).ran.seconds
                for slow in (Slowdown(), Slowdown(ranks={who: RANK_FACTOR}), Slowdown(links={who: LINK_FACTOR}))
            )
            yield [
                {
                    "schedule": schedule,
                    "length": scope.slow_length,
                    "ranks": world,
                    "seconds": usual,
                    "slow_rank": rank / usual,
                    "slow_link": link / usual,
                }
            ]


class Part(enum.StrEnum):
    """What is studied."""

    DECODE = "decode"
    SLOW = "slow"
    PREFILL = "prefill"


_ROWS = {Part.DECODE: decode_rows, Part.SLOW: slow_rows, Part.PREFILL: prefill_rows}


def study(parts: Collection[Part], *, quick: bool, hardware_file: Path | None = None) -> Iterator[tuple[Part, Rows]]:
    """The rows of every part, a few at a time: the largest take a minute each, and what is done can be kept."""
    scope, machines = QUICK if quick else FULL, cluster(HARDWARE, extra=hardware_file)
    for part in Part:
        if part in parts:
            for rows in _ROWS[part](scope, machines):
                yield part, rows
