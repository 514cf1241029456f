"""Attention: random inputs, results in float64 with all gradients, and the same results over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, run_virtual
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Mask
from attnmesh.ops.dense import reference
from attnmesh.parallel.context import ContextParallel
from attnmesh.testing.errors import ROUNDING, Comparison, assert_close

NAMES = ("out", "lse", "dq", "dk", "dv")

Attend = Callable[..., Any]  # of q, k, v, and sinks if there are any; returns out and lse


def random_inputs(
    q_len: int,
    k_len: int | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Return q, k, v and the gradients of out and lse. `heads` are the query heads and the KV heads."""
    generator = torch.Generator().manual_seed(seed)
    k_len = q_len if k_len is None else k_len
    value_dim = head_dim if value_dim is None else value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)

    q, grad_out = (normal(batch, heads[0], q_len, width) for width in (head_dim, value_dim))
    k, v = (normal(batch, heads[1], k_len, width) for width in (head_dim, value_dim))
    grad_lse = normal(batch, heads[0], q_len).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return [q, k, v, grad_out, grad_lse]


def forward_backward(attend: Attend, inputs: Sequence[Tensor], sinks: Tensor | None = None) -> list[Tensor]:
    """Return out, lse, dq, dk, dv, and dsinks if there are sinks. Gradients flow through out and through lse.

    Without the last of the inputs, no gradient flows through lse.
    """
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], sinks) if x is not None]
    results = attend(*leaves)
    outputs = list(results[: len(inputs) - 3])
    grads = torch.autograd.grad(outputs, leaves, [g.to(x.dtype) for g, x in zip(inputs[3:], outputs, strict=True)])
    return [*(x.detach() for x in results), *grads]


def reference_results(
    inputs: Sequence[Tensor],
    mask: Mask,
    *,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    plain: bool = False,
) -> list[Tensor]:
    """Return out, lse, dq, dk, dv in float64, or with `plain` by the plain computation in the inputs' precision.

    With sinks, their gradient is the last.
    """
    q, k = inputs[:2]
    rows = torch.arange(q.shape[2], device=q.device) if q_positions is None else q_positions.to(q.device).long()
    columns = torch.arange(k.shape[2], device=q.device) if k_positions is None else k_positions.to(q.device).long()
    scale = q.shape[3] ** -0.5 if scale is None else scale

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return reference.attention(
            q, k, v, mask, scale, rows, columns, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, plain=plain
        )

    if plain:
        return forward_backward(attend, inputs, sinks)
    return forward_backward(attend, [x.double() for x in inputs], None if sinks is None else sinks.double())


def compare(actual: Sequence[Tensor], inputs: Sequence[Tensor], mask: Mask, **options: Any) -> list[Comparison]:
    """Return a comparison for each of out, lse, dq, dk, dv, dsinks. `options` go to `reference_results`."""
    exact = reference_results(inputs, mask, **options)
    plain = reference_results(inputs, mask, **options, plain=True)
    rounding = min(ROUNDING[inputs[0].dtype], ROUNDING[torch.float32])
    names = (*NAMES, "dsinks")[: len(exact)]
    found = [Comparison(*each, rounding) for each in zip(names, actual, exact, plain, strict=True)]
    sinks = options.get("sinks")
    if sinks is None:
        return found
    # A few numbers, each a sum over all rows that cancels, of terms with a rounded out: two roundings may differ by
    # more than twice either. Independent roundings of out leave at most half an epsilon of the norm of all terms.
    out, lse, grad_out = exact[0], exact[1], inputs[3].double()
    terms = (sinks.double()[:, None] - lse).exp()[..., None] * out * grad_out
    noise = float(terms.norm() / exact[-1].norm().clamp(min=1e-30))
    cancelled = 4 * ROUNDING[inputs[0].dtype] * max(1.0, noise)
    return [*found[:-1], found[-1]._replace(rounding=cancelled)]


