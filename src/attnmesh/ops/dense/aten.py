"""torch's fused kernels that return an lse: the CPU flash kernel, cuDNN, FlashAttention-2.

They serve FULL and square CAUSAL blocks; the CPU kernel also takes a mask, which is built for a few rows at a time.
Their backward accepts the out and lse of the whole softmax, so the gradients of ring blocks add up exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.core.visibility import Block, Kind
from attnmesh.ops.dense.call import Call, Grads, Result, aligned, of_sequences
from attnmesh.ops.dense.cost import strip_rows
from attnmesh.ops.merge import StateAccumulator

aten = torch.ops.aten
# torch's own bindings of operators take 20 us less than `torch.ops`.
_cpu_attention = torch._scaled_dot_product_flash_attention_for_cpu
_cudnn_attention = torch._scaled_dot_product_cudnn_attention

_CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_Parts = tuple[range, range, tuple[Tensor, Tensor, Tensor]]  # rows, keys, and their dq, dk, dv
_SCORES_PER_CALL = 20_000  # a call of the CPU kernel costs as much as so many scores: measured on two cores


class Aten:
    """Backend on torch's fused kernels."""

    name = "aten"

    def why_not(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        q = call.q
        if not call.scores.plain:
            return "torch's fused kernels take no softcap and no ALiBi slopes"
        if q.device.type == "cpu":
            return None if q.dtype in _CPU_DTYPES else f"the CPU flash kernel does not take {q.dtype}"
        if q.device.type != "cuda":
            return f"it has no kernel with an lse on {q.device.type}"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "cuDNN's and FlashAttention-2's kernels need compute capability 8.0"
        if q.dtype not in _CUDA_DTYPES:
            return f"cuDNN and FlashAttention-2 take fp16 and bf16, not {q.dtype}"
        if call.v.shape[3] != q.shape[3]:
            return f"cuDNN and FlashAttention-2 take values as wide as keys, not {call.v.shape[3]} and {q.shape[3]}"
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            return f"cuDNN and FlashAttention-2 take head_dim in multiples of 8 up to 256, not {q.shape[-1]}"
        if any(block.kind is Kind.PARTIAL for block in call.visibility.blocks):
            return "on CUDA it serves full and square causal blocks, and this mask has other partial blocks"
        return None

    def backward_why_not(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward, with or without a gradient of lse; None if it can."""
        if call.q.is_cuda and grad_lse:
            return "cuDNN and FlashAttention-2 do not accept a gradient of the lse"
        if call.q.is_cuda and torch.are_deterministic_algorithms_enabled():
            return "cuDNN accumulates dq in no fixed order, and torch.use_deterministic_algorithms is on"
        return self.why_not(call)

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""
        kernel: Callable[[Call, Block], Iterable[tuple[range, State]]] = _cuda_forward
        width = call.v.shape[3]
        if not call.q.is_cuda:
            kernel = _cpu_forward
            call = _cpu_call(call)
        call, _ = _with_positive_scale(call)
        for block in call.visibility.blocks:
            for rows, part in kernel(call, block):
                if part.out.shape[3] != width:
                    part = State(part.out[..., :width], part.lse)
                total.add(part, rows.start, _first_sequence(block))

    def prepare(self, call: Call, result: Result) -> None:
        """Copies out and grad_out to the strides that cuDNN's backward requires."""
        if call.q.is_cuda:
            for block in call.visibility.blocks:
                q, k, _ = _block_inputs(call, block)
                if _cudnn_takes(q, k):
                    result.with_layout_of(q, block.q, block.sequences)

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""
        widths = [x.shape[3] for x in (call.q, call.k, call.v)]
        kernel = _cuda_backward
        if not call.q.is_cuda:
            kernel = _cpu_backward
            call = _cpu_call(call)
            if result.out.shape != (*call.q.shape[:3], call.v.shape[3]) or result.out.dtype != call.q.dtype:
                out, grad_out = (_padded(_widened(x), call.v.shape[3]) for x in (result.out, result.grad_out))
                result = replace(result, out=out, grad_out=grad_out)
            if result.grad_lse is not None:
                call, result = _with_lse_column(call, result)
        call, sign = _with_positive_scale(call)
        for block in call.visibility.blocks:
            for q, k, (dq, dk, dv) in kernel(call, result, block):
                parts = (dq if sign == 1 else dq * sign, dk, dv)
                for grad, part, row, width in zip((grads.q, grads.k, grads.v), parts, (q, k, k), widths, strict=True):
                    if grad is not None:
                        part = part if part.shape[3] == width else part[..., :width]
                        grad.add(part, row.start, _first_sequence(block))


def _with_positive_scale(call: Call) -> tuple[Call, int]:
    """The same scores with a positive scale, and the sign moved into q: kernels scale scores masked with -inf."""
    scale = call.scores.scale
    if scale > 0:
        return call, 1
    sign = -1 if scale < 0 else 0
    return replace(call, q=call.q * sign, scores=replace(call.scores, scale=-scale if sign else 1.0)), sign


def _rows(x: Tensor, rows: range, block: Block) -> Tensor:
    """Some rows of the sequences of a block."""
    if block.sequences is not None:
        x = of_sequences(x, block.sequences)
    return x if len(rows) == x.shape[2] else x[:, :, rows.start : rows.stop]


def _first_sequence(block: Block) -> int:
    return 0 if block.sequences is None else block.sequences.start


# ---- CPU ------------------------------------------------------------------------------------------------------------


def _cpu_call(call: Call) -> Call:
    """The call in the dtype of the kernel, of one width, and without the NaN that masked rows and keys may hold."""
    for block in call.visibility.blocks:
        if block.kind is Kind.PARTIAL:
            call = call.with_unseen_zeroed()
            break
    width, value_width = call.q.shape[3], call.v.shape[3]
    if width == value_width and call.q.dtype in (torch.float32, torch.float64):
        return call
    width = max(width, value_width)
    q, k, v = (_padded(_widened(x), width) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v)


def _padded(x: Tensor, width: int) -> Tensor:
    """The tensor with columns of 0 up to a width: they change no score, and nothing in the other columns."""
    return x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))


