"""`attention` on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from attnmesh.core.masks import Full, Mask
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.visibility import Visibility
from attnmesh.ops.dense import cost, reference
from attnmesh.ops.dense.call import Call, Result, Scores
from attnmesh.ops.dense.dispatch import (
    BACKENDS,
    BackendName,
    Choice,
    choose,
    choose_backward,
    choose_fused,
    forward,
    gradients,
    prepared,
    with_reproducible,
)
from attnmesh.ops.dense.operator import compiled_attention
from attnmesh.ops.merge import StateAccumulator
from attnmesh.utils.validation import check_bool, check_choice


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., q_positions: Tensor | None = ...,
    k_positions: Tensor | None = ..., return_lse: Literal[False] = ..., backend: BackendName = ...,
    reproducible: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., q_positions: Tensor | None = ...,
    k_positions: Tensor | None = ..., return_lse: Literal[True], backend: BackendName = ...,
    reproducible: bool = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = Full(),  # noqa: B008  (immutable)
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
    reproducible: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention on one device: q [B,Hq,Sq,D], k [B,Hkv,Sk,D] and v [B,Hkv,Sk,Dv] to out [B,Hq,Sq,Dv].

    Heads come before positions, as in `scaled_dot_product_attention`; pass `x.transpose(1, 2)` of tensors in the order
    of FlashAttention, [B,S,H,D]. More heads than positions on both sides warn, or raise if no model has so many heads.
    Query head h reads kv head `h // (Hq // Hkv)`. `out` has the dtype of q. A row that attends to no key has out 0 and
    lse -inf (with sinks, the sink). There is no dropout.

    Args:
        mask: which keys a query attends to. A mask with `sequences` has one mask per sequence of the batch.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`, as Gemma 2 and Grok do.
        sinks: [Hq], a score per query head that joins every softmax with a value of zero, as in GPT-OSS. It is
            differentiable, and part of the lse; `merge_sinks` has an lse without them, and sinks per query.
        alibi_slopes: [Hq], adds `-slope * |q_position - k_position|` to the scores, after the softcap. Constants.
        q_positions, k_positions: integer positions of the rows, in any order; 0, 1, 2, ... by default. A chunk of a
            longer prompt is `q_positions=torch.arange(start, start + Sq)`. On CUDA, pass CPU tensors (or None) to allow
            the fastest kernels: reading positions back from the device would stall it.
        return_lse: also return the float32 lse [B,Hq,Sq], natural log. It is differentiable.
        backend: "auto", "aten", "triton", "gluon" (Hopper), "torch" or "reference". A
            backend that cannot serve the call raises ValueError. `explain_attention` returns what "auto" chooses and
            why.
        reproducible: the bits of out, lse and gradients do not depend on the other rows of the call, nor on ranks, see
            `ContextParallel`. On a CPU, with `backend="auto"`.

    Examples:
        >>> q, k, v = torch.randn(1, 8, 100, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 32)
        >>> out, lse = am.attention(q, k, v, mask=am.Causal(), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 100, 32]), torch.Size([1, 8, 100]))
        >>> last = am.attention(q[:, :, 60:], k, v, mask=am.Causal(), q_positions=torch.arange(60, 100))
        >>> torch.allclose(last, out[:, :, 60:], atol=1e-5)
        True
    """
    if torch.compiler.is_compiling() and backend != "reference":
        tensors = q, k, v, sinks, alibi_slopes, q_positions, k_positions
        out, lse = compiled_attention(*tensors, mask, scale, softcap, with_reproducible(backend, reproducible))
        return (out, lse) if return_lse else out
    if type(return_lse) is not bool:
        check_bool(return_lse=return_lse)
    if type(backend) is not str:  # an array compares its elements
        check_choice("backend", backend, BACKENDS)
    name = backend if reproducible is False else with_reproducible(backend, reproducible)
    work = prepared(q, k, v, mask, scale, softcap, sinks, alibi_slopes, q_positions, k_positions)
    call = work.call
    if backend == "reference":
        at = [
            torch.arange(x.shape[2], device="cpu") if p is None else p for x, p in ((q, q_positions), (k, k_positions))
        ]
        with torch.autocast(q.device.type, enabled=False):  # the reference computes in the given dtype
            state = reference.attention(
                q, k, v, mask, call.scores.scale, *(p.to(q.device, torch.long) for p in at),
                softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            )  # fmt: skip
        return (state.out, state.lse) if return_lse else state.out
    inputs = call.q, call.k, call.v, sinks, call.visibility, call.scores, name
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        out, lse = _Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    elif torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        out, lse = _apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        out, lse = forward(call, sinks, name)
    if work.order is not None:
        back = work.order.argsort()
        out, lse = out[:, :, back], lse[:, :, back]
    return (out, lse) if return_lse else out


@torch.no_grad()
def attention_state(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, q_positions: Tensor, k_positions: Tensor,
    softcap: float | None = None, backend: str = "auto",
) -> State:  # fmt: skip
    """`attention` as an unrounded float32 state, to be merged with others. Positions must ascend. No autograd."""
    call = prepared(q, k, v, mask, scale, softcap, None, None, q_positions, k_positions).call
    total = StateAccumulator(call.q, v.shape[3])
    choose_fused(call, backend).forward(call, total)
    return total.finish(accumulation_dtype(q.dtype))


def explain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = Full(), scale: float | None = None,  # noqa: B008
    softcap: float | None = None, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None, k_positions: Tensor | None = None, backend: BackendName = "auto",
    reproducible: bool = False,
) -> Choice:  # fmt: skip
    """The backend that `attention` would use for this call, the reason, and why others cannot. Computes nothing.

    The reason has the number of visible pairs and of blocks, if the host knows the positions.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64)
        >>> choice = am.explain_attention(q, k, v, mask=am.Causal())
        >>> choice.backend, choice.reason
        ('aten', "torch's flash kernel is the fastest on the CPU (136 visible pairs in 1 block)")
    """
    call = prepared(q, k, v, mask, scale, softcap, sinks, alibi_slopes, q_positions, k_positions).call
    name = with_reproducible(backend, reproducible)
    choice = choose(call, name)
    reason = f"{choice.reason} ({cost.described(call)})"
    if choice.backend != "reference" and (back := choose_backward(call, name, whole=True)).backend != choice.backend:
        reason += f"; gradients by {back.backend}: {back.reason}"
    return replace(choice, reason=reason)


class _Attention(torch.autograd.Function):
    """The fused path: backends add to accumulators; the backward needs only (out, lse)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visibility: Visibility, scores: Scores,
        backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        state = forward(Call(q, k, v, visibility, scores), sinks, backend)
        ctx.save_for_backward(q, k, v, sinks, *state)
        ctx.visibility, ctx.scores, ctx.backend = visibility, scores, backend
        ctx.set_materialize_grads(False)
        return state.out, state.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        backward = _refused_twice if torch.is_grad_enabled() else _backward
        return backward(ctx, *grads)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    call = Call(q, k, v, ctx.visibility, ctx.scores)
    result = Result.of(out, lse, grad_out, grad_lse)
    return *gradients(call, sinks, result, ctx.backend, ctx.needs_input_grad), None, None, None


_refused_twice = once_differentiable(_backward)  # what it returns has no gradient of its own
_apply = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without what it does for transforms of torch.func, which takes longer than the function itself."""
