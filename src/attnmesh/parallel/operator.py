"""Attention over ranks as two operators, forward and backward, that `torch.compile` takes as they are.

A compiled graph holds tensors and numbers. So everything else about a call is told in numbers. Masks and layouts are
told by what they are; a context, which has ranks behind it, by the number it was given when it was made. That number
is in a tensor, so that a graph serves all contexts. Checks, agreement and messages happen when the graph runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attnmesh.comm.subgroups import propagate_failure
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Mask
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Result
from attnmesh.parallel.in_numbers import from_numbers, in_numbers
from attnmesh.parallel.schedule import Schedule


class Ask(NamedTuple):
    """What a call of attention asks for, beside its tensors."""

    mask: Mask
    scale: float | None
    length: int | None
    key_length: int | None
    key_layout: Layout | None
    lse: bool
    needed: tuple[bool, ...]  # whether gradients of q, k, v are asked for


class Context(Protocol):
    """What a number stands for: a ContextParallel."""

    def agree_on(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Schedule:
        """The schedule that answers, once all ranks agree on what is asked for."""

    def schedule_for(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Schedule:
        """The schedule that answers what has been agreed on."""


_contexts: WeakValueDictionary[int, Context] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(context: Context) -> Tensor:
    """A number for a context."""
    number = next(_numbers)
    _contexts[number] = context
    with torch.inference_mode(False):  # or no backward could keep it
        told = torch.tensor(number, device="cpu")
    told.context = context  # type: ignore[attr-defined]  # a backward keeps the number, and so the context
    return told


def needed_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[bool, ...]:
    """Whether a call made now is asked for gradients of q, k, v."""
    # Whether they are tensors at all is checked later, together with the other ranks.
    return tuple(torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in (q, k, v))


def compiled_attention(q: Tensor, k: Tensor, v: Tensor, number: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
    """out and lse by the context of that number, as one operator of the graph that is being traced."""
    mask, scale, length, key_length, key_layout, lse, needed = ask
    told = None if key_layout is None else in_numbers(key_layout)
    results: tuple[Tensor, Tensor] = _forward(
        q, k, v, number, in_numbers(mask), scale, length, key_length, told, lse, list(needed)
    )
    return results


# The host takes part in both: it compares notes and may wait for messages, which no CUDA graph replays.
_HOST = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("attnmesh::context_attention", mutates_args=(), tags=_HOST)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor, mask: Sequence[int], scale: float | None, length: int | None,
    key_length: int | None, key_layout: Sequence[int] | None, lse: bool, needed: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    asked = _ask(mask, scale, length, key_length, key_layout, lse, needed)
    schedule = _context(context).agree_on(q, k, v, asked)
    if _returns_lse(lse, needed) and not lse:
        schedule = _context(context).schedule_for(q, k, v, asked._replace(lse=True))
    with propagate_failure(schedule.comm), torch.autocast(q.device.type, enabled=False):
        state, _ = schedule.forward(q, k, v)
    return state.out.contiguous(), state.lse.contiguous() if _returns_lse(lse, needed) else _nothing(state.lse)


@_forward.register_fake
def _(q: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    *_, asked, needed = call
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse if _returns_lse(asked, needed) else _nothing(lse)


def _returns_lse(asked: bool, needed: Sequence[bool]) -> bool:
    """Whether the forward returns the lse: it is asked for, or the backward will need it."""
    return asked or any(needed)


@torch.library.custom_op("attnmesh::context_attention_backward", mutates_args=(), tags=_HOST)
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None,
    context: Tensor, mask: Sequence[int], scale: float | None, length: int | None, key_length: int | None,
    key_layout: Sequence[int] | None, asked_lse: bool, needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ask = _ask(mask, scale, length, key_length, key_layout, asked_lse, needed)
    schedule = _context(context).schedule_for(q, k, v, ask)
    with propagate_failure(schedule.comm), torch.autocast(q.device.type, enabled=False):
        # Not what the forward kept: a graph would have to know its shapes, which the schedule decides when it runs.
        kept = schedule.kept_again(q, k, v, State(out, lse))
        grads = schedule.backward(kept, Result.of(out, lse, grad_out, grad_lse), needed)
        found = [None if grad is None else grad.finish() for grad in (grads.q, grads.k, grads.v)]
    dq, dk, dv = (_nothing(q) if grad is None else grad.contiguous() for grad in found)
    return dq, dk, dv


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    needed = call[-1]
    dq, dk, dv = (x.new_empty(x.shape) if need else _nothing(x) for x, need in zip((q, k, v), needed, strict=True))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, number, *call = inputs
    ctx.save_for_backward(q, k, v, *output, number)
    ctx.call = call
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *kept, number = ctx.saved_tensors
    needed = ctx.call[-1]
    if any(due and not agreed for due, agreed in zip(ctx.needs_input_grad, needed, strict=False)):
        raise RuntimeError(f"gradients of q, k, v are due {ctx.needs_input_grad[:3]}, but ranks agreed on {needed}")
    grads = _backward(*kept, grad_out, grad_lse, number, *ctx.call)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, *(None for _ in ctx.call)


_forward.register_autograd(_differentiated, setup_context=_keep)


def _context(number: Tensor) -> Context:
    context = _contexts.get(int(number))
    if context is None:
        raise RuntimeError("the ContextParallel of a compiled attention is gone: keep it until the backward is done")
    return context


def _ask(
    mask: Sequence[int], scale: float | None, length: int | None, key_length: int | None,
    key_layout: Sequence[int] | None, lse: bool, needed: Sequence[bool],
) -> Ask:  # fmt: skip
    layout = None if key_layout is None else from_numbers(key_layout)
    return Ask(from_numbers(mask), scale, length, key_length, layout, lse, tuple(needed))


def _nothing(like: Tensor) -> Tensor:
    """In place of what nobody asked for: an operator returns tensors."""
    return like.new_empty(0)
