"""Training with a reproducible ContextParallel: the same bits of losses and parameters at any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmesh import (
    Aligned,
    ContextParallel,
    Contiguous,
    Striped,
    Zigzag,
    attention,
    register_attention,
    run_virtual,
    shard_inputs,
)
from attnmesh.comm import Comm
from attnmesh.training.data_parallel import GradientReduction
from helpers.training import training_model


class _Whole(torch.autograd.Function):
    """Every rank computes the whole attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp: Any, length: int, options: dict[str, Any]) -> Tensor:
        whole = [cp.unshard(x.detach(), 2, length).requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attention(*whole, **options)
        ctx.cp, ctx.length, ctx.whole, ctx.out = cp, length, whole, out
        return cp.shard(out.detach(), 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.no_grad():
            whole = ctx.cp.unshard(grad.contiguous(), 2, ctx.length)
        grads = torch.autograd.grad(ctx.out, ctx.whole, whole)
        return (*(ctx.cp.shard(x, 2).contiguous() for x in grads), None, None, None)


class Whole(ContextParallel):
    reproducible = True

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, length: int, **options: Any) -> Any:
        return _Whole.apply(q, k, v, self, length, options)


def model(kind: str = "llama", **changes: Any) -> Any:
    register_attention()
    found = training_model(kind, **changes)
    found.set_attn_implementation("attnmesh")
    return found


def batch(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


def train(comm: Comm, template: Any, layout: Any, steps: int, rows: int = 2, length: int = 150) -> list[Tensor]:
    """The losses, and the parameters after some steps."""
    trained = copy.deepcopy(template)
    cp = Whole(comm, layout=layout)
    reduction = GradientReduction(trained, cp)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = batch(rows, length, step)
        out = trained(**shard_inputs(cp, ids, ids))
        losses.append(reduction.loss(out.loss))
        out.loss.backward()
        reduction.reduce()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses), *(weight.detach() for weight in trained.parameters())]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("world", "layout"), [(2, Zigzag()), (3, Contiguous()), (4, Striped())])
def test_parameters_and_losses_have_the_bits_of_one_rank(world, layout):
    template = model()
    [alone] = run_virtual(1, lambda comm: train(comm, template, Aligned(Zigzag(), 16), 3))
    for rank in run_virtual(world, lambda comm: train(comm, template, Aligned(layout, 16), 3)):
        assert_same_bits(rank, alone)
