"""Writing to the cache in Triton: keys and values are read once, quantized in registers and stored with their scales.

The bits are those of `quantize`. So divisions are exact ones (Triton's `/` is not), halves round to even, and fp8 is
rounded by hand, which also serves GPUs without fp8 of their own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.kv_cache.prepare import ProjectedTokens
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.stages import Norm
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


# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


_ELEMENTS_triton_prepare = 1024  # of one token per program: few, since there are few tokens and they should spread


def prepare(
    q: Tensor, positions: Tensor, new: ProjectedTokens | None, config: AttentionConfig, weights: AttentionWeights,
    parts: int,
) -> Tensor:  # fmt: skip
    """As `attnmesh.kv_cache.prepare.prepare`, which has checked the arguments."""
    batch, tokens, width = q.shape
    dim, rope = config.head_dim, config.rope
    heads = width // dim
    message = q.new_empty(q.numel())
    if not message.numel():
        return message
    block_d = padded(max(dim, BFP_GROUP))
    tile = max(1, _ELEMENTS_triton_prepare // block_d)
    kv_heads = 0 if new is None else values_of(new.keys).shape[2]
    grid = batch * tokens, triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile)
    with torch.cuda.device_of(q):
        _prepare_kernel[grid](
            q, q.stride(), message, positions, positions.stride(), batch, tokens, parts, heads,
            None if rope is None else rope.on(q.device),
            weights.q_norm_before_rope, weights.q_norm_after_rope,
            weights.k_norm_before_rope, weights.k_norm_after_rope,
            kv_heads, *_written(new),
            EPS_BEFORE=_eps(config.norm_before_rope), EPS_AFTER=_eps(config.norm_after_rope),
            ROTARY=0 if rope is None else rope.dim, PAIRS=rope is not None and rope.layout == "pairs",
            FACTOR=1.0 if rope is None else rope.factor,
            D=dim, BLOCK_D=block_d, HEADS=tile, num_warps=4,
        )  # fmt: skip
    return message


def _written(new: ProjectedTokens | None) -> tuple[Any, ...]:
    """The kernel's arguments about the cache, down to the name of its storage; None where nothing is written."""
    if new is None:
        nothing = (None, (0,))
        return (*nothing, 0, 0, 0, *nothing, 1, *nothing, *nothing, *nothing, *nothing, None)
    return (
        new.kv, new.kv.stride(), new.own.start, new.own.stop, new.first, new.slots, new.slots.stride(),
        values_of(new.keys).shape[1], *pool_pointers(new.keys), *pool_pointers(new.values), storage_of(new.keys),
    )  # fmt: skip


def _eps(norm: Norm | None) -> float | None:
    return None if norm is None else norm.eps


