"""The ranks that share a KV cache: everyone, those that trade sequences for heads, those that share positions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, comm_from
from attnmesh.comm.sub import SubComm
from attnmesh.parallel.together import RankGroups
from attnmesh.plan.decode import DecodeSharding, Place

_DIMENSIONS = ("tp", "cp", "kvdp")


@dataclass(frozen=True)
class DecodeRanks(RankGroups):
    """`rank` is this one's number in the order of the sharding; the comms count their ranks by their own coordinate."""

    kvdp: Comm
    cp: Comm
    rank: int

    @property
    def parts(self) -> tuple[Comm, ...]:
        """Those that trade sequences for heads, and those that share positions."""
        return self.kvdp, self.cp


def whole_comm(where: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """All ranks, in any order: they only sum and agree."""
    if not isinstance(where, DeviceMesh) or where.ndim == 1:
        return comm_from(where)
    return comm_from(None if prod(where.shape) == dist.get_world_size() else where._flatten())


def decode_rank(where: Comm | ProcessGroup | DeviceMesh | None, sharding: DecodeSharding) -> int:
    """This process's rank in the order of a sharding: the one whose weights and cache it must have.

    On a comm or a group it is the rank there; on a mesh it follows from the names of the dimensions.
    """
    return decode_ranks(where, whole_comm(where), sharding).rank


def decode_ranks(
    where: Comm | ProcessGroup | DeviceMesh | None, everyone: Comm, sharding: DecodeSharding
) -> DecodeRanks:
    """The ranks of a comm or group in the sharding's order; or of a mesh with dimensions named tp, cp and kvdp.

    A mesh may have its dimensions in any order, and leave out those of size 1. `everyone` is their `whole_comm`.
    """
    if everyone.world != sharding.ranks:
        raise ValueError(
            f"the sharding wants tp x kvdp x cp = {sharding.tp} x {sharding.kvdp} x {sharding.cp} = {sharding.ranks} "
            f"ranks, there are {everyone.world}"
        )
    if isinstance(where, DeviceMesh) and (where.ndim > 1 or set(where.mesh_dim_names or ()) & set(_DIMENSIONS)):
        return _on_mesh(where, everyone, sharding)
    rank = everyone.rank
    return DecodeRanks(
        everyone, _part(everyone, sharding.kvdp_peers(rank)), _part(everyone, sharding.cp_peers(rank)), rank
    )


def _part(everyone: Comm, members: list[int]) -> Comm:
    return everyone if len(members) == everyone.world else SubComm(everyone, members)


def _on_mesh(mesh: DeviceMesh, everyone: Comm, sharding: DecodeSharding) -> DecodeRanks:
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True)) if names else {}
    wanted = {name: getattr(sharding, name) for name in _DIMENSIONS}
    if set(sizes) - set(_DIMENSIONS) or any(sizes.get(name, 1) != size for name, size in wanted.items()):
        raise ValueError(
            f"the mesh must have dimensions named {', '.join(_DIMENSIONS)} of sizes {wanted}, got "
            f"{sizes or tuple(mesh.shape)}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not a member of the mesh {mesh.mesh.tolist()}")
    place = Place(**{name: mesh.get_local_rank(name) if name in sizes else 0 for name in _DIMENSIONS})

    def along(name: str) -> Comm:
        comm = comm_from(mesh.get_group(name)) if name in sizes else SubComm(everyone, [everyone.rank])
        if comm.rank != getattr(place, name):
            raise ValueError(f"the mesh must have its ranks in ascending order along {name}, got {mesh.mesh.tolist()}")
        return comm

    return DecodeRanks(everyone, along("kvdp"), along("cp"), sharding.rank(place))