def _widened(x: Tensor) -> Tensor:
    """Half precision as float32 if the processor has no instructions for it: the kernel is then 100 times faster.

    float16 always: even with such instructions the kernel was slower.
    """
    narrow = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not _has_bf16())
    return x.float() if narrow else x


@cache
def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _cpu_forward(call: Call, block: Block) -> Iterable[tuple[range, State]]:
    if block.kind is Kind.PARTIAL:
        return _cpu_strips(call, block)
    out, lse = _cpu_attention(
        _rows(call.q, block.q, block), _rows(call.k, block.k, block), _rows(call.v, block.k, block), 0.0,
        block.kind is Kind.CAUSAL, scale=call.scores.scale,
    )  # fmt: skip
    return ((block.q, State(out, lse)),)


def _cpu_strips(call: Call, block: Block) -> Iterator[tuple[range, State]]:
    for q, k, mask, empty in _strips(call, block):
        out, lse = _cpu_attention(
            _rows(call.q, q, block), _rows(call.k, k, block), _rows(call.v, k, block), 0.0, False,
            attn_mask=mask, scale=call.scores.scale,
        )  # fmt: skip
        # The kernel gives a row without keys an lse of 0.
        yield q, State(out, lse.masked_fill(empty, -torch.inf))


def _cpu_backward(call: Call, result: Result, block: Block) -> Iterator[_Parts]:
    parts = _strips(call, block) if block.kind is Kind.PARTIAL else ((block.q, block.k, None, None),)
    for q, k, mask, _ in parts:
        lse = _rows(result.lse, q, block)
        # The kernel computes exp(score - lse) of masked scores too, and -inf - -inf is NaN. Such rows have no keys.
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        yield q, k, aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            _rows(result.grad_out, q, block), _rows(call.q, q, block), _rows(call.k, k, block),
            _rows(call.v, k, block), _rows(result.out, q, block), lse, 0.0, block.kind is Kind.CAUSAL, attn_mask=mask,
            scale=call.scores.scale,
        )  # fmt: skip


