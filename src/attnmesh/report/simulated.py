"""The forward of a schedule, simulated: when every rank computes, sends, receives and waits, step by step."""

from __future__ import annotations

from dataclasses import replace

from attnmesh.plan.programs import program
from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.simulate import simulate
from attnmesh.trace.timeline import Span

_MOST_RANKS = 16  # rows of a timeline that can be told apart


def simulated(schedule: str, workload: Workload, cluster: Cluster, steps: int) -> list[Span]:
    """The spans of the first ranks; each says which of the page's `steps` it belongs to."""
    whole = program(schedule, workload, backward=False)
    ran = simulate(whole, cluster.with_node(workload.ranks_per_node), keep=range(min(whole.world, _MOST_RANKS)))
    computed: dict[str, int] = {}
    travelled: dict[str, int] = {}
    for at, part in enumerate(whole.rounds()):
        step = min(at, steps - 1)
        computed[part.name] = step
        travelled |= dict.fromkeys(part.starts, step)

    def of(span: Span) -> int | None:
        return computed.get(str(span.facts.get("round"))) if span.track == "compute" else travelled.get(span.name)

    return [replace(span, facts={**span.facts, "step": of(span)}) for span in ran.ranges]
