"""Sparse attention over ranks: heads and rows of this rank, keys of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import propagate_failure
from attnmesh.core.state import State, accumulation_dtype, add_sinks, merge, sink_gradient
from attnmesh.ops.sparse import dispatch
from attnmesh.ops.sparse.arguments import SparseCall
from attnmesh.parallel.sparse.keys import KeyExchange, SequenceSharding, exchange_keys, map_slots


def attend(
    call: SparseCall, sinks: Tensor | None, sharding: SequenceSharding, return_attn_sum: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse, differentiable; and the distribution [s_q, topk] over the heads of this rank, or an empty tensor."""
    result: tuple[Tensor, Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        call.q, call.k, call.v, sinks, call, sharding, return_attn_sum
    )
    return result


def distribution(call: SparseCall, keys: KeyExchange, lse: Tensor, head_group: int) -> Tensor:
    """[groups, s_q, topk] over the heads of this rank."""
    lse = lse.to(accumulation_dtype(call.q.dtype))
    call = call._replace(v=None)
    return map_slots(
        keys, call.indices, call.bounds, 0.0,
        lambda shard, slots: dispatch.distribution(
            call.over(shard.tensors, slots.indices, slots.bounds), lse, head_group
        ),
    )  # fmt: skip


class _Attention(torch.autograd.Function):
    """(out, lse) over all keys is all that the backward pass of any part of them needs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, call: SparseCall,
        sharding: SequenceSharding, return_attn_sum: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        call = call._replace(q=q, k=k, v=v)
        keys = exchange_keys([k] if v is None else [k, v], sharding)
        slots = keys.slots(call.indices, call.bounds)
        wide = accumulation_dtype(q.dtype)
        state: State | None = None
        for shard in keys.shards():
            local = slots(shard)
            over = call.over(shard.tensors, local.indices, local.bounds)
            part = State(*dispatch.forward(over, *((q.dtype, sinks) if keys.single else (wide, None))))
            state = part if state is None else merge([state, part])
        assert state is not None
        out, lse = state if sinks is None or keys.single else add_sinks(state, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.rest = call.without_tensors(), sharding
        ctx.number = sharding.groups.calls
        ctx.set_materialize_grads(False)
        dist = lse.new_empty(0)
        if return_attn_sum:
            dist = distribution(call, keys, lse, q.shape[1])[0]
        ctx.mark_non_differentiable(dist)
        return out, lse, dist

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call, sharding = ctx.rest
        call = call._replace(q=q, k=k, v=v)
        sharding.groups.note("backward of sparse attention", ctx.number)
        with propagate_failure(sharding.groups):
            if d_out is None:
                d_out = torch.zeros_like(out)
            d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
            delta = dispatch.softmax_delta(call, out, lse, d_out, d_lse)
            d_q: Tensor | None = None
            grads: list[Tensor | None] = [None, None]
            if any(ctx.needs_input_grad[:3]):
                d_q, grads = _gradients(call, sharding, lse, delta, d_out, any(ctx.needs_input_grad[1:3]))
            d_sinks = None
            if ctx.needs_input_grad[3]:  # sinks are replicated over cp: every rank gets the whole gradient
                d_sinks = sharding.groups.cp.all_reduce(sink_gradient(sinks, lse, delta)).to(sinks.dtype)
        return d_q, *grads, d_sinks, None, None, None


def _gradients(
    call: SparseCall, sharding: SequenceSharding, lse: Tensor, delta: Tensor, d_out: Tensor, of_keys: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of q, and of k and v: summed over all ranks that read them, rounded once."""
    q, k, v = call.q, call.k, call.v
    keys = exchange_keys([k] if v is None else [k, v], sharding)
    slots, grad_return = keys.slots(call.indices, call.bounds), keys.grad_return()
    dtype = q.dtype if keys.single else accumulation_dtype(q.dtype)
    d_q: Tensor | None = None
    for shard in keys.shards():
        local = slots(shard)
        over = call.over(shard.tensors, local.indices, local.bounds)
        part, d_k, d_v = dispatch.backward(over, lse, delta, d_out, dtype)
        d_q = part if d_q is None else d_q.add_(part)
        if of_keys:
            grad_return.send(shard, [d_k] if d_v is None else [d_k, d_v])
    assert d_q is not None
    if not of_keys:
        return d_q.to(q.dtype), [None, None]
    # Heads are sharded over tp and keys are not: the gradient of a key is a sum over tp ranks.
    tp = sharding.groups.tp
    grads: list[Tensor | None] = [
        (grad if tp.world == 1 else tp.all_reduce(grad, reuse=True)).to(k.dtype) for grad in grad_return.collect()
    ]
    return d_q.to(q.dtype), grads if len(grads) == 2 else [*grads, None]
