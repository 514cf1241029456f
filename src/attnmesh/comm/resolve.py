"""Whatever names a set of ranks, made a comm."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.base import Comm
from attnmesh.comm.group import GroupComm
from attnmesh.comm.solo import SoloComm

_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupComm] = weakref.WeakKeyDictionary()
"""One comm for each group: ranks count their agreements in it. It goes when its group is destroyed."""


def comm_from(where: Comm | dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> Comm:
    """The comm over these ranks. None means the default process group, or a world of one where there is none.

    `timeout`, in seconds, is set on the comm, for all who use it.
    """
    comm = _comm_from(where)
    if timeout is not None:
        if timeout <= 0:
            raise ValueError(f"timeout must be positive seconds, got {timeout}")
        comm.timeout = timeout
    return comm


def _comm_from(where: Comm | dist.ProcessGroup | DeviceMesh | None) -> Comm:
    if isinstance(where, Comm):
        return where
    if where is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SoloComm()
        where = dist.group.WORLD
    if isinstance(where, DeviceMesh):
        where = _group_of(where)
    if not isinstance(where, dist.ProcessGroup):
        if where is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not a member of the process group")
        raise ValueError(f"expected a Comm, ProcessGroup, DeviceMesh or None, got {type(where).__name__}")
    if where not in _comms:
        _comms[where] = GroupComm(where)
    return _comms[where]


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = f'mesh["{names[-1]}"]' if names else 'mesh["cp"], after naming them with mesh_dim_names'
        raise ValueError(
            f"the mesh must be one-dimensional, got {mesh.ndim} dimensions {names or ''} of shape "
            f"{tuple(mesh.shape)}: slice it, for example {example}"
        )
    return mesh.get_group()
