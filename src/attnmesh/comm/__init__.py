"""What ranks exchange: a few verbs over process groups, over virtual ranks in one process, or alone."""

from .base import Comm, CommError, Pending
from .group import GroupComm
from .resolve import comm_from
from .solo import SoloComm
from .traffic import Traffic
from .virtual import VirtualComm, run_virtual

__all__ = [
    "Comm",
    "CommError",
    "GroupComm",
    "Pending",
    "SoloComm",
    "Traffic",
    "VirtualComm",
    "comm_from",
    "run_virtual",
]
