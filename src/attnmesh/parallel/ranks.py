"""The ranks that share a sequence: all of them, those of this node, and those of other nodes with this one's place."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, comm_from
from attnmesh.comm.sub import SubComm
from attnmesh.parallel.together import RankGroups


@dataclass(frozen=True)
class Ranks(RankGroups):
    """Rank `node x ranks_per_node + i` is the i-th of its node. On a mesh of one dimension all ranks are one node."""

    inside: Comm
    outside: Comm

    @property
    def ranks_per_node(self) -> int:
        """Ranks a node."""
        return self.inside.world

    @property
    def parts(self) -> tuple[Comm, ...]:
        """Those of this node, and those of other nodes."""
        return self.inside, self.outside


def ranks_from(where: Comm | ProcessGroup | DeviceMesh | None, ranks_per_node: int | None) -> Ranks:
    """The ranks of a comm or group, `ranks_per_node` of them a node; or of a mesh: (ranks), or (nodes, ranks a node)."""
    if isinstance(where, DeviceMesh) and where.ndim > 2:
        raise ValueError(
            f"the mesh must have one dimension, or two (nodes, ranks a node), got {where.ndim} of shape "
            f"{tuple(where.shape)}: slice it by mesh_dim_names"
        )
    if isinstance(where, DeviceMesh) and where.get_coordinate() is None:
        raise ValueError(f"this rank is not a member of the mesh {where.mesh.tolist()}")
    if isinstance(where, DeviceMesh) and where.ndim == 2:
        if ranks_per_node is not None and ranks_per_node != where.shape[1]:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} contradicts the mesh, whose second dimension has {where.shape[1]} ranks"
            )
        return Ranks(_flat(where), comm_from(where.get_group(1)), comm_from(where.get_group(0)))
    everyone = comm_from(where)
    if ranks_per_node is None:
        return Ranks(everyone, everyone, SubComm(everyone, [everyone.rank]))
    world = everyone.world
    if (
        isinstance(ranks_per_node, bool)
        or not isinstance(ranks_per_node, int)
        or ranks_per_node < 1
        or world % ranks_per_node
    ):
        raise ValueError(f"ranks_per_node must be an integer that divides the {world} ranks, got {ranks_per_node!r}")
    node, i = divmod(everyone.rank, ranks_per_node)
    inside = SubComm(everyone, range(node * ranks_per_node, (node + 1) * ranks_per_node))
    return Ranks(everyone, inside, SubComm(everyone, range(i, world, ranks_per_node)))


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
