"""The kernels as a backend: Gluon's where Hopper runs them, Triton's everywhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.ops.sparse import (
    gluon_distribution,
    gluon_forward,
    triton_backward,
    triton_distribution,
    triton_forward,
    triton_indexer_backward,
    triton_indexer_dense_backward,
    triton_indexer_scores,
    triton_indexer_topk,
)
from attnmesh.ops.sparse.canonical import Slots
from attnmesh.ops.sparse.mask import Rows


class Triton:
    """Kernels for a GPU (or Triton's interpreter), float32 and narrower."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows,
        *, scale: float, d_v: int, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`out` of `dtype` and `lse`."""
        forward = gluon_forward.forward if gluon_forward.suits(q, k, v, d_v=d_v) else triton_forward.forward
        return forward(
            q, k, v, indices, rows.lo, rows.hi, rows.slots, d_v=d_v, k_offset=rows.k_offset, scale=scale,
            out_dtype=dtype,
        )  # fmt: skip

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, lse: Tensor, delta: Tensor,
        dout: Tensor, *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """dq of `dtype`; dk and dv in float32."""
        return triton_backward.backward(
            q, k, v, indices, rows.lo, rows.hi, rows.slots, lse, delta, dout, k_offset=rows.k_offset,
            scale=scale, d_v=d_v, deterministic=deterministic, dtype=dtype,
        )  # fmt: skip

    def row_delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """The sum of out * dout over features."""
        return triton_backward.row_delta(out, dout)

    def distribution(
        self, q: Tensor, k: Tensor, indices: Tensor, rows: Rows, lse: Tensor, *, scale: float, head_group: int
    ) -> Tensor:
        """[groups, s_q, topk]."""
        hopper = gluon_distribution.suits(q, k, head_group=head_group)
        distribution = gluon_distribution.distribution if hopper else triton_distribution.distribution
        return distribution(
            q, k, indices, rows.lo, rows.hi, rows.slots, lse, k_offset=rows.k_offset, scale=scale,
            head_group=head_group,
        )  # fmt: skip

    def scores_at(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, *, scale: float, relu: bool
    ) -> Tensor:
        """[s_q, topk], -inf where a slot is not valid."""
        return triton_indexer_scores.scores_at(
            iq, ik, w, indices, rows.lo, rows.hi, rows.slots, k_offset=rows.k_offset, scale=scale, relu=relu
        )

    def scores_at_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, grad: Tensor,
        *, scale: float, relu: bool, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """d_iq of `dtype`; d_ik and d_w in float32."""
        return triton_indexer_backward.scores_at_backward(
            iq, ik, w, indices, rows.lo, rows.hi, rows.slots, grad, k_offset=rows.k_offset, scale=scale, relu=relu,
            deterministic=deterministic, d_iq_dtype=dtype,
        )  # fmt: skip

    def stretch_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, rows: Rows, grad: Tensor,
        *, scale: float, relu: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The same where every row names all of `ik`: programs own keys, and none adds to another's."""
        return triton_indexer_dense_backward.scores_backward_dense(
            iq, ik, w, rows.k_offset, rows.lo, rows.hi, grad, scale=scale, relu=relu, d_iq_dtype=dtype
        )

    def topk(
        self, iq: Tensor, ik: Tensor, w: Tensor, topk: int, rows: Rows, *, scale: float, relu: bool, block: int
    ) -> Slots:
        """The best keys of every row; how many are scored at a time is the kernels' own business, not `block`'s."""
        found = triton_indexer_topk.topk(
            iq, ik, w, topk, rows.lo - rows.k_offset, rows.hi - rows.k_offset, scale=scale, relu=relu
        )
        indices = torch.where(found.indices < 0, -1, found.indices + rows.k_offset) if rows.k_offset else found.indices
        return Slots(indices, found.scores, found.length)
