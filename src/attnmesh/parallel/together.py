"""Ranks that share something in more than one way: all of them, and parts that exchange among themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnmesh.comm import Comm, GroupComm


@dataclass(frozen=True)
class RankGroups:
    """Everyone, and in what a subclass adds, the comms of this rank's parts."""

    everyone: Comm

    @property
    def parts(self) -> tuple[Comm, ...]:
        """The comms that this rank has beside everyone's."""
        raise NotImplementedError

    def fail(self, message: str) -> None:
        """As `Comm.fail`, for all who may wait for this rank, wherever they do."""
        for comm in {id(comm): comm for comm in (self.everyone, *self.parts)}.values():
            comm.fail(message)

    def agree(
        self, operation: str, facts: Mapping[str, object], error: str | None = None, *, anew: bool = False
    ) -> None:
        """As `Comm.agree`, among everyone."""
        self.everyone.agree(operation, facts, error, anew=anew)
        for part in self.parts:
            if isinstance(part, GroupComm) and part is not self.everyone:
                part.agree(operation, facts, error)  # all agree already; but NCCL wants a group's first call whole
