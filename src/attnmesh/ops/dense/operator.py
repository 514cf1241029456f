"""`attention` on one device as two operators, forward and backward, for `torch.compile`.

A compiled graph holds tensors and numbers, so the mask is encoded as integers. Checks happen when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.mask_encoding import decode_mask, encode_mask
from attnmesh.core.masks import Mask
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.dense.call import Result
from attnmesh.ops.dense.dispatch import forward, gradients, prepared


def compiled_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, q_positions: Tensor | None,
    k_positions: Tensor | None, mask: Mask, scale: float | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of `attention`, as one operator of the graph that is being traced."""
    codes, documents = encode_mask(mask)
    found: tuple[Tensor, Tensor] = _forward(
        q, k, v, sinks, alibi_slopes, q_positions, k_positions, documents, codes, scale, softcap, backend
    )
    return found


# The host reads positions and chooses kernels, which a CUDA graph would not repeat.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("attnmesh::attention", mutates_args=(), tags=_TAGS)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, q_positions: Tensor | None,
    k_positions: Tensor | None, documents: Tensor | None, mask: Sequence[int], scale: float | None,
    softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    allowed = decode_mask(mask, documents)
    work = prepared(q, k, v, allowed, scale, softcap, sinks, alibi_slopes, q_positions, k_positions)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = forward(work.call, sinks, backend)
    if work.order is not None:
        back = work.order.argsort()
        out, lse = out[:, :, back], lse[:, :, back]
    return out.contiguous(), lse.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op("attnmesh::attention_backward", mutates_args=(), tags=_TAGS)
def _backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, q_positions: Tensor | None,
    k_positions: Tensor | None, documents: Tensor | None, out: Tensor, lse: Tensor, grad_out: Tensor | None,
    grad_lse: Tensor | None, mask: Sequence[int], scale: float | None, softcap: float | None, backend: str,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    allowed = decode_mask(mask, documents)
    work = prepared(q, k, v, allowed, scale, softcap, sinks, alibi_slopes, q_positions, k_positions)
    rows = [out, lse, grad_out, grad_lse]
    if work.order is not None:
        rows = [None if x is None else x[:, :, work.order] for x in rows]
    with torch.autocast(q.device.type, enabled=False):
        found = gradients(work.call, sinks, Result.of(*rows), backend, needs_grad)  # type: ignore[arg-type]
    for at, order in enumerate((work.order, work.key_order, work.key_order)):
        grad = found[at]
        if grad is not None and order is not None:
            found[at] = grad[:, :, order.argsort()]
    dq, dk, dv, d_sinks = (q.new_empty(0) if grad is None else grad.contiguous() for grad in found)
    return dq, dk, dv, d_sinks


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = zip((q, k, v, sinks), call[-1], strict=True)
    dq, dk, dv, d_sinks = (q.new_empty(0) if x is None or not need else x.new_empty(x.shape) for x, need in inputs)
    return dq, dk, dv, d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.call = inputs[8:]
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_grad = list(ctx.needs_input_grad[:4])
    grads = _backward(*ctx.saved_tensors, grad_out, grad_lse, *ctx.call, needs_grad)
    needed = [grad if need else None for grad, need in zip(grads, needs_grad, strict=True)]
    return *needed, *(None for _ in range(8))


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
