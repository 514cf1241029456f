"""What travels between ranks: rows first, K and V together.

A message is `[rows, 2, B, Hkv, D]`, so that any stretch of rows is contiguous: what is sent on is a slice of what was
received, never a copy. Kernels read the same memory as strided `[B, Hkv, rows, D]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.comm import Comm


def two_buffers(comm: Comm, rows: int, k: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One is computed on and sent from while the other is received into. No buffers where nothing travels."""
    return [comm.buffer((rows, *message_row(k)), dtype=dtype, device=k.device) for _ in range(2 if rows else 0)]


def message_row(k: Tensor) -> tuple[int, int, int, int]:
    """The shape of one row of a message: K and V together."""
    return 2, k.shape[0], k.shape[1], k.shape[3]


def sides(message: Tensor) -> tuple[Tensor, Tensor]:
    """K and V (or their gradients) of a message, as views [B, Hkv, rows, D]."""
    k, v = heads_first(message)
    return k, v


def heads_first(message: Tensor) -> list[Tensor]:
    """The tensors of a message, as views [B, H, rows, D]."""
    return list(message.permute(1, 2, 3, 0, 4))


def rows_first(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [B, H, rows, D] of one shape as a message [rows, how many, B, H, D]."""
    return torch.stack([x.permute(2, 0, 1, 3) for x in tensors], 1)


def rows_of(message: Tensor, holds: range, rows: range) -> Tensor:
    """The rows `rows` of a message whose first row is `holds.start`."""
    return message[rows.start - holds.start : rows.stop - holds.start]
