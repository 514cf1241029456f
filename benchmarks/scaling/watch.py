"""A program's rounds counted as they pass: exchanges, messages, and what has arrived and is still in use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Ints, Load, LoadCounter, Messages, MessageTotals, Program, Round
from attnmesh.plan.schedules import program
from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.network import Slowdown
from attnmesh.planner.simulator.simulate import Simulated, simulate

# Ulysses' exchanges. What it attends over stays until the end; what it trades back are results of other ranks' rows.
KEPT, RESULTS = "there", "back"


@dataclass(frozen=True)
class Watched:
    """A simulated run, and the most that one rank has of each count."""

    ran: Simulated
    most: Load
    exchanges: int  # rounds in which something is sent
    sends: int
    arrived: int  # bytes in use at once that are from others, or of others' rows
    wall: float  # seconds that the simulation itself took


def watched(
    schedule: str, workload: Workload, cluster: Cluster, *, backward: bool, slow: Slowdown | None = None
) -> Watched:
    """Simulate a schedule that can serve the case. The case says how many ranks a node has."""
    whole = program(schedule, workload, backward=backward)
    counter, watch = LoadCounter(whole.world, workload.ranks_per_node), _Watch(whole.world)

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
    return Watched(ran, counter.maximum(), watch.exchanges, int(watch.sends.max()), watch.most_arrived, wall)


class _Watch:
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
            self.coming[name] = leaving if name == RESULTS else arriving
            self.here = self.here + self.coming[name]
        self.most_arrived = max(self.most_arrived, int(self.here.max(initial=0)))
        for arrived in self.used:
            self.here = self.here - arrived
        self.used = [self.coming.pop(name) for name in part.waits if name in self.coming and name != KEPT]
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
