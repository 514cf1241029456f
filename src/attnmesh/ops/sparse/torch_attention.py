"""Sparse attention in torch operations, on any device: the CPU's backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.mask import Rows
from attnmesh.ops.sparse.torch_gather import Part, parts


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    rows: Rows,
    *,
    scale: float,
    d_v: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`out` [s_q, h, d_v] of `dtype` and `lse` [s_q, h]."""
    s_q, h, _ = q.shape
    out = q.new_empty(s_q, h, d_v, dtype=dtype)
    lse = q.new_empty(s_q, h, dtype=accumulation_dtype(q.dtype))
    for part, values in _parts(q, k, v, indices, rows, d_v):
        s = _scores(q, part, scale)
        top = s.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        out[part.rows] = torch.matmul(p, values.keys) / total.masked_fill(total == 0, 1.0)
        lse[part.rows] = (top + total.log()).squeeze(-1)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, lse: Tensor, delta: Tensor, dout: Tensor,
    *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq of `dtype`; dk and dv summed up, not rounded. Without `v`, dk has the values' gradient, too."""
    dq = torch.empty_like(q, dtype=dtype)
    dk = _sum(q, k.shape[0], k.shape[1])
    dv = None if v is None else _sum(q, v.shape[0], d_v)
    for part, values in _parts(q, k, v, indices, rows, d_v):
        p = _probabilities(q, part, lse, scale)
        grad = dout[part.rows].to(p.dtype)
        seen = part.valid[:, None] & torch.isfinite(lse[part.rows, :, None])
        dp = values.dots(grad)
        ds = torch.where(seen, p * (dp - delta[part.rows, :, None]), 0.0) * scale
        dq[part.rows] = torch.matmul(ds, part.keys).to(dq.dtype)
        to_keys = part.for_keys(ds, q[part.rows].to(p.dtype))
        to_values = values.for_keys(p, grad)
        if dv is None:
            to_keys[..., :d_v] += to_values
        else:
            values.add_to(dv, to_values, deterministic)
        part.add_to(dk, to_keys, deterministic)
    return dq, dk[:-1], None if dv is None else dv[:-1]


def distribution(
    q: Tensor, k: Tensor, indices: Tensor, rows: Rows, lse: Tensor, *, scale: float, head_group: int
) -> Tensor:
    """[groups, s_q, topk]: for each slot, its probabilities summed over the heads of a group."""
    s_q, h, d = q.shape
    dist = lse.new_empty(-(-h // head_group), s_q, indices.shape[1], dtype=accumulation_dtype(q.dtype))
    for part in parts(k, indices, rows, d + h):
        p = _probabilities(q, part, lse, scale)
        for group, heads in enumerate(p.split(head_group, 1)):
            dist[group, part.rows] = heads.sum(1)
    return dist


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """The sum of out * dout over features, [s_q, h]."""
    dtype = accumulation_dtype(out.dtype)
    return (out.to(dtype) * dout.to(dtype)).sum(-1)


def _parts(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, d_v: int
) -> Iterator[tuple[Part, Part]]:
    """Keys and values: those of `v`, or what the keys begin with."""
    per_slot = max(k.shape[1], d_v) + q.shape[1]
    if v is None:
        for part in parts(k, indices, rows, per_slot):
            yield part, replace(part, keys=part.keys[..., :d_v])
    else:
        yield from zip(parts(k, indices, rows, per_slot), parts(v, indices, rows, per_slot), strict=True)


def _scores(q: Tensor, part: Part, scale: float) -> Tensor:
    s = part.dots(q[part.rows].to(part.keys.dtype)) * scale
    return s.masked_fill(~part.valid[:, None], -torch.inf)


def _probabilities(q: Tensor, part: Part, lse: Tensor, scale: float) -> Tensor:
    """exp(score - lse); nothing where the slot is not valid, or the head saw no key (or all the mass is elsewhere)."""
    lse = lse[part.rows, :, None]
    infinite = torch.isinf(lse)
    p = torch.exp(_scores(q, part, scale) - lse.masked_fill(infinite, 0.0))
    return p.masked_fill(infinite | ~part.valid[:, None], 0.0)  # where nothing is valid, lse may be anything


def _sum(q: Tensor, rows: int, width: int) -> Tensor:
    """Zeros, with a row more for what belongs to no key."""
    return q.new_zeros(rows + 1, width, dtype=accumulation_dtype(q.dtype))
