"""`comm_from`: the comm over a process group, a device mesh, or a single rank."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.base import Comm, SoloComm
from attnmesh.comm.process_group import group_comm
from attnmesh.utils.validation import check_timeout


def comm_from(group: Comm | dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> Comm:
    """The comm over `group`: a ProcessGroup, a one-dimensional DeviceMesh, or a comm, which is returned as is.

    None is the default process group, or a single rank if torch.distributed is not initialized. `timeout`, in seconds,
    is set on the comm for all its users. Without it, the comm has the timeout that the group was created with, or the
    default group's if that group was created without one.

    Examples:
        >>> comm = am.comm_from(None, timeout=60)  # torch.distributed is not initialized: a single rank
        >>> comm.rank, comm.world, comm.timeout
        (0, 1, 60.0)
        >>> am.comm_from(comm) is comm
        True
    """
    seconds = None if timeout is None else check_timeout(timeout)
    comm = _comm_from(group)
    if seconds is not None:
        comm.timeout = seconds
    return comm


def _comm_from(group: Comm | dist.ProcessGroup | DeviceMesh | None) -> Comm:
    if isinstance(group, Comm):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SoloComm()
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        group = _group_of(group)
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group must contain this rank, which is not a member of it")
        raise ValueError(f"group must be a Comm, ProcessGroup, DeviceMesh or None, got {type(group).__name__}")
    return group_comm(group)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = 'mesh["cp"], after naming its dimensions with mesh_dim_names'
        if names:
            example = f'mesh["{"cp" if "cp" in names else names[-1]}"]'
        raise ValueError(
            f"the mesh must be one-dimensional, got {mesh.ndim} dimensions {names or ''} of shape "
            f"{tuple(mesh.shape)}: slice it, for example {example}"
        )
    return mesh.get_group()
