"""Packed states merged in Triton: one launch, every row read once."""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 4


def merge_packed(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `attnmesh.ops.packed.merge_packed`."""
    count, heads, batch, tokens, width = parts.shape
    parts = parts if parts.stride(-1) == 1 else parts.contiguous()
    out = torch.empty(batch, heads, tokens, width - 1, dtype=dtype, device=parts.device)
    rows = heads * batch * tokens
    if rows:
        with torch.cuda.device_of(parts):
            _merge_kernel[(triton.cdiv(rows, _ROWS),)](
                parts, parts.stride()[:4], sinks, out, out.stride()[:3], count, rows, batch, tokens,
                D=width - 1, BLOCK_D=triton.next_power_of_2(width - 1), ROWS=_ROWS, num_warps=4,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "rows", "batch", "tokens"])
def _merge_kernel(
    parts, strides, sinks, out, out_strides, count, rows, batch, tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows (head, sequence, token) of all parts, one part after the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    head = (row // (batch * tokens)).to(tl.int64)
    sequence = (row // tokens % batch).to(tl.int64)
    token = row % tokens
    column = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (column < D)[None, :]
    place = parts + head * strides[1] + sequence * strides[2] + token * strides[3]

    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    for _ in range(count):
        lse = tl.load(place + D, mask=real, other=float("-inf"))
        part = tl.load(place[:, None] + column[None, :], mask=inside, other=0.0)
        top = tl.maximum(peak, lse)
        shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
        decay, weight = tl.exp(peak - shift), tl.exp(lse - shift)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        peak = top
        place += strides[0]
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32)
        # A row that saw nothing stays 0: its peak is -inf.
        total += tl.exp(tl.where(peak == float("-inf"), float("-inf"), sink - peak))
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + sequence * out_strides[0] + head * out_strides[1] + token * out_strides[2]
    tl.store(target[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=inside)
