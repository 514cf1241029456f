"""The specification: decode attention in plain torch, every score in memory, right in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import Quantized, Stored, dequantize, values_of


def run(call: DecodeCall, *, plain: bool = False) -> State:
    """The state of every row. Skipped sequences, and rows that attend to no key, are `(0, -inf)`.

    A sink is one more key whose value is 0: a row that attends to no other key is `(0, sink)`.
    `plain` rounds keys, scores and weights to the dtype of q, as a computation in that dtype would. The errors of
    kernels are measured against it.
    """
    q, group = call.q, call.group
    dtype = accumulation_dtype(q.dtype)

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(dtype) if plain else x

    visible = visible_pairs(call)  # [B, Hq or 1, T, N]
    used = visible.any(1).any(1)[:, None, :, None]  # [B, 1, N, 1]
    # where, not a product: keys that no row attends to may hold anything.
    k, v = (torch.where(used, rounded(_gathered(call, x, dtype)), 0.0) for x in (call.k, call.v))
    v = v[..., : call.value_dim]  # the values of a latent cache are its first features

    heads = q.to(dtype).unflatten(1, (call.kv_heads, group))
    scores = torch.einsum("bhgtd,bhnd->bhgtn", heads, k).flatten(1, 2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores[..., : call.mask.shape[3]] += call.mask.to(dtype)
    scores = rounded(scores).masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        sinks = torch.where(call.cur_pos < 0, -torch.inf, call.sinks.to(dtype)[:, None])  # [Hq, B]
        scores = torch.cat([scores, sinks.T[:, :, None, None].expand(*scores.shape[:3], 1)], -1)

    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(torch.where(scores == torch.inf, 0.0, scores - top))  # an infinite sink outweighs all keys
    total = weight.sum(-1, keepdim=True)
    nonempty = total > 0
    weight = rounded(weight / torch.where(nonempty, total, 1.0))[..., : visible.shape[-1]]
    out = torch.einsum("bhgtn,bhnd->bhgtd", weight.unflatten(1, (call.kv_heads, group)), v).flatten(1, 2)
    lse = torch.where(nonempty, top + torch.log(total), -torch.inf).squeeze(-1)
    return State(out.to(call.out_dtype), lse)


def visible_pairs(call: DecodeCall) -> Tensor:
    """Whether each query attends to each position of the cache: [B, Hq or 1, T, capacity]."""
    tokens = call.q.shape[2]
    device = call.q.device
    keys = torch.arange(call.capacity, device=device)
    last = call.cur_pos.long()[:, None, None]  # [B, 1, 1]
    own = last - (tokens - 1) + torch.arange(tokens, device=device)[:, None]  # [B, T, 1]
    if call.key_range is not None:
        first, end = (x.long()[:, :, None] for x in call.key_range)  # [B, T, 1]
        visible = ((keys >= first) & (keys < end) & (keys <= last))[:, None]
    elif call.mask is not None:
        visible = (keys <= last)[:, None].expand(-1, -1, tokens, -1)
        wide = torch.zeros(*call.mask.shape[:3], call.capacity, dtype=torch.bool, device=device)
        selected = call.mask if call.mask.dtype == torch.bool else call.mask != -torch.inf
        wide[..., : call.mask.shape[3]] = selected
        visible = visible & wide
    elif call.tree is not None:
        column = keys - (last - (tokens - 1))  # [B, 1, N]: the index of a key among the new tokens
        new = (column >= 0) & (column < tokens)
        selected = call.tree.expand(call.q.shape[0], -1, -1)
        selected = selected.gather(2, column.clamp(0, tokens - 1).expand(-1, tokens, -1))
        visible = torch.where(new, selected, column < 0)[:, None]
    else:
        visible = (keys <= own)[:, None]
    if call.window is not None:
        visible = visible & (keys > own - call.window)[:, None]
    return visible & (last >= 0)[:, None]


def _gathered(call: DecodeCall, stored: Stored, dtype: torch.dtype) -> Tensor:
    """The keys or values of every sequence in order, [B or 1, Hkv, capacity, D], dequantized."""
    if call.table is None:
        return dequantize(stored, dtype)
    rows = call.table.long().clamp(0, values_of(stored).shape[0] - 1)  # other entries are not visible

    def ordered(pool: Tensor) -> Tensor:
        pool = pool if pool.shape[0] else pool.new_zeros(1, *pool.shape[1:])  # for tables without a valid entry
        return pool[rows.clamp(0)].flatten(1, 2).transpose(1, 2)

    if isinstance(stored, Tensor):
        return ordered(stored).to(dtype)
    scales = stored.scales if stored.storage == "fp8" else ordered(stored.scales)
    rope = None if stored.rope is None else ordered(stored.rope)
    return dequantize(Quantized(ordered(stored.values), scales, rope), dtype)