@triton.jit(do_not_specialize=["batch", "tokens", "parts", "own_start", "own_stop", "kv_first"])
def _prepare_kernel(
    q, q_strides, message, positions, position_strides, batch, tokens, parts, q_heads, frequencies,
    q_before, q_after, k_before, k_after, kv_heads,
    kv, kv_strides, own_start, own_stop, kv_first, slots, slot_strides, block_size,
    keys, keys_strides, key_scales, key_scales_strides, values, values_strides, value_scales, value_scales_strides,
    STORAGE: tl.constexpr, EPS_BEFORE: tl.constexpr, EPS_AFTER: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, FACTOR: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(q_heads, HEADS)
    position = tl.maximum(tl.load(positions + row * position_strides[0] + token * position_strides[1]), 0)
    if tile < q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        x = q + row * q_strides[0] + token * q_strides[1]
        turned = _stages(
            x, q_strides[2], head, q_heads, position, frequencies, q_before, q_after,
            EPS_BEFORE, EPS_AFTER, ROTARY, PAIRS, FACTOR, D, BLOCK_D,
        )  # fmt: skip
        _send(turned, message, row, token, head, q_heads, batch, tokens, parts, D, BLOCK_D)
    elif STORAGE is not None:
        if (row >= own_start) & (row < own_stop):
            slot = tl.load(slots + (row - own_start) * slot_strides[0] + token * slot_strides[1])
            if slot >= 0:
                block, offset = slot // block_size, slot % block_size
                kv_tiles = tl.cdiv(kv_heads, HEADS)
                x = kv + (row - own_start + kv_first) * kv_strides[0] + token * kv_strides[1]
                if tile < q_tiles + kv_tiles:
                    head = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
                    turned = _stages(
                        x, kv_strides[2], head, kv_heads, position, frequencies, k_before, k_after,
                        EPS_BEFORE, EPS_AFTER, ROTARY, PAIRS, FACTOR, D, BLOCK_D,
                    )  # fmt: skip
                    turned = turned.to(kv.dtype.element_ty).to(tl.float32)
                    store_heads(
                        turned, keys, keys_strides, key_scales, key_scales_strides, block, offset, head, kv_heads,
                        STORAGE, D, BLOCK_D, HEADS,
                    )  # fmt: skip
                else:
                    head = (tile - q_tiles - kv_tiles) * HEADS + tl.arange(0, HEADS)
                    write_heads(
                        x + kv_heads * D * kv_strides[2], D * kv_strides[2], kv_strides[2], values, values_strides,
                        value_scales, value_scales_strides, block, offset, head, kv_heads, STORAGE, D, BLOCK_D, HEADS,
                    )  # fmt: skip


@triton.jit
def _stages(
    x, stride, head, heads, position, frequencies, before, after,
    EPS_BEFORE: tl.constexpr, EPS_AFTER: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr,
    FACTOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Heads of one token, normed, turned and normed again: float32 [HEADS, BLOCK_D], 0 beyond D."""
    column = tl.arange(0, BLOCK_D)
    wide = _load(x, stride, head, heads, column, D)
    if EPS_BEFORE is not None:
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) / D + EPS_BEFORE)[:, None]
        wide = _weighed(wide * shrink, before, column, D)
    if ROTARY > 0:
        if PAIRS:
            partner, pair, lower = column ^ 1, column // 2, column % 2 == 0
        else:
            lower = column < ROTARY // 2
            partner, pair = tl.where(lower, column + ROTARY // 2, column - ROTARY // 2), column % (ROTARY // 2)
        turning = column < ROTARY
        partner = tl.where(turning, partner, 0)
        other = _load(x, stride, head, heads, partner, D)
        if EPS_BEFORE is not None:
            other = _weighed(other * shrink, before, partner, D)
        angle = position.to(tl.float32) * tl.load(frequencies + pair, mask=turning, other=0.0)
        cos = tl.where(turning, tl.cos(angle) * FACTOR, 1.0)
        sin = tl.where(turning, tl.where(lower, -tl.sin(angle), tl.sin(angle)) * FACTOR, 0.0)
        wide = wide * cos[None, :] + other * sin[None, :]
    if EPS_AFTER is not None:
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) / D + EPS_AFTER)[:, None]
        wide = _weighed(wide * shrink, after, column, D)
    return wide


@triton.jit
def _load(x, stride, head, heads, column, D: tl.constexpr):
    """Some columns of some heads of one token, in float32; 0 beyond D."""
    place = head.to(tl.int64)[:, None] * D + column[None, :]
    mask = (head < heads)[:, None] & (column < D)[None, :]
    return tl.load(x + place * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weighed(x, weight, column, D: tl.constexpr):
    if weight is not None:
        x = x * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _send(x, message, row, token, head, heads, batch, tokens, parts, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries into the message: [heads, rows of the part, tokens, D], one part after the other."""
    part = ((row + 1) * parts - 1) // batch
    start, stop = batch * part // parts, batch * (part + 1) // parts
    part_begins = start * heads * tokens
    place = part_begins + (head.to(tl.int64) * (stop - start) + (row - start)) * tokens + token
    column = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (column < D)[None, :]
    tl.store(message + place[:, None] * D + column[None, :], x.to(message.dtype.element_ty), mask=mask)
