"""What a backend of the sparse family computes: everything else is the same for all."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnmesh.ops.sparse.canonical import Slots
from attnmesh.ops.sparse.mask import Rows


class Backend(Protocol):
    """Checked tensors in: q [s_q, h, d], k [s_kv, d], indices [s_q, topk], the natural lse in float32."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows,
        *, scale: float, d_v: int, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, lse: Tensor, delta: Tensor,
        dout: Tensor, *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...  # fmt: skip

    def row_delta(self, out: Tensor, dout: Tensor) -> Tensor: ...

    def distribution(
        self, q: Tensor, k: Tensor, indices: Tensor, rows: Rows, lse: Tensor, *, scale: float, head_group: int
    ) -> Tensor: ...

    def scores_at(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, *, scale: float, relu: bool
    ) -> Tensor: ...

    def scores_at_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, grad: Tensor,
        *, scale: float, relu: bool, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def stretch_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, rows: Rows, grad: Tensor,
        *, scale: float, relu: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `scores_at_backward`, where every row names all of `ik`, in order. The same bits in every run."""
        ...

    def topk(
        self, iq: Tensor, ik: Tensor, w: Tensor, topk: int, rows: Rows, *, scale: float, relu: bool, block: int
    ) -> Slots: ...
