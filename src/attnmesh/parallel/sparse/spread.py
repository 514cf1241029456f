"""Who holds which queries and keys in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layouts import Layout
from attnmesh.ops.sparse.mask import Rows, SparseMask
from attnmesh.parallel.sparse.ranks import SparseGroups

_MOST_REMEMBERED = 128


class KeyTable(NamedTuple):
    """For every key its owner and its row there; one more entry, for no key, is owned by nobody (`world`)."""

    owner: Tensor
    row: Tensor


@dataclass(frozen=True)
class Spread:
    """`length` queries and `key_length` keys, spread over the cp ranks by a layout. Nothing here is exchanged."""

    ranks: SparseGroups
    layout: Layout
    sharded: bool
    length: int
    key_length: int
    device: torch.device

    @property
    def key_lengths(self) -> list[int]:
        """How many keys each cp rank holds."""
        world = self.ranks.cp.world
        return [self.layout.local_length(self.key_length, world, rank) for rank in range(world)]

    def check(self, what: str, rows: int, length: int) -> None:
        """Raise ValueError unless this rank has its share."""
        cp = self.ranks.cp
        due = self.layout.local_length(length, cp.world, cp.rank)
        if rows != due:
            raise ValueError(
                f"under {self.layout} cp rank {cp.rank} of {cp.world} holds {due} of {length} {what}, got {rows} rows"
            )

    def local_mask(self, mask: SparseMask) -> SparseMask:
        """The mask of the whole sequence as one of this rank's rows; or ValueError."""
        if mask.k_offset:
            raise ValueError(f"mask.k_offset must be 0, all keys count here wherever they are, got {mask.k_offset}")
        if not mask.causal or mask.q_positions is not None:
            return mask
        cp = self.ranks.cp
        here = _positions(self.layout, self.length, cp.world, cp.rank, self.device) + mask.q_start
        return replace(mask, q_start=0, q_positions=here)

    def key_table(self) -> KeyTable:
        """Where every key is."""
        return _key_table(self.layout, self.key_length, self.ranks.cp.world, self.device)

    def rows_at(self, owner: int, rows: Rows) -> Rows:
        """The same ranges of keys, counted in the rows of `owner`: it holds its keys in ascending order."""
        held = _positions(self.layout, self.key_length, self.ranks.cp.world, owner, self.device)
        lo, hi = (torch.searchsorted(held, bound, out_int32=True) for bound in (rows.lo, rows.hi))
        return Rows(lo, hi, rows.slots, 0)

    def keys_of(self, owner: int, rows: Tensor) -> Tensor:
        """The keys that lie in these rows of `owner`, -1 where there is none."""
        held = _positions(self.layout, self.key_length, self.ranks.cp.world, owner, self.device)
        if not held.shape[0]:
            return rows
        return torch.where(rows < 0, -1, held[rows.clamp(min=0).long()])


@lru_cache(maxsize=_MOST_REMEMBERED)
def _positions(layout: Layout, length: int, world: int, rank: int, device: torch.device) -> Tensor:
    """Made once: a GPU would have to wait for the copy in every call."""
    return layout.positions(length, world, rank).to(device, torch.int32)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _key_table(layout: Layout, length: int, world: int, device: torch.device) -> KeyTable:
    owner = torch.full((length + 1,), world, dtype=torch.int16, device="cpu")
    row = torch.full((length + 1,), -1, dtype=torch.int32, device="cpu")
    for rank in range(world):
        held = layout.positions(length, world, rank).cpu()
        owner[held] = rank
        row[held] = torch.arange(held.shape[0], dtype=torch.int32, device="cpu")
    return KeyTable(owner.to(device), row.to(device))
