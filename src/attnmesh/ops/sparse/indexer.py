"""The lightning indexer on one device: scores of given keys, and the exact top-k.

The score of key j for row i is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.ops.sparse import arguments
from attnmesh.ops.sparse.arguments import RowBounds, SparseMask, TopKIndices
from attnmesh.ops.sparse.backend import Backend, select_backend
from attnmesh.utils.validation import check_bool, check_number, check_positive, shown


class IndexerCall(NamedTuple):
    """Validated arguments of a call."""

    iq: Tensor
    ik: Tensor
    w: Tensor
    scale: float
    relu: bool
    deterministic: bool
    backend: Backend

    def without_tensors(self) -> IndexerCall:
        """The arguments that autograd does not save itself."""
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
    """Index scores of the keys in `indices`: float32 [s_q, topk], -inf where a slot is invalid.

    iq [s_q, heads, d], ik [s_kv, d] (or [s_kv, 1, d]), w [s_q, heads], indices int32 [s_q, topk]. Without `relu` the
    products are summed as they are. Gradients flow to iq, ik and w.

    Examples:
        >>> iq, ik, w = torch.randn(3, 2, 8), torch.randn(10, 8), torch.rand(3, 2)
        >>> indices = torch.tensor([[4, -1]] * 3, dtype=torch.int32)
        >>> scores = am.indexer_scores_at(iq, ik, w, indices)
        >>> torch.allclose(scores[:, 0], ((iq @ ik[4]).relu() * w).sum(1)), scores[:, 1].tolist()
        (True, [-inf, -inf, -inf])
    """
    call = indexer_call(iq, ik, w, scale, relu, deterministic, backend)
    indices = arguments.check_same_device(arguments.check_indices(indices, call.iq.shape[0]), call.iq)
    return scores_at(call, indices, arguments.mask_bounds(mask, call.iq, call.ik.shape[0], indices.shape[1]))


def indexer_topk(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    topk: int,
    *,
    scale: float = 1.0,
    relu: bool = True,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    block_size: int = 4096,
    backend: str = "auto",
) -> TopKIndices:
    """The exact top-k keys of every row: `indices` int32 [s_q, topk], ascending, then -1; `scores`; `lengths`.

    Shapes as in `indexer_scores_at`. Of equal scores the lowest index wins (ReLU makes many of them exactly 0); a key
    whose score is NaN is never selected. Scores are computed for `block_size` keys at a time on a CPU; the result has
    the same bits in every run and for every block size. No gradient flows: train the indexer with `indexer_kl_loss`.

    Examples:
        >>> iq, ik, w = torch.randn(3, 2, 8), torch.randn(10, 8), torch.rand(3, 2)
        >>> top = am.indexer_topk(iq, ik, w, topk=4, mask=am.SparseMask(causal=True))
        >>> top.indices[0].tolist(), top.lengths.tolist()  # one key is visible to row 0, three to row 2
        ([0, -1, -1, -1], [1, 2, 3])
    """
    check_topk(topk, block_size, mask)
    call = indexer_call(iq, ik, w, scale, relu, False, backend)
    bounds = arguments.mask_bounds(mask, call.iq, call.ik.shape[0], topk)
    with torch.no_grad():
        return call.backend.topk(
            call.iq.detach(), call.ik.detach(), call.w.detach(), topk, bounds, scale=call.scale, relu=call.relu,
            block_size=block_size,
        )  # fmt: skip


def check_topk(topk: object, block_size: object, mask: object) -> None:
    """Raises ValueError unless these can be the arguments of a top-k."""
    check_positive(topk=topk, block_size=block_size)
    if isinstance(mask, SparseMask) and mask.topk_length is not None:
        raise ValueError(
            "mask.topk_length must be None for indexer_topk, which has no slots yet (use k_start and k_end), got "
            f"{shown(mask.topk_length)}"
        )


def indexer_call(
    iq: Tensor, ik: Tensor, w: Tensor, scale: float, relu: bool, deterministic: bool, backend: str
) -> IndexerCall:
    """Validates the arguments."""
    iq = arguments.check_queries("iq", iq)
    ik = arguments.check_keys("ik", ik, iq, iq.shape[2])
    w = arguments.check_per_head("w", w, iq)
    scale = check_number("scale", scale)
    check_bool(relu=relu, deterministic=deterministic)
    return IndexerCall(iq, ik, w, scale, relu, deterministic, select_backend(iq, backend))


def scores_at(call: IndexerCall, indices: Tensor, bounds: RowBounds) -> Tensor:
    """Scores of a validated call, differentiable."""
    scores: Tensor = _ScoresAt.apply(call.iq, call.ik, call.w, call, indices, bounds)  # type: ignore[no-untyped-call]
    return scores


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: IndexerCall, indices: Tensor, bounds: RowBounds
    ) -> Tensor:
        ctx.save_for_backward(iq, ik, w)
        ctx.rest = call.without_tensors(), indices, bounds
        return call.backend.scores_at(iq, ik, w, indices, bounds, scale=call.scale, relu=call.relu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w = ctx.saved_tensors
        call, indices, bounds = ctx.rest
        d_iq, d_ik, d_w = call.backend.scores_at_backward(
            iq, ik, w, indices, bounds, grad.contiguous(), scale=call.scale, relu=call.relu,
            deterministic=call.deterministic, dtype=iq.dtype,
        )  # fmt: skip
        return d_iq, d_ik.to(ik.dtype), d_w.to(w.dtype), None, None, None
