"""The reference implementation: attention in plain torch, with gradients by autograd and O(Sq x Sk) memory."""

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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    plain: bool = False,
) -> State:
    """Attention with all scores in memory. `out` has the dtype of q; a row that attends to no key is `(0, -inf)`.

    Differentiable in q, k, v and sinks. `plain` rounds scores and weights to the dtype of q, as a computation in that
    dtype would. The errors of fused kernels are measured against it.
    """
    dtype = accumulation_dtype(q.dtype)

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(dtype) if plain else x

    allowed = mask.visible(q_positions[:, None], k_positions[None, :])
    allowed = allowed if allowed.ndim == 3 else allowed[None]  # [B or 1, Sq, Sk]
    # where, not a product with a weight of 0: rows and keys without a visible pair may hold NaN.
    q = torch.where(allowed.any(2)[:, None, :, None], q, 0.0)
    k, v = (torch.where(allowed.any(1)[:, None, :, None], x, 0.0) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    heads = q.to(dtype).unflatten(1, (k.shape[1], group))  # [B, Hkv, group, Sq, D]: kv heads are not expanded
    scores = rounded(torch.einsum("bhgqd,bhkd->bhgqk", heads, k.to(dtype)) * scale)
    if softcap is not None:
        scores = rounded(softcap * torch.tanh(scores / softcap))
    if alibi_slopes is not None:
        distance = (q_positions[:, None] - k_positions[None, :]).abs()
        scores = rounded(scores - alibi_slopes.to(dtype).view(k.shape[1], group, 1, 1) * distance)
    scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)

    # logsumexp with an explicit maximum: a row of -inf must give -inf, and gradients of 0, never NaN.
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
    else:
        top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    sink = None
    if sinks is not None:  # one more key, whose value is 0
        sink = sinks.to(dtype).view(k.shape[1], group, 1, 1)
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(torch.where(sink == torch.inf, 0.0, sink - top))
    nonempty = total > 0
    total = torch.where(nonempty, total, 1.0)
    out = torch.einsum("bhgqk,bhkd->bhgqd", rounded(weight / total), v.to(dtype))
    lse = torch.where(nonempty, top + torch.log(total), -torch.inf).squeeze(-1)
    return State(out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2))
