"""`sparse_attention` and `attention_distribution` on one device."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from attnmesh.core.state import accumulation_dtype, sink_gradient
from attnmesh.ops.launch import Recent, signature
from attnmesh.ops.merge import stream_of
from attnmesh.ops.sparse import arguments, dispatch
from attnmesh.ops.sparse.arguments import Base, RowBounds, SparseCall, SparseMask, check_base, convert_lse
from attnmesh.utils.validation import check_bool, check_number, check_positive

MAX_DEFAULT_D_V = 512  # the latent of an MLA key; the features after it encode the position
_MAX_KEPT_ROWS = 1 << 14  # of bounds; longer calls have time to compute them


def sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, d_v: int | None = None, v: Tensor | None = None,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    sinks: Tensor | None = None, return_attn_sum: bool = False, return_max_logits: bool = False,
    deterministic: bool = False, backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
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
        backend: "auto", "gluon", "triton" or "torch".

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
    known, call = prepared_call(
        q, kv, indices, v, sinks, mask, scale, d_v, deterministic, backend, None, "kv", return_attn_sum,
        return_max_logits,
    )  # fmt: skip
    if _has_gradient(q, kv, v, sinks):
        results = _SparseAttention.apply(call.q, call.k, call.v, sinks, call, known)  # type: ignore[no-untyped-call]
    else:
        results = known.forward(call, sinks)
    if not return_attn_sum:
        return results  # type: ignore[no-any-return]
    out, lse, *largest = results
    return (out, lse, distribution(call, lse.detach(), call.q.shape[1])[0], *largest)


def attention_distribution(
    q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, *, scale: float,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    lse_base: Base = "e", head_group: int | None = None, normalize: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
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


def distribution(call: SparseCall, lse: Tensor, head_group: int) -> Tensor:
    """[groups, s_q, topk] of a validated call."""
    with torch.no_grad():
        detached = call._replace(q=call.q.detach(), k=call.k.detach())
        return dispatch.distribution(detached, lse.to(accumulation_dtype(call.q.dtype)), head_group)


class PreparedCall:
    """What is known of calls by their signature, and their forward pass. Keeps no tensors but constant bounds."""

    def __init__(
        self, call: SparseCall, mask: SparseMask, s_kv: int, forward: Any, given: tuple[Tensor | None, ...]
    ) -> None:
        self.forward = forward
        self._options = call.scale, call.d_v, call.deterministic, call.backend
        self._sizes = call.q.shape[0], s_kv, call.indices.shape[1], call.q.device
        self._as_given = all(x is y for x, y in zip(call[:4], given, strict=True))
        self._keep(mask, call.q, call.bounds)

    def call(self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, mask: SparseMask) -> SparseCall:
        """A call with this signature. Its mask is checked."""
        if not self._as_given:
            q, k, indices = arguments.contiguous_features(q), arguments.as_rows(k), arguments.as_rows(indices)
            v = None if v is None else arguments.as_rows(v)
        numbers, stream, bounds = self._bounds
        if type(mask) is not SparseMask or mask.numbers is None or mask.numbers != numbers or stream != stream_of(q):
            bounds = arguments.check_mask(mask).bounds(*self._sizes)
            self._keep(mask, q, bounds)
        return SparseCall(q, k, v, indices, bounds, *self._options)

    def _keep(self, mask: SparseMask, q: Tensor, bounds: RowBounds) -> None:
        """Keep bounds that depend on numbers alone, for the stream that computes them."""
        stream = None if mask.numbers is None or q.shape[0] > _MAX_KEPT_ROWS else stream_of(q)
        self._bounds: tuple[Any, ...] = (None,) * 3 if stream is None else (mask.numbers, stream, bounds)


_prepared: Recent[PreparedCall] = Recent()


def attention_call(
    q: Tensor, k: Tensor, indices: Tensor, scale: float, d_v: int | None, v: Tensor | None, mask: SparseMask,
    deterministic: bool, backend: str, s_kv: int | None = None, k_name: str = "kv", sinks: Tensor | None = None,
    attn_sum: bool = False,
) -> SparseCall:  # fmt: skip
    """Validates the arguments. `s_kv` is the number of keys in the sequence, where `k` is a shard of them."""
    options = scale, d_v, deterministic, backend, s_kv, k_name, attn_sum, False
    return prepared_call(q, k, indices, v, sinks, mask, *options)[1]


def prepared_call(
    q: Tensor, k: Tensor, indices: Tensor, v: Tensor | None, sinks: Tensor | None, mask: SparseMask, *options: Any
) -> tuple[PreparedCall, SparseCall]:
    """Validates the arguments. What depends on the signature of the arguments alone is checked and chosen once."""
    key: Any = None
    if not torch.compiler.is_compiling():
        try:
            kinds = type(q), type(k), type(indices), type(v), type(sinks), dispatch.LOG.isEnabledFor(logging.INFO)
            # Launches keep the offset of keys. The other numbers of a mask are in its bounds, which are tensors.
            key = (*signature(q, k, indices, v, sinks), mask.k_offset, *kinds, options, *map(type, options))
            known = _prepared.get(key)
        except (AttributeError, RuntimeError, TypeError):  # not dense tensors, or an option that is no number
            key = known = None
        if known is not None:
            return known, known.call(q, k, v, indices, mask)
    known, call = _checked_call(q, k, indices, v, sinks, mask, *options)
    if key is not None:
        _prepared.add(key, known)
    return known, call


def _checked_call(
    q: Tensor, k: Tensor, indices: Tensor, v: Tensor | None, sinks: Tensor | None, mask: SparseMask, scale: float,
    d_v: int | None, deterministic: bool, backend: str, s_kv: int | None, k_name: str, attn_sum: bool, max_logits: bool,
) -> tuple[PreparedCall, SparseCall]:  # fmt: skip
    given = q, k, v, indices
    check_bool(return_attn_sum=attn_sum, return_max_logits=max_logits, deterministic=deterministic)
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
    s_kv = k.shape[0] if s_kv is None else s_kv
    bounds = arguments.mask_bounds(mask, q, s_kv, indices.shape[1])
    call = SparseCall(q, k, v, indices, bounds, check_number("scale", scale), d_v, deterministic, backend)
    arguments.check_sinks(sinks, q)
    if attn_sum or k_name == "k":
        dispatch.check_backend("distribution", call, q.shape[1])
    forward = None if k_name == "k" else dispatch.prepare_forward(call, q.dtype, max_logits)
    return PreparedCall(call, mask, s_kv, forward, given), call


def _has_gradient(q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors, backward or forward."""
    if forward_ad._current_level >= 0 or torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (v is not None and v.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, call: SparseCall, known: PreparedCall
    ) -> tuple[Tensor, ...]:
        out, lse, *largest = known.forward(call._replace(q=q, k=k, v=v), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call.without_tensors()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*largest)
        return (out, lse, *largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call: SparseCall = ctx.call._replace(q=q, k=k, v=v)
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        delta = dispatch.softmax_delta(call, out, lse, d_out, d_lse)
        d_q, d_k, d_v = dispatch.backward(call, lse, delta, d_out, q.dtype)
        d_sinks = None if sinks is None else sink_gradient(sinks, lse, delta).to(sinks.dtype)
        return d_q, d_k.to(k.dtype), None if d_v is None else d_v.to(k.dtype), d_sinks, None, None
