"""Storage types of a KV cache: plain dtypes, or 8-bit values with scales.

| name | value | scale | bytes per value at head_dim 128 |
|---|---|---|---|
| `bf16` `fp16` `fp32` | itself | none | 2, 2, 4 |
| `fp8` | e4m3 | one float32 per tensor or per kv head | 1 |
| `int8` | -127..127 | one float32 per token and head | 1.031 |
| `bfp8` | -127..127 | one power of two per 16 values | 1.0625 |

The exponents of block floating point (`bfp8`) add a sixteenth to one byte per value.

Sparse attention as in DeepSeek-V3.2 has two more, whose scales `quantize` rounds up to powers of two: `fp8_token`, e4m3
with one float32 scale per token and head, for the keys of an indexer; and `fp8_ds_mla` for the latent of MLA, e4m3 with
one float32 scale per 128 values, followed by a rope part in bfloat16: 656 bytes for a latent of 512 + 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.utils.validation import check_choice, check_dtype, check_positive, check_tensor, check_type, shown

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORAGES = (*PLAIN, "fp8", "int8", "bfp8")
SPARSE_STORAGES = ("fp8_token", "fp8_ds_mla")
FP8_MAX = 448.0  # of e4m3
INT8_MAX = 127.0
BFP_GROUP = 16  # values that share an exponent
LATENT_GROUP = 128  # values of a latent that share a scale
SMALLEST_AMAX = 1e-4  # scales of SPARSE_STORAGES are at least the power of two above it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BFP_BITS = 6  # below the leading one: a value is at most 127 steps of 2 ** (exponent - 6)


@dataclass(frozen=True)
class Quantized:
    """A quantized cache: `values` in the shape of the cache [..., D], and the `scales` to dequantize them.

    The dtypes determine the storage type. `fp8`: float8_e4m3fn with float32 scales [] or [Hkv]. `int8`: int8 with
    float32 scales [...], one per token and head. `bfp8`: int8 with int8 scales [..., D / 16], powers of two: a value is
    `values * 2 ** scales`. Strides are arbitrary: a pool keeps the scales of a head adjacent.

    `fp8_token`: float8_e4m3fn with float32 scales [...], at least two dimensions. `fp8_ds_mla`: float8_e4m3fn [..., L]
    with float32 scales [..., L / 128] and the last features, a `rope` part in bfloat16 [..., R].

    Examples:
        >>> cache = am.Quantized(torch.zeros(1, 2, 100, 64, dtype=torch.int8), torch.ones(1, 2, 100))
        >>> cache.storage
        'int8'
        >>> am.Quantized(cache.values, torch.ones(1, 2, 100, 4, dtype=torch.int8)).storage
        'bfp8'
    """

    values: Tensor
    scales: Tensor
    rope: Tensor | None = None

    def __post_init__(self) -> None:
        values, scales = check_tensor("values", self.values), check_tensor("scales", self.scales)
        if not values.ndim:
            raise ValueError(f"values must be [..., head_dim], got {shown(values)}")
        if self.rope is not None:
            self._check_latent(values, scales, check_tensor("rope", self.rope))
            return
        if values.dtype == torch.float8_e4m3fn:
            fit = scales.dtype == torch.float32 and (scales.ndim <= 1 or scales.shape == values.shape[:-1])
        elif values.dtype == torch.int8 and scales.dtype == torch.float32:
            fit = scales.shape == values.shape[:-1]
        elif values.dtype == torch.int8:
            if scales.dtype == torch.int8:
                check_storage("bfp8", values.shape[-1], "values")
            fit = scales.dtype == torch.int8 and scales.shape == _bfp_shape(values)
        else:
            raise ValueError(f"values must be float8_e4m3fn or int8, got {values.dtype}")
        if not fit:
            per_token = list(values.shape[:-1])
            wanted = f"{per_token} (int8) or int8 {list(_bfp_shape(values))} (bfp8)"
            if values.dtype == torch.float8_e4m3fn:
                wanted = f"[] or [kv heads] (fp8) or {per_token} (fp8_token)"
            raise ValueError(f"scales of {values.dtype} values must be float32 {wanted}, got {shown(scales)}")
        if values.device != scales.device:
            raise ValueError(f"values and scales must be on the same device, got {values.device} and {scales.device}")

    @staticmethod
    def _check_latent(values: Tensor, scales: Tensor, rope: Tensor) -> None:
        *front, width = values.shape
        if values.dtype != torch.float8_e4m3fn or not width or width % LATENT_GROUP:
            raise ValueError(
                f"values beside a rope part must be float8_e4m3fn [..., a multiple of {LATENT_GROUP}], got "
                f"{shown(values)}"
            )
        if scales.dtype != torch.float32 or list(scales.shape) != [*front, width // LATENT_GROUP]:
            raise ValueError(
                f"scales must be float32 {[*front, width // LATENT_GROUP]}, one per {LATENT_GROUP} values, got "
                f"{scales.dtype} {list(scales.shape)}"
            )
        if rope.dtype != torch.bfloat16 or list(rope.shape[:-1]) != front or not 0 < rope.shape[-1] < LATENT_GROUP:
            raise ValueError(
                f"rope must be bfloat16 [{', '.join(map(str, front))}, 1 to {LATENT_GROUP - 1}], got {shown(rope)}"
            )
        if not values.device == scales.device == rope.device:
            raise ValueError(
                f"values, scales and rope must be on the same device, got {values.device}, {scales.device} and "
                f"{rope.device}"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return self.values.shape

    @property
    def storage(self) -> str:
        """`fp8`, `int8`, `bfp8`, `fp8_token` or `fp8_ds_mla`."""
        if self.rope is not None:
            return "fp8_ds_mla"
        if self.values.dtype == torch.float8_e4m3fn:
            return "fp8" if self.scales.ndim <= 1 else "fp8_token"
        return "int8" if self.scales.dtype == torch.float32 else "bfp8"


Stored = Tensor | Quantized


def storage_of(stored: Stored, name: str = "a cache") -> str:
    """The storage type of a cache; raises ValueError for other dtypes."""
    if isinstance(stored, Quantized):
        return stored.storage
    for storage, dtype in PLAIN.items():
        if stored.dtype == dtype:
            return storage
    if stored.dtype == torch.float64:  # for the reference
        return "fp64"
    raise ValueError(f"{name} must be stored as one of {', '.join(STORAGES)}, got a tensor of {stored.dtype}")


def values_of(stored: Stored) -> Tensor:
    """The tensor in the shape of the cache: the cache itself, or the values of a quantized cache.

    (Those of `fp8_ds_mla` lack the rope part: see `width_of`.)
    """
    return stored.values if isinstance(stored, Quantized) else stored


def width_of(stored: Stored) -> int:
    """The number of features of a token and head."""
    if isinstance(stored, Quantized) and stored.rope is not None:
        return stored.values.shape[-1] + stored.rope.shape[-1]
    return values_of(stored).shape[-1]


def check_storage(storage: str, head_dim: int, of: str = "") -> None:
    """Raises ValueError for an unknown storage type, or a head_dim that it does not support."""
    check_choice("storage", storage, (*STORAGES, *SPARSE_STORAGES))
    if storage == "fp8_ds_mla" and (head_dim < LATENT_GROUP or not head_dim % LATENT_GROUP or head_dim % 2):
        raise ValueError(
            f"head_dim must be a multiple of {LATENT_GROUP} plus an even rope part of 2 to {LATENT_GROUP - 2} for "
            f"fp8_ds_mla (576 = 512 + 64 in DeepSeek-V3.2), got {head_dim}{of and ' in ' + of}"
        )
    if storage == "bfp8" and head_dim % BFP_GROUP:
        raise ValueError(f"head_dim must be a multiple of {BFP_GROUP} for bfp8, got {head_dim}{of and ' in ' + of}")


def bytes_per_token(storage: str, head_dim: int) -> float:
    """Bytes per head and token, scales included."""
    check_storage(storage, head_dim)
    if storage in PLAIN:
        return float(head_dim * PLAIN[storage].itemsize)
    if storage == "fp8_ds_mla":
        return float(head_dim // LATENT_GROUP * (LATENT_GROUP + 4) + 2 * (head_dim % LATENT_GROUP))
    return head_dim + {"fp8": 0.0, "fp8_token": 4.0, "int8": 4.0, "bfp8": head_dim / BFP_GROUP}[storage]


def quantize(x: Tensor, storage: str, *, scale: Tensor | None = None, head_axis: int = 1) -> Stored:
    """x [..., D] in a storage type.

    `scale`, [] or [Hkv], is for fp8 only; by default it maps the largest value to 448. Values outside the range of an
    fp8 scale are clamped. `head_axis` is the dimension of x that indexes kv heads: 1 in a cache [B, Hkv, L, D], 2 in a
    pool [blocks, block_size, Hkv, D].

    Examples:
        >>> keys, values = (am.quantize(torch.randn(1, 2, 100, 64), "int8") for _ in "kv")
        >>> keys.values.shape, keys.scales.shape  # int8, and one scale per token and head
        (torch.Size([1, 2, 100, 64]), torch.Size([1, 2, 100]))
        >>> am.decode_attention(torch.randn(1, 8, 1, 64), keys, values).shape
        torch.Size([1, 8, 1, 64])
        >>> am.quantize(torch.randn(1, 2, 100, 64), "fp16").dtype
        torch.float16
    """
    _check_values("x", x)
    check_storage(storage, x.shape[-1], "x")
    axis = _head_axis(x, head_axis)
    if scale is not None:
        _check_scale(x, storage, scale, axis)
    if storage in PLAIN:
        return x.to(PLAIN[storage])
    wide = x.float()  # as in the kernel that writes a cache, for any dtype of x
    if storage == "fp8":
        if scale is None:
            scale = wide.abs().amax() / FP8_MAX if x.numel() else wide.new_ones(())
            scale = torch.where(scale > 0, scale, 1.0)
        values = (wide / _along(scale, x.ndim, axis)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return Quantized(values, scale)
    if storage in SPARSE_STORAGES:
        return _quantize_sparse(wide, storage)
    if storage == "int8":
        # Divide by a tensor: for a Python number CUDA multiplies by the reciprocal, whose bits differ from the CPU's.
        scales = wide.abs().amax(-1) / wide.new_full((), INT8_MAX)
        steps = (wide / torch.where(scales > 0, scales, 1.0)[..., None]).round()
        # Clamped: a scale near the smallest float32 is coarse, and a quotient may exceed 127.
        return Quantized(steps.clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales)
    grouped = wide.unflatten(-1, (-1, BFP_GROUP))
    # frexp returns a mantissa in [0.5, 1): the leading bit is worth 2 ** (exponent - 1).
    exponent = (torch.frexp(grouped.abs().amax(-1)).exponent - 1).clamp(-120, 127) - BFP_BITS
    steps = torch.ldexp(grouped, -exponent[..., None]).round().clamp(-INT8_MAX, INT8_MAX)
    return Quantized(steps.to(torch.int8).flatten(-2), exponent.to(torch.int8))


def _quantize_sparse(x: Tensor, storage: str) -> Quantized:
    """Float32 x [..., D] as `fp8_token` or `fp8_ds_mla`, with scales as FlashMLA and DeepSeek-V3.2 choose them."""
    if storage == "fp8_token":
        if x.ndim < 3:
            raise ValueError(f"x must be at least [tokens, heads, head_dim] for fp8_token, got {list(x.shape)}")
        scales = _power_of_two_scales(x)
        return Quantized((x / scales[..., None]).to(torch.float8_e4m3fn), scales)
    width = x.shape[-1] // LATENT_GROUP * LATENT_GROUP
    grouped = x[..., :width].unflatten(-1, (-1, LATENT_GROUP))
    scales = _power_of_two_scales(grouped)
    values = (grouped / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    return Quantized(values, scales, x[..., width:].to(torch.bfloat16))


def _power_of_two_scales(x: Tensor) -> Tensor:
    """The smallest powers of two by which the values of the last dimension divide to at most 448; at least 2**-13."""
    if not x.shape[-1]:
        return x.new_ones(x.shape[:-1])
    amax = (x.abs().amax(-1) / x.new_full((), FP8_MAX)).clamp(min=SMALLEST_AMAX)
    bits = amax.contiguous().view(torch.int32)
    # One more than the exponent unless the number is a power of two; 255 is that of infinity, which becomes NaN.
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(max=255)
    return (exponent << 23).to(torch.int32).view(torch.float32)


def dequantize(stored: Stored, dtype: torch.dtype, *, head_axis: int = 1) -> Tensor:
    """The values of a cache in `dtype`, computed in the wider of `dtype` and float32."""
    check_type("stored", stored, (Tensor, Quantized))
    check_dtype("dtype", dtype)
    if not values_of(stored).ndim:
        raise ValueError(f"stored must be [..., head_dim], got {shown(stored)}")
    axis = _head_axis(values_of(stored), head_axis)
    if isinstance(stored, Tensor):
        if not check_tensor("stored", stored).is_floating_point():
            raise ValueError(f"stored must be floating point or Quantized, got {shown(stored)}")
        return stored.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    values = stored.values.to(wide)
    if stored.storage == "fp8":
        if stored.scales.ndim and len(stored.scales) != values.shape[axis]:
            raise ValueError(
                f"head_axis must be the dimension of {len(stored.scales)} kv heads, one per scale, got {head_axis} of "
                f"{list(values.shape)}"
            )
        return (values * _along(stored.scales.to(wide), values.ndim, axis)).to(dtype)
    if stored.rope is not None:
        grouped = values.unflatten(-1, (-1, LATENT_GROUP)) * stored.scales.to(wide)[..., None]
        return torch.cat([grouped.flatten(-2).to(dtype), stored.rope.to(dtype)], -1)
    if stored.storage in ("int8", "fp8_token"):
        return (values * stored.scales.to(wide)[..., None]).to(dtype)
    steps = torch.ldexp(torch.ones_like(stored.scales, dtype=wide), stored.scales.int())
    in_groups: Tensor = values.unflatten(-1, (-1, BFP_GROUP)) * steps[..., None]
    return in_groups.flatten(-2).to(dtype)


# Caches of other projects, as bytes.


def unpack_latent(cache: Tensor, rope_dim: int = 64) -> Quantized:
    """The `fp8_ds_mla` cache in bytes [..., L + L / 32 + 2 * rope_dim], as FlashMLA and vLLM lay it out; not copied.

    `cache` is uint8 or float8_e4m3fn, [num_blocks, block_size, 1, 656] for a latent of 512 values: the values, then one
    float32 scale per 128 of them, then the rope part in bfloat16.

    Examples:
        >>> cache = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
        >>> latent = am.sparse.unpack_latent(cache)
        >>> latent.storage, latent.values.shape, latent.scales.shape, latent.rope.shape
        ('fp8_ds_mla', torch.Size([2, 64, 1, 512]), torch.Size([2, 64, 1, 4]), torch.Size([2, 64, 1, 64]))
    """
    raw = _check_bytes(cache, 1)
    check_positive(rope_dim=rope_dim)
    groups, rest = divmod(raw.shape[-1] - 2 * rope_dim, LATENT_GROUP + 4)
    if groups < 1 or rest or rope_dim % 2 or rope_dim >= LATENT_GROUP:
        raise ValueError(
            f"cache must have {LATENT_GROUP + 4} bytes per {LATENT_GROUP} values and {2 * rope_dim} for an even "
            f"rope_dim={rope_dim} below {LATENT_GROUP} in its last dimension (656 for 512 + 64), got {shown(cache)}"
        )
    width = groups * LATENT_GROUP
    values, scales, rope = raw.split([width, 4 * groups, 2 * rope_dim], -1)
    return Quantized(values.view(torch.float8_e4m3fn), _view(scales, torch.float32), _view(rope, torch.bfloat16))


def unpack_index_keys(cache: Tensor, block_size: int) -> Quantized:
    """The `fp8_token` keys [num_blocks, block_size, 1, D] in bytes [num_blocks, ...] as DeepGEMM and vLLM lay them out.

    A block of `cache`, uint8 or float8_e4m3fn, has block_size * (D + 4) bytes in any shape: the values of all its
    tokens, then their float32 scales. Not copied.

    Examples:
        >>> keys = am.sparse.unpack_index_keys(torch.zeros(2, 64 * (128 + 4), dtype=torch.uint8), block_size=64)
        >>> keys.storage, keys.values.shape, keys.scales.shape
        ('fp8_token', torch.Size([2, 64, 1, 128]), torch.Size([2, 64, 1]))
    """
    check_positive(block_size=block_size)
    raw = _check_bytes(cache, 2)
    if not raw[:1].is_contiguous():
        raise ValueError(f"cache must have contiguous blocks, got strides {raw.stride()}")
    raw = raw.as_strided((raw.shape[0], raw[:1].numel()), (raw.stride(0), 1))
    width, rest = divmod(raw.shape[1], block_size)
    if rest or width <= 4 or width % 4:
        raise ValueError(
            f"cache must have block_size={block_size} times D + 4 bytes per block, D a multiple of 4, got "
            f"{shown(cache)}"
        )
    values, scales = raw.split([block_size * (width - 4), block_size * 4], 1)
    values = values.view(torch.float8_e4m3fn).unflatten(1, (block_size, 1, width - 4))
    return Quantized(values, _view(scales, torch.float32).unflatten(1, (block_size, 1)))


def _check_bytes(cache: object, ndim: int) -> Tensor:
    cache = check_tensor("cache", cache)
    if cache.dtype not in (torch.uint8, torch.float8_e4m3fn) or cache.ndim < ndim:
        raise ValueError(f"cache must be uint8 or float8_e4m3fn of {ndim} or more dimensions, got {shown(cache)}")
    return cache.view(torch.uint8)


def _view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of `dtype`, not copied."""
    if raw.stride(-1) != 1 or any(n % dtype.itemsize for n in (*raw.stride()[:-1], raw.storage_offset())):
        raise ValueError(
            f"cache must have a contiguous last dimension and strides in multiples of {dtype.itemsize} bytes, got "
            f"{raw.stride()}"
        )
    return raw.view(dtype)


