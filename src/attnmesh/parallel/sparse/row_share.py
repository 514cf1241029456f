"""Work on rows that all tp ranks hold alike, done by one of them each, dealt out in turn: late rows see more keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm
from attnmesh.core.layouts import Striped
from attnmesh.ops.sparse.mask import Rows

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
