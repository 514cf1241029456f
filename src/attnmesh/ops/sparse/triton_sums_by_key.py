"""Deterministic sums of the gradients of slots, key by key, in the order of rows and slots.

The slots of a row are summed first, then the rows: a row may name one key in all of its slots, and an error that grows
with the number of additions in a chain then grows with the longer of the two.
"""

# Kernels are written in Triton's language, whose names have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.launch import Launch, Recent, cdiv, next_power_of_2, repeat
from attnmesh.ops.sparse.arguments import RowBounds

_MAX_COLUMNS = 1024  # per program
_IN_FLIGHT = tl.constexpr(8)  # loads issued before the first is added
_launches: Recent[Launch] = Recent()


class SlotsByKey(NamedTuple):
    """Slots, numbered row by row, sorted by key: `order`; the slots of key j begin at `starts[j]`."""

    order: Tensor
    starts: Tensor
    row_slots: int


def sort_slots_by_key(indices: Tensor, bounds: RowBounds, keys: int) -> SlotsByKey:
    """Sorts the slots of some rows by key, those of a key by row and slot; invalid slots come last."""
    slot_keys = torch.where(bounds.valid(indices), indices - bounds.k_offset, keys).int()
    slot_keys, order = slot_keys.flatten().sort(stable=True)
    every = torch.arange(keys + 1, dtype=torch.int32, device=slot_keys.device)
    return SlotsByKey(order, torch.searchsorted(slot_keys, every), indices.shape[1])


def add_by_key(total: Tensor, grads: Tensor, slots: SlotsByKey) -> None:
    """Adds the gradient of each slot, float32 [..., width], to the row of its key in `total` [keys, width]."""
    keys, width = total.shape
    columns = min(_MAX_COLUMNS, next_power_of_2(width))
    repeat(
        _launches, sum_kernel, (keys, cdiv(width, columns)), (grads, *slots, total, total.stride(0)),
        WIDTH=width, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


@triton.jit
def sum_kernel(grads, order, starts, row_slots, total, total_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the slots of one key to its sum, row by row: the bits do not depend on the chunks of rows."""
    key = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + key)
    end = tl.load(starts + key + 1)
    if begin < end:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pointers = total + key * total_stride + columns
        acc = tl.load(pointers, mask=columns < WIDTH, other=0.0)
        row = tl.load(order + begin) // row_slots
        of_row = tl.zeros((COLUMNS,), tl.float32)
        for first in range(begin, end, _IN_FLIGHT):
            for i in tl.static_range(_IN_FLIGHT):  # past the end it adds 0 once more; no partial sum is -0
                slot = tl.load(order + first + i, mask=first + i < end, other=0)
                grad = tl.load(grads + slot * WIDTH + columns, mask=(first + i < end) & (columns < WIDTH), other=0.0)
                same = slot // row_slots == row
                acc += tl.where(same, 0.0, of_row)
                of_row = tl.where(same, of_row + grad, grad)
                row = slot // row_slots
        tl.store(pointers, acc + of_row, mask=columns < WIDTH)