def _along(scale: Tensor, ndim: int, axis: int) -> Tensor:
    """A scale [] or [Hkv], reshaped to broadcast along dimension `axis` of a tensor."""
    return scale.view([-1 if i == axis else 1 for i in range(ndim)])


def _check_values(name: str, x: object) -> None:
    tensor = check_tensor(name, x)
    if not tensor.ndim or not tensor.shape[-1] or tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} must be floating point [..., head_dim] of 16, 32 or 64 bits, got {shown(x)}")


def _head_axis(x: Tensor, axis: object) -> int:
    """`head_axis` as an index from 0. The default may be beyond a tensor without a dimension of heads."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < max(2, x.ndim):
        raise ValueError(f"head_axis must be a dimension of {list(x.shape)}, got {shown(axis)}")
    return axis % x.ndim


def _check_scale(x: Tensor, storage: str, scale: object, axis: int) -> None:
    if storage != "fp8":
        raise ValueError(f"scale must be None for storage {storage!r}, which computes its scales, got {shown(scale)}")
    check_tensor("scale", scale)
    assert isinstance(scale, Tensor)
    if scale.dtype != torch.float32 or scale.shape not in ((), (x.shape[axis],)) or scale.device != x.device:
        raise ValueError(
            f"scale must be float32 [] or [{x.shape[axis]}], one per kv head of x, on {x.device}, got {shown(scale)}"
        )
    if scale.device.type == "cpu" and not (scale > 0).all():  # free to read
        raise ValueError(f"scale must be positive, got {scale.tolist()}")


def _bfp_shape(values: Tensor) -> torch.Size:
    return torch.Size([*values.shape[:-1], values.shape[-1] // BFP_GROUP])
