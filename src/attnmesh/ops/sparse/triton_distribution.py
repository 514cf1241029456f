"""The attention distribution of chosen keys, summed over heads, in Triton.

A program takes some slots of a row and one group of heads. Keys are the rows of its products and heads the columns, so
few heads cost little and the sum over heads stays within a few threads. A group of more heads than one product takes is
summed in several passes over the keys, each of which adds to the output of the previous pass.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.launch import Launch, Recent, cdiv, gpu_of, next_power_of_2, repeat
from attnmesh.ops.sparse.arguments import SparseCall
from attnmesh.ops.sparse.triton_bounds import valid_keys

LOG2_E = 1.4426950408889634  # the kernels exponentiate in base 2, as the hardware does
_LOG2_E = tl.constexpr(LOG2_E)
# They vary, and each value would be compiled separately.
_NOT_SPECIALIZED = ["s_q", "h", "topk", "k_offset", "span", "indices_stride"]
_launches: Recent[Launch] = Recent()


class DistributionTiles(NamedTuple):
    """Keys and heads of one product, and the warps and pipeline stages of its program."""

    keys: int
    heads: int
    warps: int
    stages: int

    def shared_memory(self, width: int) -> int:
        """Bytes of the queries and of the keys of each stage, in a 16-bit type."""
        return (self.heads + self.stages * self.keys) * width * 2


# Tuning. 16-bit tiles: keys, maximum of heads, stages; the first that fit are used.
TILES = [(64, 64, 3), (64, 64, 2), (32, 64, 2), (64, 64, 1), (32, 32, 2), (32, 16, 2), (32, 16, 1)]
MAX_HEADS = 64  # per pass
# float32 runs without tensor cores, and a thread holds whole rows of both operands: small tiles, columns in steps.
WIDE_TILES = DistributionTiles(32, 16, 4, 2)
STEPS = {4: 32}  # bytes per element -> columns per step; others take all columns at once
RESERVED = 4096  # bytes of shared memory for indices and reductions
PROGRAMS = 1024  # few rows are split into about this many programs


def distribution(call: SparseCall, lse: Tensor, head_group: int, *, tiles: DistributionTiles | None = None) -> Tensor:
    """`dispatch.distribution`, in float32."""
    q, k, _, indices, bounds, scale, *_ = call
    s_q, h, d = q.shape
    topk = indices.shape[1]
    groups = cdiv(h, head_group)
    out = torch.empty(groups, s_q, topk, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    main = 1 << (d.bit_length() - 1)  # 576 is 512 + 64: padded to one power of two it would be nearly twice as wide
    tail = max(16, next_power_of_2(d - main)) if d > main else 0
    group = min(head_group, h)
    tiles = tiles or pick_tiles(q, group, main + tail)
    # Few rows: several programs share each of them.
    blocks = cdiv(topk, tiles.keys)
    span = cdiv(blocks, max(1, min(blocks, PROGRAMS // (s_q * groups)))) * tiles.keys
    repeat(
        _launches, _distribution_kernel, (s_q * groups * cdiv(topk, span),),
        (
            q, q.stride(), k, k.stride(), indices, indices.stride(0),
            *(x.contiguous() for x in bounds[:3]), lse, lse.stride(), out,
            s_q, h, topk, bounds.k_offset, scale * LOG2_E, span, group,
        ),
        D=d, MAIN=main, TAIL=tail, STEP=STEPS.get(q.element_size(), 0), HEADS=tiles.heads, KEYS=tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def pick_tiles(q: Tensor, group: int, width: int) -> DistributionTiles:
    """The first tiles whose keys and queries fit the device's shared memory."""
    if q.element_size() == 4:
        return WIDE_TILES
    heads = min(max(16, next_power_of_2(group)), MAX_HEADS)
    warps = 8 if width > 256 else 4  # addresses of wide rows would fill the registers of fewer threads
    choices = [DistributionTiles(keys, min(heads, most), warps, stages) for keys, most, stages in TILES]
    limit = gpu_of(q.device).shared_memory - RESERVED
    return next((tiles for tiles in choices if tiles.shared_memory(width) <= limit), choices[-1])


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _distribution_kernel(
    q, q_strides, k, k_strides, indices, indices_stride, lo, hi, slots, lse, lse_strides, out,
    s_q, h, topk, k_offset, scale_log2, span, group,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(h, group)
    parts = tl.cdiv(topk, span)
    which_group = tl.program_id(0) % groups
    part = tl.program_id(0) // groups % parts
    row = (tl.program_id(0) // (groups * parts)).to(tl.int64)
    begin = part * span
    end = tl.minimum(begin + span, topk)
    first_head = which_group * group
    end_head = tl.minimum(first_head + group, h)

    row_slots = tl.load(slots + row)
    row_lo = tl.load(lo + row)
    row_hi = tl.load(hi + row)
    stop = tl.maximum(tl.minimum(end, row_slots), begin)
    out_row = out + (which_group.to(tl.int64) * s_q + row) * topk
    near = tl.arange(0, KEYS)
    for head in range(first_head, end_head, HEADS):
        heads = (head + tl.arange(0, HEADS)).to(tl.int64)
        there = heads < end_head
        shift = tl.load(lse + row * lse_strides[0] + heads * lse_strides[1], mask=there, other=float("inf"))
        # An infinite lse, or no head: +inf makes every probability 0.
        shift = tl.where(shift == float("-inf"), float("inf"), shift * _LOG2_E)
        queries = q + row * q_strides[0] + heads * q_strides[1]
        if STEP == 0:
            q_main = _load_columns(queries, there, 0, D, MAIN)
            if TAIL > 0:
                q_tail = _load_columns(queries, there, MAIN, D, TAIL)
        for slot_begin in range(begin, stop, KEYS):
            slot = slot_begin + near
            valid, key = valid_keys(indices + row * indices_stride, slot, stop, row_lo, row_hi, k_offset)
            keys = k + key * k_strides[0]
            if STEP == 0:
                scores = tl.dot(_load_columns(keys, valid, 0, D, MAIN), tl.trans(q_main))
                if TAIL > 0:
                    scores = tl.dot(_load_columns(keys, valid, MAIN, D, TAIL), tl.trans(q_tail), scores)
            else:
                scores = tl.zeros((KEYS, HEADS), tl.float32)
                for column in range(0, D, STEP):
                    q_step = _load_columns(queries, there, column, D, STEP)
                    k_step = _load_columns(keys, valid, column, D, STEP)
                    scores = tl.dot(k_step, tl.trans(q_step), scores, input_precision="ieee")
            total = tl.sum(tl.exp2(scores * scale_log2 - shift[None, :]), 1)
            total += tl.load(out_row + slot, mask=(slot < stop) & (head > first_head), other=0.0)
            tl.store(out_row + slot, tl.where(valid, total, 0.0), mask=slot < stop)
        if head + HEADS < end_head:
            tl.debug_barrier()  # the next pass reads what other threads wrote in this one
    for slot_begin in range(stop, end, KEYS):
        tl.store(out_row + slot_begin + near, tl.zeros((KEYS,), tl.float32), mask=slot_begin + near < end)


@triton.jit
def _load_columns(rows, there, column, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [column, column + WIDTH) of some rows, [rows, WIDTH]; 0 where they do not exist."""
    columns = column + tl.arange(0, WIDTH)
    return tl.load(rows[:, None] + columns[None, :], mask=there[:, None] & (columns < D)[None, :], other=0.0)
