"""States that travel: out and lse of a row side by side in one buffer [..., D + 1], so that they are one message.

Heads lead, so that the rows of some heads are one run of memory. A kernel writes its state straight into the buffer,
and what arrives from others is merged from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmesh.core.optional import require
from attnmesh.core.state import State


def state_in(packed: Tensor) -> State:
    """The state [rows, heads, ...] in a buffer [heads, rows, ..., D + 1], as views of it."""
    by_row = packed.transpose(0, 1)
    return State(by_row[..., :-1], by_row[..., -1])


def merge_packed(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The out [B, H, T, D] over all keys of `parts` [N, H, B, T, D + 1], whose key sets are disjoint.

    They join one after the other, so the bits depend on their order and on nothing else: identities, wherever they
    stand, change nothing. `sinks` [H] are scores of keys without a value.
    """
    if parts.is_cuda:
        return _triton().merge_packed(parts, sinks, dtype)  # type: ignore[no-any-return]
    acc = torch.zeros_like(parts[0, ..., :-1])
    total = torch.zeros_like(parts[0, ..., -1])
    peak = torch.full_like(total, -torch.inf)
    for part in parts:
        lse = part[..., -1]
        top = torch.maximum(peak, lse)
        shift = torch.where(top == -torch.inf, 0.0, top)  # -inf - -inf would be NaN
        decay, weight = torch.exp(peak - shift), torch.exp(lse - shift)
        acc = acc * decay.unsqueeze(-1) + part[..., :-1] * weight.unsqueeze(-1)
        total, peak = total * decay + weight, top
    out = acc / torch.where(total == 0.0, 1.0, total).unsqueeze(-1)
    lse = torch.where(total == 0.0, -torch.inf, peak + torch.log(total))
    return with_sinks(out, lse, sinks).transpose(0, 1).to(dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Out [H, B, T, D] with one more key a head, whose score is the sink and whose value is 0."""
    if sinks is None:
        return out
    # Not by logaddexp: on the CPU its last bit depends on where in the tensor a number stands, and so on the batch.
    share = 1 / (1 + torch.exp(sinks.to(lse.dtype)[:, None, None] - lse))
    return out * torch.where(lse == -torch.inf, 0.0, share).unsqueeze(-1)


def _triton() -> Any:
    return require("attnmesh.ops.triton_packed", extra="triton")
