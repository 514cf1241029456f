"""What every schedule asks of a rank: work and bytes, the sums of its program, without starting a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Bundle, Program, Round
from attnmesh.plan.programs import program
from attnmesh.plan.workload import Workload
from attnmesh.planner.hardware import OF_BYTES


@dataclass(frozen=True)
class Load:
    """What one rank does in one direction, forward or backward."""

    flops: int = 0
    near: int = 0  # bytes sent within the node
    far: int = 0  # bytes sent to other nodes

    @property
    def sent(self) -> int:
        """All bytes sent."""
        return self.near + self.far


def imbalance(ranks: Sequence[Load]) -> float:
    """Work of the busiest rank over the mean."""
    work = [load.flops for load in ranks]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def loads(schedule: str, workload: Workload, *, backward: bool) -> list[Load]:
    """What `schedule` asks of every rank. It must be able to serve the case: see `refusal`."""
    return loads_of(program(schedule, workload, backward=backward), workload.ranks_per_node)


def loads_of(whole: Program, node: int) -> list[Load]:
    """The sums of a program, by rank, where nodes have so many ranks."""
    tally = Tally(whole.world, node)
    for part in whole.rounds():
        tally.add(part)
    return tally.loads()


class Tally:
    """Sums of rounds as they pass."""

    def __init__(self, world: int, node: int) -> None:
        self.node, self.rounds = node, 0
        self.flops = np.zeros(world)
        self.near, self.far = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)

    def add(self, part: Round) -> None:
        """Count one round."""
        self.rounds += 1
        for kernels in part.work:
            if kernels.kind not in OF_BYTES:
                self.flops += kernels.size
        for messages in part.starts.values():
            if isinstance(messages, Bundle):
                self.near += messages.near_out
                self.far += messages.far_out
                continue
            within = messages.source // self.node == messages.target // self.node
            np.add.at(self.near, messages.source[within], messages.nbytes[within])
            np.add.at(self.far, messages.source[~within], messages.nbytes[~within])

    def counting(self, whole: Program) -> Program:
        """The same program, counted as somebody runs it: rounds of thousands of ranks are not made twice."""

        def counted() -> Iterator[Round]:
            for part in whole.rounds():
                self.add(part)
                yield part

        return Program(whole.name, whole.world, counted)

    def loads(self) -> list[Load]:
        """What every rank does in all of them."""
        columns = zip(self.flops, self.near, self.far, strict=True)
        return [Load(round(work), int(near), int(far)) for work, near, far in columns]

    def most(self) -> Load:
        """The most that one rank does, of each."""
        return Load(*(int(column.max(initial=0)) for column in (self.flops, self.near, self.far)))
