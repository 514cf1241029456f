"""How keys and values are stored: plain numbers, or fewer bits with scales that turn them back.

| name | a value | what it shares | bytes a value at head_dim 128 |
|---|---|---|---|
| `bf16` `fp16` `fp32` | itself | nothing | 2, 2, 4 |
| `fp8` | e4m3 | one scale a tensor, or one a kv head | 1 |
| `int8` | -127..127 | one float32 scale a token and head | 1.031 |
| `bfp8` | -127..127 | one power of two for each 16 values | 1.0625 |

The flash decode text this grew from counts one byte a value for block floating point; its exponents add a sixteenth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORAGES = (*PLAIN, "fp8", "int8", "bfp8")
FP8_MAX = 448.0  # of e4m3
INT8_MAX = 127.0
BFP_GROUP = 16  # values that share an exponent
BFP_BITS = 6  # below the leading one: a value is at most 127 steps of 2 ** (exponent - 6)


@dataclass(frozen=True)
class Quantized:
    """A cache in fewer bits: `values` in the cache's own shape [..., D], and the `scales` that turn them back.

    The two dtypes say which storage it is. `fp8`: float8_e4m3fn with float32 scales [] or [Hkv]. `int8`: int8 with
    float32 scales [...], one a token and head. `bfp8`: int8 with int8 scales [..., D / 16], powers of two:
    a value is `values * 2 ** scales`. Strides are free: a pool keeps a head's scales next to one another.
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if values.dtype == torch.float8_e4m3fn:
            wanted = scales.dtype == torch.float32 and scales.ndim <= 1
            shape = "float32 [] or [kv heads]"
        elif values.dtype == torch.int8 and scales.dtype == torch.float32:
            wanted = scales.shape == values.shape[:-1]
            shape = f"float32 {list(values.shape[:-1])}, one a token and head"
        elif values.dtype == torch.int8:
            if scales.dtype == torch.int8:
                check_storage("bfp8", values.shape[-1])
            wanted = scales.dtype == torch.int8 and scales.shape == _bfp_shape(values)
            shape = f"float32 {list(values.shape[:-1])} (int8) or int8 {list(_bfp_shape(values))} (bfp8)"
        else:
            raise ValueError(f"quantized values must be float8_e4m3fn or int8, got {values.dtype}")
        if not wanted:
            raise ValueError(
                f"scales of {values.dtype} values must be {shape}, got {scales.dtype} {list(scales.shape)}"
            )
        if values.device != scales.device:
            raise ValueError(f"values and scales must be on one device, got {values.device} and {scales.device}")

    @property
    def storage(self) -> str:
        """`fp8`, `int8` or `bfp8`."""
        if self.values.dtype == torch.float8_e4m3fn:
            return "fp8"
        return "int8" if self.scales.dtype == torch.float32 else "bfp8"


Stored = Tensor | Quantized


def storage_of(stored: Stored) -> str:
    """The name of a cache's storage type; a plain dtype we do not store in raises ValueError."""
    if isinstance(stored, Quantized):
        return stored.storage
    for name, dtype in PLAIN.items():
        if stored.dtype == dtype:
            return name
    if stored.dtype == torch.float64:  # for references
        return "fp64"
    raise ValueError(f"a cache is stored as one of {', '.join(STORAGES)}; a tensor of {stored.dtype} is none of them")


def values_of(stored: Stored) -> Tensor:
    """The tensor in the cache's shape: what is stored, or the values of what is quantized."""
    return stored.values if isinstance(stored, Quantized) else stored


def check_storage(storage: str, head_dim: int) -> None:
    """Refuse a name we do not know, and a head_dim its groups do not divide."""
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    if storage == "bfp8" and head_dim % BFP_GROUP:
        raise ValueError(f"bfp8 shares an exponent among {BFP_GROUP} values: head_dim {head_dim} is not a multiple")


def bytes_per_token(storage: str, head_dim: int) -> float:
    """Bytes that one head of one token takes, scales included."""
    check_storage(storage, head_dim)
    if storage in PLAIN:
        return float(head_dim * PLAIN[storage].itemsize)
    return head_dim + {"fp8": 0.0, "int8": 4.0, "bfp8": head_dim / BFP_GROUP}[storage]


def quantize(x: Tensor, storage: str, *, scale: Tensor | None = None, head_axis: int = 1) -> Stored:
    """x [..., D] in a storage type. `scale` is fp8's: [] or [Hkv], by default what maps the largest value to 448.

    A value beyond an fp8 scale's range becomes the largest of its sign. `head_axis` says which dimension of x the
    scales of heads belong to: 1 in a cache [B, Hkv, L, D], 2 in a pool [blocks, block_size, Hkv, D].
    """
    check_storage(storage, x.shape[-1])
    if storage in PLAIN:
        return x.to(PLAIN[storage])
    wide = x.float()  # as the kernel that writes a cache does, whatever x is
    if storage == "fp8":
        if scale is None:
            scale = wide.abs().amax() / FP8_MAX if x.numel() else wide.new_ones(())
            scale = torch.where(scale > 0, scale, 1.0)
        values = (wide / _along(scale, x.ndim, head_axis)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return Quantized(values, scale)
    if storage == "int8":
        # Divided by a tensor: by a number, CUDA multiplies with its reciprocal, and its bits would not be the CPU's.
        scales = wide.abs().amax(-1) / wide.new_full((), INT8_MAX)
        steps = (wide / torch.where(scales > 0, scales, 1.0)[..., None]).round()
        # Clamped: a scale near the smallest float32 is coarse, and a quotient may pass 127.
        return Quantized(steps.clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales)
    grouped = wide.unflatten(-1, (-1, BFP_GROUP))
    # frexp gives a mantissa in [0.5, 1): the leading one is worth 2 ** (exponent - 1).
    exponent = (torch.frexp(grouped.abs().amax(-1)).exponent - 1).clamp(-120, 127) - BFP_BITS
    steps = torch.ldexp(grouped, -exponent[..., None]).round().clamp(-INT8_MAX, INT8_MAX)
    return Quantized(steps.to(torch.int8).flatten(-2), exponent.to(torch.int8))


def dequantize(stored: Stored, dtype: torch.dtype, *, head_axis: int = 1) -> Tensor:
    """What a cache stands for, as plain numbers of `dtype` (computed in it, or in float32 if that is wider)."""
    if isinstance(stored, Tensor):
        return stored.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    values = stored.values.to(wide)
    if stored.storage == "fp8":
        return (values * _along(stored.scales.to(wide), values.ndim, head_axis)).to(dtype)
    if stored.storage == "int8":
        return (values * stored.scales.to(wide)[..., None]).to(dtype)
    steps = torch.ldexp(torch.ones_like(stored.scales, dtype=wide), stored.scales.int())
    grouped: Tensor = values.unflatten(-1, (-1, BFP_GROUP)) * steps[..., None]
    return grouped.flatten(-2).to(dtype)


def _along(scale: Tensor, ndim: int, axis: int) -> Tensor:
    """A scale [] or [Hkv], to be multiplied with a tensor whose dimension `axis` is that of the heads."""
    if scale.ndim == 0:
        return scale
    return scale.view([-1 if i == axis % ndim else 1 for i in range(ndim)])


def _bfp_shape(values: Tensor) -> torch.Size:
    return torch.Size([*values.shape[:-1], values.shape[-1] // BFP_GROUP])
