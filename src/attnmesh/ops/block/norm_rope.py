"""RMSNorm and rotary position embedding.

Rotary embedding rotates pairs of a head's elements by an angle proportional to the position:

| layout | element i is paired with | as in |
|---|---|---|
| `halves` | i + dim / 2 | GPT-NeoX, and Llama in Transformers |
| `pairs` | i + 1 (i even) | GPT-J, and Llama as Meta published it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.utils.validation import check_choice, check_number, check_positive, check_tensor, check_type, shown


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension: `x / sqrt(mean(x ** 2) + eps)`, times a weight if there is one.

    Examples:
        >>> norm = am.decode.Norm(1e-6)
        >>> config = am.decode.AttentionConfig(32, 4, 2, 8, norm=norm, norm_before_rope=norm)
        >>> config.norm
        Norm(eps=1e-06)
    """

    eps: float

    def __post_init__(self) -> None:
        check_number("eps", self.eps, above=0)


def rms_norm(x: Tensor, weight: Tensor | None, norm: Norm) -> Tensor:
    """RMSNorm of x over the last dimension, in float32 (float64 for float64), rounded once, after the weight."""
    shape = (x.shape[-1],)
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, shape, weight, norm.eps)  # one fused kernel on a GPU
    wide = widened(x)
    return F.rms_norm(wide, shape, weight.to(wide.dtype), norm.eps).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x in the dtype of the computation: float64 for float64, else float32."""
    return x if x.dtype == torch.float64 else x.float()


class CosSin(NamedTuple):
    """Cosines and sines of the angles of T tokens, [B, T, dim / 2] each, times the factor of the embedding."""

    cos: Tensor
    sin: Tensor


Layout = Literal["halves", "pairs"]
LAYOUTS = ("halves", "pairs")
_MAX_DIM = 2**16


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: pair i rotates by position * frequencies[i]; `factor` multiplies cosines and sines (YaRN).

    Frequencies are float32 values, so that every path, float64 included, uses the same ones. Elements of a head beyond
    `dim` are not rotated.

    Examples:
        >>> rope = am.decode.Rope.plain(4, theta=10000.0)
        >>> x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)  # [batch, heads, tokens, head_dim]
        >>> rope.rotate(x, torch.tensor([[1]])).flatten()  # cos(1) and sin(1) in the first pair
        tensor([0.5403, 0.0000, 0.8415, 0.0000])
    """

    frequencies: tuple[float, ...]
    layout: Layout = "halves"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.frequencies, tuple) or not self.frequencies:
            raise ValueError(
                f"frequencies must be a tuple that contains one number per pair, got {shown(self.frequencies)}"
            )
        for i, frequency in enumerate(self.frequencies):
            check_number(f"frequencies[{i}]", frequency)
        wide = torch.tensor(self.frequencies, dtype=torch.float64, device="cpu")
        inexact = (wide.float().double() != wide) | ~wide.isfinite()
        if inexact.any():
            raise ValueError(f"frequencies must be finite float32 numbers, got {wide[inexact][0].item()!r}")
        check_choice("layout", self.layout, LAYOUTS)
        check_number("factor", self.factor)

    @classmethod
    def plain(cls, dim: int, theta: float = 10000.0, layout: Layout = "halves") -> Rope:
        """The original embedding: wavelengths from 2 pi to 2 pi theta in a geometric progression."""
        return cls(_as_floats(_plain_frequencies(dim, theta)), layout)

    @classmethod
    def llama3(
        cls, dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float,
        original_length: int, layout: Layout = "halves",
    ) -> Rope:  # fmt: skip
        """The scaling of Llama 3: wavelengths above original_length / low_freq_factor become `factor` times as long.

        Those below original_length / high_freq_factor are unchanged; in between they are interpolated.
        """
        check_number("factor", factor, above=0)
        check_number("low_freq_factor", low_freq_factor, above=0)
        check_number("high_freq_factor", high_freq_factor, above=0)
        check_positive(original_length=original_length)
        if low_freq_factor >= high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be below high_freq_factor, got {low_freq_factor} and {high_freq_factor}"
            )
        plain = _plain_frequencies(dim, theta)
        turns = original_length / (2 * math.pi / plain)  # rotations of each pair within the original length
        kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
        return cls(_as_floats((1 - kept) * plain / factor + kept * plain), layout)

    @property
    def dim(self) -> int:
        """The number of elements of a head that are rotated: its first ones."""
        return 2 * len(self.frequencies)

    def on(self, device: torch.device) -> Tensor:
        """The frequencies on a device, float32, cached."""
        check_type("device", device, torch.device)
        return _frequencies_on(self, device)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, heads, T, D] rotated by integer positions [B, T]. Negative positions mark unused rows and count as 0.

        Angles are float32 products as in Transformers (float64 for float64); the result is rounded once.
        """
        self._check_rotate(x, positions)
        return rotated(x, self, self._cos_sin(positions, widened(x).dtype))

    def cos_sin(self, positions: Tensor) -> CosSin:
        """The cosines and sines that integer positions [B, T] rotate by, float32 [B, T, dim / 2] each.

        Computed once, they serve all layers of a step (`cos_sin` of an `AttentionBlock`).
        """
        _check_positions(positions)
        return self._cos_sin(positions, torch.float32)

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        # From float32 for any dtype, so that the frequencies are the same.
        angles = positions.clamp(min=0).unsqueeze(-1).to(dtype) * self.on(positions.device).to(dtype)
        return CosSin(angles.cos() * self.factor, angles.sin() * self.factor)

    def _check_rotate(self, x: Tensor, positions: Tensor) -> None:
        check_tensor("x", x), check_tensor("positions", positions)
        if x.ndim != 4 or x.shape[3] < self.dim or not x.dtype.is_floating_point:
            raise ValueError(f"x must be floating point [B, heads, T, D] with D >= {self.dim}, got {shown(x)}")
        _check_positions(positions, (x.shape[0], x.shape[2]))
        if positions.device != x.device:
            raise ValueError(f"positions must be on {x.device} like x, got {positions.device}")


def rotated(x: Tensor, rope: Rope, cos_sin: CosSin) -> Tensor:
    """x [B, heads, T, D] rotated by given cosines and sines; the result is rounded once."""
    wide = widened(x)
    cos, sin = (each.to(wide.dtype).unsqueeze(1) for each in cos_sin)
    turning, rest = wide[..., : rope.dim], wide[..., rope.dim :]
    if rope.layout == "halves":
        a, b = turning.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        turned = torch.cat([turned, rest], -1)
    return turned.to(x.dtype)


def _check_positions(positions: object, shape: tuple[int, int] | None = None) -> None:
    tensor = check_tensor("positions", positions)
    fits = tensor.ndim == 2 if shape is None else tensor.shape == shape
    if not fits or tensor.dtype not in (torch.int32, torch.int64):
        wanted = "[B, T]" if shape is None else f"{list(shape)}, one per token of x"
        raise ValueError(f"positions must be int32 or int64 {wanted}, got {shown(positions)}")


def _plain_frequencies(dim: int, theta: float) -> Tensor:
    """In float32 and in this order of operations, as published models compute them."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not 2 <= dim <= _MAX_DIM or dim % 2:
        raise ValueError(f"dim must be a positive even integer up to {_MAX_DIM}, got {shown(dim)}")
    theta = check_number("theta", theta, above=0)
    # On the CPU, whatever the default device, for the same bits everywhere.
    frequencies: Tensor = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    return frequencies


def _as_floats(frequencies: Tensor) -> tuple[float, ...]:
    return tuple(frequencies.tolist())


@lru_cache(maxsize=256)
def _frequencies_on(rope: Rope, device: torch.device) -> Tensor:
    return torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
