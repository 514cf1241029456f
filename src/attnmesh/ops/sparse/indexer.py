"""The lightning indexer on one device: scores at chosen slots, and the exact top-k.

The score of key j for row i is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.validation import check_positive
from attnmesh.ops.sparse import arguments as check
from attnmesh.ops.sparse.arguments import Rows, Slots, SparseMask
from attnmesh.ops.sparse.backend import Backend, choose


class Indexing(NamedTuple):
    """A checked indexer."""

    iq: Tensor
    ik: Tensor
    w: Tensor
    scale: float
    relu: bool
    deterministic: bool
    backend: Backend

    def without_tensors(self) -> Indexing:
        """What autograd's saved tensors do not hold already."""
        return self._replace(iq=None, ik=None, w=None)  # type: ignore[arg-type]


def indexer_scores_at(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    indices: Tensor,
    *,
    scale: float = 1.0,
    relu: bool = True,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Scores of the keys that slots name: [s_q, topk] float32, -inf where a slot is not valid.

    iq [s_q, heads, d], ik [s_kv, d] (or [s_kv, 1, d]), w [s_q, heads], indices [s_q, topk] int32. Gradients flow to
    iq, ik and w.
    """
    call = checked(iq, ik, w, scale, relu, deterministic, backend)
    indices = check.same_device(check.check_indices(indices, call.iq.shape[0]), call.iq)
    return scores_at(call, indices, check.rows_of(mask, call.iq, call.ik.shape[0], indices.shape[1]))


def indexer_topk(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    topk: int,
    *,
    scale: float = 1.0,
    relu: bool = True,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    block: int = 4096,
    backend: str = "auto",
) -> Slots:
    """The `topk` best keys of every row, exactly: `indices` [s_q, topk] int32 ascending, -1 last, `scores`, `length`.

    Of equal scores the lowest index wins (ReLU makes many of exactly 0); a key whose score is NaN is not chosen. Keys
    are streamed, `block` of them at a time on a CPU; what comes out has the same bits in every run and for every block.
    Shapes as in `indexer_scores_at`. No gradient flows: train the indexer with `indexer_kl_loss`.
    """
    check_choosing(topk, block, mask)
    call = checked(iq, ik, w, scale, relu, False, backend)
    rows = check.rows_of(mask, call.iq, call.ik.shape[0], topk)
    with torch.no_grad():
        return call.backend.topk(
            call.iq.detach(), call.ik.detach(), call.w.detach(), topk, rows, scale=call.scale, relu=call.relu,
            block=block,
        )  # fmt: skip


def check_choosing(topk: object, block: object, mask: object) -> None:
    """Raise ValueError for what no top-k can be asked for."""
    check_positive(topk=topk, block=block)
    if isinstance(mask, SparseMask) and mask.topk_length is not None:
        raise ValueError("mask.topk_length counts slots, and indexer_topk has none yet: use k_start and k_end")


def checked(iq: Tensor, ik: Tensor, w: Tensor, scale: float, relu: bool, deterministic: bool, backend: str) -> Indexing:
    """An indexer that can be served, or ValueError."""
    iq = check.check_queries("iq", iq)
    ik = check.check_keys("ik", ik, iq, iq.shape[2])
    w = check.check_per_head("w", w, iq)
    scale = check.check_scale("scale", scale)
    return Indexing(iq, ik, w, scale, bool(relu), deterministic, choose(iq, backend))


def scores_at(call: Indexing, indices: Tensor, rows: Rows) -> Tensor:
    """Scores of a checked call, differentiable."""
    scores: Tensor = _ScoresAt.apply(call.iq, call.ik, call.w, call, indices, rows)  # type: ignore[no-untyped-call]
    return scores


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: Indexing, indices: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(iq, ik, w)
        ctx.rest = call.without_tensors(), indices, rows
        return call.backend.scores_at(iq, ik, w, indices, rows, scale=call.scale, relu=call.relu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w = ctx.saved_tensors
        call, indices, rows = ctx.rest
        d_iq, d_ik, d_w = call.backend.scores_at_backward(
            iq, ik, w, indices, rows, grad.contiguous(), scale=call.scale, relu=call.relu,
            deterministic=call.deterministic, dtype=iq.dtype,
        )  # fmt: skip
        return d_iq, d_ik.to(ik.dtype), d_w.to(w.dtype), None, None, None
