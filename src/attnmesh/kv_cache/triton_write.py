"""Writing to the cache in Triton: keys and values are read once, quantized in registers and stored with their scales.

The bits are those of `quantize`. So divisions are exact ones (Triton's `/` is not), halves round to even, and fp8 is
rounded by hand, which also serves GPUs without fp8 of their own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.dense.triton_tiles import padded
from attnmesh.ops.storage import BFP_BITS, BFP_GROUP, FP8_MAX, INT8_MAX, Quantized, Stored, storage_of, values_of

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


_ELEMENTS = 2048  # of one token's keys per program
_FP8_MAX = tl.constexpr(FP8_MAX)
_INT8_MAX = tl.constexpr(INT8_MAX)
_BFP_GROUP = tl.constexpr(BFP_GROUP)
_BFP_BITS = tl.constexpr(BFP_BITS)
# Added and subtracted again, it rounds what is below 2**22 to an integer, halves to even: beyond it a float32 has no
# fraction. (The libraries' `rint` does not exist in the interpreter.)
_ROUNDER = tl.constexpr(1.5 * 2**23)


def write_tokens(keys: Stored, values: Stored, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n, Hkv, T, D] and v [n, Hkv, T, Dv] of any strides to `slots` [n, T]; those below 0 are skipped."""
    sequences, heads, tokens, dim = k.shape
    value_dim = v.shape[-1]
    if not slots.numel():
        return
    storage = storage_of(keys)
    block_d, block_dv = padded(max(dim, BFP_GROUP)), padded(max(value_dim, BFP_GROUP))
    tile = min(padded(heads), max(1, _ELEMENTS // max(block_d, block_dv)))
    with torch.cuda.device_of(slots):
        _write_kernel[(sequences * tokens, triton.cdiv(heads, tile))](
            slots, slots.stride(), tokens, values_of(keys).shape[1], heads,
            k, k.stride(), *pool_pointers(keys), v, v.stride(), *pool_pointers(values),
            STORAGE=storage, D=dim, BLOCK_D=block_d, DV=value_dim, BLOCK_DV=block_dv, HEADS=tile, num_warps=4,
        )  # fmt: skip


def pool_pointers(pool: Stored) -> tuple[Tensor, tuple[int, ...], Tensor | None, tuple[int, ...]]:
    """The values and scales of a pool and their strides; an fp8 scale by head, stride 0 where they share it."""
    if isinstance(pool, Tensor):
        return pool, pool.stride(), None, (0,)
    assert isinstance(pool, Quantized)
    if pool.storage == "fp8":
        return pool.values.view(torch.uint8), pool.values.stride(), pool.scales, pool.scales.stride() or (0,)
    return pool.values, pool.values.stride(), pool.scales, pool.scales.stride()


@triton.jit(do_not_specialize=["tokens"])
def _write_kernel(
    slots, slot_strides, tokens, block_size, heads,
    k, k_strides, keys, keys_strides, key_scales, key_scales_strides,
    v, v_strides, values, values_strides, value_scales, value_scales_strides,
    STORAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    slot = tl.load(slots + sequence * slot_strides[0] + token * slot_strides[1])
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        block, offset = slot // block_size, slot % block_size
        write_heads(
            k + sequence * k_strides[0] + token * k_strides[2], k_strides[1], k_strides[3], keys, keys_strides,
            key_scales, key_scales_strides, block, offset, head, heads, STORAGE, D, BLOCK_D, HEADS,
        )  # fmt: skip
        write_heads(
            v + sequence * v_strides[0] + token * v_strides[2], v_strides[1], v_strides[3], values, values_strides,
            value_scales, value_scales_strides, block, offset, head, heads, STORAGE, DV, BLOCK_DV, HEADS,
        )  # fmt: skip


@triton.jit
def write_heads(
    x, head_stride, dim_stride, pool, pool_strides, scales, scales_strides, block, offset, head, heads,
    STORAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token's HEADS heads, [HEADS, BLOCK_D], to where its block keeps them."""
    at = head.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (column < D)[None, :]
    wide = tl.load(x + at[:, None] * head_stride + column[None, :] * dim_stride, mask=mask, other=0.0).to(tl.float32)
    store_heads(
        wide, pool, pool_strides, scales, scales_strides, block, offset, head, heads, STORAGE, D, BLOCK_D, HEADS
    )


@triton.jit
def store_heads(
    wide, pool, pool_strides, scales, scales_strides, block, offset, head, heads,
    STORAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Heads that are in registers, float32 [HEADS, BLOCK_D] and 0 beyond D, quantized to where the block keeps them."""
    at = head.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (column < D)[None, :]
    row = pool + block * pool_strides[0] + offset * pool_strides[1] + at * pool_strides[2]
    target = row[:, None] + column[None, :]
    if STORAGE == "fp8":
        scale = tl.load(scales + at * scales_strides[0], mask=head < heads, other=1.0)
        tl.store(target, _e4m3(tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))), mask=mask)
    elif STORAGE == "int8":
        peak = tl.max(tl.abs(wide), 1)
        scale = tl.div_rn(peak, tl.full((HEADS,), _INT8_MAX, tl.float32))
        divisor = tl.where(scale > 0.0, scale, 1.0)
        steps = _steps(tl.div_rn(wide, tl.broadcast_to(divisor[:, None], wide.shape)))
        tl.store(target, steps, mask=mask)
        place = scales + block * scales_strides[0] + offset * scales_strides[1] + at * scales_strides[2]
        tl.store(place, scale, mask=head < heads)
    elif STORAGE == "bfp8":
        GROUPS: tl.constexpr = BLOCK_D // _BFP_GROUP
        grouped = tl.reshape(wide, (HEADS, GROUPS, _BFP_GROUP))
        peak = tl.max(tl.abs(grouped), 2)
        # The exponent field of a float32 is that of its leading one, plus 127; frexp says 0 for a 0, ours is one less.
        leading = (peak.to(tl.int32, bitcast=True) >> 23) - 127
        leading = tl.where(peak == 0.0, -1, tl.minimum(tl.maximum(leading, -120), 127))
        exponent = leading - _BFP_BITS
        step = ((127 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** -exponent
        steps = tl.reshape(_steps(grouped * step[:, :, None]), (HEADS, BLOCK_D))
        tl.store(target, steps, mask=mask)
        group = tl.arange(0, GROUPS)
        place = scales + block * scales_strides[0] + offset * scales_strides[1] + at * scales_strides[2]
        real = (head < heads)[:, None] & (group < D // _BFP_GROUP)[None, :]
        tl.store(place[:, None] + group[None, :] * scales_strides[3], exponent.to(tl.int8), mask=real)
    else:
        tl.store(target, wide.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _steps(x):
    """The nearest integer, halves to even, at most 127 either way."""
    rounded = (x + _ROUNDER) - _ROUNDER
    return tl.minimum(tl.maximum(rounded, -_INT8_MAX), _INT8_MAX).to(tl.int8)


@triton.jit
def _e4m3(x):
    """The nearest e4m3, halves to even, at most 448 either way, as a byte: sign, 4 bits of exponent, 3 of mantissa."""
    size = tl.minimum(tl.abs(x), _FP8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    # Round off 20 of the 23 bits of the mantissa; a carry moves on into the exponent, whose bias is 7, not 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 they are multiples of 2**-9, and the eighth multiple is the code of 2**-6.
    small = ((size * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
