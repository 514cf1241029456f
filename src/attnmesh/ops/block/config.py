"""`AttentionConfig`: what an attention block computes, whatever its weights and however it is spread."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from attnmesh.core.validation import check_positive
from attnmesh.ops.block.norm import Norm
from attnmesh.ops.block.rope import Rope


@dataclass(frozen=True)
class AttentionConfig:
    """The whole model's sizes, and its stages; None leaves a stage out.

    `norm` is X's, before the projections. `norm_before_rope` and `norm_after_rope` are those of each head of Q and K.
    `window` keeps the last so many keys up to the query's own; `scale` multiplies the scores, by default
    1 / sqrt(head_dim). Whether there are biases, sinks and an output projection is said by the weights.
    """

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    _: KW_ONLY
    norm: Norm | None = None
    norm_before_rope: Norm | None = None
    norm_after_rope: Norm | None = None
    rope: Rope | None = None
    window: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden, q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads must be a multiple of kv_heads, got q_heads={self.q_heads} and kv_heads={self.kv_heads}"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"rope turns {self.rope.dim} numbers of a head, but head_dim is {self.head_dim}")
        if self.window is not None:
            check_positive(window=self.window)
        if self.scale is not None and not (isinstance(self.scale, float | int) and math.isfinite(self.scale)):
            raise ValueError(f"scale must be a finite number or None, got {self.scale!r}")
