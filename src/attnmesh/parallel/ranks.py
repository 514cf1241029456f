"""The ranks that share a sequence: all of them, those of this node, and those of other nodes with this one's place."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, comm_from
from attnmesh.comm.sub import SubComm
from attnmesh.parallel.together import Together


@dataclass(frozen=True)
class Ranks(Together):
    """Rank `node x inner + i` is the i-th of its node. On a mesh of one dimension all ranks are one node."""

    inside: Comm
    outside: Comm

    @property
    def inner(self) -> int:
        """Ranks a node."""
        return self.inside.world

    @property
    def parts(self) -> tuple[Comm, ...]:
        """Those of this node, and those of other nodes."""
        return self.inside, self.outside


def ranks_from(where: Comm | ProcessGroup | DeviceMesh | None, inner: int | None) -> Ranks:
    """The ranks of a comm or group, `inner` of them a node; or of a mesh: (ranks), or (nodes, ranks a node)."""
    if isinstance(where, DeviceMesh) and where.ndim > 2:
        raise ValueError(
            f"the mesh must have one dimension, or two (nodes, ranks a node), got {where.ndim} of shape "
            f"{tuple(where.shape)}: slice it by mesh_dim_names"
        )
    if isinstance(where, DeviceMesh) and where.get_coordinate() is None:
        raise ValueError(f"this rank is not a member of the mesh {where.mesh.tolist()}")
    if isinstance(where, DeviceMesh) and where.ndim == 2:
        if inner is not None and inner != where.shape[1]:
            raise ValueError(f"inner={inner} contradicts the mesh, whose second dimension has {where.shape[1]} ranks")
        return Ranks(_flat(where), comm_from(where.get_group(1)), comm_from(where.get_group(0)))
    everyone = comm_from(where)
    if inner is None:
        return Ranks(everyone, everyone, SubComm(everyone, [everyone.rank]))
    world = everyone.world
    if isinstance(inner, bool) or not isinstance(inner, int) or inner < 1 or world % inner:
        raise ValueError(f"inner must be an integer that divides the {world} ranks, got {inner!r}")
    node, i = divmod(everyone.rank, inner)
    inside = SubComm(everyone, range(node * inner, (node + 1) * inner))
    return Ranks(everyone, inside, SubComm(everyone, range(i, world, inner)))


def _flat(mesh: DeviceMesh) -> Comm:
    """All ranks of a mesh: a group has them in ascending order, so the mesh must have them row by row."""
    rows = sorted(sorted(row) for row in mesh.mesh.tolist())
    ascending = [rank for row in rows for rank in row]
    if ascending != sorted(ascending):
        raise ValueError(
            f"the ranks of a node must be neighbours in ascending order, got the mesh {mesh.mesh.tolist()}"
        )
    if mesh.mesh.flatten().tolist() == list(range(dist.get_world_size())):
        return comm_from(None)
    if mesh.mesh_dim_names is None:
        raise ValueError("a mesh over some of the ranks needs mesh_dim_names, to be taken as one group")
    return comm_from(mesh._flatten())
