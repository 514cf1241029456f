"""`Rope`: rotary position embedding. Pairs of a head's numbers are turned by an angle that grows with the position.

| layout | number i turns with | as in |
|---|---|---|
| `halves` | i + dim / 2 | GPT-NeoX, and Llama as Transformers has it |
| `pairs` | i + 1 (i even) | GPT-J, and Llama as Meta published it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from attnmesh.ops.block.norm import widened

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
