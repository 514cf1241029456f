"""The same indices on every tp rank, or an error on every rank.

Slots are added up over ranks by their place. Ranks that chose for themselves may break ties in their own ways; then
sums of different keys look like probabilities, and nothing fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.comm.agreement import format_ranks
from attnmesh.ops.sparse.mask import Rows
from attnmesh.parallel.sparse.ranks import SparseGroups

_STEP, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64's, as int64
_MOST_ELEMENTS = 1 << 22


def check_same_indices(indices: Tensor, rows: Rows, ranks: SparseGroups) -> None:
    """Raise ValueError on every rank of the grid if any tp ranks name other keys: one read from the device."""
    tp, cp = ranks.tp, ranks.cp
    if tp.world == 1:
        return
    sums = torch.cat(tp.all_gather(checksum(indices, rows), [(1,)] * tp.world))
    every = torch.stack(cp.all_gather(sums, [(tp.world,)] * cp.world)).tolist()
    wrong = [
        f"those of tp {format_ranks(others)} differ from tp rank 0's" + (f" (on cp rank {at})" if cp.world > 1 else "")
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
