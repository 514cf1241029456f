"""Communication between ranks: process groups, virtual ranks in one process, or a single rank."""

from attnmesh.comm.base import (
    Comm,
    Pending,
    SharedValues,
    SoloComm,
    Traffic,
    recording,
)
from attnmesh.comm.health.group_store import CommError
from attnmesh.comm.process_group import GroupComm, comm_from
from attnmesh.comm.subgroups import (
    OBJECT,
    IndependentSubComm,
    RankGroups,
    SubComm,
    check_on_all_ranks,
    propagate_failure,
    report_failure,
)
from attnmesh.comm.virtual import VirtualComm, run_virtual

__all__ = [
    "OBJECT",
    "Comm",
    "CommError",
    "GroupComm",
    "IndependentSubComm",
    "Pending",
    "RankGroups",
    "SharedValues",
    "SoloComm",
    "SubComm",
    "Traffic",
    "VirtualComm",
    "check_on_all_ranks",
    "comm_from",
    "propagate_failure",
    "recording",
    "report_failure",
    "run_virtual",
]
