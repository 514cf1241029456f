"""How long a program takes on a cluster and where the time goes: event by event, or a round at a time if it is long."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from attnmesh.plan.program import Floats, MessageTotals, Program, Round
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.events import run_events
from attnmesh.planner.simulator.network import Network, Slow
from attnmesh.planner.simulator.record import Record
from attnmesh.planner.simulator.rounds import run_waves
from attnmesh.trace.timeline import Span

FEW_MESSAGES = 50_000  # followed one by one within seconds
FEW_MEETINGS = 1_000_000  # of two messages on a port: each changes the share of the other


@dataclass(frozen=True)
class Simulated:
    """What a run took, in seconds: `finish`, `computed` and `waited` are by rank."""

    finish: Floats  # when the rank was through, with all of its messages
    computed: Floats
    waited: Floats  # with nothing to compute, for messages: transfer that is not hidden, and ranks that are late
    spans: list[Span]  # of the ranks that were asked for, in the order of their beginnings
    method: str  # in words

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return float(self.finish.max(initial=0.0))


def simulate(
    program: Program,
    cluster: Cluster,
    *,
    slow: Slow | None = None,
    keep: Collection[int] = (),
    exact: bool | None = None,
) -> Simulated:
    """Run a program on a cluster of `program.world` ranks, with the spans of the ranks in `keep`.

    `exact`: whether to follow every message event by event; by default if there are few, see `Simulated.method`.
    """
    slow = Slow() if slow is None else slow
    if program.world < 1:
        raise ValueError(f"a program must have at least 1 rank, got {program.world}")
    why = "as asked for" if exact is False else None
    if exact is None:
        rounds, made = program.rounds(), list[Round]()
        why = _too_much(rounds, made, program.world, cluster)
        program = replace(program, make=lambda: chain(made, rounds))  # the first rounds may have taken long to make
    if why is None:
        return _simulated(run_events(program, cluster, slow, keep), "event by event")
    method = f"a round at a time: {why}; what a message gets of its ports is estimated when its round begins"
    return _simulated(run_waves(program, cluster, slow, keep), method)


def _simulated(record: Record, method: str) -> Simulated:
    spans = sorted(record.spans, key=lambda span: (span.begin, span.rank))
    return Simulated(record.finish, record.computed, record.waited, spans, method)


def _too_much(rounds: Iterator[Round], made: list[Round], world: int, cluster: Cluster) -> str | None:
    """Why a program is not followed event by event, or None. Takes no more rounds than that wants, into `made`."""
    network = Network(cluster, world, Slow())
    messages, meetings = 0, 0
    for round_ in rounds:
        made.append(round_)
        for name, exchange in round_.starts.items():
            if isinstance(exchange, MessageTotals):
                return f"the messages of {name!r} are known as sums by rank only"
            messages += len(exchange)
            if messages > FEW_MESSAGES:
                return f"more than {FEW_MESSAGES:,} messages"
            routes = network.routes(exchange)
            for ports in (routes.out, routes.into[routes.into != network.none]):
                meetings += int(np.square(np.bincount(ports)).sum())
        if meetings > FEW_MEETINGS:
            return f"messages that meet on a port more than {FEW_MEETINGS:,} times"
        if len(made) * world > FEW_MESSAGES * 4:
            return f"more than {FEW_MESSAGES * 4:,} rounds of all ranks together"
    return None
