"""What many slots found for one key, added up in a fixed order: gradients with the same bits in every run."""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.sparse.mask import Rows

_MOST_COLUMNS = 1024  # of a program
_IN_FLIGHT = tl.constexpr(8)  # reads on their way before the first is added


class ByKey(NamedTuple):
    """Slots, numbered row by row, in the `order` of their keys; those of key j begin at `starts[j]`."""

    order: Tensor
    starts: Tensor


def by_key(indices: Tensor, rows: Rows, keys: int) -> ByKey:
    """The slots of some rows; those of one key in the order of rows and slots, invalid ones after the last key's."""
    named = torch.where(rows.valid(indices), indices - rows.k_offset, keys).int()
    named, order = named.flatten().sort(stable=True)
    return ByKey(order, torch.searchsorted(named, torch.arange(keys + 1, dtype=torch.int32, device=named.device)))


def add_by_key(total: Tensor, found: Tensor, slots: ByKey) -> None:
    """Add what was `found` for each slot, float32 [..., width], to its key's row of `total` [keys, width]."""
    keys, width = total.shape
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(total):
        sum_kernel[(keys, triton.cdiv(width, columns))](
            found, *slots, total, total.stride(0), WIDTH=width, COLUMNS=columns, num_warps=4
        )


@triton.jit
def sum_kernel(found, order, starts, total, total_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """One key: its slots are added one by one onto what is there, so where a chunk of rows ended leaves no trace."""
    key = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + key)
    end = tl.load(starts + key + 1)
    if begin < end:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pointers = total + key * total_stride + columns
        acc = tl.load(pointers, mask=columns < WIDTH, other=0.0)
        for first in range(begin, end, _IN_FLIGHT):
            for i in tl.static_range(_IN_FLIGHT):  # one that is not there adds 0, and no partial sum is ever -0
                slot = tl.load(order + first + i, mask=first + i < end, other=0)
                acc += tl.load(found + slot * WIDTH + columns, mask=(first + i < end) & (columns < WIDTH), other=0.0)
        tl.store(pointers, acc, mask=columns < WIDTH)
