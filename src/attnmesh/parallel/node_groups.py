"""The ranks that share a sequence: all of them, this node's, and the ranks at the same position of other nodes."""

from __future__ import annotations

import re

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, RankGroups, SubComm, comm_from
from attnmesh.utils.text import counted
from attnmesh.utils.validation import shown


class NodeGroups(RankGroups):
    """Rank `node x ranks_per_node + i` is the i-th rank of its node. A flat world is a single node.

    `intra_node` connects the ranks of this node, `inter_node` the ranks of all nodes with the same i.
    """

    def __init__(self, all_ranks: Comm, intra_node: Comm, inter_node: Comm) -> None:
        super().__init__(all_ranks, {"intra_node": intra_node, "inter_node": inter_node})
        self.intra_node, self.inter_node = intra_node, inter_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node."""
        return self.intra_node.world


def comm_named(name: str, group: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """`comm_from` for an argument that is not called `group`."""
    try:
        return comm_from(group)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# The words of which the names of two mesh dimensions may consist: those that say (nodes, ranks per node).
_NODE_WORDS = {
    "node", "nodes", "host", "hosts", "machine", "machines", "inter", "intra", "outer", "inner", "local", "per",
    "rank", "ranks", "gpu", "gpus", "device", "devices", "cp", "context", "parallel", "ring", "ulysses",
}  # fmt: skip
# Ranks along a dimension with one of these words hold other sequences, weights or layers.
_OTHER_WORDS = {
    "dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "replica", "shard", "tp", "tensor", "mp", "model", "pp",
    "pipe", "pipeline", "stage", "ep", "etp", "expert", "moe",
}  # fmt: skip


def check_context_mesh(group: object) -> None:
    """Raise ValueError for a DeviceMesh whose names say that its ranks do not all share one sequence.

    A mesh of one dimension may have any name except names of another parallelism (dp, fsdp, tp, pp, ep, ...). A mesh of
    two is (nodes, ranks per node): it has no names, or names that say so, such as ("node", "cp").
    """
    if not isinstance(group, DeviceMesh) or not group.mesh_dim_names:
        return
    names = group.mesh_dim_names
    words = [set(filter(None, re.split(r"[^a-z]+", name.lower()))) for name in names]
    if len(names) == 1:
        if words[0] & _OTHER_WORDS:
            raise ValueError(
                f"group must be the ranks that share a sequence, got a mesh with the dimension {names[0]!r}: pass "
                f'mesh["cp"] (if its ranks share a sequence all the same, pass mesh.get_group())'
            )
    elif len(names) > 2 or not all(each and each <= _NODE_WORDS for each in words):
        cp = next((name for name in names if name.lower() in ("cp", "context", "context_parallel")), None)
        remedy = f'pass mesh["{cp}"]' if cp else 'pass one dimension of it, such as mesh["cp"]'
        raise ValueError(
            f"group must be a mesh of the ranks that share a sequence, got dimensions {names} of shape "
            f"{tuple(group.shape)}: {remedy}. Two dimensions are (nodes, ranks per node), named so, as in "
            '("node", "cp")'
        )


def context_comm(group: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """`comm_from` for ranks that share a sequence."""
    check_context_mesh(group)
    return comm_from(group)


def node_groups(group: Comm | ProcessGroup | DeviceMesh | None, ranks_per_node: int | None) -> NodeGroups:
    """The ranks of a comm or process group, or of a mesh of shape (ranks) or (nodes, ranks per node)."""
    check_context_mesh(group)
    if isinstance(group, DeviceMesh) and group.ndim > 2:
        raise ValueError(
            f"group must be a mesh of one dimension, or of two (nodes, ranks per node), got {group.ndim} of shape "
            f"{tuple(group.shape)}: slice it by mesh_dim_names"
        )
    if isinstance(group, DeviceMesh) and group.get_coordinate() is None:
        raise ValueError(f"group must contain this rank, which is not a member of the mesh {group.mesh.tolist()}")
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        if ranks_per_node is not None and ranks_per_node != group.shape[1]:
            raise ValueError(
                f"ranks_per_node must be the size of the second mesh dimension, {group.shape[1]}, got {ranks_per_node}"
            )
        return NodeGroups(_flat_comm(group), comm_from(group.get_group(1)), comm_from(group.get_group(0)))
    all_ranks = comm_from(group)
    if ranks_per_node is None:
        return NodeGroups(all_ranks, all_ranks, SubComm(all_ranks, [all_ranks.rank]))
    world = all_ranks.world
    if (
        isinstance(ranks_per_node, bool)
        or not isinstance(ranks_per_node, int)
        or ranks_per_node < 1
        or world % ranks_per_node
    ):
        raise ValueError(
            f"ranks_per_node must be an integer that divides the {counted(world, 'rank')}, got {shown(ranks_per_node)}"
        )
    node, i = divmod(all_ranks.rank, ranks_per_node)
    intra_node = SubComm(all_ranks, range(node * ranks_per_node, (node + 1) * ranks_per_node))
    return NodeGroups(all_ranks, intra_node, SubComm(all_ranks, range(i, world, ranks_per_node)))


def _flat_comm(mesh: DeviceMesh) -> Comm:
    """All ranks of a mesh. A process group sorts its ranks, so they must be in row-major order in the mesh."""
    rows = sorted(sorted(row) for row in mesh.mesh.tolist())
    ascending = [rank for row in rows for rank in row]
    if ascending != sorted(ascending):
        raise ValueError(
            f"group must be a mesh whose nodes hold consecutive ranks in ascending order, got {mesh.mesh.tolist()}"
        )
    if mesh.mesh.flatten().tolist() == list(range(dist.get_world_size())):
        return comm_from(None)
    if mesh.mesh_dim_names is None:
        raise ValueError("group must be a mesh with mesh_dim_names if it has only some of the ranks")
    return comm_from(mesh._flatten())
