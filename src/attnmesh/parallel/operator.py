"""Context-parallel attention as two operators, forward and backward, for `torch.compile`.

A compiled graph holds tensors and numbers, so the other arguments of a call are encoded as integers: masks and layouts
by their contents, and a ContextParallel by a handle, a number that it gets on construction. The handle is in a tensor,
so that one graph serves all of them. Checks, agreement and messages happen when the graph runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnmesh.comm import propagate_failure
from attnmesh.core.mask_encoding import decode, decode_mask, encode, encode_mask
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Result
from attnmesh.parallel.executor import AttentionOptions, ExecutorFactory, Inputs, backward, forward

_contexts: WeakValueDictionary[int, ExecutorFactory] = WeakValueDictionary()
_numbers = itertools.count()


def context_handle(context: ExecutorFactory) -> Tensor:
    """A new handle for a context."""
    number = next(_numbers)
    _contexts[number] = context
    with torch.inference_mode(False):  # an inference tensor could not be saved for a backward
        handle = torch.tensor(number, device="cpu")
    handle.context = context  # type: ignore[attr-defined]  # a backward saves the handle, which keeps the context alive
    return handle


def compiled_attention(inputs: Inputs, handle: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """out and lse by the context of this handle, as one operator of the graph that is being traced."""
    mask, scale, softcap, length, key_length, key_layout, return_lse, needs_grad = options
    layout = None if key_layout is None else encode(key_layout)
    codes, documents = encode_mask(mask)
    results: tuple[Tensor, Tensor] = _forward(
        *inputs, handle, documents, codes, scale, softcap, length, key_length, layout, return_lse, list(needs_grad)
    )
    return results


# The host takes part in both: it compares arguments and may wait for messages, which a CUDA graph would not replay.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("attnmesh::context_attention", mutates_args=(), tags=_TAGS)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, handle: Tensor,
    documents: Tensor | None, mask: Sequence[int], scale: float | None, softcap: float | None, length: int | None,
    key_length: int | None, key_layout: Sequence[int] | None, return_lse: bool, needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context, inputs = _context(handle), Inputs(q, k, v, sinks, alibi_slopes)
    options = _options(documents, mask, scale, softcap, length, key_length, key_layout, return_lse, needs_grad)
    executor = context.agreed_executor(inputs, options)
    if _needs_lse(return_lse, needs_grad) and not return_lse:
        executor = context.executor(inputs, options._replace(return_lse=True))
    state, _ = forward(executor, q, k, v, options.scores(inputs), sinks)
    return state.out.contiguous(), state.lse.contiguous() if _needs_lse(return_lse, needs_grad) else _empty(state.lse)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    *_, return_lse, needs_grad = call
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse if _needs_lse(return_lse, needs_grad) else _empty(lse)


def _needs_lse(return_lse: bool, needs_grad: Sequence[bool]) -> bool:
    """Whether the forward returns the lse: the caller or the backward needs it."""
    return return_lse or any(needs_grad)


@torch.library.custom_op("attnmesh::context_attention_backward", mutates_args=(), tags=_TAGS)
def _backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, out: Tensor, lse: Tensor,
    grad_out: Tensor | None, grad_lse: Tensor | None, handle: Tensor, documents: Tensor | None, mask: Sequence[int],
    scale: float | None, softcap: float | None, length: int | None, key_length: int | None,
    key_layout: Sequence[int] | None, return_lse: bool, needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = Inputs(q, k, v, sinks, alibi_slopes)
    options = _options(documents, mask, scale, softcap, length, key_length, key_layout, return_lse, needs_grad)
    executor = _context(handle).executor(inputs, options)
    executor.comm.note("backward of attention in a compiled graph")
    saved: tuple[Tensor, ...] = ()
    if any(needs_grad[:3]):
        with propagate_failure(executor.comm), torch.autocast(q.device.type, enabled=False):
            # Recomputed, because a graph would have to know the shapes of what the forward saved.
            saved = executor.recompute_saved(q, k, v, State(out, lse))
    result = Result.of(out, lse, grad_out, grad_lse)
    grads = backward(executor, saved, result, options.scores(inputs), sinks, needs_grad)
    dq, dk, dv, d_sinks = (_empty(q) if grad is None else grad.contiguous() for grad in grads)
    return dq, dk, dv, d_sinks


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_grad = call[-1]
    inputs = zip((q, k, v, sinks), needs_grad, strict=True)
    dq, dk, dv, d_sinks = (_empty(q) if x is None or not need else x.new_empty(x.shape) for x, need in inputs)
    return dq, dk, dv, d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, alibi_slopes, handle, documents, *call = inputs
    ctx.save_for_backward(q, k, v, sinks, alibi_slopes, *output, handle, documents)
    ctx.call = call
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, handle, documents = ctx.saved_tensors
    needs_grad = ctx.call[-1]
    if any(due and not agreed for due, agreed in zip(ctx.needs_input_grad, needs_grad, strict=False)):
        raise RuntimeError(
            f"the backward needs gradients of q, k, v, sinks {ctx.needs_input_grad[:4]}, but ranks agreed on "
            f"{needs_grad}"
        )
    grads = _backward(*saved, grad_out, grad_lse, handle, documents, *ctx.call)
    needed = (grad if need else None for grad, need in zip(grads, needs_grad, strict=True))
    return *needed, None, None, None, *(None for _ in ctx.call)


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def _context(handle: Tensor) -> ExecutorFactory:
    context = _contexts.get(int(handle))
    if context is None:
        raise RuntimeError(
            "the ContextParallel of a compiled attention was deleted: keep it until the backward is done"
        )
    return context


def _options(
    documents: Tensor | None, mask: Sequence[int], scale: float | None, softcap: float | None, length: int | None,
    key_length: int | None, key_layout: Sequence[int] | None, return_lse: bool, needs_grad: Sequence[bool],
) -> AttentionOptions:  # fmt: skip
    layout = None if key_layout is None else decode(key_layout)
    allowed = decode_mask(mask, documents)
    return AttentionOptions(allowed, scale, softcap, length, key_length, layout, return_lse, tuple(needs_grad))


def _empty(like: Tensor) -> Tensor:
    """A placeholder for a result that is not needed, since an operator must return tensors."""
    return like.new_empty(0)
