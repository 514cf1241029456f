"""The specification: attention in plain torch, right in float64, gradients by autograd, O(Sq x Sk) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.masks import Mask
from attnmesh.core.state import State, accumulation_dtype


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    q_positions: Tensor,
    k_positions: Tensor,
    *,
    plain: bool = False,
) -> State:
    """Attention with every score in memory. `out` in the dtype of q; a row that sees no key has `(0, -inf)`.

    `plain` rounds scores and weights to the dtype of q on their way, as a computation in that dtype would: what the
    errors of fused kernels are measured against.
    """
    dtype = accumulation_dtype(q.dtype)

    def held(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(dtype) if plain else x

    group = q.shape[1] // k.shape[1]
    heads = q.to(dtype).unflatten(1, (k.shape[1], group))  # [B, Hkv, group, Sq, D]: no expanded kv heads
    scores = held(torch.einsum("bhgqd,bhkd->bhgqk", heads, k.to(dtype)) * scale)
    allowed = mask.allows(q_positions[:, None], k_positions[None, :])
    scores = scores.masked_fill(~allowed, -torch.inf)

    # logsumexp with the top taken out by hand: a row of -inf must give -inf, and gradients of 0, never NaN.
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    out = torch.einsum("bhgqk,bhkd->bhgqd", held(weight / total), v.to(dtype))
    lse = torch.where(seen, top + torch.log(total), -torch.inf).squeeze(-1)
    return State(out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2))
