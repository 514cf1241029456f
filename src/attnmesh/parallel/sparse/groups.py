"""The rank groups of the sparse functions: heads are sharded over tp, the sequence over cp.

Also work that tp ranks share by rows, and checks that ranks agree on arguments and indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, RankGroups, SoloComm, propagate_failure
from attnmesh.core.layouts import Striped
from attnmesh.ops.sparse.arguments import RowBounds, SparseMask
from attnmesh.parallel.checksums import checksums, is_readable
from attnmesh.parallel.executor import score_checks
from attnmesh.parallel.node_groups import comm_named
from attnmesh.utils.text import format_ranks

_ROW_LAYOUT = Striped()  # late rows see more keys
_STEP, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64, as int64
_MAX_ELEMENTS = 1 << 22


class SparseGroups(RankGroups):
    """The tp and cp groups of this rank; a group that is not used has a world size of 1.

    No comm contains all ranks of the grid, so agreement goes along tp and then along cp.
    """

    def __init__(self, tp: Comm, cp: Comm) -> None:
        super().__init__(None, {"tp": tp, "cp": cp})
        self.tp, self.cp = tp, cp


def comm_or_solo(name: str, group: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """The comm of the argument `name`; None is this rank alone."""
    return SoloComm() if group is None else comm_named(name, group)


# Values that ranks must agree on.


def mask_summary(mask: SparseMask) -> str:
    """The part of a mask that must be equal on all ranks: its numbers, and which per-row tensors are given."""
    numbers = f"causal={mask.causal}, q_start={mask.q_start}, k_stride={mask.k_stride}"
    per_row = [name for name in ("topk_length", "q_positions", "k_start", "k_end") if getattr(mask, name) is not None]
    return f"SparseMask({numbers}{''.join(f', {name}' for name in per_row)})"


def requiring_grad(**tensors: Tensor | None) -> list[str]:
    """The names of tensors that require a gradient: all ranks must exchange gradients, or none."""
    if not torch.is_grad_enabled():
        return []
    return [name for name, x in tensors.items() if x is not None and x.requires_grad]


# Rows that all tp ranks hold.


@dataclass(frozen=True)
class RowSharding:
    """Rows that are replicated over tp ranks, and computed by all of them or, if `scattered`, by one rank each."""

    tp: Comm
    rows: int
    scattered: bool

    def shard(self, x: Tensor) -> Tensor:
        """The rows that this rank computes."""
        return _ROW_LAYOUT.shard(x, 0, self.tp.world, self.tp.rank) if self.scattered else x

    def shard_bounds(self, bounds: RowBounds) -> RowBounds:
        """The bounds of the rows that this rank computes."""
        lo, hi, slots = (self.shard(x).contiguous() for x in bounds[:3])
        return RowBounds(lo, hi, slots, bounds.k_offset)

    def gather(self, shard: Tensor) -> Tensor:
        """All rows, from the shards of all ranks."""
        if not self.scattered:
            return shard
        counts = [_ROW_LAYOUT.local_length(self.rows, self.tp.world, rank) for rank in range(self.tp.world)]
        return _ROW_LAYOUT.unshard(self.tp.all_gather(shard.contiguous(), [(n, *shard.shape[1:]) for n in counts]), 0)

    def reduce_heads(self, partial: Tensor) -> Tensor:
        """The sum over all heads for the rows of this rank, given the sum over its own heads for all rows."""
        if self.tp.world == 1:
            return partial
        if not self.scattered:
            return self.tp.all_reduce(partial, reuse=True)
        shards = [_ROW_LAYOUT.shard(partial, 0, self.tp.world, rank).contiguous() for rank in range(self.tp.world)]
        return self.tp.reduce_scatter(shards)

    def reduce_grad(self, grad: Tensor) -> Tensor:
        """The gradient of a tensor that all rows read, given the part from the rows of this rank."""
        return self.tp.all_reduce(grad, reuse=True) if self.scattered else grad


def shard_replicated(x: Tensor, sharding: RowSharding) -> Tensor:
    """The rows of this rank, differentiable: the gradient of `x` is the whole gradient on every rank."""
    shard: Tensor = _Shard.apply(x, sharding) if sharding.scattered else x  # type: ignore[no-untyped-call]
    return shard


def gather_replicated(shard: Tensor, sharding: RowSharding) -> Tensor:
    """All rows on all ranks, differentiable: the incoming gradient is equal on all, and each keeps that of its rows."""
    rows: Tensor = _Gather.apply(shard, sharding) if sharding.scattered else shard  # type: ignore[no-untyped-call]
    return rows


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: RowSharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.shard(x).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.sharding.gather(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, sharding: RowSharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.gather(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.sharding.shard(grad).contiguous(), None


# Indices that must be equal on all tp ranks, and sinks on all cp ranks.


def check_same_indices(indices: Tensor, bounds: RowBounds, groups: SparseGroups) -> None:
    """Raises ValueError on every rank if the valid indices of any tp ranks differ. Reads from the device once.

    Slots are summed over ranks by position. Ranks that select keys independently may break ties differently; without
    this check the sums would mix the probabilities of different keys unnoticed.
    """
    if groups.tp.world > 1:
        with propagate_failure(groups):
            own = checksum(indices, bounds)
        if errors := _differences(own, groups.tp, groups.cp, "tp", "cp"):
            raise ValueError(f"indices, where they are valid, must be the same on every tp rank: {errors}")


def check_same_sinks(sinks: Tensor, groups: SparseGroups) -> None:
    """Raises ValueError on every rank if the sinks of any cp ranks differ; sinks of tp ranks are of other heads.

    In the calls in which `score_checks` compares values on a device, on the host too: checksums are exchanged.
    """
    checks = score_checks(groups.cp)
    if groups.cp.world > 1 and checks.is_due() and is_readable(sinks):
        with propagate_failure(groups):
            own = checksums([sinks], sinks.device)
        if errors := _differences(own, groups.cp, groups.tp, "cp", "tp"):
            raise ValueError(f"sinks must be the same on every cp rank: {errors}")
    checks.count()


def _differences(own: Tensor, group: Comm, others: Comm, name: str, name_of_others: str) -> str:
    """Which ranks of the groups along one dimension of the grid have another checksum [1] than the first."""
    of_group = torch.cat(group.all_gather(own, [(1,)] * group.world))
    of_all = torch.stack(others.all_gather(of_group, [(group.world,)] * others.world)).tolist()
    return "; ".join(
        f"those of {name} {format_ranks(ranks)} differ from {name} rank 0's"
        + (f" (on {name_of_others} rank {other})" if others.world > 1 else "")
        for other, (first, *rest) in enumerate(of_all)
        if (ranks := [rank for rank, each in enumerate(rest, 1) if each != first])
    )


def checksum(indices: Tensor, bounds: RowBounds) -> Tensor:
    """A 64-bit hash [1] of the keys of all slots; invalid slots count as no key, whatever their index."""
    total = torch.zeros(1, dtype=torch.int64, device=indices.device)
    s_q, topk = indices.shape
    step = max(1, _MAX_ELEMENTS // topk)
    for start in range(0, s_q, step):
        chunk = indices[start : start + step]
        valid = bounds.narrow(start, start + step).valid(chunk)
        slot = torch.arange(start * topk, start * topk + chunk.numel(), device=indices.device).view_as(chunk)
        # The position is hashed with the key, so that exchanging two slots changes the sum.
        mixed = _mix(slot * _STEP) + torch.where(valid, chunk, -1)
        total += _mix(mixed).sum()
    return total


def _mix(x: Tensor) -> Tensor:
    """The mixing function of splitmix64; int64 overflow wraps around on every device."""
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, by: int) -> Tensor:
    """Shifts right and fills with zeros; `>>` on int64 would fill with the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
