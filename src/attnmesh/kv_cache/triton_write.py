"""Triton kernels that write to the cache: `write_tokens`, and `norm_rope_write`, which includes RMSNorm and RoPE.

`write_tokens` reads keys and values once, quantizes them in registers and stores them with their scales. The bits are
the same as of `quantize`: divisions are exact (Triton's `/` is not), halves round to even, and fp8 is rounded in
integer arithmetic, which also serves GPUs without native fp8.

`norm_rope_write` is one kernel between the QKV projection and attention, in which each number is read and written once.
A program handles one token and a few heads of Q, K or V; norms and the rotation are computed in float32 registers. RoPE
rotates a number together with one that another thread holds: it is loaded a second time, from the L1 cache, instead of
being exchanged between threads. Any RoPE layout is then only another column to load.
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.block.config import AttentionConfig, AttentionWeights, ProjectedKV
from attnmesh.ops.block.norm_rope import CosSin
from attnmesh.ops.dense.triton_tiles import padded
from attnmesh.ops.storage import (
    BFP_BITS,
    BFP_GROUP,
    FP8_MAX,
    INT8_MAX,
    LATENT_GROUP,
    SMALLEST_AMAX,
    Quantized,
    Stored,
    storage_of,
    values_of,
)

_WRITE_ELEMENTS = 2048  # of one token's keys per program
_PREPARE_ELEMENTS = 1024  # per program: few, so that the few tokens of a step fill the GPU
_FP8_MAX = tl.constexpr(FP8_MAX)
_INT8_MAX = tl.constexpr(INT8_MAX)
_BFP_GROUP = tl.constexpr(BFP_GROUP)
_BFP_BITS = tl.constexpr(BFP_BITS)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
# Added and subtracted again, it rounds what is below 2**22 to an integer, halves to even: beyond it a float32 has no
# fraction. (The libraries' `rint` does not exist in the interpreter.)
_ROUNDER = tl.constexpr(1.5 * 2**23)


def write_tokens(keys: Stored, values: Stored, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n, Hkv, T, D] and v [n, Hkv, T, Dv] of any strides to `slots` [n, T]; slots below 0 are skipped."""
    sequences, heads, tokens, dim = k.shape
    value_dim = v.shape[-1]
    if not slots.numel():
        return
    storage = storage_of(keys)
    block_d, block_dv = padded(max(dim, BFP_GROUP)), padded(max(value_dim, BFP_GROUP))
    tile = min(padded(heads), max(1, _WRITE_ELEMENTS // max(block_d, block_dv)))
    with torch.cuda.device_of(slots):
        _write_kernel[(sequences * tokens, triton.cdiv(heads, tile))](
            slots, slots.stride(), tokens, values_of(keys).shape[1], heads,
            k, k.stride(), *pool_pointers(keys), v, v.stride(), *pool_pointers(values),
            STORAGE=storage, D=dim, BLOCK_D=block_d, DV=value_dim, BLOCK_DV=block_dv, HEADS=tile, num_warps=4,
        )  # fmt: skip


def pool_pointers(pool: Stored) -> tuple[Tensor, tuple[int, ...], Tensor | None, tuple[int, ...]]:
    """The values and scales of a pool and their strides; the stride of an fp8 scale shared by all heads is 0."""
    if isinstance(pool, Tensor):
        return pool, pool.stride(), None, (0,)
    assert isinstance(pool, Quantized)
    values = pool.values.view(torch.uint8) if pool.values.dtype == torch.float8_e4m3fn else pool.values
    return values, values.stride(), pool.scales, pool.scales.stride() or (0,)


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
        k_token = k + sequence * k_strides[0] + token * k_strides[2]
        k_place = Place(keys, keys_strides, key_scales, key_scales_strides, block, offset)
        v_place = Place(values, values_strides, value_scales, value_scales_strides, block, offset)
        write_heads(k_token, k_strides[1], k_strides[3], k_place, head, heads, STORAGE, D, BLOCK_D)
        v_token = v + sequence * v_strides[0] + token * v_strides[2]
        write_heads(v_token, v_strides[1], v_strides[3], v_place, head, heads, STORAGE, DV, BLOCK_DV)


# Where the heads of a token are stored.
Place = namedtuple("Place", "pool strides scales scale_strides block offset")


@triton.jit
def write_heads(
    x, head_stride, dim_stride, place, head, heads, STORAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load heads of one token, [HEADS, BLOCK_D], and store them in its block."""
    at = head.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (column < D)[None, :]
    wide = tl.load(x + at[:, None] * head_stride + column[None, :] * dim_stride, mask=mask, other=0.0).to(tl.float32)
    store_heads(wide, place, head, heads, STORAGE, D)


@triton.jit
def store_heads(wide, place, head, heads, STORAGE: tl.constexpr, D: tl.constexpr):
    """Quantize heads in registers, float32 [HEADS, BLOCK_D] and 0 beyond D, and store them in their block."""
    HEADS: tl.constexpr = wide.shape[0]
    BLOCK_D: tl.constexpr = wide.shape[1]
    pool, strides, scales, scale_strides, block, offset = place
    at = head.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = (head < heads)[:, None] & (column < D)[None, :]
    target = (pool + block * strides[0] + offset * strides[1] + at * strides[2])[:, None] + column[None, :]
    if STORAGE == "fp8":
        scale = tl.load(scales + at * scale_strides[0], mask=head < heads, other=1.0)
        tl.store(target, _e4m3(tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))), mask=mask)
    elif STORAGE == "int8":
        amax = tl.max(tl.abs(wide), 1)
        scale = tl.div_rn(amax, tl.full((HEADS,), _INT8_MAX, tl.float32))
        divisor = tl.where(scale > 0.0, scale, 1.0)
        steps = _steps(tl.div_rn(wide, tl.broadcast_to(divisor[:, None], wide.shape)))
        tl.store(target, steps, mask=mask)
        address = scales + block * scale_strides[0] + offset * scale_strides[1] + at * scale_strides[2]
        tl.store(address, scale, mask=head < heads)
    elif STORAGE == "bfp8":
        GROUPS: tl.constexpr = BLOCK_D // _BFP_GROUP
        grouped = tl.reshape(wide, (HEADS, GROUPS, _BFP_GROUP))
        amax = tl.max(tl.abs(grouped), 2)
        # The exponent field of a float32 is that of its leading one, plus 127. For 0, frexp gives 0; this is one less.
        leading = (amax.to(tl.int32, bitcast=True) >> 23) - 127
        leading = tl.where(amax == 0.0, -1, tl.minimum(tl.maximum(leading, -120), 127))
        exponent = leading - _BFP_BITS
        step = ((127 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** -exponent
        steps = tl.reshape(_steps(grouped * step[:, :, None]), (HEADS, BLOCK_D))
        tl.store(target, steps, mask=mask)
        group = tl.arange(0, GROUPS)
        address = scales + block * scale_strides[0] + offset * scale_strides[1] + at * scale_strides[2]
        real = (head < heads)[:, None] & (group < D // _BFP_GROUP)[None, :]
        tl.store(address[:, None] + group[None, :] * scale_strides[3], exponent.to(tl.int8), mask=real)
    else:
        tl.store(target, wide.to(pool.dtype.element_ty), mask=mask)


def write_rows(pool: Stored, slots: Tensor, x: Tensor) -> None:
    """Write x [n, 1, T, D] of any strides to `slots` [n, T] of a pool with one head; slots below 0 are skipped."""
    if not slots.numel():
        return
    tokens, dim = x.shape[2:]
    storage = storage_of(pool)
    group, rope = dim, None
    if isinstance(pool, Quantized):
        group, rope = (LATENT_GROUP if storage == "fp8_ds_mla" else padded(max(dim, 16))), pool.rope
    values, strides, scales, scale_strides = pool_pointers(pool)
    width = values.shape[-1]
    with torch.cuda.device_of(slots):
        _write_rows_kernel[(slots.numel(),)](
            slots, slots.stride(), tokens, values_of(pool).shape[1], x, x.stride(),
            values, strides[:2], scales, (*scale_strides[:2], scale_strides[-1]),
            rope, (0, 0) if rope is None else rope.stride()[:2],
            STORAGE=storage, WIDTH=width, BLOCK=padded(max(width, 16)), GROUP=group, REST=dim - width,
            BLOCK_REST=padded(max(dim - width, 1)), num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _write_rows_kernel(
    slots, slot_strides, tokens, block_size, x, x_strides, pool, strides, scales, scale_strides, rope, rope_strides,
    STORAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    slot = tl.load(slots + sequence * slot_strides[0] + token * slot_strides[1])
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        row = x + sequence * x_strides[0] + token * x_strides[2]
        column = tl.arange(0, BLOCK)
        given = tl.load(row + column * x_strides[3], mask=column < WIDTH, other=0.0)
        target = pool + block * strides[0] + offset * strides[1] + column
        if STORAGE == "fp8_token" or STORAGE == "fp8_ds_mla":
            GROUPS: tl.constexpr = BLOCK // GROUP
            grouped = tl.reshape(given.to(tl.float32), (GROUPS, GROUP))
            scale = _power_of_two_scale(tl.max(tl.abs(grouped), 1))
            codes = tl.reshape(_e4m3(tl.div_rn(grouped, tl.broadcast_to(scale[:, None], grouped.shape))), (BLOCK,))
            tl.store(target, codes, mask=column < WIDTH)
            group = tl.arange(0, GROUPS)
            at = scales + block * scale_strides[0] + offset * scale_strides[1] + group * scale_strides[2]
            tl.store(at, scale, mask=group * GROUP < WIDTH)
        else:
            tl.store(target, given.to(tl.float32).to(pool.dtype.element_ty), mask=column < WIDTH)
        if rope is not None:
            column = tl.arange(0, BLOCK_REST)
            rest = tl.load(row + (WIDTH + column) * x_strides[3], mask=column < REST, other=0.0).to(tl.float32)
            target = rope + block * rope_strides[0] + offset * rope_strides[1] + column
            tl.store(target, rest.to(rope.dtype.element_ty), mask=column < REST)


@triton.jit
def _power_of_two_scale(amax):
    """The smallest power of two that divides `amax` to at most 448, at least 2**-13: as `quantize` computes it."""
    amax = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, _FP8_MAX, tl.float32)), _SMALLEST_AMAX)
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _steps(x):
    """The nearest integer, halves to even, clamped to [-127, 127]."""
    rounded = (x + _ROUNDER) - _ROUNDER
    return tl.minimum(tl.maximum(rounded, -_INT8_MAX), _INT8_MAX).to(tl.int8)


@triton.jit
def _e4m3(x):
    """The nearest e4m3, halves to even, clamped to [-448, 448], as a byte: sign, 4 exponent bits, 3 mantissa bits."""
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


def norm_rope_write(
    q: Tensor, positions: Tensor, new: ProjectedKV | None, config: AttentionConfig, weights: AttentionWeights,
    parts: int, cos_sin: CosSin | None = None,
) -> Tensor:  # fmt: skip
    """As `attnmesh.kv_cache.pools.norm_rope_write`, which validates the arguments."""
    batch, tokens, width = q.shape
    dim, rope = config.head_dim, config.rope
    heads = width // dim
    buffer = q.new_empty(q.numel())
    if not buffer.numel():
        return buffer
    block_d = padded(max(dim, BFP_GROUP))
    tile = max(1, _PREPARE_ELEMENTS // block_d)
    kv_heads = 0 if new is None else values_of(new.keys).shape[2]
    grid = batch * tokens, triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile)
    norms = (
        weights.q_norm_before_rope, weights.q_norm_after_rope, weights.k_norm_before_rope, weights.k_norm_after_rope,
    )  # fmt: skip
    with torch.cuda.device_of(q):
        _prepare_kernel[grid](
            q, q.stride(), buffer, positions, positions.stride(), batch, tokens, parts, heads,
            None if rope is None else rope.on(q.device), *_angles(cos_sin),
            *(None if weight is None else weight.contiguous() for weight in norms), kv_heads, *_cache_arguments(new),
            EPS_BEFORE=getattr(config.norm_before_rope, "eps", None),
            EPS_AFTER=getattr(config.norm_after_rope, "eps", None),
            ROTARY=0 if rope is None else rope.dim, PAIRS=rope is not None and rope.layout == "pairs",
            FACTOR=1.0 if rope is None else rope.factor,
            D=dim, BLOCK_D=block_d, HEADS=tile, num_warps=4,
        )  # fmt: skip
    return buffer


def _angles(cos_sin: CosSin | None) -> tuple[Any, ...]:
    """Cosines, sines and the strides of their rows and tokens; None where the kernel computes them."""
    if cos_sin is None:
        return None, None, (0, 0)
    cos, sin = (x.contiguous() for x in cos_sin)
    return cos, sin, cos.stride()[:2]


def _cache_arguments(new: ProjectedKV | None) -> tuple[Any, ...]:
    """The kernel's arguments from `kv` to STORAGE; None where nothing is written."""
    if new is None:
        nothing = (None, (0,))
        return (*nothing, 0, 0, 0, *nothing, 1, *nothing, *nothing, *nothing, *nothing, None)
    return (
        new.kv, new.kv.stride(), new.rows.start, new.rows.stop, new.first, new.slots, new.slots.stride(),
        values_of(new.keys).shape[1], *pool_pointers(new.keys), *pool_pointers(new.values), storage_of(new.keys),
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens", "parts", "rows_start", "rows_stop", "kv_first"])
def _prepare_kernel(
    q, q_strides, buffer, positions, position_strides, batch, tokens, parts, q_heads, frequencies,
    cosines, sines, angle_strides, q_before, q_after, k_before, k_after, kv_heads,
    kv, kv_strides, rows_start, rows_stop, kv_first, slots, slot_strides, block_size,
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
    if cosines is not None:
        cosines += row * angle_strides[0] + token * angle_strides[1]
        sines += row * angle_strides[0] + token * angle_strides[1]
    if tile < q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        x = q + row * q_strides[0] + token * q_strides[1]
        rotated = _norm_rope_norm(
            x, q_strides[2], head, q_heads, position, frequencies, cosines, sines, q_before, q_after,
            EPS_BEFORE, EPS_AFTER, ROTARY, PAIRS, FACTOR, D, BLOCK_D,
        )  # fmt: skip
        # In the send buffer, [heads, rows of the part, tokens, D], one part after the other.
        part = ((row + 1) * parts - 1) // batch
        start, stop = batch * part // parts, batch * (part + 1) // parts
        address = start * q_heads * tokens + (head.to(tl.int64) * (stop - start) + (row - start)) * tokens + token
        column = tl.arange(0, BLOCK_D)
        mask = (head < q_heads)[:, None] & (column < D)[None, :]
        tl.store(buffer + address[:, None] * D + column[None, :], rotated.to(buffer.dtype.element_ty), mask=mask)
    elif STORAGE is not None:
        if (row >= rows_start) & (row < rows_stop):
            slot = tl.load(slots + (row - rows_start) * slot_strides[0] + token * slot_strides[1])
            if slot >= 0:
                block, offset = slot // block_size, slot % block_size
                kv_tiles = tl.cdiv(kv_heads, HEADS)
                x = kv + (row - rows_start + kv_first) * kv_strides[0] + token * kv_strides[1]
                if tile < q_tiles + kv_tiles:
                    head = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
                    rotated = _norm_rope_norm(
                        x, kv_strides[2], head, kv_heads, position, frequencies, cosines, sines, k_before, k_after,
                        EPS_BEFORE, EPS_AFTER, ROTARY, PAIRS, FACTOR, D, BLOCK_D,
                    )  # fmt: skip
                    rotated = rotated.to(kv.dtype.element_ty).to(tl.float32)
                    place = Place(keys, keys_strides, key_scales, key_scales_strides, block, offset)
                    store_heads(rotated, place, head, kv_heads, STORAGE, D)
                else:
                    head = (tile - q_tiles - kv_tiles) * HEADS + tl.arange(0, HEADS)
                    x += kv_heads * D * kv_strides[2]
                    place = Place(values, values_strides, value_scales, value_scales_strides, block, offset)
                    write_heads(x, D * kv_strides[2], kv_strides[2], place, head, kv_heads, STORAGE, D, BLOCK_D)


@triton.jit
def _norm_rope_norm(
    x, stride, head, heads, position, frequencies, cosines, sines, before, after,
    EPS_BEFORE: tl.constexpr, EPS_AFTER: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr,
    FACTOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """RMSNorm, RoPE and RMSNorm of heads of one token: float32 [HEADS, BLOCK_D], 0 beyond D."""
    column = tl.arange(0, BLOCK_D)
    wide = _load(x, stride, head, heads, column, D)
    if EPS_BEFORE is not None:
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) / D + EPS_BEFORE)[:, None]
        wide = _apply_weight(wide * shrink, before, column, D)
    if ROTARY > 0:
        if PAIRS:
            partner, pair, lower = column ^ 1, column // 2, column % 2 == 0
        else:
            lower = column < ROTARY // 2
            partner, pair = tl.where(lower, column + ROTARY // 2, column - ROTARY // 2), column % (ROTARY // 2)
        rotates = column < ROTARY
        partner = tl.where(rotates, partner, 0)
        other = _load(x, stride, head, heads, partner, D)
        if EPS_BEFORE is not None:
            other = _apply_weight(other * shrink, before, partner, D)
        if cosines is not None:
            cos = tl.load(cosines + pair, mask=rotates, other=1.0).to(tl.float32)
            sin = tl.load(sines + pair, mask=rotates, other=0.0).to(tl.float32)
        else:
            angle = position.to(tl.float32) * tl.load(frequencies + pair, mask=rotates, other=0.0)
            cos = tl.where(rotates, tl.cos(angle) * FACTOR, 1.0)
            sin = tl.where(rotates, tl.sin(angle) * FACTOR, 0.0)
        sin = tl.where(lower, -sin, sin)
        wide = wide * cos[None, :] + other * sin[None, :]
    if EPS_AFTER is not None:
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) / D + EPS_AFTER)[:, None]
        wide = _apply_weight(wide * shrink, after, column, D)
    return wide


@triton.jit
def _load(x, stride, head, heads, column, D: tl.constexpr):
    """Columns of heads of one token, in float32; 0 beyond D."""
    address = head.to(tl.int64)[:, None] * D + column[None, :]
    mask = (head < heads)[:, None] & (column < D)[None, :]
    return tl.load(x + address * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _apply_weight(x, weight, column, D: tl.constexpr):
    if weight is not None:
        x = x * tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    return x
