"""torch's CPU flash kernel on packed rows, and how the states of its parts merge."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.state import State

ROWS_A_TASK = 32  # query rows that one task of the kernel takes; more make another task, which reads the keys again
_FEW = 3


def one_by_one(rows: int) -> bool:
    """Whether the rows of a kv head go through the kernel one after the other rather than as one product.

    Its matrix-vector product reads keys where they lie, its product of matrices copies them into an order of its own
    first, which pays from four rows on.
    """
    return 1 < rows <= _FEW


def attend(q: Tensor, k: Tensor, v: Tensor, parts: int, bias: Tensor | None = None) -> State:
    """Rows q [n, Hkv, R, D], scaled, against k, v [n, Hkv, N, D]: out [n, Hkv, R, D] and lse [n, Hkv, R].

    Or the keys of one sequence in equal parts: then these take the place of n. The kernel's tasks are its batch, its
    heads and its blocks of rows, never blocks of keys, so parts in the batch are what lets threads share a head.
    """
    _, heads, rows, width = q.shape
    if parts > 1:
        k, v = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v))
        q = q.expand(parts, -1, -1, -1)
    apart = bias is None and one_by_one(rows)
    if apart:
        q = q.reshape(-1, heads * rows, 1, width)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=1.0
    )
    if apart:
        out, lse = out.reshape(-1, heads, rows, width), lse.reshape(-1, heads, rows)
    return State(out, lse)


def merged(states: list[State], n: int) -> State:
    """The state [n, ...] over all keys, of n sequences in one part each or of one sequence in parts, in their order."""
    if len(states) == 1 and states[0].lse.shape[0] == n:
        return states[0]
    joined = torch.cat if n == 1 else torch.stack
    out, lse = (joined(parts) for parts in zip(*states, strict=True))
    # A row that no part saw has a top and a total of nothing; any other total is at least 1, the largest part's own.
    top = lse.amax(0, keepdim=n == 1).clamp(min=torch.finfo(lse.dtype).min)
    weight = torch.exp(lse - top)
    total = weight.sum(0, keepdim=n == 1)
    weight = weight / total.clamp(min=1.0)
    # A product will do for parts that saw nothing: their out is 0, never NaN.
    return State((out * weight.unsqueeze(-1)).sum(0, keepdim=n == 1), top + torch.log(total))
