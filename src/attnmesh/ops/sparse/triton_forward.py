"""The forward pass of sparse attention in Triton: any number of heads, any head dim up to 576.

A program takes a tile of heads of one query row and iterates over the slots of the row. A key is gathered once: where
the values are the first columns of the keys, the tile loaded for the scores is also the tile of the values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.dense.triton_tiles import blocks_of
from attnmesh.ops.launch import GPU, Launch, cdiv, gpu_of, next_power_of_2, prepare
from attnmesh.ops.sparse.arguments import SparseCall

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
NOT_SPECIALIZED = ["heads", "k_offset", "scale_log2", "topk"]


class ForwardTiles(NamedTuple):
    """Heads and keys of a tile, and the warps and pipeline stages of a program."""

    heads: int
    keys: int
    warps: int
    stages: int


_WIDE = {16: ForwardTiles(16, 64, 4, 2), 32: ForwardTiles(32, 64, 8, 2), 64: ForwardTiles(64, 64, 8, 2)}
_RESERVED = 1024  # bytes of shared memory for reductions


def launch(
    call: SparseCall, sinks: Tensor | None, results: tuple[Tensor, ...], *, tiles: ForwardTiles | None = None
) -> Launch:
    """The first launch of a `Forward`."""
    q, k, v, indices, (lo, hi, slots, k_offset), scale, d_v, *_ = call
    (s_q, heads, d), gpu = q.shape, gpu_of(q.device)
    main, tail = blocks_of(d)
    values = v
    if v is None and 2 * d_v <= main:  # loaded separately: less work than a product with the whole key
        values = k[:, :d_v]
    value_main, value_tail = (main, tail if d_v > main else 0) if values is None else blocks_of(d_v)
    if tiles is None:
        width = main + tail + (0 if values is None else value_main + value_tail)
        tiles = pick_tiles(heads, main, width, q.dtype, separate=values is not None, gpu=gpu)
    args = (
        q, q.stride(0), q.stride(1), k, k.stride(0), values, 0 if values is None else values.stride(0),
        indices, indices.stride(0), lo, hi, slots, sinks, *results, *(None,) * (3 - len(results)),
        heads, indices.shape[1], k_offset, scale * LOG2_E,
    )  # fmt: skip
    return prepare(
        _forward_kernel, (s_q * cdiv(heads, tiles.heads),), args, (q, k, v, indices, lo, hi, slots, sinks, *results),
        D=d, MAIN=main, TAIL=tail, D_V=d_v, VALUE_MAIN=value_main, VALUE_TAIL=value_tail,
        HEADS=tiles.heads, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def pick_tiles(heads: int, main: int, width: int, dtype: torch.dtype, *, separate: bool, gpu: GPU) -> ForwardTiles:
    """The tiles for these heads and this main width that fit in the registers and the shared memory of a GPU.

    `width` is the number of elements of a key in shared memory, including its value if that is `separate`.
    """
    heads = min(64, max(16, next_power_of_2(heads)))
    if dtype == torch.float32:
        tiles = ForwardTiles(16, 16, 8, 2) if main > 64 else ForwardTiles(16, 32, 4, 2)
    elif main > 256:
        # 64 keys per tile take three quarters of the time of 32 (H200, 16 and 128 heads).
        tiles = ForwardTiles(min(heads, 32), 32, 4 if heads == 16 else 8, 2) if separate else _WIDE[heads]
        if heads == 64 and not separate and gpu.capability >= 100:
            tiles = tiles._replace(stages=1)  # with more, the compiler moves the sums to shared memory, too
    else:
        tiles = ForwardTiles(heads, 64, 8 if main == 256 and heads == 64 else 4, 2)
    while (tiles.heads + tiles.stages * tiles.keys) * width * dtype.itemsize + _RESERVED > gpu.shared_memory:
        if tiles.keys > 16:
            tiles = tiles._replace(keys=tiles.keys // 2)
        elif tiles.heads > 16:
            tiles = tiles._replace(heads=tiles.heads // 2)
        else:
            break
    return tiles


@triton.jit
def softmax_step(scores, valid, scale_log2, row_max, total):
    """The weights of a tile of scores, the factor of the sums so far, and the new maximum, in base 2, and sum."""
    scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # No valid key yet: subtract 0, because -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    return weights, rescale, new_max, total * rescale + tl.sum(weights, 1)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _forward_kernel(
    q, q_row, q_head, k, k_row, v, v_row, indices, indices_row, lo, hi, slots, sinks, out, lse, top,
    heads, topk, k_offset, scale_log2,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    D_V: tl.constexpr, VALUE_MAIN: tl.constexpr, VALUE_TAIL: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One query row, one tile of its heads. Neighboring programs share a row: its keys are in L2 for the second."""
    head_tiles = tl.cdiv(heads, HEADS)
    row = (tl.program_id(0) // head_tiles).to(tl.int64)
    head = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS)
    real = (head < heads)[:, None]

    main = tl.arange(0, MAIN)[None, :]
    q_tile = q + row * q_row + head[:, None].to(tl.int64) * q_head
    q_main = tl.load(q_tile + main, mask=real & (main < D), other=0.0)
    if TAIL > 0:
        tail = MAIN + tl.arange(0, TAIL)[None, :]
        q_tail = tl.load(q_tile + tail, mask=real & (tail < D), other=0.0)

    # The running state: `acc / total` is the output, `row_max + log2(total)` the lse in base 2.
    acc = tl.zeros((HEADS, VALUE_MAIN), tl.float32)
    if VALUE_TAIL > 0:
        acc_tail = tl.zeros((HEADS, VALUE_TAIL), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    row_max = tl.full((HEADS,), float("-inf"), tl.float32)

    first = tl.load(lo + row)
    end = tl.load(hi + row)
    slot_count = tl.minimum(tl.load(slots + row), topk)
    row_indices = indices + row * indices_row
    for slot_begin in range(0, slot_count, KEYS):
        slot = slot_begin + tl.arange(0, KEYS)
        # A slot past the end reads as an index that is never valid.
        key = tl.load(row_indices + slot, mask=slot < slot_count, other=-2147483648)
        valid = (key >= first) & (key < end) & (slot < slot_count)
        k_index = key.to(tl.int64) - k_offset
        k_rows = k + k_index[:, None] * k_row
        k_main = tl.load(k_rows + main, mask=valid[:, None] & (main < D), other=0.0)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if TAIL > 0:
            k_tail = tl.load(k_rows + tail, mask=valid[:, None] & (tail < D), other=0.0)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        weights, rescale, row_max, total = softmax_step(scores, valid, scale_log2, row_max, total)
        weights = weights.to(k.dtype.element_ty)
        if v is None:
            acc = tl.dot(weights, k_main, acc * rescale[:, None], input_precision="ieee")
            if VALUE_TAIL > 0:
                acc_tail = tl.dot(weights, k_tail, acc_tail * rescale[:, None], input_precision="ieee")
        else:
            v_rows = v + k_index[:, None] * v_row
            column = tl.arange(0, VALUE_MAIN)[None, :]
            v_main = tl.load(v_rows + column, mask=valid[:, None] & (column < D_V), other=0.0)
            acc = tl.dot(weights, v_main, acc * rescale[:, None], input_precision="ieee")
            if VALUE_TAIL > 0:
                column = VALUE_MAIN + tl.arange(0, VALUE_TAIL)[None, :]
                v_tail = tl.load(v_rows + column, mask=valid[:, None] & (column < D_V), other=0.0)
                acc_tail = tl.dot(weights, v_tail, acc_tail * rescale[:, None], input_precision="ieee")

    largest = row_max
    kept = 1.0
    if sinks is not None:
        sink = tl.load(sinks + head, mask=head < heads, other=0.0).to(tl.float32) * _LOG2_E
        highest = tl.maximum(row_max, sink)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        kept = tl.exp2(row_max - shift)
        total = total * kept + tl.where(sink == shift, 1.0, tl.exp2(sink - shift))  # also if both are +inf
        row_max = highest
    # A row without a valid slot has total 0 and maximum -inf: out 0 / 1, lse -inf + -inf.
    inv_sum = (kept / tl.where(total == 0.0, 1.0, total))[:, None]
    out_rows = out + (row * heads + head[:, None]) * D_V
    column = tl.arange(0, VALUE_MAIN)[None, :]
    tl.store(out_rows + column, (acc * inv_sum).to(out.dtype.element_ty), mask=real & (column < D_V))
    if VALUE_TAIL > 0:
        column = VALUE_MAIN + tl.arange(0, VALUE_TAIL)[None, :]
        tl.store(out_rows + column, (acc_tail * inv_sum).to(out.dtype.element_ty), mask=real & (column < D_V))
    tl.store(lse + row * heads + head, (row_max + tl.log2(total)) / _LOG2_E, mask=head < heads)
    if top is not None:
        tl.store(top + row * heads + head, largest / _LOG2_E, mask=head < heads)
