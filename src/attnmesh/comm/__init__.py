"""What ranks exchange: a few verbs over process groups, over virtual ranks in one process, or alone."""

from attnmesh.comm.base import Comm, CommError, Pending
from attnmesh.comm.group import GroupComm
from attnmesh.comm.recording import recording
from attnmesh.comm.resolve import comm_from
from attnmesh.comm.solo import SoloComm
from attnmesh.comm.traffic import Traffic
from attnmesh.comm.virtual import VirtualComm, run_virtual

__all__ = [
    "Comm",
    "CommError",
    "GroupComm",
    "Pending",
    "SoloComm",
    "Traffic",
    "VirtualComm",
    "comm_from",
    "recording",
    "run_virtual",
]
