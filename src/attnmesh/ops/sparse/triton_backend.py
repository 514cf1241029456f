"""The sparse backend in kernels: Gluon on Hopper where it applies, Triton elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.ops.sparse import (
    gluon_distribution,
    gluon_forward,
    gluon_topk,
    triton_backward,
    triton_distribution,
    triton_forward,
    triton_indexer,
    triton_indexer_backward,
    triton_topk,
)
from attnmesh.ops.sparse.arguments import RowBounds, TopKIndices


class Triton:
    """Kernels for a GPU, or Triton's interpreter: float32, bfloat16 and float16."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, bounds: RowBounds,
        *, scale: float, d_v: int, dtype: torch.dtype, sinks: Tensor | None = None, max_logits: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`Backend.forward`."""
        forward = gluon_forward.forward if gluon_forward.supports(q, k, v, d_v=d_v) else triton_forward.forward
        return forward(
            q, k, v, indices, bounds.lo, bounds.hi, bounds.slots, d_v=d_v, k_offset=bounds.k_offset, scale=scale,
            out_dtype=dtype, sinks=sinks, max_logits=max_logits,
        )  # fmt: skip

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, bounds: RowBounds, lse: Tensor, delta: Tensor,
        dout: Tensor, *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """`Backend.backward`."""
        return triton_backward.backward(
            q, k, v, indices, bounds.lo, bounds.hi, bounds.slots, lse, delta, dout, k_offset=bounds.k_offset,
            scale=scale, d_v=d_v, deterministic=deterministic, dtype=dtype,
        )  # fmt: skip

    def row_delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """`Backend.row_delta`."""
        return triton_backward.row_delta(out, dout)

    def distribution(
        self, q: Tensor, k: Tensor, indices: Tensor, bounds: RowBounds, lse: Tensor, *, scale: float, head_group: int
    ) -> Tensor:
        """`Backend.distribution`."""
        hopper = gluon_distribution.supports(q, k, head_group=head_group)
        distribution = gluon_distribution.distribution if hopper else triton_distribution.distribution
        return distribution(
            q, k, indices, bounds.lo, bounds.hi, bounds.slots, lse, k_offset=bounds.k_offset, scale=scale,
            head_group=head_group,
        )  # fmt: skip

    def scores_at(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, bounds: RowBounds, *, scale: float, relu: bool
    ) -> Tensor:
        """`Backend.scores_at`."""
        return triton_indexer.scores_at(
            iq, ik, w, indices, bounds.lo, bounds.hi, bounds.slots, k_offset=bounds.k_offset, scale=scale, relu=relu
        )

    def scores_at_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, bounds: RowBounds, grad: Tensor,
        *, scale: float, relu: bool, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`Backend.scores_at_backward`."""
        return triton_indexer_backward.scores_at_backward(
            iq, ik, w, indices, bounds.lo, bounds.hi, bounds.slots, grad, k_offset=bounds.k_offset, scale=scale,
            relu=relu, deterministic=deterministic, d_iq_dtype=dtype,
        )  # fmt: skip

    def dense_scores_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, bounds: RowBounds, grad: Tensor,
        *, scale: float, relu: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`Backend.dense_scores_backward`: without atomics, because every program owns its keys."""
        return triton_indexer_backward.dense_scores_backward(
            iq, ik, w, bounds.k_offset, bounds.lo, bounds.hi, grad, scale=scale, relu=relu, d_iq_dtype=dtype
        )

    def topk(
        self,
        iq: Tensor,
        ik: Tensor,
        w: Tensor,
        topk: int,
        bounds: RowBounds,
        *,
        scale: float,
        relu: bool,
        block_size: int,
    ) -> TopKIndices:
        """`Backend.topk`. The kernel chooses its own block size; `block_size` is ignored."""
        topk_of = gluon_topk.topk if gluon_topk.is_faster(iq, ik, topk) else triton_topk.topk
        if not bounds.k_offset:
            return topk_of(iq, ik, w, topk, bounds.lo, bounds.hi, scale=scale, relu=relu)
        lo, hi = bounds.lo - bounds.k_offset, bounds.hi - bounds.k_offset
        selected = topk_of(iq, ik, w, topk, lo, hi, scale=scale, relu=relu)
        return selected._replace(indices=torch.where(selected.indices < 0, -1, selected.indices + bounds.k_offset))
