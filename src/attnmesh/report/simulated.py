"""The forward of a schedule, simulated: when every rank computes, sends, receives and waits, step by step."""

from __future__ import annotations

from dataclasses import replace

from attnmesh.plan.schedule import is_step
from attnmesh.plan.schedules import program
from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.simulate import simulate
from attnmesh.trace.timeline import Span

_MOST_RANKS = 16  # rows of a timeline that can be told apart


def simulated(schedule: str, workload: Workload, cluster: Cluster) -> list[Span]:
    """The spans of the first ranks, each with the index of the step that it belongs to."""
    whole = program(schedule, workload, backward=False)
    ran = simulate(
        whole, cluster.with_ranks_per_node(workload.ranks_per_node), keep=range(min(whole.world, _MOST_RANKS))
    )
    computed: dict[str, int] = {}
    travelled: dict[str, int] = {}
    step = -1
    for part in whole.rounds():
        step += is_step(part)
        computed[part.name] = step
        travelled |= dict.fromkeys(part.starts, step)

    def of(span: Span) -> int | None:
        return computed.get(str(span.args.get("round"))) if span.track == "compute" else travelled.get(span.name)

    return [replace(span, args={**span.args, "step": of(span)}) for span in ran.spans]
