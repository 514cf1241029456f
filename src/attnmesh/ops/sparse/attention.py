"""`sparse_attention` and `attention_distribution` on one device."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from attnmesh.core.merge import sink_gradient
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.launch import Recent, signature
from attnmesh.ops.sparse import arguments
from attnmesh.ops.sparse.arguments import Base, RowBounds, SparseMask, check_base, convert_lse
from attnmesh.ops.sparse.backend import LOG, Backend, select_backend
from attnmesh.utils.validation import check_bool, check_number, check_positive

MAX_DEFAULT_D_V = 512  # the latent of an MLA key; the features after it encode the position


class AttentionCall(NamedTuple):
    """Validated arguments of a call."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    indices: Tensor
    bounds: RowBounds
    scale: float
    d_v: int
    deterministic: bool
    backend: Backend

    def without_tensors(self) -> AttentionCall:
        """The arguments that autograd does not save itself."""
        return self._replace(q=None, k=None, v=None)  # type: ignore[arg-type]


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    d_v: int | None = None,
    v: Tensor | None = None,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    sinks: Tensor | None = None,
    return_attn_sum: bool = False,
    return_max_logits: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Softmax attention of every query over the keys in its row of `indices`: `(out, lse)`.

    Args:
        q: [s_q, heads, d].
        kv: [s_kv, d] or [s_kv, 1, d], one kv head for all query heads. The value of a key is its first `d_v` features.
        indices: int32 [s_q, topk]. A slot is invalid, and ignored, if it holds the index of no key (negative, or at
            least s_kv) or if `mask` excludes it. A key that occurs twice in a row counts twice.
        scale: the factor of the scores, before the softmax.
        d_v: features of a value; min(d, 512) by default.
        v: [s_kv, d_v]; values, where they are not the first features of the keys.
        mask: further conditions for a slot to be valid.
        sinks: [heads]; scores of one more key per head, which has no value.
        return_attn_sum: also return the `attention_distribution` of the call.
        return_max_logits: also return, last, the largest scaled score of every head, float32 [s_q, heads], without
            sinks; -inf without a valid slot. It has no gradient.
        deterministic: compute the gradients of kv and v with the same bits in every run, which is slower on a GPU.
        backend: "auto", "torch" or "triton".

    Returns:
        out [s_q, heads, d_v] in the dtype of q, and lse [s_q, heads] float32, natural log, sinks included. A row
        without a valid slot has out 0 and lse -inf (or its sink).

    Gradients flow to q, kv, v and sinks, from out and from lse, so states over parts of the keys can be merged.

    Examples:
        >>> q, kv = torch.randn(6, 4, 96), torch.randn(100, 96)
        >>> indices = torch.tensor([[0, 50, 99, -1]] * 5 + [[-1] * 4], dtype=torch.int32)  # -1 is padding
        >>> out, lse = am.sparse_attention(q, kv, indices, scale=96**-0.5, d_v=64)
        >>> out.shape, lse.shape
        (torch.Size([6, 4, 64]), torch.Size([6, 4]))
        >>> lse[5].tolist()  # the last row attends to nothing
        [-inf, -inf, -inf, -inf]
    """
    check_bool(return_attn_sum=return_attn_sum, return_max_logits=return_max_logits)
    call = attention_call(q, kv, indices, scale, d_v, v, mask, deterministic, backend)
    arguments.check_sinks(sinks, call.q)
    if _has_gradient(call.q, call.k, call.v, sinks):
        out, lse, *largest = _SparseAttention.apply(  # type: ignore[no-untyped-call]
            call.q, call.k, call.v, sinks, call, return_max_logits
        )
    else:
        out, lse, *largest = _forward(call, sinks, return_max_logits)
    if not return_attn_sum:
        return (out, lse, *largest)
    return (out, lse, distribution(call, lse.detach(), call.q.shape[1])[0], *largest)


def attention_distribution(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    scale: float,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    lse_base: Base = "e",
    head_group: int | None = None,
    normalize: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The sum over heads of exp(score - lse) for each slot: float32 [s_q, topk], 0 where a slot is invalid.

    Shapes and validity as in `sparse_attention`. No gradient flows.

    Args:
        lse: [s_q, heads]. It may cover more keys than `indices` (dense attention, a window, a sink); heads then differ
            in their sum over the slots. A head whose lse is infinite contributes nothing.
        lse_base: the base of `lse`, "e" or "2".
        head_group: sum groups of this many heads instead of all: [groups, s_q, topk].
        normalize: scale every row to a sum of 1, unless it is 0. By default nothing is normalized, so that results of
            ranks that hold other heads can be summed.

    Examples:
        >>> q, kv = torch.randn(3, 4, 16), torch.randn(8, 16)
        >>> indices = torch.tensor([[0, 5, -1]] * 3, dtype=torch.int32)
        >>> _, lse = am.sparse_attention(q, kv, indices, scale=0.25)
        >>> p = am.attention_distribution(q, kv, indices, lse, scale=0.25)
        >>> torch.allclose(p.sum(1), torch.tensor(4.0)), p[:, 2].tolist()  # each of 4 heads sums to 1
        (True, [0.0, 0.0, 0.0])
    """
    check_bool(normalize=normalize)
    call = attention_call(q, k, indices, scale, None, None, mask, False, backend, k_name="k")
    check_base("lse_base", lse_base)
    lse = arguments.check_per_head("lse", lse, call.q).detach().to(accumulation_dtype(call.q.dtype))
    lse = convert_lse(lse, lse_base, "e")
    if head_group is not None:
        check_positive(head_group=head_group)
    heads = call.q.shape[1]
    dist = distribution(call, lse, heads if head_group is None else min(head_group, heads))
    if normalize:
        dist = normalize_rows(dist)
    return dist[0] if head_group is None else dist


