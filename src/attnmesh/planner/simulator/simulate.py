"""`simulate`: the time of a program on a cluster, event by event, or round by round if it is large."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from attnmesh.plan.program import Floats, MessageTotals, Program, Round
from attnmesh.planner.counts import check_sizes
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.events import run_events
from attnmesh.planner.simulator.network import Network, Slowdown
from attnmesh.planner.simulator.record import Record
from attnmesh.planner.simulator.rounds import run_rounds
from attnmesh.trace.timeline import Span
from attnmesh.utils.validation import check_bool, check_count, check_list, check_type

MAX_MESSAGES = 50_000  # simulated event by event within seconds
MAX_SHARED = 1_000_000  # pairs of messages on one port: each changes the rate of the other


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation, in seconds; `finish`, `computed` and `waited` are arrays by rank.

    Attributes:
        finish: when the rank has finished, its messages included.
        computed: time in kernels.
        waited: time for messages, with nothing to compute: exposed communication, and late ranks.
        spans: of the ranks in `keep`, sorted by start time.
        method: of the simulation.

    Examples:
        >>> result = simulate(program("ring", workload, backward=False), cluster("h200"))
        >>> result.seconds == max(result.finish.tolist()), result.spans
        (True, [])
    """

    finish: Floats
    computed: Floats
    waited: Floats
    spans: list[Span]
    method: str

    @property
    def seconds(self) -> float:
        """The time of the slowest rank."""
        return float(self.finish.max(initial=0.0))


def simulate(
    program: Program,
    cluster: Cluster,
    *,
    slow: Slowdown | None = None,
    keep: Collection[int] = (),
    exact: bool | None = None,
) -> Simulated:
    """Simulate a program on a cluster of `program.world` ranks; record the spans of the ranks in `keep`.

    `exact`: whether to simulate every message event by event; by default if there are few, see `Simulated.method`.

    Examples:
        >>> result = simulate(program("ring", workload, backward=False), cluster("h200"), keep=[0])
        >>> result.method, {span.rank for span in result.spans}
        ('event by event', {0})
    """
    slow = Slowdown() if slow is None else slow
    check_type("program", program, Program)
    check_type("cluster", cluster, Cluster)
    check_type("slow", slow, Slowdown)
    keep = check_list("keep", keep, "ranks")
    for i, rank in enumerate(keep):
        check_count(f"keep[{i}]", rank)
    if exact is not None:
        check_bool(exact=exact)
    check_sizes(world=program.world)
    why = "exact=False" if exact is False else None
    if exact is None:
        rounds, made = program.rounds(), list[Round]()
        why = _too_much(rounds, made, program.world, cluster)
        program = replace(program, make=lambda: chain(made, rounds))  # rounds may be slow to generate
    if why is None:
        return _simulated(run_events(program, cluster, slow, keep), "event by event")
    method = f"round by round ({why}): the bandwidth of a message is estimated when its round begins"
    return _simulated(run_rounds(program, cluster, slow, keep), method)


def _simulated(record: Record, method: str) -> Simulated:
    spans = sorted(record.spans, key=lambda span: (span.begin, span.rank))
    return Simulated(record.finish, record.computed, record.waited, spans, method)


def _too_much(rounds: Iterator[Round], made: list[Round], world: int, cluster: Cluster) -> str | None:
    """Why a program is too large to simulate event by event, or None. The rounds it reads are appended to `made`."""
    network = Network(cluster, world, Slowdown())
    messages, shared = 0, 0
    for round_ in rounds:
        made.append(round_)
        for name, exchange in round_.starts.items():
            if isinstance(exchange, MessageTotals):
                return f"exchange {name!r} only has totals"
            messages += len(exchange)
            if messages > MAX_MESSAGES:
                return f"more than {MAX_MESSAGES:,} messages"
            routes = network.routes(exchange)
            for ports in (routes.out, routes.into[routes.into != network.none]):
                shared += int(np.square(np.bincount(ports)).sum())
        if shared > MAX_SHARED:
            return f"more than {MAX_SHARED:,} pairs of messages on one port"
        if len(made) * world > MAX_MESSAGES * 4:
            return f"more than {MAX_MESSAGES * 4:,} rounds times ranks"
    return None
