"""Everything between the projections and attention in one Triton kernel: each number is read once and written once.

A program has one token and a few heads of Q, K or V. Norms and the rotation happen in float32 registers. A number turns
together with a partner in another register or thread: the partner is loaded a second time, from the cache next to the
processor, instead of being passed around. That way any layout is only another column to load.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.kv_cache.projected import ProjectedTokens
from attnmesh.kv_cache.triton_write import pool_pointers, store_heads, write_heads
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.stages import Norm
from attnmesh.ops.dense.triton_tiles import padded
from attnmesh.ops.storage import BFP_GROUP, storage_of, values_of

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


_ELEMENTS = 1024  # of one token per program: few, since there are few tokens and they should spread


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
    tile = max(1, _ELEMENTS // block_d)
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
