"""All schedules by name."""

from __future__ import annotations

from attnmesh.plan.allgather import ALLGATHER
from attnmesh.plan.program import Ints, Load, Program, program_loads
from attnmesh.plan.ring import RING
from attnmesh.plan.schedule import ScheduleSpec, Step
from attnmesh.plan.shards import Shards
from attnmesh.plan.two_level import TWO_LEVEL_RING
from attnmesh.plan.ulysses import UlyssesSpec
from attnmesh.plan.workload import Workload
from attnmesh.utils.error_links import see
from attnmesh.utils.validation import check_bool, check_choice, check_type

SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        RING,
        ALLGATHER,
        UlyssesSpec("ulysses", RING, within_nodes=False),
        UlyssesSpec("ulysses+ring", RING, within_nodes=True),
        UlyssesSpec("ulysses+allgather", ALLGATHER, within_nodes=True),
        TWO_LEVEL_RING,
    )
}
"""From the simplest to the most complex: of those that tie, the first is chosen."""


def refusal(schedule: str, shards: Shards, ranks_per_node: int) -> str | None:
    """Why the schedule cannot serve; None if it can."""
    return SCHEDULES[schedule].refusal(shards, ranks_per_node)


def check_schedule(schedule: str, shards: Shards, ranks_per_node: int) -> None:
    """Raise ValueError if the schedule cannot serve."""
    why = refusal(schedule, shards, ranks_per_node)
    if why is not None:
        raise ValueError(
            f"schedule={schedule!r} cannot serve this: {why}{see('context-parallelism.md#select-a-schedule')}"
        )


def program(schedule: str, workload: Workload, *, backward: bool) -> Program:
    """The program of all ranks under a schedule that can serve the workload, forward or backward.

    A program is plain data: `rounds()` generates the messages and kernels of each round.

    Examples:
        >>> ring = program("ring", workload, backward=False)
        >>> ring.world, [each.name for each in ring.rounds()][:3]
        (8, ['keys 0', 'keys 1', 'keys 2'])
    """
    check_choice("schedule", schedule, SCHEDULES)
    check_type("workload", workload, Workload)
    check_bool(backward=backward)
    return SCHEDULES[schedule].program(workload, backward=backward)


def loads(schedule: str, workload: Workload, *, backward: bool) -> list[Load]:
    """What every rank computes and sends."""
    return program_loads(program(schedule, workload, backward=backward), workload.ranks_per_node)


def peak_bytes(schedule: str, workload: Workload, *, backward: bool) -> Ints:
    """The memory that the schedule allocates besides its inputs, in bytes by rank; see `ScheduleSpec.peak_bytes`."""
    return SCHEDULES[schedule].peak_bytes(workload, backward=backward)


def steps(schedule: str, workload: Workload) -> list[Step]:
    """The forward of a schedule, step by step; see `ScheduleSpec.steps`."""
    return SCHEDULES[schedule].steps(workload)
