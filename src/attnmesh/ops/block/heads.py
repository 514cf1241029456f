"""From the projections to the heads of Q, K and V: split, norm, rotary embedding, norm.

Between stages numbers stay float32 (float64 for float64); what comes out is rounded once to the projection's dtype.
"""

from __future__ import annotations

from torch import Tensor

from attnmesh.ops.block.config import AttentionConfig
from attnmesh.ops.block.norm import rms_norm, widened
from attnmesh.ops.block.weights import AttentionWeights


def split_and_rotate(
    q: Tensor, kv: Tensor, positions: Tensor, config: AttentionConfig, weights: AttentionWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, q*D] and kv [B, T, 2*kv*D] (keys, then values) as Q [B, q, T, D], K and V [B, kv, T, D].

    Of a fused projection, give two views. Positions are integers [B, T]; below 0 they mark rows that nobody reads.
    """
    k, v = keys_and_values(kv, positions, config, weights)
    return queries(q, positions, config, weights), k, v


def queries(q: Tensor, positions: Tensor, config: AttentionConfig, weights: AttentionWeights) -> Tensor:
    """The queries alone: q [B, T, q*D] as [B, q, T, D]."""
    norms = weights.q_norm_before_rope, weights.q_norm_after_rope
    return _stages(_heads(q, config.head_dim), positions, config, *norms)


def keys_and_values(
    kv: Tensor, positions: Tensor, config: AttentionConfig, weights: AttentionWeights
) -> tuple[Tensor, Tensor]:
    """Keys and values alone: kv [B, T, 2*kv*D] as two of [B, kv, T, D]."""
    k, v = _heads(kv, config.head_dim).chunk(2, 1)
    norms = weights.k_norm_before_rope, weights.k_norm_after_rope
    return _stages(k, positions, config, *norms), v


def _heads(x: Tensor, head_dim: int) -> Tensor:
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def _stages(
    x: Tensor, positions: Tensor, config: AttentionConfig, before: Tensor | None, after: Tensor | None
) -> Tensor:
    wide = widened(x)
    if config.norm_before_rope is not None:
        wide = rms_norm(wide, before, config.norm_before_rope)
    if config.rope is not None:
        wide = config.rope.rotate(wide, positions)
    if config.norm_after_rope is not None:
        wide = rms_norm(wide, after, config.norm_after_rope)
    return wide.to(x.dtype)