def _strips(call: Call, block: Block) -> Iterator[tuple[range, range, Tensor, Tensor]]:
    """(rows, keys, additive mask, rows without keys) of the kernel calls that make up a PARTIAL block."""
    first, end = call.bounds(block, call.q.device)
    batch = call.q.shape[0] if block.sequences is None else len(block.sequences)
    strip = strip_rows(first, end, batch * call.q.shape[1], _SCORES_PER_CALL)
    for start in range(0, len(block.q), strip):
        q = block.q[start : start + strip]
        lo, hi = first[start : start + strip], end[start : start + strip]
        k = range(int(lo[0]), int(hi[-1]))
        if not k:
            continue
        at = torch.arange(k.start, k.stop, device=call.q.device)
        allowed = (at >= lo[:, None]) & (at < hi[:, None])
        mask = torch.zeros_like(allowed, dtype=call.q.dtype).masked_fill_(~allowed, -torch.inf)
        yield q, k, mask, lo >= hi


def _with_lse_column(call: Call, result: Result) -> tuple[Call, Result]:
    """The same backward, with the gradient of the lse in an extra column.

    ds = p * (grad_out . v - (grad_out . out - grad_lse)). The kernel computes the inner product of grad_out and out. An
    extra column, 1 in grad_out, -grad_lse in out and 0 in q, k and v, adds exactly -grad_lse to it.
    """
    assert result.grad_lse is not None
    q, k, v = (F.pad(x, (0, 1)) for x in (call.q, call.k, call.v))
    out = torch.cat([result.out, -result.grad_lse.unsqueeze(-1).to(result.out.dtype)], -1)
    grad_out = F.pad(result.grad_out, (0, 1), value=1.0)
    return Call(q, k, v, call.visibility, call.scores), Result(out, result.lse, grad_out, None)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


def _cuda_forward(call: Call, block: Block) -> Iterator[tuple[range, State]]:
    assert block.kind is not Kind.PARTIAL, "see why_not"
    q, k, v = _block_inputs(call, block)
    causal = block.kind is Kind.CAUSAL
    if _cudnn_takes(q, k):
        out, lse, *_ = _cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=call.scores.scale)
        lse = lse.view(out.shape[:3])
    else:
        out, lse, *_ = aten._flash_attention_forward.default(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=call.scores.scale,
        )  # fmt: skip
        out = out.transpose(1, 2)
    yield block.q, State(out, lse)


def _cuda_backward(call: Call, result: Result, block: Block) -> Iterator[_Parts]:
    assert block.kind is not Kind.PARTIAL, "see why_not"
    q, k, v = _block_inputs(call, block)
    lse = _rows(result.lse, block.q, block)
    causal = block.kind is Kind.CAUSAL
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # dropout state, unused
    if _cudnn_takes(q, k):
        # torch caches a plan per shape and strides of q, k and v, whatever the strides of out are. So out must have the
        # strides that the forward would give it for this q, or the plan of another call reads wrong memory.
        out, grad_out = result.with_layout_of(q, block.q, block.sequences)
        parts = aten._scaled_dot_product_cudnn_attention_backward.default(
            grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1), unused[0], unused[1], None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=call.scores.scale,
        )  # fmt: skip
    else:
        out, grad_out = (aligned(_rows(x, block.q, block)) for x in (result.out, result.grad_out))
        parts = aten._flash_attention_backward.default(
            *(x.transpose(1, 2) for x in (grad_out, q, k, v, out)), lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=call.scores.scale,
        )  # fmt: skip
        parts = tuple(part.transpose(1, 2) for part in parts)
    yield block.q, block.k, parts


def _block_inputs(call: Call, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (aligned(_rows(x, at, block)) for x, at in ((call.q, block.q), (call.k, block.k), (call.v, block.k)))
    return q, k, v


def _cudnn_takes(q: Tensor, k: Tensor) -> bool:
    """Whether to use cuDNN, the faster one: not for one query and one key, nor for wide heads (its backward)."""
    return q.shape[-1] <= 128 and (q.shape[2] > 1 or k.shape[2] > 1) and torch.backends.cudnn.is_available()
