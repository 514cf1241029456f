"""What each schedule costs: its program, the load of every rank, its peak memory, and its steps.

`program` is the one source: `explain`, the cost model, the simulator and the report read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attnmesh.plan.schedules import SCHEDULES
from attnmesh.plan.workload import Workload
from attnmesh.planner.program import Ints, Load, Messages, Program, Round, program_loads
from attnmesh.planner.specs.allgather import AllGatherSpec
from attnmesh.planner.specs.base import ScheduleSpec, Tile
from attnmesh.planner.specs.ring import RingSpec
from attnmesh.planner.specs.two_level import TwoLevelRingSpec
from attnmesh.planner.specs.ulysses import UlyssesSpec
from attnmesh.utils.validation import check_bool, check_choice, check_type

SPECS: dict[str, ScheduleSpec] = {
    "ring": RingSpec(),
    "allgather": AllGatherSpec(),
    "ulysses": UlyssesSpec(RingSpec(), within_nodes=False),
    "ulysses+ring": UlyssesSpec(RingSpec(), within_nodes=True),
    "ulysses+allgather": UlyssesSpec(AllGatherSpec(), within_nodes=True),
    "ring+ring": TwoLevelRingSpec(),
}


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
    return Program(schedule, workload.world, lambda: SPECS[schedule].rounds(workload, backward=backward))


def loads(schedule: str, workload: Workload, *, backward: bool) -> list[Load]:
    """What every rank computes and sends."""
    return program_loads(program(schedule, workload, backward=backward), workload.ranks_per_node)


def peak_bytes(schedule: str, workload: Workload, *, backward: bool) -> Ints:
    """The memory that the schedule allocates besides its inputs, in bytes by rank.

    Forward: until the results are returned, including them and what is saved for the backward. Backward: besides
    q, k, v, out, lse and the gradient of out; gradients and what the forward saved included. Workspaces of kernels
    are not counted. Not of a reproducible workload, which raises ValueError.
    """
    if workload.reproducible:
        raise ValueError("workload must not be reproducible: the memory of reproducible=True is not estimated")
    return np.ceil(SPECS[schedule].memory(workload, backward=backward)).astype(np.int64)


class Message(NamedTuple):
    """What a rank sends to another during a step."""

    source: int
    target: int
    nbytes: int
    what: str


@dataclass(frozen=True)
class Step:
    """One step of a forward: the tiles that ranks compute, and the messages in flight meanwhile."""

    name: str
    tiles: list[Tile]
    messages: list[Message]


def steps(schedule: str, workload: Workload) -> list[Step]:
    """The forward, step by step: what every rank computes, and the messages that travel at the same time."""
    spec = SPECS[schedule]
    rounds = [round_ for round_ in spec.rounds(workload, backward=False) if is_step(round_)]
    return [
        Step(name, tiles, _messages(round_)) for round_, (name, tiles) in zip(rounds, spec.tiles(workload), strict=True)
    ]


def is_step(round_: Round) -> bool:
    """Whether a round of a forward computes attention or starts an exchange, not only copies and merges."""
    return bool(round_.starts) or any(kernels.kind == "attention" for kernels in round_.work)


def _messages(round_: Round) -> list[Message]:
    """The messages that a round starts. Exchanges are named after what is sent, with a number behind."""
    sent = []
    for name, messages in round_.starts.items():
        if not isinstance(messages, Messages):
            raise ValueError(f"steps need single messages, but exchange {name!r} only has totals: use fewer ranks")
        what = name.rstrip("0123456789. ")
        columns = (messages.source.tolist(), messages.target.tolist(), messages.nbytes.tolist())
        sent += [Message(*message, what) for message in zip(*columns, strict=True)]
    return sent
