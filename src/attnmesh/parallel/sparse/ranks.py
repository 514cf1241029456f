"""The ranks of the sparse family: a tensor-parallel (tp) and a context-parallel (cp) group."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, RankGroups, SoloComm, comm_from


class SparseGroups(RankGroups):
    """This rank's groups along both dimensions of a grid. No comm contains all ranks: agreement goes along each."""

    def __init__(self, tp: Comm, cp: Comm) -> None:
        super().__init__(None, {"tp": tp, "cp": cp})
        self.tp, self.cp = tp, cp


def comm_or_solo(group: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """The comm over `group`; None is this rank alone."""
    return SoloComm() if group is None else comm_from(group)
