"""Rows in tiles that are aligned to their positions, and gradients of keys as sums over leaves of rows.

What `reproducible` and `reproducible_kernels` have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.core.tree import Node, Sum, TreeSum, total

_WIDTH = 16  # of which rows have a multiple: a product with one column would be summed in another order


class Gradients(NamedTuple):
    """dq, and for each node of the tree over rows what its rows add to dk and dv; None where not needed."""

    q: Tensor | None
    k: Sequence[Tensor | None]
    v: Sequence[Tensor | None]


T = TypeVar("T", bound=Sum)


def sum_of(tree: TreeSum[T], node: Node | None) -> T | None:
    """The sum of the leaves of a node, or of all; None if none has arrived."""
    parts = {part: x for part, x in tree.nodes.items() if node is None or part.leaves.start in node.leaves}
    return total(parts, node) if parts else None


@dataclass(frozen=True)
class Side:
    """Rows at ascending positions in tiles that are aligned to multiples of their size, with gaps for absent rows."""

    tiles: tuple[int, ...]  # by number: positions `number * size` to `(number + 1) * size`
    slots: Tensor  # of each row
    size: int
    _slots: dict[torch.device, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, positions: Tensor, size: int, unit: int) -> Side:
        """The tiles of positions on the host. `unit` is a multiple of the size: tiles come in whole units."""
        if positions.numel() and bool((positions.diff() <= 0).any()):
            raise ValueError("positions must be distinct with reproducible=True, got some of them twice")
        positions = positions.long()
        units, at = torch.unique_consecutive(positions.div(unit, rounding_mode="floor"), return_inverse=True)
        tiles = [number * (unit // size) + i for number in units.tolist() for i in range(unit // size)]
        return cls(tuple(tiles), at * unit + positions.remainder(unit), size)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each slot."""
        first = torch.tensor(self.tiles, device="cpu") * self.size
        return (first.view(-1, 1) + torch.arange(self.size, device="cpu")).flatten()

    @cached_property
    def dense(self) -> bool:
        """Whether the rows are in their tiles as they are: without gaps, from the beginning of a tile on."""
        return not len(self.slots) or int(self.slots[-1]) == len(self.slots) - 1

    @property
    def count(self) -> int:
        """The number of slots; of rows that are dense, without the slots behind the last row."""
        return len(self.slots) if self.dense else len(self.tiles) * self.size

    def packed(self, x: Tensor, absent: float = 0.0) -> Tensor:
        """The rows of x [B, H, n, ...] in their slots [B, H, count, ...]: x itself if they are dense."""
        if self.dense:
            return x
        slots = x.new_full((*x.shape[:2], self.count, *x.shape[3:]), absent)
        return slots.index_copy_(2, self._on(x.device), x)

    def unpacked(self, x: Tensor) -> Tensor:
        """The inverse of `packed`."""
        return x if self.dense else x.index_select(2, self._on(x.device))

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._slots:
            self._slots[device] = self.slots.to(device)
        return self._slots[device]

    def pack(self, x: Tensor, absent: float = 0.0) -> Tensor:
        """The rows of x [B, H, n, width] in tiles, in the accumulation dtype: [B, H, tiles, size, padded width]."""
        width = x.shape[3]
        shape = *x.shape[:2], len(self.tiles) * self.size, -(-width // _WIDTH) * _WIDTH
        packed = torch.full(shape, absent, dtype=accumulation_dtype(x.dtype), device=x.device)
        packed[:, :, self._on(x.device), :width] = x.to(packed.dtype)
        return packed.view(*shape[:2], len(self.tiles), self.size, shape[3])

    def pack_column(self, x: Tensor, absent: float = 0.0) -> Tensor:
        """A value per row, x [B, H, n]: [B, H, tiles, size]."""
        packed = x.new_full((*x.shape[:2], len(self.tiles) * self.size), absent)
        packed[:, :, self._on(x.device)] = x
        return packed.view(*x.shape[:2], len(self.tiles), self.size)

    def unpack(self, x: Tensor, width: int) -> Tensor:
        """The inverse of `pack`, without the dtype."""
        return x.flatten(2, 3)[:, :, self.slots.to(x.device), :width]

    def unpack_column(self, x: Tensor) -> Tensor:
        """The inverse of `pack_column`."""
        return x.flatten(2, 3)[:, :, self._on(x.device)]