def normalize_rows(dist: Tensor) -> Tensor:
    """Rows scaled to a sum of 1; a row of zeros stays 0."""
    mass = dist.sum(-1, keepdim=True)
    return dist / mass.masked_fill(mass == 0, 1.0)


def distribution(call: AttentionCall, lse: Tensor, head_group: int) -> Tensor:
    """[groups, s_q, topk] of a validated call."""
    lse = lse.to(accumulation_dtype(call.q.dtype))
    with torch.no_grad():
        return call.backend.distribution(
            call.q.detach(),
            call.k.detach(),
            call.indices,
            call.bounds,
            lse,
            scale=call.scale,
            head_group=head_group,
        )


def attention_call(
    q: Tensor, k: Tensor, indices: Tensor, scale: float, d_v: int | None, v: Tensor | None, mask: SparseMask,
    deterministic: bool, backend: str, s_kv: int | None = None, k_name: str = "kv",
) -> AttentionCall:  # fmt: skip
    """Validates the arguments. `s_kv` is the number of keys in the sequence, where `k` is a shard of them.

    What depends on the signature of the arguments alone is checked and chosen once.
    """
    key = _signature(q, k, indices, v, scale, d_v, deterministic, backend, s_kv, k_name)
    known = _find(key)
    if known is None:
        return _checked_call(key, q, k, indices, scale, d_v, v, mask, deterministic, backend, s_kv, k_name)
    q, k, indices = arguments.contiguous_features(q), arguments.as_rows(k), arguments.as_rows(indices)
    v = None if v is None else arguments.as_rows(v)
    bounds = arguments.mask_bounds(mask, q, k.shape[0] if s_kv is None else s_kv, indices.shape[1])
    return AttentionCall(q, k, v, indices, bounds, known.scale, known.d_v, deterministic, known.backend)


class _Known(NamedTuple):
    """What calls of a signature have in common."""

    scale: float
    d_v: int
    backend: Backend


_known: Recent[_Known] = Recent()


def _signature(q: Tensor, k: Tensor, indices: Tensor, v: Tensor | None, *options: object) -> tuple[Any, ...] | None:
    """What the checks of a call and its backend depend on; None if it cannot be known: then the call is checked."""
    if torch.compiler.is_compiling():
        return None
    try:
        kinds = type(q), type(k), type(indices), type(v), LOG.isEnabledFor(logging.INFO)
        return (*signature(q, k, indices, v), *kinds, options, *map(type, options))
    except (AttributeError, RuntimeError, TypeError):  # not tensors, or not dense ones
        return None


def _find(key: tuple[Any, ...] | None) -> _Known | None:
    try:
        return None if key is None else _known.get(key)
    except TypeError:  # an option that is no number
        return None


def _checked_call(
    key: tuple[Any, ...] | None, q: Tensor, k: Tensor, indices: Tensor, scale: float, d_v: int | None,
    v: Tensor | None, mask: SparseMask, deterministic: bool, backend: str, s_kv: int | None, k_name: str,
) -> AttentionCall:  # fmt: skip
    q = arguments.check_queries("q", q)
    width = q.shape[2]
    k = arguments.check_keys(k_name, k, q, width)
    indices = arguments.check_same_device(arguments.check_indices(indices, q.shape[0]), q)
    if d_v is not None:
        check_positive(d_v=d_v)
    if v is not None:
        v = arguments.check_keys("v", v, q, d_v)
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"v must have {k.shape[0]} rows, one per key, got {v.shape[0]}")
        d_v = v.shape[1]
    elif d_v is None:
        d_v = min(width, MAX_DEFAULT_D_V)
    elif d_v > width:
        raise ValueError(f"d_v must be at most the width of a key, {width}, got {d_v}")
    bounds = arguments.mask_bounds(mask, q, k.shape[0] if s_kv is None else s_kv, indices.shape[1])
    scale = check_number("scale", scale)
    check_bool(deterministic=deterministic)
    known = _Known(scale, d_v, select_backend(q, backend))
    if key is not None:
        _known.add(key, known)
    return AttentionCall(q, k, v, indices, bounds, scale, d_v, deterministic, known.backend)


def _has_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors, backward or forward."""
    if forward_ad._current_level >= 0 or torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _forward(call: AttentionCall, sinks: Tensor | None, max_logits: bool) -> tuple[Tensor, ...]:
    return call.backend.forward(
        call.q, call.k, call.v, call.indices, call.bounds, scale=call.scale, d_v=call.d_v, dtype=call.q.dtype,
        sinks=sinks, max_logits=max_logits,
    )  # fmt: skip


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, call: AttentionCall, max_logits: bool
    ) -> tuple[Tensor, ...]:
        out, lse, *largest = _forward(call._replace(q=q, k=k, v=v), sinks, max_logits)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call.without_tensors()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*largest)
        return (out, lse, *largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        delta = softmax_delta(call.backend, out, lse, d_out, d_lse)
        d_q, d_k, d_v = call.backend.backward(
            q, k, v, call.indices, call.bounds, lse, delta, d_out, scale=call.scale, d_v=call.d_v,
            deterministic=call.deterministic, dtype=q.dtype,
        )  # fmt: skip
        d_sinks = None if sinks is None else sink_gradient(sinks, lse, delta).to(sinks.dtype)
        return d_q, d_k.to(k.dtype), None if d_v is None else d_v.to(k.dtype), d_sinks, None, None


def softmax_delta(backend: Backend, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """[s_q, heads]: sum(out * d_out) - d_lse, which is subtracted from the gradient of every probability."""
    delta = backend.row_delta(out, d_out)
    return delta if d_lse is None else delta - torch.where(torch.isinf(lse), 0.0, d_lse)