def assert_attention_close(actual: Sequence[Tensor], inputs: Sequence[Tensor], mask: Mask, **options: Any) -> None:
    """Assert that out, lse, dq, dk, dv, dsinks obey the error rule. `options` go to `reference_results`."""
    exact = reference_results(inputs, mask, **options)
    plain = reference_results(inputs, mask, **options, plain=True)
    assert_results_close(actual, plain, exact, rounding=ROUNDING[inputs[0].dtype])


def assert_results_close(
    actual: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], *, rounding: float
) -> None:
    """Assert that out, lse, dq, dk, dv and, if there are sinks, dsinks obey the error rule."""
    for name, result, simple, right in zip((*NAMES, "dsinks")[: len(exact)], actual, plain, exact, strict=True):
        if name == "dsinks":  # [H]: the rule is for results by position; a sum over rows of terms with a rounded out
            result, right, simple = (x[None, None] for x in (result, right, simple))
        assert_close(name, result, simple, right, rounding=4 * rounding if name == "dsinks" else rounding)


def shard_inputs(
    inputs: Sequence[Tensor], comm: Comm, layout: Layout, key_layout: Layout | None = None
) -> list[Tensor]:
    """Return one rank's shards of q, k, v and of the gradients of out and lse."""
    layouts = [layout, key_layout or layout, key_layout or layout, layout, layout]
    return [own.shard(x, 2, comm.world, comm.rank) for x, own in zip(inputs, layouts, strict=False)]


def shard_results(
    comm: Comm,
    inputs: Sequence[Tensor],
    mask: Mask,
    layout: Layout,
    *,
    backend: str = "auto",
    schedule: str = "ring",
    ranks_per_node: int | None = None,
    key_layout: Layout | None = None,
    sinks: Tensor | None = None,
    reproducible: bool = False,
    **scores: Any,
) -> list[Tensor]:
    """Return one rank's shards of out, lse, dq, dk, dv, and its part of dsinks if there are sinks.

    Keys may have a length and a layout of their own. `scores` are scale, softcap and alibi_slopes.
    """
    how: dict[str, Any] = {"schedule": schedule, "backend": backend, "reproducible": reproducible}
    cp = ContextParallel(comm, layout=layout, ranks_per_node=ranks_per_node, **how)
    length, key_length = inputs[0].shape[2], inputs[1].shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return cp.attention(
            q, k, v, mask=mask, length=length, key_length=None if key_length == length else key_length,
            key_layout=key_layout, sinks=sinks, return_lse=True, **scores,
        )  # fmt: skip

    return forward_backward(attend, shard_inputs(inputs, comm, layout, key_layout), sinks)


def gather_results(
    comm: Comm, shards: Sequence[Tensor], inputs: Sequence[Tensor], layout: Layout, key_layout: Layout | None = None
) -> list[Tensor]:
    """Return the whole out, lse, dq, dk, dv, dsinks on every rank, from each rank's shards and its part of dsinks."""
    queries, keys = (ContextParallel(comm, layout=side) for side in (layout, key_layout or layout))
    lengths = [inputs[0].shape[2]] * 3 + [inputs[1].shape[2]] * 2
    sides = [queries] * 3 + [keys] * 2
    whole = [side.unshard(x, 2, length) for side, x, length in zip(sides, shards, lengths, strict=False)]
    return [*whole, *(comm.all_reduce(x) for x in shards[len(NAMES) :])]


def virtual_results(
    world: int, inputs: Sequence[Tensor], mask: Mask, layout: Layout, *, key_layout: Layout | None = None, **how: Any
) -> list[Tensor]:
    """Return the whole out, lse, dq, dk, dv, dsinks of `world` virtual ranks. `how` is as in `shard_results`."""
    shards = run_virtual(world, lambda comm: shard_results(comm, inputs, mask, layout, key_layout=key_layout, **how))
    sides = [layout] * 3 + [key_layout or layout] * 2
    out, lse, dq, dk, dv, *d_sinks = (list(parts) for parts in zip(*shards, strict=True))
    whole = [side.unshard(parts, 2) for side, parts in zip(sides, (out, lse, dq, dk, dv), strict=True)]
    return [*whole, *(torch.stack(parts).sum(0) for parts in d_sinks)]
