"""The block table and the positions on the device, at fixed addresses, changed entry by entry."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGNED = 64  # entries: the table starts at a multiple of 256 bytes, as a tensor of its own would


class Tables:
    """`block_table` int32 [rows, slots] and `cur_pos` int32 [rows], -1 where there is nothing.

    Both are views of one tensor, so that one upload and one scatter bring all changes of an operation. The host keeps
    a mirror, and so knows what changed without ever reading the device. On the meta device there is nothing to keep.
    """

    def __init__(self, rows: int, slots: int, device: torch.device | str | None) -> None:
        self._begin = rows + -rows % _ALIGNED
        self._slots = slots
        size = self._begin + rows * slots
        self._device_copy = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.cur_pos = self._device_copy[:rows]
        self.block_table = self._device_copy[self._begin :].view(rows, slots)
        self.is_meta = self._device_copy.is_meta
        self._mirror = array("i", [-1]) * (0 if self.is_meta else size)
        self._changed: dict[int, int] = {}
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)

    def set_length(self, row: int, length: int) -> None:
        """The last of a row's `length` tokens that are held here is at length - 1; a row without tokens has -1."""
        self._set(row, length - 1)

    def set_blocks(self, row: int, first: int, blocks: Iterable[int]) -> None:
        """Put blocks into a row from slot `first` on."""
        begin = self._begin + row * self._slots + first
        for at, block in enumerate(blocks, begin):
            self._set(at, block)

    def _set(self, at: int, value: int) -> None:
        if not self.is_meta and self._mirror[at] != value:
            self._mirror[at] = self._changed[at] = value

    def upload(self, more: Iterable[int] = ()) -> Tensor:
        """Bring all changes to the device, and in the same upload `more`, which comes back as int64 there."""
        count = len(self._changed)
        numbers = [*self._changed, *self._changed.values(), *more]
        if not numbers or self.is_meta:
            return self._nothing
        # Pinned: from pageable memory the host would wait for the device.
        packed = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.cur_pos.is_cuda)
        packed = packed.to(self.cur_pos.device, non_blocking=True)
        if count:
            self._device_copy[packed[:count]] = packed[count : 2 * count].to(torch.int32)
            self._changed = {}
        return packed[2 * count :]
