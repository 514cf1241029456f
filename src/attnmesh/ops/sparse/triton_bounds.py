"""The bounds of a `SparseMask` in one launch, and the keys that they make valid.

Torch would compute the bounds in nine to sixteen operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.launch import Launch, Recent, cdiv, prepare, signature

_ROWS = 1024
_launches: Recent[Launch] = Recent()


def bounds(
    s_q: int, k_start: Tensor | None, k_end: Tensor | None, q_positions: Tensor | None, topk_length: Tensor | None,
    *, first: int, end: int, q_start: int, k_stride: int, topk: int, causal: bool, device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """lo, hi and slots of `RowBounds`, of keys [first, end). The tensors [s_q] are int32 or int64 on the device."""
    result = torch.empty_strided((3, s_q), (s_q, 1), dtype=torch.int32, device=device)
    lo, hi, slots = result.unbind()
    if not s_q:
        return lo, hi, slots
    given = k_start, k_end, q_positions, topk_length
    numbers = first, end, q_start, k_stride, topk, causal
    key = (s_q, *numbers, device, *signature(*given))
    launch = _launches.get(key)
    if launch is not None:
        launch(*given, result)
        return lo, hi, slots
    strides = tuple(0 if x is None else x.stride(0) for x in given)
    with torch.cuda.device_of(result):
        _launches.add(
            key,
            prepare(
                _bounds_kernel, (cdiv(s_q, _ROWS),), (*given, strides, result, s_q, *numbers[:-1]),
                (*given, result), CAUSAL=causal, ROWS=_ROWS, num_warps=4,
            ),
        )  # fmt: skip
    return lo, hi, slots


@triton.jit(do_not_specialize=["s_q", "first", "end", "q_start", "k_stride", "topk"])
def _bounds_kernel(
    k_start, k_end, q_positions, topk_length, strides, result, s_q, first, end, q_start, k_stride, topk,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lo = _per_row(k_start, strides[0], row, s_q, first)
    hi = _per_row(k_end, strides[1], row, s_q, end)
    if CAUSAL:
        if q_positions is None:
            position = row + tl.cast(q_start, tl.int64)
        else:
            position = _per_row(q_positions, strides[2], row, s_q, 0)
        # Clamp first: a position may be the largest integer, and adding 1 would overflow.
        position = tl.minimum(tl.maximum(position, -1), tl.cast(end, tl.int64) * k_stride)
        hi = tl.minimum(hi, (position + 1) // k_stride)
    slots = tl.minimum(tl.maximum(_per_row(topk_length, strides[3], row, s_q, topk), 0), topk)
    lo, hi = tl.minimum(tl.maximum(lo, first), end), tl.minimum(tl.maximum(hi, first), end)
    tl.store(result + row, lo.to(tl.int32), mask=row < s_q)
    tl.store(result + s_q + row, hi.to(tl.int32), mask=row < s_q)
    tl.store(result + 2 * s_q + row, slots.to(tl.int32), mask=row < s_q)


@triton.jit
def _per_row(given, stride, row, s_q, default):
    if given is None:
        return tl.zeros_like(row).to(tl.int64) + default
    else:  # noqa: RET505, a constant condition
        return tl.load(given + row.to(tl.int64) * stride, mask=row < s_q, other=0).to(tl.int64)


@triton.jit
def valid_keys(indices, j, limit, lo, hi, k_offset):
    """Whether slots j of a row are valid, and the rows of their keys, else row 0. Without indices, slot j is key j."""
    index = j
    if indices is not None:
        index = tl.load(indices + j, mask=j < limit, other=0)
    valid = (j < limit) & (index >= lo) & (index < hi)
    return valid, tl.where(valid, index - k_offset, 0).to(tl.int64)
