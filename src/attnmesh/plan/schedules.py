"""The schedules of `ContextParallel` by name, and which shards each can serve."""

from __future__ import annotations

from typing import Literal

from attnmesh.plan.shards import Shards, node_shards
from attnmesh.utils.error_links import see

ScheduleName = Literal["auto", "ring", "allgather", "ulysses", "ulysses+ring", "ulysses+allgather", "ring+ring"]
SCHEDULES = ("ring", "allgather", "ulysses", "ulysses+ring", "ulysses+allgather", "ring+ring")
"""From the simplest to the most complex: of schedules that tie, the first is chosen."""
REPRODUCIBLE = ("allgather", "ulysses", "ulysses+allgather")
"""The schedules of reproducible=True: a rank has all keys of its queries, and visits them in ascending order."""


def why_not(schedule: str, shards: Shards, ranks_per_node: int, *, reproducible: bool = False) -> str | None:
    """Why the schedule cannot serve; None if it can."""
    if reproducible and schedule not in REPRODUCIBLE:
        return (
            f"with reproducible=True a rank visits keys in ascending order, but a ring brings them in another; the "
            f"schedules with reproducible=True are {', '.join(REPRODUCIBLE)}"
        )
    if "+" not in schedule:
        return None
    if not 1 < ranks_per_node < shards.world:
        return (
            f"{schedule} requires a two-dimensional mesh, or ranks_per_node above 1 and below the world size, got "
            f"{ranks_per_node} of {shards.world} ranks per node"
        )
    if schedule.startswith("ulysses") and node_shards(shards, ranks_per_node) is None:
        return f"{schedule} joins the shards of a node, and in this layout the shards of a node interleave"
    return None


def check_schedule(schedule: str, shards: Shards, ranks_per_node: int, *, reproducible: bool = False) -> None:
    """Raise ValueError if the schedule cannot serve."""
    why = why_not(schedule, shards, ranks_per_node, reproducible=reproducible)
    if why is not None:
        raise ValueError(
            f"schedule={schedule!r} cannot serve this: {why}{see('context-parallelism.md#select-a-schedule')}"
        )
