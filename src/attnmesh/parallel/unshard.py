"""The whole of a sequence from the shards of all ranks, differentiably."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm
from attnmesh.core.layouts import Layout


def unshard(x: Tensor, dim: int, length: int, layout: Layout, comm: Comm) -> Tensor:
    """The whole tensor, on every rank, from the shards along `dim` (>= 0). Gradients are summed over ranks."""
    whole: Tensor = _Unshard.apply(x, dim, length, layout, comm)  # type: ignore[no-untyped-call]
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm = dim, layout, comm
        shapes = []
        for rank in range(comm.world):
            shape = list(x.shape)
            shape[dim] = layout.local_length(length, comm.world, rank)
            shapes.append(shape)
        return layout.unshard(comm.all_gather(x.contiguous(), shapes), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.comm.all_reduce(grad.contiguous())
        return ctx.layout.shard(total, ctx.dim, ctx.comm.world, ctx.comm.rank), None, None, None, None
