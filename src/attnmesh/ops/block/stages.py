"""The per-token stages of an attention block: RMSNorm, rotary embedding, and the split of projections into heads.

Rotary embedding rotates pairs of a head's elements by an angle proportional to the position:

| layout | element i is paired with | as in |
|---|---|---|
| `halves` | i + dim / 2 | GPT-NeoX, and Llama in Transformers |
| `pairs` | i + 1 (i even) | GPT-J, and Llama as Meta published it |

Between stages values stay in float32 (float64 for float64); the result is rounded once to the projection's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # config.py imports Norm and Rope
    from attnmesh.ops.block.config import AttentionConfig, AttentionWeights


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: `x / sqrt(mean(x ** 2) + eps)`, times a weight where there is one."""

    eps: float

    def __post_init__(self) -> None:
        if not (isinstance(self.eps, float | int) and math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps must be a positive number, got {self.eps!r}")


def rms_norm(x: Tensor, weight: Tensor | None, norm: Norm) -> Tensor:
    """x normed in float32 (float64 for float64), and rounded once to its own dtype, after the weight."""
    shape = (x.shape[-1],)
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, shape, weight, norm.eps)  # on a GPU one kernel
    wide = widened(x)
    return F.rms_norm(wide, shape, weight.to(wide.dtype), norm.eps).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x as what is computed in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


Layout = Literal["halves", "pairs"]
LAYOUTS = ("halves", "pairs")


@dataclass(frozen=True)
class Rope:
    """Pair i turns by position * frequencies[i]; `factor` multiplies cosines and sines (YaRN's attention factor).

    Frequencies are float32 numbers, so that every path, float64 too, computes with the same ones. Heads wider than
    `dim` keep the rest of their numbers as they are.
    """

    frequencies: tuple[float, ...]
    layout: Layout = "halves"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.frequencies:
            raise ValueError("frequencies must hold one number for each pair, got none")
        wide = torch.tensor(self.frequencies, dtype=torch.float64)
        inexact = (wide.float().double() != wide) | ~wide.isfinite()
        if inexact.any():
            raise ValueError(f"frequencies must be finite float32 numbers, got {wide[inexact][0].item()!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if not (isinstance(self.factor, float | int) and math.isfinite(self.factor)):
            raise ValueError(f"factor must be a finite number, got {self.factor!r}")

    @classmethod
    def plain(cls, dim: int, theta: float = 10000.0, layout: Layout = "halves") -> Rope:
        """Wavelengths from 2 pi to 2 pi theta, in equal ratios."""
        return cls(_as_floats(_plain_frequencies(dim, theta)), layout)

    @classmethod
    def llama3(
        cls, dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float,
        original_length: int, layout: Layout = "halves",
    ) -> Rope:  # fmt: skip
        """Llama 3's scaling: wavelengths beyond original_length / low_freq_factor become `factor` times as long.

        Those below original_length / high_freq_factor stay, and between the two it is a mixture.
        """
        if low_freq_factor >= high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be below high_freq_factor, got {low_freq_factor} and {high_freq_factor}"
            )
        plain = _plain_frequencies(dim, theta)
        turns = original_length / (2 * math.pi / plain)  # of each pair within the original length
        kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
        return cls(_as_floats((1 - kept) * plain / factor + kept * plain), layout)

    @property
    def dim(self) -> int:
        """How many of a head's numbers turn: its first ones."""
        return 2 * len(self.frequencies)

    def on(self, device: torch.device) -> Tensor:
        """The frequencies on a device, in float32; made once."""
        return _frequencies_on(self, device)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, heads, T, D] at integer positions [B, T]; those below 0 mark rows that nobody reads, and count as 0.

        Angles are float32 products as in Transformers (float64 for float64), and the result is rounded once.
        """
        wide = widened(x)
        # From float32 for any x: what multiplies is the same number.
        angles = positions.clamp(min=0)[:, None, :, None].to(wide.dtype) * self.on(x.device).to(wide.dtype)
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        turning, rest = wide[..., : self.dim], wide[..., self.dim :]
        if self.layout == "halves":
            a, b = turning.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
        else:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
            turned = torch.cat([turned, rest], -1)
        return turned.to(x.dtype)


def _plain_frequencies(dim: int, theta: float) -> Tensor:
    """In float32 and in this order of operations, as every published model had them."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2 or dim % 2:
        raise ValueError(f"dim must be a positive even integer, got {dim!r}")
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"theta must be a positive number, got {theta!r}")
    # On the CPU, whatever the default device: its bits are the ones to have.
    frequencies: Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    return frequencies


def _as_floats(frequencies: Tensor) -> tuple[float, ...]:
    return tuple(frequencies.tolist())


@lru_cache(maxsize=256)
def _frequencies_on(rope: Rope, device: torch.device) -> Tensor:
    return torch.tensor(rope.frequencies, dtype=torch.float32, device=device)


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
