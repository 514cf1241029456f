"""Slots by the rank that owns their keys: a visiting block is met by its own slots only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.ops.sparse.mask import Rows
from attnmesh.parallel.sparse.spread import Spread


@dataclass(frozen=True)
class Here:
    """Slots whose keys are at hand: `indices` [s_q, width] are rows of the block; `rows` says how many count."""

    indices: Tensor
    rows: Rows
    slot: Tensor | None
    """Which slot of the call each one is, and `topk` where there is none. None: they are the call's own."""

    def put(self, total: Tensor, found: Tensor) -> None:
        """Bring what was found [..., s_q, width] to its slots in `total` [..., s_q, topk + 1], the last for none."""
        assert self.slot is not None
        total.scatter_(-1, self.slot.expand_as(found), found)

    def take(self, given: Tensor) -> Tensor:
        """From what is given for each slot of the call [s_q, topk], that of these; anything where there is none."""
        return given if self.slot is None else given.gather(1, self.slot.clamp(max=given.shape[1] - 1))


class ByOwner:
    """The valid slots of every row, sorted by owner once; each block then gets its stretch of them."""

    def __init__(self, indices: Tensor, rows: Rows, spread: Spread) -> None:
        world = spread.ranks.cp.world
        table = spread.key_table()
        at = torch.where(rows.valid(indices), indices, spread.key_length).long()
        owner = table.owner[at]
        self._order = owner.argsort(dim=1, stable=True)
        self._local = table.row[at].gather(1, self._order)
        ones = torch.ones_like(at)
        self._count = at.new_zeros(at.shape[0], world + 1).scatter_add_(1, owner.long(), ones)
        self._first = self._count.cumsum(1) - self._count
        self._held = spread.key_lengths

    def at(self, owner: int) -> Here:
        """The slots whose keys `owner` holds, first in every row."""
        count = self._count[:, owner, None]
        n, topk = self._local.shape
        # Reading a number back is free on a CPU. Elsewhere it is not, and kernels stop where slots do.
        width = max(1, int(count.max()) if n else 1) if count.device.type == "cpu" else topk
        j = torch.arange(width, device=count.device)
        source = (self._first[:, owner, None] + j).clamp(max=topk - 1)
        none = j >= count
        lo = count.new_zeros(n, dtype=torch.int32)
        rows = Rows(lo, torch.full_like(lo, self._held[owner]), count[:, 0].int().contiguous(), 0)
        indices = self._local.gather(1, source).masked_fill(none, -1)
        return Here(indices, rows, self._order.gather(1, source).masked_fill(none, topk))
