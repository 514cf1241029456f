"""The specification: decode attention in plain torch, every score in memory, right in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import Quantized, Stored, dequantize, values_of


def run(call: DecodeCall, *, plain: bool = False) -> State:
    """The state of every row. A skipped sequence, or a row that sees nothing, is `(0, -inf)`.

    A sink is one more key whose value is 0: a row that sees nothing else has `(0, sink)`.
    `plain` rounds keys, scores and weights to the dtype of q on their way, as a computation in that dtype would: what
    the errors of kernels are measured against.
    """
    q, group = call.q, call.group
    dtype = accumulation_dtype(q.dtype)

    def held(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(dtype) if plain else x

    visible = _visible(call)  # [B, Hq or 1, T, N]
    used = visible.any(1).any(1)[:, None, :, None]  # [B, 1, N, 1]
    # where, not a product: what nobody sees may hold anything.
    k, v = (torch.where(used, held(_gathered(call, x, dtype)), 0.0) for x in (call.k, call.v))

    heads = q.to(dtype).unflatten(1, (call.kv_heads, group))
    scores = torch.einsum("bhgtd,bhnd->bhgtn", heads, k).flatten(1, 2) * call.scale
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores[..., : call.mask.shape[3]] += call.mask.to(dtype)
    scores = held(scores).masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        sinks = torch.where(call.cur_pos < 0, -torch.inf, call.sinks.to(dtype)[:, None])  # [Hq, B]
        scores = torch.cat([scores, sinks.T[:, :, None, None].expand(*scores.shape[:3], 1)], -1)

    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    seen = total > 0
    weight = held(weight / torch.where(seen, total, 1.0))[..., : visible.shape[-1]]
    out = torch.einsum("bhgtn,bhnd->bhgtd", weight.unflatten(1, (call.kv_heads, group)), v).flatten(1, 2)
    lse = torch.where(seen, top + torch.log(total), -torch.inf).squeeze(-1)
    return State(out.to(call.out_dtype), lse)


def _visible(call: DecodeCall) -> Tensor:
    """Who sees which of the cache's positions: [B, Hq or 1, T, capacity]."""
    tokens = call.q.shape[2]
    device = call.q.device
    keys = torch.arange(call.capacity, device=device)
    last = call.cur_pos.long()[:, None, None]  # [B, 1, 1]
    own = last - (tokens - 1) + torch.arange(tokens, device=device)[:, None]  # [B, T, 1]
    if call.key_range is not None:
        first, end = (x.long()[:, :, None] for x in call.key_range)  # [B, T, 1]
        seen = ((keys >= first) & (keys < end) & (keys <= last))[:, None]
    elif call.mask is not None:
        seen = (keys <= last)[:, None].expand(-1, -1, tokens, -1)
        wide = torch.zeros(*call.mask.shape[:3], call.capacity, dtype=torch.bool, device=device)
        named = call.mask if call.mask.dtype == torch.bool else call.mask != -torch.inf
        wide[..., : call.mask.shape[3]] = named
        seen = seen & wide
    elif call.tree is not None:
        column = keys - (last - (tokens - 1))  # [B, 1, N]: which of the new tokens a key is
        new = (column >= 0) & (column < tokens)
        named = call.tree.expand(call.q.shape[0], -1, -1)
        named = named.gather(2, column.clamp(0, tokens - 1).expand(-1, tokens, -1))
        seen = torch.where(new, named, column < 0)[:, None]
    else:
        seen = (keys <= own)[:, None]
    if call.window is not None:
        seen = seen & (keys > own - call.window)[:, None]
    return seen & (last >= 0)[:, None]


def _gathered(call: DecodeCall, stored: Stored, dtype: torch.dtype) -> Tensor:
    """The keys or values of every sequence in order, [B or 1, Hkv, capacity, D], as plain numbers."""
    if call.table is None:
        return dequantize(stored, dtype)
    rows = call.table.long().clamp(0, values_of(stored).shape[0] - 1)  # nobody sees what other entries name

    def ordered(pool: Tensor) -> Tensor:
        pool = pool if pool.shape[0] else pool.new_zeros(1, *pool.shape[1:])  # for tables that name nothing
        return pool[rows.clamp(0)].flatten(1, 2).transpose(1, 2)

    if isinstance(stored, Tensor):
        return ordered(stored).to(dtype)
    scales = stored.scales if stored.storage == "fp8" else ordered(stored.scales)
    return dequantize(Quantized(ordered(stored.values), scales), dtype)
