"""`sparse_attention` and `attention_distribution` on one device: validate, dispatch, differentiate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.merge import add_sinks, sink_gradient
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.validation import check_positive
from attnmesh.ops.sparse import check
from attnmesh.ops.sparse.backend import Backend
from attnmesh.ops.sparse.choose import choose
from attnmesh.ops.sparse.lse import Base, check_base, convert_lse
from attnmesh.ops.sparse.mask import Rows, SparseMask

_WIDEST_VALUE = 512  # of a key that holds its value: MLA's latent, before what carries the position


class Attending(NamedTuple):
    """A checked call: which keys each row reads, and how."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    indices: Tensor
    rows: Rows
    scale: float
    d_v: int
    deterministic: bool
    backend: Backend


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
    deterministic: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Softmax attention of every query over the keys its indices name: `(out, lse)`.

    q [s_q, h, d]; kv [s_kv, d] (or [s_kv, 1, d]), one kv head for all; indices [s_q, topk] int32. The value of a key is
    its first `d_v` features (all of them, at most 512, unless said), or its row of `v` [s_kv, d_v]. A slot that names
    no key (negative, past s_kv) or that `mask` rules out counts for nothing; a key named twice counts twice.
    `sinks` [h] are scores of keys without a value. out [s_q, h, d_v] in the dtype of q; lse [s_q, h] float32,
    natural log, sinks included; a row without a key: out 0, lse -inf (or its sink).

    Gradients flow to q, kv, v and sinks, from out and from lse, so that states over parts of the keys can be
    merged. `deterministic`: the gradient of kv has the same bits in every run, at some cost on a GPU.
    `return_attn_sum` adds `attention_distribution` of the same call.
    """
    call = checked(q, kv, indices, scale, d_v, v, mask, deterministic, backend)
    check.check_sink(sinks, call.q)
    out, lse = _SparseAttention.apply(call.q, call.k, call.v, sinks, call)  # type: ignore[no-untyped-call]
    if not return_attn_sum:
        return out, lse
    return out, lse, distribution(call, lse.detach(), call.q.shape[1])[0]


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
    """The sum over heads of exp(score - lse) at each slot: [s_q, topk] float32, 0 at slots that are not valid.

    Shapes and validity as in `sparse_attention`. `lse` [s_q, h] may be over more keys than the slots name (dense
    attention, a window, a sink): then heads differ in how much of their mass the slots hold. An infinite lse is a head
    without mass. `lse_base` names its base, "e" or "2". `head_group=n` sums groups of n heads to [groups, s_q, topk].
    Nothing is normalized, so that sums over ranks with other heads add up, unless `normalize` asks that every
    row with any mass sum to 1. No gradient flows.
    """
    call = checked(q, k, indices, scale, None, None, mask, False, backend, k_name="k")
    check_base("lse_base", lse_base)
    lse = check.check_per_head("lse", lse, call.q).detach().to(accumulation_dtype(call.q.dtype))
    lse = convert_lse(lse, lse_base, "e")
    if head_group is not None:
        check_positive(head_group=head_group)
    heads = call.q.shape[1]
    dist = distribution(call, lse, heads if head_group is None else min(head_group, heads))
    if normalize:
        dist = normalized(dist)
    return dist[0] if head_group is None else dist


def normalized(dist: Tensor) -> Tensor:
    """Rows that sum to 1; a row without mass stays 0."""
    mass = dist.sum(-1, keepdim=True)
    return dist / mass.masked_fill(mass == 0, 1.0)


def distribution(call: Attending, lse: Tensor, head_group: int) -> Tensor:
    """[groups, s_q, topk] of a checked call."""
    lse = lse.to(accumulation_dtype(call.q.dtype))
    with torch.no_grad():
        return call.backend.distribution(
            call.q.detach(),
            call.k.detach(),
            call.indices,
            call.rows,
            lse,
            scale=call.scale,
            head_group=head_group,
        )


def checked(
    q: Tensor, k: Tensor, indices: Tensor, scale: float, d_v: int | None, v: Tensor | None, mask: SparseMask,
    deterministic: bool, backend: str, s_kv: int | None = None, k_name: str = "kv",
) -> Attending:  # fmt: skip
    """A call that can be served, or ValueError. `s_kv`: how many keys there are, where `k` is only some of them."""
    q = check.check_queries("q", q)
    width = q.shape[2]
    k = check.check_keys(k_name, k, q, width)
    indices = check.same_device(check.check_indices(indices, q.shape[0]), q)
    if d_v is not None:
        check_positive(d_v=d_v)
    if v is not None:
        v = check.check_keys("v", v, q, d_v)
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"v must have a row for each of the {k.shape[0]} keys, got {v.shape[0]}")
        d_v = v.shape[1]
    elif d_v is None:
        d_v = min(width, _WIDEST_VALUE)
    elif d_v > width:
        raise ValueError(f"d_v must be at most the width of a key, {width}, got {d_v}")
    return Attending(
        q, k, v, indices, check.rows_of(mask, q, k.shape[0] if s_kv is None else s_kv, indices.shape[1]),
        check.check_scale("scale", scale), d_v, deterministic, choose(q, backend),
    )  # fmt: skip


class _SparseAttention(torch.autograd.Function):
    """(out, lse) is all the backward needs; a sink is a key of its own, whose value is zero."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor | None, sink: Tensor | None, call: Attending
    ) -> tuple[Tensor, Tensor]:
        wide = accumulation_dtype(q.dtype)
        out, lse = call.backend.forward(
            q, k, v, call.indices, call.rows, scale=call.scale, d_v=call.d_v,
            dtype=q.dtype if sink is None else wide,
        )  # fmt: skip
        if sink is not None:
            out, lse = add_sinks(State(out, lse), sink)
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.call = call._replace(q=None, k=None, v=None)  # type: ignore[arg-type]  # saved above, where autograd watches over them
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        call: Attending = ctx.call
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        delta = delta_of(call.backend, out, lse, d_out, d_lse)
        d_q, d_k, d_v = call.backend.backward(
            q, k, v, call.indices, call.rows, lse, delta, d_out, scale=call.scale, d_v=call.d_v,
            deterministic=call.deterministic, dtype=q.dtype,
        )  # fmt: skip
        d_sink = None if sink is None else sink_gradient(sink, lse, delta).to(sink.dtype)
        return d_q, d_k.to(k.dtype), None if d_v is None else d_v.to(k.dtype), d_sink, None


def delta_of(backend: Backend, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """[s_q, h]: what is taken from the gradient of every probability."""
    delta = backend.row_delta(out, d_out)
    return delta if d_lse is None else delta - torch.where(torch.isinf(lse), 0.0, d_lse)
