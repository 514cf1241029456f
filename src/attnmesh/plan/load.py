"""What every schedule asks of a rank: work and bytes, the sums of its program, without starting a process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnmesh.plan.case import Case
from attnmesh.plan.hardware import OF_BYTES
from attnmesh.plan.program import Bundle, Program
from attnmesh.plan.programs import program


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


def loads(schedule: str, case: Case, *, backward: bool) -> list[Load]:
    """What `schedule` asks of every rank. It must be able to serve the case: see `refusal`."""
    return loads_of(program(schedule, case, backward=backward), case.inner)


def loads_of(whole: Program, node: int) -> list[Load]:
    """The sums of a program, by rank, where nodes have so many ranks."""
    flops = np.zeros(whole.world)
    near, far = np.zeros(whole.world, dtype=np.int64), np.zeros(whole.world, dtype=np.int64)
    for part in whole.rounds():
        for kernels in part.work:
            if kernels.kind not in OF_BYTES:
                flops += kernels.size
        for messages in part.starts.values():
            if isinstance(messages, Bundle):
                near += messages.near_out
                far += messages.far_out
                continue
            within = messages.source // node == messages.target // node
            np.add.at(near, messages.source[within], messages.nbytes[within])
            np.add.at(far, messages.source[~within], messages.nbytes[~within])
    return [Load(round(work), int(n), int(f)) for work, n, f in zip(flops, near, far, strict=True)]
