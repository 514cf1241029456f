"""What a process group was created with: its store and its timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from attnmesh.comm.nccl import own_timeout
from attnmesh.utils.validation import MAX_TIMEOUT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_DEFAULT_TIMEOUT = 300.0  # seconds, for a backend that does not tell its own


def store_of(group: dist.ProcessGroup) -> Store:
    """The key-value store of a group."""
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a group that was created without setting its store
        return dist.distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that `group` was created with; those of the default group if it was created with torch's default."""
    timeout = _own_timeout(group)
    if timeout in (default_pg_timeout, default_pg_nccl_timeout) and dist.group.WORLD is not None:
        timeout = _own_timeout(dist.group.WORLD)
    return _DEFAULT_TIMEOUT if timeout is None else min(timeout.total_seconds(), MAX_TIMEOUT)


def _own_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The shortest timeout of the group's backends; None if they do not tell."""
    try:
        backends = (group._get_backend(device).options._timeout for device in group._device_types)
        return own_timeout(group) or min(backends)
    except (AttributeError, RuntimeError, ValueError):  # a backend without options, or without backends
        return None
