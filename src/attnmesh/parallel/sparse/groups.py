"""The ranks of the sparse family: those that share the heads (tp), and those that share the sequence (cp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SoloComm, agreement, comm_from
from attnmesh.core.layouts import Striped
from attnmesh.ops.sparse.arguments import Rows, SparseMask


@dataclass(frozen=True)
class Ranks:
    """This rank's peers in both directions of a grid; a direction that is not spread is a world of one."""

    tp: Comm
    cp: Comm

    def agree(
        self, operation: str, facts: Mapping[str, object], error: str | None = None, *, anew: bool = False
    ) -> None:
        """As `Comm.agree`, over the whole grid.

        First along tp, then along cp, and who heard of a mistake in the first round says it in the second: so it
        reaches every rank, though no comm has them all.
        """
        if self.tp.world > 1:
            try:
                self.tp.agree(operation, facts, error, anew=anew)
            except ValueError as wrong:
                if self.cp.world == 1:
                    raise
                error = f"{str(wrong).removeprefix(f'{operation}: ')}, along tp"
        self.cp.agree(operation, facts, error, anew=anew)


def spread_over(where: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """The comm of these ranks; None is this rank alone."""
    return SoloComm() if where is None else comm_from(where)


def mask_summary(mask: SparseMask) -> str:
    """What all ranks must say of the whole sequence alike, and which numbers they give for their own rows."""
    said = f"causal={mask.causal}, q_start={mask.q_start}, k_stride={mask.k_stride}"
    own = [name for name in ("topk_length", "q_positions", "k_start", "k_end") if getattr(mask, name) is not None]
    return f"SparseMask({said}{''.join(f', {name}' for name in own)})"


def gradients(**tensors: Tensor | None) -> list[str]:
    """Which of these want one: where one rank sends gradients, all must."""
    if not torch.is_grad_enabled():
        return []
    return [name for name, x in tensors.items() if x is not None and x.requires_grad]


_DEALT = Striped()


@dataclass(frozen=True)
class RowShare:
    """This rank's share of `rows` rows; all of them unless they are `scattered`."""

    tp: Comm
    rows: int
    scattered: bool

    def mine(self, x: Tensor) -> Tensor:
        """The rows of the share."""
        return _DEALT.shard(x, 0, self.tp.world, self.tp.rank) if self.scattered else x

    def mine_of(self, rows: Rows) -> Rows:
        """What the mask says of them."""
        lo, hi, slots = (self.mine(x).contiguous() for x in rows[:3])
        return Rows(lo, hi, slots, rows.k_offset)

    def whole(self, mine: Tensor) -> Tensor:
        """All rows, from the shares of all ranks."""
        if not self.scattered:
            return mine
        counts = [_DEALT.local_length(self.rows, self.tp.world, rank) for rank in range(self.tp.world)]
        return _DEALT.unshard(self.tp.all_gather(mine.contiguous(), [(n, *mine.shape[1:]) for n in counts]), 0)

    def over_heads(self, part: Tensor) -> Tensor:
        """The sum over all heads, of the rows of the share, from that of this rank's heads for all rows."""
        if self.tp.world == 1:
            return part
        if not self.scattered:
            return self.tp.all_reduce(part, reuse=True)
        shares = [_DEALT.shard(part, 0, self.tp.world, rank).contiguous() for rank in range(self.tp.world)]
        return self.tp.reduce_scatter(shares)

    def over_ranks(self, grad: Tensor) -> Tensor:
        """The gradient of what the rows of all shares read, from that of the rows of this one."""
        return self.tp.all_reduce(grad, reuse=True) if self.scattered else grad


def mine_of_alike(x: Tensor, share: RowShare) -> Tensor:
    """The rows of the share of a tensor that all ranks hold alike, differentiable: each gets the whole gradient."""
    mine: Tensor = _Mine.apply(x, share) if share.scattered else x  # type: ignore[no-untyped-call]
    return mine


def alike_from_mine(mine: Tensor, share: RowShare) -> Tensor:
    """All rows on all ranks, differentiable: what comes back is the same on all, and each keeps its own rows' part."""
    whole: Tensor = _Whole.apply(mine, share) if share.scattered else mine  # type: ignore[no-untyped-call]
    return whole


class _Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: RowShare) -> Tensor:
        ctx.share = share
        return share.mine(x).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.whole(grad), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, share: RowShare) -> Tensor:
        ctx.share = share
        return share.whole(mine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.mine(grad).contiguous(), None


_STEP, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64's, as int64
_MOST_ELEMENTS = 1 << 22


def check_same_indices(indices: Tensor, rows: Rows, ranks: Ranks) -> None:
    """Raise ValueError on every rank of the grid if any tp ranks name other keys: one read from the device."""
    tp, cp = ranks.tp, ranks.cp
    if tp.world == 1:
        return
    sums = torch.cat(tp.all_gather(checksum(indices, rows), [(1,)] * tp.world))
    every = torch.stack(cp.all_gather(sums, [(tp.world,)] * cp.world)).tolist()
    wrong = [
        f"those of tp {agreement.in_words(others)} differ from tp rank 0's"
        + (f" (on cp rank {at})" if cp.world > 1 else "")
        for at, (first, *rest) in enumerate(every)
        if (others := [rank for rank, found in enumerate(rest, 1) if found != first])
    ]
    if wrong:
        raise ValueError(
            f"indices (and what the mask says of them) must be the same on every tp rank: {'; '.join(wrong)}"
        )


def checksum(indices: Tensor, rows: Rows) -> Tensor:
    """64 bits [1] of which key every slot names; slots that are not valid name none, whatever is written there."""
    total = torch.zeros(1, dtype=torch.int64, device=indices.device)
    s_q, topk = indices.shape
    step = max(1, _MOST_ELEMENTS // topk)
    for start in range(0, s_q, step):
        named = indices[start : start + step]
        valid = rows.part(start, start + step).valid(named)
        slot = torch.arange(start * topk, start * topk + named.numel(), device=indices.device).view_as(named)
        # The place goes through the mixing with the key: a sum of mixed pairs that no exchange of slots leaves alone.
        mixed = _mixed(slot * _STEP) + torch.where(valid, named, -1)
        total += _mixed(mixed).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of x; integers wrap around, on any device alike."""
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in: int64 has a sign that `>>` would bring along."""
    return (x >> by) & ((1 << (64 - by)) - 1)
