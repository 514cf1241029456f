"""The rank groups of a decode sharding: all ranks, the KVDP group and the CP group of this rank."""

from __future__ import annotations

from math import prod

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, RankGroups, SubComm, comm_from
from attnmesh.parallel.node_groups import comm_named
from attnmesh.plan.decode import DecodeSharding, Place
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_type

_DIMENSIONS = ("tp", "cp", "kvdp")


class DecodeRanks(RankGroups):
    """All ranks, and this rank's KVDP and CP groups, in which ranks are numbered by their coordinate.

    `rank` is this rank's number in the order of the sharding.
    """

    def __init__(self, all_ranks: Comm, kvdp: Comm, cp: Comm, rank: int) -> None:
        super().__init__(all_ranks, {"kvdp": kvdp, "cp": cp})
        self.kvdp, self.cp, self.rank = kvdp, cp, rank


def all_ranks_of(group: Comm | ProcessGroup | DeviceMesh | None, name: str = "group") -> Comm:
    """A comm over all ranks, in any order: it is used for all-reduce and agreement only."""
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        return comm_named(name, group)
    return comm_from(None if prod(group.shape) == dist.get_world_size() else group._flatten())


def decode_rank(group: Comm | ProcessGroup | DeviceMesh | None, sharding: DecodeSharding) -> int:
    """This process's rank in the order of a sharding, which decides the weights and the cache shard that it needs.

    On a comm or a group it is the rank there; on a mesh it follows from the names of the dimensions.

    Examples:
        >>> am.run_virtual(4, lambda comm: am.decode.decode_rank(comm, am.DecodeSharding(tp=2, cp=2)))
        [0, 1, 2, 3]
    """
    return decode_ranks(group, all_ranks_of(group), sharding).rank


def decode_ranks(
    group: Comm | ProcessGroup | DeviceMesh | None, all_ranks: Comm, sharding: DecodeSharding
) -> DecodeRanks:
    """The groups of this rank, from a comm or group in the sharding's order or a mesh with dimensions tp, cp and kvdp.

    A mesh may have its dimensions in any order, and omit dimensions of size 1. `all_ranks` is `all_ranks_of(group)`.
    """
    check_type("sharding", sharding, DecodeSharding)
    if all_ranks.world != sharding.ranks:
        raise ValueError(
            f"sharding must have as many ranks as the group, got tp x kvdp x cp = {sharding.tp} x {sharding.kvdp} x "
            f"{sharding.cp} = {sharding.ranks} for {counted(all_ranks.world, 'rank')}"
        )
    if isinstance(group, DeviceMesh) and (group.ndim > 1 or set(group.mesh_dim_names or ()) & set(_DIMENSIONS)):
        return _on_mesh(group, all_ranks, sharding)
    rank = all_ranks.rank
    return DecodeRanks(
        all_ranks, _part(all_ranks, sharding.kvdp_peers(rank)), _part(all_ranks, sharding.cp_peers(rank)), rank
    )


def _part(all_ranks: Comm, members: list[int]) -> Comm:
    return all_ranks if len(members) == all_ranks.world else SubComm(all_ranks, members)


def _on_mesh(mesh: DeviceMesh, all_ranks: Comm, sharding: DecodeSharding) -> DecodeRanks:
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True)) if names else {}
    wanted = {name: getattr(sharding, name) for name in _DIMENSIONS}
    if set(sizes) - set(_DIMENSIONS) or any(sizes.get(name, 1) != size for name, size in wanted.items()):
        raise ValueError(
            f"mesh must have dimensions named {', '.join(_DIMENSIONS)} of sizes {wanted}, got "
            f"{sizes or tuple(mesh.shape)}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must contain this rank, got {mesh.mesh.tolist()}")
    place = Place(**{name: mesh.get_local_rank(name) if name in sizes else 0 for name in _DIMENSIONS})

    def along(name: str) -> Comm:
        comm = comm_from(mesh.get_group(name)) if name in sizes else SubComm(all_ranks, [all_ranks.rank])
        if comm.rank != getattr(place, name):
            raise ValueError(f"mesh must have its ranks in ascending order along {name}, got {mesh.mesh.tolist()}")
        return comm

    return DecodeRanks(all_ranks, along("kvdp"), along("cp"), sharding.rank(place))
