"""The ranks of the sparse family: those that share the heads (tp), and those that share the sequence (cp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SoloComm, comm_from


@dataclass(frozen=True)
class Ranks:
    """This rank's peers in both directions of a grid; a direction that is not spread is a world of one."""

    tp: Comm
    cp: Comm

    def agree(
        self, operation: str, facts: Mapping[str, object], error: str | None = None, *, anew: bool = False
    ) -> None:
        """As `Comm.agree`, over the whole grid.

        First along tp, then along cp, and who heard of a mistake in the first round says it in the second: so it
        reaches every rank, though no comm has them all.
        """
        if self.tp.world > 1:
            try:
                self.tp.agree(operation, facts, error, anew=anew)
            except ValueError as wrong:
                if self.cp.world == 1:
                    raise
                error = f"{str(wrong).removeprefix(f'{operation}: ')}, along tp"
        self.cp.agree(operation, facts, error, anew=anew)


def spread_over(where: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """The comm of these ranks; None is this rank alone."""
    return SoloComm() if where is None else comm_from(where)
