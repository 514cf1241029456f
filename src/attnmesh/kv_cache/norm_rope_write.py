"""`norm_rope_write`: norm and RoPE between the QKV projection and attention, and the write of keys and values.

The send buffer is laid out for an exchange among `parts` ranks. Rank p attends for rows `B * p // parts` up to
`B * (p + 1) // parts` of the batch::

    [q heads, rows of part 0, T, D] [q heads, rows of part 1, T, D] ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmesh.kv_cache.pools import write_tokens
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights, ProjectedKV, keys_and_values, queries
from attnmesh.ops.block.norm_rope import CosSin
from attnmesh.ops.storage import values_of
from attnmesh.utils.optional import require


def norm_rope_write(
    q: Tensor, positions: Tensor, new: ProjectedKV | None, config: AttentionConfig, weights: AttentionWeights,
    parts: int, cos_sin: CosSin | None = None,
) -> Tensor:  # fmt: skip
    """The flat send buffer of the queries q [B, T, q*D], in q's dtype. Writes the new keys and values to the cache.

    Positions are integers [B, T]. A position below 0 marks a row that is not in the step: its part of the buffer is
    undefined. `cos_sin`, [B, T, rope.dim / 2] each, replace the cosines and sines that rotary embedding computes from
    positions. Keys are rounded to the dtype of their projection, then stored as by `write_tokens`. Without `new`,
    nothing is written. On a GPU this is one kernel launch.
    """
    _check(q, positions, new, config, parts)
    if q.is_cuda:
        buffer: Tensor = _triton().norm_rope_write(q, positions, new, config, weights, parts, cos_sin)
        return buffer
    if new is not None:
        own = slice(new.rows.start, new.rows.stop)
        at = positions[own] if cos_sin is None else CosSin(*(x[own] for x in cos_sin))
        _write(new, at, config, weights)
    return _send_buffer(queries(q, positions if cos_sin is None else cos_sin, config, weights), parts)


def _write(new: ProjectedKV, positions: Tensor | CosSin, config: AttentionConfig, weights: AttentionWeights) -> None:
    kv = new.kv[new.first : new.first + len(new.rows)]
    k, v = keys_and_values(kv, positions, config, weights)
    write_tokens(new.keys, new.values, new.slots, k, v)


def _send_buffer(q: Tensor, parts: int) -> Tensor:
    batch = len(q)
    by_part = [q[batch * part // parts : batch * (part + 1) // parts] for part in range(parts)]
    return torch.cat([rows.transpose(0, 1).flatten() for rows in by_part])


def _check(q: Tensor, positions: Tensor, new: ProjectedKV | None, config: AttentionConfig, parts: int) -> None:
    if q.ndim != 3 or q.shape[-1] % config.head_dim:
        raise ValueError(f"q must be [B, T, heads * {config.head_dim}], got {list(q.shape)}")
    if q.is_cuda and q.dtype == torch.float64:
        raise ValueError(f"q must not be float64 on a GPU, got {q.dtype} on {q.device}")
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions must be {list(q.shape[:2])}, as in q, got {list(positions.shape)}")
    if parts < 1:
        raise ValueError(f"parts must be a positive integer, got {parts!r}")
    if new is None:
        return
    batch, tokens = positions.shape
    rows, pool = new.rows, values_of(new.keys)
    if not 0 <= rows.start <= rows.stop <= batch or rows.step != 1:
        raise ValueError(f"rows must be consecutive rows of the batch of {batch}, got {rows}")
    width = 2 * pool.shape[2] * config.head_dim
    if len(new.kv) not in (batch, len(rows)) or new.kv.shape[1:] != (tokens, width):
        raise ValueError(
            f"kv must be [{batch} or {len(rows)}, {tokens}, {width}], keys and values of the pool's {pool.shape[2]} "
            f"heads, got {list(new.kv.shape)}"
        )
    if new.slots.shape != (len(rows), tokens):
        raise ValueError(f"slots must be [{len(rows)}, {tokens}], got {list(new.slots.shape)}")


def _triton() -> Any:
    return require("attnmesh.kv_cache.triton_write", extra="triton")
