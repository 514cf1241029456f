"""Sparse attention over ranks: local heads and rows, keys from wherever they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.merge import add_sinks, merge, sink_gradient
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.sparse.attention import Attending, delta_of
from attnmesh.parallel.sparse.spread import Spread
from attnmesh.parallel.sparse.visits import Keys, at_slots, bring


def attend(call: Attending, sink: Tensor | None, spread: Spread, attn_sum: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse, differentiable; and the distribution [s_q, topk] over this rank's heads, empty unless asked for."""
    found: tuple[Tensor, Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        call.q, call.k, call.v, sink, call, spread, attn_sum
    )
    return found


def distribute(call: Attending, keys: Keys, lse: Tensor, head_group: int) -> Tensor:
    """[groups, s_q, topk] over this rank's heads: every slot from the visit that brings its key."""
    lse = lse.to(accumulation_dtype(call.q.dtype))
    return at_slots(
        keys,
        call.indices,
        call.rows,
        0.0,
        lambda visit, here: call.backend.distribution(
            call.q, visit.keys[0], here.indices, here.rows, lse, scale=call.scale, head_group=head_group
        ),
    )


class _Attention(torch.autograd.Function):
    """As on one device: (out, lse) over all keys is all that the backward of any part of them needs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, call: Attending, spread: Spread,
        attn_sum: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        keys = bring([k] if v is None else [k, v], spread)
        slots = keys.slots(call.indices, call.rows)
        wide = accumulation_dtype(q.dtype)
        state: State | None = None
        for visit in keys.visits():
            here = slots(visit)
            part = State(*call.backend.forward(
                q, visit.keys[0], None if v is None else visit.keys[1], here.indices, here.rows,
                scale=call.scale, d_v=call.d_v, dtype=q.dtype if keys.alone and sink is None else wide,
            ))  # fmt: skip
            state = part if state is None else merge([state, part])
        assert state is not None
        out, lse = state if sink is None else add_sinks(state, sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.rest = call._replace(q=None, k=None, v=None), spread  # type: ignore[arg-type]  # saved above
        ctx.set_materialize_grads(False)
        dist = lse.new_empty(0)
        if attn_sum:
            dist = distribute(call._replace(q=q), keys, lse, q.shape[1])[0]
        ctx.mark_non_differentiable(dist)
        return out, lse, dist

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        call, spread = ctx.rest
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        delta = delta_of(call.backend, out, lse, d_out, d_lse)
        d_q: Tensor | None = None
        grads: list[Tensor | None] = [None, None]
        if any(ctx.needs_input_grad[:3]):
            d_q, grads = _to_queries_and_keys(q, k, v, call, spread, lse, delta, d_out, any(ctx.needs_input_grad[1:3]))
        d_sink = None
        if ctx.needs_input_grad[3]:  # what all cp ranks hold alike gets the whole gradient on each
            d_sink = spread.ranks.cp.all_reduce(sink_gradient(sink, lse, delta)).to(sink.dtype)
        return d_q, *grads, d_sink, None, None, None


def _to_queries_and_keys(
    q: Tensor, k: Tensor, v: Tensor | None, call: Attending, spread: Spread, lse: Tensor, delta: Tensor, d_out: Tensor,
    for_keys: bool,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """The gradients of q, and of k and v: sums over all ranks that read them, rounded once."""
    keys = bring([k] if v is None else [k, v], spread)
    slots, homing = keys.slots(call.indices, call.rows), keys.homing()
    dtype = q.dtype if keys.alone else accumulation_dtype(q.dtype)
    d_q: Tensor | None = None
    for visit in keys.visits():
        here = slots(visit)
        part, d_k, d_v = call.backend.backward(
            q, visit.keys[0], None if v is None else visit.keys[1], here.indices, here.rows, lse, delta, d_out,
            scale=call.scale, d_v=call.d_v, deterministic=call.deterministic, dtype=dtype,
        )  # fmt: skip
        d_q = part if d_q is None else d_q.add_(part)
        if for_keys:
            homing.leave(visit, [d_k] if d_v is None else [d_k, d_v])
    assert d_q is not None
    if not for_keys:
        return d_q.to(q.dtype), [None, None]
    # Heads are spread over tp, keys are not: every tp rank found a part of the gradient of every key.
    tp = spread.ranks.tp
    grads: list[Tensor | None] = [
        (grad if tp.world == 1 else tp.all_reduce(grad, reuse=True)).to(k.dtype) for grad in homing.home()
    ]
    return d_q.to(q.dtype), grads if len(grads) == 2 else [*grads, None]
