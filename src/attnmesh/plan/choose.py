"""Which schedule to use: the one whose slowest rank is done first, by the bytes and operations of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from attnmesh.plan.case import Case, refusal
from attnmesh.plan.load import Load, loads
from attnmesh.plan.programs import SCHEDULES
from attnmesh.plan.rates import Machine

# A ring meets every shard run by run; with more runs than these (packed documents) its blocks become crumbs.
_MOST_RUNS_OF_A_RING = 4


@dataclass(frozen=True)
class Choice:
    """A schedule, and the estimates it was chosen by: seconds by schedule, or why it cannot serve."""

    schedule: str
    seconds: dict[str, float]
    refusals: dict[str, str]


@lru_cache(maxsize=256)
def choose_schedule(case: Case, machine: Machine) -> Choice:
    """The fastest schedule by estimate; the simplest of those that tie. Estimates rank, they do not predict.

    Forward and backward count, also where no gradient is asked for: the bits of a forward must not depend on that, or
    what activation checkpointing computes again would not be what it was.
    """
    seconds, refusals = {}, {}
    for schedule in SCHEDULES:
        why = refusal(schedule, case.spread, case.inner) or _unwise(schedule, case)
        if why is not None:
            refusals[schedule] = why
            continue
        seconds[schedule] = sum(slowest(loads(schedule, case, backward=way), machine) for way in (False, True))
    return Choice(min(seconds, key=lambda name: seconds[name]), seconds, refusals)


def slowest(ranks: Sequence[Load], machine: Machine) -> float:
    """Estimated seconds until the last rank is done."""
    return max(_seconds(load, machine) for load in ranks)


def _seconds(load: Load, machine: Machine) -> float:
    """Exposed bytes, and the longer of work and the other bytes: near and far links carry theirs at the same time."""
    work = load.flops / machine.flops
    near, far = (load.near - load.exposed_near) / machine.near, (load.far - load.exposed_far) / machine.far
    exposed = load.exposed_near / machine.near + load.exposed_far / machine.far
    return exposed + max(work, near, far) + load.stages * machine.step


def _unwise(schedule: str, case: Case) -> str | None:
    runs = max((len(held) for side in (case.spread.queries, case.spread.keys) for held in side), default=0)
    if schedule.split("+")[-1] == "ring" and runs > _MOST_RUNS_OF_A_RING:
        return f"shards of {runs} runs would cut a ring's blocks small"
    return None
