"""From the QKV projection to the heads of attention: split into heads, norm, rotary embedding, norm.

Between stages values stay in float32 (float64 for float64); the result is rounded once to the projection's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.norm_rope import CosSin, rms_norm, rotated, widened
from attnmesh.ops.storage import Stored


def split_and_rotate(
    q: Tensor, kv: Tensor, positions: Tensor, config: AttentionConfig, weights: AttentionWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [B, q, T, D], K and V [B, kv, T, D] from projections q [B, T, q*D] and kv [B, T, 2*kv*D] (keys, then values).

    For a fused projection, pass two views. Positions are integers [B, T]; negative ones mark unused rows.
    """
    k, v = keys_and_values(kv, positions, config, weights)
    return queries(q, positions, config, weights), k, v


def queries(q: Tensor, positions: Tensor | CosSin, config: AttentionConfig, weights: AttentionWeights) -> Tensor:
    """The queries only: [B, q, T, D] from q [B, T, q*D]; cosines and sines may stand for the positions."""
    norms = weights.q_norm_before_rope, weights.q_norm_after_rope
    return _stages(_heads(q, config.head_dim), positions, config, *norms)


def keys_and_values(
    kv: Tensor, positions: Tensor | CosSin, config: AttentionConfig, weights: AttentionWeights
) -> tuple[Tensor, Tensor]:
    """Keys and values only: two tensors [B, kv, T, D] from kv [B, T, 2*kv*D]; positions as in `queries`."""
    k, v = _heads(kv, config.head_dim).chunk(2, 1)
    norms = weights.k_norm_before_rope, weights.k_norm_after_rope
    return _stages(k, positions, config, *norms), v


def _heads(x: Tensor, head_dim: int) -> Tensor:
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def _stages(
    x: Tensor, positions: Tensor | CosSin, config: AttentionConfig, before: Tensor | None, after: Tensor | None
) -> Tensor:
    wide = widened(x)
    if config.norm_before_rope is not None:
        wide = rms_norm(wide, before, config.norm_before_rope)
    if config.rope is not None:
        rope = config.rope
        wide = rotated(wide, rope, positions) if isinstance(positions, CosSin) else rope.rotate(wide, positions)
    if config.norm_after_rope is not None:
        wide = rms_norm(wide, after, config.norm_after_rope)
    return wide.to(x.dtype)


@dataclass(frozen=True, eq=False)
class ProjectedKV:
    """Projected keys and values of new tokens, and the cache that this rank writes them to.

    `kv` is projected K, then V: [B, T, 2*kv*D] of all rows of the batch, or [len(rows), T, 2*kv*D] of `rows` alone.
    Only `rows` are written, to `slots` int64 [len(rows), T] of the pools [num_blocks, block_size, kv, D]; slots below 0
    are skipped.
    """

    kv: Tensor
    rows: range
    slots: Tensor
    keys: Stored
    values: Stored

    @property
    def first(self) -> int:
        """The index in `kv` of the first of `rows`."""
        return 0 if len(self.kv) == len(self.rows) else self.rows.start
