"""The error that each policy of merging adds to a zigzag ring in bf16, emulated on the CPU.

A block is computed as kernels do: products in float32 of numbers rounded to bf16, the weights among them. All policies
get the same blocks and differ in what they round:

- `HALF_SUM`: blocks are rounded to bf16, and the sum too after every block. TransformerEngine, `cp_comm_type="p2p"`.
- `HALF_BLOCKS`: blocks are rounded to bf16 and summed in float32. ring_flash_attn, torch's `context_parallel`.
- `FLOAT32`: nothing is rounded before the end. The Triton, Gluon and torch backends of attnmesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layouts import Zigzag

HALF_SUM, HALF_BLOCKS, FLOAT32 = "bf16 sum of bf16 blocks", "float32 sum of bf16 blocks", "float32 throughout"
POLICIES = (HALF_SUM, HALF_BLOCKS, FLOAT32)
NAMES = ("out", "dq", "dk", "dv")


class Inputs(NamedTuple):
    """Tensors [heads, length, head_dim] that bf16 represents exactly."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


def random_inputs(length: int, heads: int = 2, head_dim: int = 128) -> Inputs:
    """Return normal numbers of seed 0."""
    generator = torch.Generator().manual_seed(0)
    shape = (heads, length, head_dim)
    return Inputs(*(_half(torch.randn(shape, generator=generator, dtype=torch.float32)) for _ in Inputs._fields))


def measure_policies(worlds: Sequence[int], *, length: int = 4096, heads: int = 2) -> list[dict[str, object]]:
    """Relative RMS errors against float64 by policy and number of ranks."""
    inputs = random_inputs(length, heads)
    exact = exact_attention(inputs)
    rows: list[dict[str, object]] = []
    for policy in POLICIES:
        for world in worlds:
            found = ring(inputs, world, policy)
            errors = {name: _error(a, b) for name, a, b in zip(NAMES, found, exact, strict=True)}
            rows.append({"policy": policy, "ranks": world, **errors})
    return rows


def exact_attention(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return out, dq, dk and dv of causal attention in float64."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.grad_out.double()))


def ring(inputs: Inputs, world: int, policy: str) -> tuple[Tensor, ...]:
    """Return out, dq, dk and dv of a causal ring over `world` ranks, in positions of the whole sequence."""
    shards = [Zigzag().positions(inputs.q.shape[1], world, rank) for rank in range(world)]
    out, lse = torch.zeros_like(inputs.v), inputs.q.new_zeros(inputs.q.shape[:2])
    for rank, rows in enumerate(shards):
        blocks = [_forward(inputs, rows, shards[(rank - step) % world]) for step in range(world)]
        lse[:, rows] = torch.stack([block_lse for _, block_lse in blocks]).logsumexp(0)
        for block_out, block_lse in blocks:  # the final weight of a block, as in TransformerEngine
            weight = (block_lse - lse[:, rows]).exp()[..., None]
            out[:, rows] = _added(out[:, rows], _rounded(block_out, policy) * weight, policy)
    out = _half(out)
    dq, dk, dv = (torch.zeros_like(x) for x in inputs[:3])
    for step in range(world):  # gradients of K and V travel with them, and end at their owner
        for rank, rows in enumerate(shards):
            keys = shards[(rank - step) % world]
            parts = _backward(inputs, out, lse, rows, keys)
            for grad, at, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                grad[:, at] = _added(grad[:, at], _rounded(part, policy), policy)
    return out, _half(dq), _half(dk), _half(dv)


def _added(total: Tensor, part: Tensor, policy: str) -> Tensor:
    return _half(total + part) if policy == HALF_SUM else total + part


def _rounded(x: Tensor, policy: str) -> Tensor:
    return x if policy == FLOAT32 else _half(x)


def _forward(inputs: Inputs, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The state of these rows over these keys; (0, -inf) where a row sees none."""
    scores = _scores(inputs, rows, keys)
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = _half(weights) @ inputs.v[:, keys] / total.clamp(min=1e-30)
    return out, (largest + total.log())[..., 0]


def _backward(
    inputs: Inputs, out: Tensor, lse: Tensor, rows: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, grad_out, k, v = inputs.q[:, rows], inputs.grad_out[:, rows], inputs.k[:, keys], inputs.v[:, keys]
    weights = (_scores(inputs, rows, keys) - lse[:, rows, None]).exp()
    inner = (out[:, rows] * grad_out).sum(-1, keepdim=True)
    grad = _half(weights * (grad_out @ v.transpose(1, 2) - inner))
    scale = q.shape[-1] ** -0.5
    return scale * (grad @ k), scale * (grad.transpose(1, 2) @ q), _half(weights).transpose(1, 2) @ grad_out


def _scores(inputs: Inputs, rows: Tensor, keys: Tensor) -> Tensor:
    scores = inputs.q[:, rows] @ inputs.k[:, keys].transpose(1, 2) * inputs.q.shape[-1] ** -0.5
    return scores.masked_fill(keys > rows[:, None], -torch.inf)


def _half(x: Tensor) -> Tensor:
    """Round to bf16; still float32."""
    return x.bfloat16().float()


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
