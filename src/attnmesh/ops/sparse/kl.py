"""KL(p || softmax(scores)) of every row, over slots that lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.ops.sparse.attention import normalized


def row_kl(scores: Tensor, target: Tensor) -> Tensor:
    """[s_q] from scores [s_q, topk], -inf where a slot does not count, and a target that need not be normalized."""
    rows: Tensor = _RowKL.apply(scores, target)  # type: ignore[no-untyped-call]
    return rows


class _RowKL(torch.autograd.Function):
    """The gradient of a row is softmax(scores) - p: nothing but scores and p needs to be kept."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor) -> Tensor:
        counts = scores != -torch.inf  # a score that is NaN does count: it must show
        p = normalized(torch.where(counts, target.to(scores.dtype), 0.0))
        log_z = torch.logsumexp(scores, -1, keepdim=True)
        ctx.save_for_backward(scores, p, log_z)
        # where, before the product: 0 log 0 is 0, and a slot without mass may have any score.
        return torch.where(p > 0, p * (p.log() - scores + log_z), 0.0).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, p, log_z = ctx.saved_tensors
        mass = p.sum(-1, keepdim=True)  # 1, or 0 in a row that costs nothing
        q = torch.where(mass > 0, torch.exp(scores - log_z), 0.0)
        return (q - p) * grad[:, None], None
