"""Recurrences in chunks: products of matrices within a chunk, and a scan over chunks.

With the incoming state S, the positions of a chunk read and write

    u = values - erase @ S               what each position adds to the state, after what it erases
    outputs = read @ S + mix @ u
    next S = decay * S + write^T @ u     = transition @ S + update, the segment of the chunk

`mix[i, j]` holds the decay from position j to position i. Decays are `exp` of sums of logarithms that are at most 0,
summed from the position on where they begin: a difference of two sums from the begin of the chunk would lose the small
one to the rounding of the large one, and a position that forgets everything (-inf) would give NaN.

Everything but the scan is computed for all chunks at once. What takes much memory is computed for some chunks at a
time, and again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.segment import Segment
from attnmesh.ops.recurrent.layer import SegmentedChunks

CHUNK = 64
"""Positions of a chunk."""
_BLOCK = 16  # positions whose decays per channel are computed pair by pair
_GROUP_ELEMENTS = 2**24  # of the largest temporary tensor


class _Terms(NamedTuple):
    """What the outputs of chunks [n, B, G, H / G, ...] are computed from."""

    read: Tensor
    mix: Tensor
    values: Tensor
    erase: Tensor | None
    segments: Segment


@dataclass(frozen=True)
class MatrixChunks(SegmentedChunks):
    """Chunks whose outputs are products of matrices."""

    terms: _Terms
    length: int

    @property
    def segments(self) -> Segment:  # type: ignore[override]
        return self.terms.segments

    def outputs(self, states: Tensor) -> Tensor:
        read, mix, u, erase, _ = self.terms
        if erase is not None:
            u = u - erase @ states
        return joined(read @ states + mix @ u, self.length)


def joined(x: Tensor, length: int) -> Tensor:
    """Outputs [n, B, G, H / G, size, V] of chunks as [B, H, length, V]."""
    return x.flatten(2, 3).movedim(0, 2).flatten(2, 3)[:, :, :length]


def chunk_size(length: int) -> int:
    """The positions of a chunk: few where there are few."""
    return min(CHUNK, -(-max(length, 1) // _BLOCK) * _BLOCK)


def scalar_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, length: int) -> MatrixChunks:
    """Chunks of a recurrence with one decay per head: `S = exp(g) S`, then `S += k u^T`, and `q^T S` is read.

    `u` is v, or with `beta` the delta rule's `beta (v - k^T S)`.
    """
    decay = _sums_between(g.unsqueeze(-1)).squeeze(-1).exp()
    from_start, to_end = g.cumsum(-1).exp().unsqueeze(-1), decay[..., -1, :].unsqueeze(-1)
    mix = q @ k.mT * decay
    after = from_start[..., -1:, :]
    if beta is None:
        return MatrixChunks(_Terms(from_start * q, mix, v, None, Segment(after, k.mT @ (to_end * v))), length)
    u, erase = _solved(beta, k @ k.mT * decay, v, from_start * k)
    keys = k.mT
    transition = after * _eye(k) - keys @ (to_end * erase)
    return MatrixChunks(_Terms(from_start * q, mix, u, erase, Segment(transition, keys @ (to_end * u))), length)


def channel_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, length: int) -> MatrixChunks:
    """Chunks of the delta rule with a decay per channel of the keys."""

    def terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        (mix,), (mixed_keys,) = _decayed_products((q, k), (k,), g)
        from_start, to_end, after = _decays(g)
        u, erase = _solved(beta, mixed_keys, v, from_start * k)
        keys = (to_end * k).mT
        transition = after.mT * _eye(k) - keys @ erase
        return from_start * q, mix, u, erase, transition, keys @ u

    read, mix, u, erase, *segment = in_groups(terms, (q, k, v, g, beta), _pairs(g))
    return MatrixChunks(_Terms(read, mix, u, erase, Segment(*segment)), length)


def low_rank_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, length: int
) -> MatrixChunks:  # fmt: skip
    """Chunks of `S = exp(g) S + b (a^T S) + k v^T`, where `a` reads the state before the decay.

    A position writes two keys: b with the value `w = a^T S`, and k with v. The w of a chunk solve a triangular system.
    """

    def terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        # a at position i reads the state after position i - 1: products of its successor, moved down by one position.
        size = q.shape[-2]
        next_a = torch.cat([a[..., 1:, :], torch.zeros_like(a[..., :1, :])], -2)
        (mix_b, mix_k), products = _decayed_products((q, next_a), (b, k), g)
        a_b, a_k = (torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2) for x in products)
        from_start, to_end, after = _decays(g)
        before = torch.cat([torch.ones_like(from_start[..., :1, :]), from_start[..., :-1, :]], -2)
        right = torch.cat([a_k @ v, (before * a).expand(*from_start.shape[:-1], -1)], -1)
        solved = torch.linalg.solve_triangular(_eye(a_b) - a_b, right, upper=False, unitriangular=True)
        w, reads = solved.split([v.shape[-1], q.shape[-1]], -1)
        values = torch.cat([w, v], -2)
        erase = torch.cat([-reads, torch.zeros_like(reads)], -2)
        keys = torch.cat([to_end * b, to_end * k], -2).mT
        transition = after.mT * _eye(keys.mT) + keys[..., :size] @ reads
        return from_start * q, torch.cat([mix_b, mix_k], -1), values, erase, transition, keys @ values

    read, mix, u, erase, *segment = in_groups(terms, (q, k, v, g, a, b), 2 * _pairs(g))
    return MatrixChunks(_Terms(read, mix, u, erase, Segment(*segment)), length)


def in_groups(
    function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], elements: int, shared: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`function` of the inputs [n, ...], some chunks at a time, and of `shared`; its results [n, ...] of all chunks.

    `elements` is the size of its largest temporary tensor for one chunk. The backward computes the temporary tensors
    again.
    """
    count = inputs[0].shape[0]
    step = max(1, _GROUP_ELEMENTS // max(elements, 1))
    whole = () if shared is None else (shared,)
    parts = []
    for first in range(0, max(count, 1), step):
        group = tuple(x[first : first + step] for x in inputs)
        parts.append(_Recomputed.apply(function, *group, *whole))  # type: ignore[no-untyped-call]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


class _Recomputed(torch.autograd.Function):
    """A function that keeps its inputs only; torch.utils.checkpoint would import torch._dynamo."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)
        ]  # fmt: skip
        with torch.enable_grad():
            outs = ctx.function(*inputs)
        leaves = [x for x, need in zip(inputs, needed, strict=True) if need]
        known = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
        found = iter(
            torch.autograd.grad([out for out, _ in known], leaves, [grad for _, grad in known], allow_unused=True)
        )
        return None, *(next(found) if need else None for need in needed)


def _solved(beta: Tensor, products: Tensor, v: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """u and erase of the delta rule: u[i] = beta[i] (v[i] - sum over j < i of products[i, j] u[j] - keys[i] S)."""
    beta = beta.unsqueeze(-1)
    system = beta * products.tril(-1)
    right = beta * torch.cat([v, keys.expand(*v.shape[:-1], -1)], -1)
    solved = torch.linalg.solve_triangular(system + _eye(system), right, upper=False, unitriangular=True)
    u, erase = solved.split([v.shape[-1], keys.shape[-1]], -1)
    return u, erase


def _sums_between(g: Tensor) -> Tensor:
    """[..., i, j, D]: the sum of g [..., size, D] over j < t <= i; -inf for j > i."""
    size = g.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    after = torch.where(lower.tril(-1).unsqueeze(-1), g.unsqueeze(-2), 0.0)
    return after.cumsum(-3).masked_fill(~lower.unsqueeze(-1), -math.inf)


def _sums_after(g: Tensor) -> Tensor:
    """The sums of g [..., size, D] over all later positions of the chunk."""
    later = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return later.flip(-2).cumsum(-2).flip(-2)


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The decays from the chunk's begin to each position, from each to its end [..., size, D], and of the chunk."""
    from_start = g.cumsum(-2).exp()
    return from_start, _sums_after(g).exp(), from_start[..., -1:, :]


def _decayed_products(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], g: Tensor) -> list[list[Tensor]]:
    """For every x and y, [i, j] = sum over channels of x[i] y[j] times the decay from j to i; 0 for j > i.

    Within blocks of 16 positions, pair by pair. From block to block, a decay is one up to the begin of the later block
    times one after it, both at most 1: a product of matrices.
    """
    shape = torch.broadcast_shapes(g.shape, *(x.shape for x in (*xs, *ys)))
    blocks = shape[-2] // _BLOCK
    x, y, by_block = (
        torch.stack([z.expand(shape) for z in zs]).unflatten(-2, (blocks, _BLOCK)) for zs in (xs, ys, (g,))
    )
    g = by_block[0]
    decay = _sums_between(g).exp()  # [..., block, i, j, D]
    pairs = decay.unsqueeze(-2) * y.movedim(0, -2).unsqueeze(-4)  # [..., block, i, j, y, D]
    within = x.movedim(0, -2) @ pairs.flatten(-3, -2).mT  # [..., block, i, x, (j, y)]
    within = within.unflatten(-1, (_BLOCK, len(ys))).movedim((-3, -1), (0, 1))  # [x, y, ..., block, i, j]

    since, until = g.cumsum(-2).exp(), _sums_after(g).exp()
    left, right = x * since, y * until
    rows: list[Tensor] = []
    earlier: Tensor | None = None  # y of all blocks before, with the decay up to the begin of this one
    for at in range(blocks):
        row = [within[..., at, :, :]]
        if earlier is not None:
            row.insert(0, left[:, None, ..., at, :, :] @ earlier.mT[None])
        if at + 1 < blocks:
            row.append(row[0].new_zeros(*row[0].shape[:-1], shape[-2] - (at + 1) * _BLOCK))
            passed = [] if earlier is None else [earlier * since[..., at, -1:, :]]
            earlier = torch.cat([*passed, right[..., at, :, :]], -2)
        rows.append(torch.cat(row, -1))
    both = torch.cat(rows, -2)
    return [list(products) for products in both]


def _pairs(g: Tensor) -> int:
    """The elements of the decays of one chunk, pair by pair within blocks."""
    return g[:1].numel() * _BLOCK


def _eye(like: Tensor) -> Tensor:
    """The identity matrix of the size of the last dimension."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
