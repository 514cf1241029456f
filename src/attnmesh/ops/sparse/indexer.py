"""The lightning indexer on one device: scores of given keys, and the exact top-k.

The score of key j for row i is `scale * sum_h w[i, h] * relu(iq[i, h] . ik[j])`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.ops.sparse import arguments, dispatch
from attnmesh.ops.sparse.arguments import IndexerCall, SparseMask, TopKIndices
from attnmesh.utils.validation import check_bool, check_number, check_positive, shown


def indexer_scores_at(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, *, scale: float = 1.0, relu: bool = True,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    deterministic: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Index scores of the keys in `indices`: float32 [s_q, topk], -inf where a slot is invalid.

    iq [s_q, heads, d], ik [s_kv, d] (or [s_kv, 1, d]), w [s_q, heads], indices int32 [s_q, topk]. Without `relu` the
    products are summed as they are. Gradients flow to iq, ik and w.

    Examples:
        >>> iq, ik, w = torch.randn(3, 2, 8), torch.randn(10, 8), torch.rand(3, 2)
        >>> indices = torch.tensor([[4, -1]] * 3, dtype=torch.int32)
        >>> scores = am.sparse.indexer_scores_at(iq, ik, w, indices)
        >>> torch.allclose(scores[:, 0], ((iq @ ik[4]).relu() * w).sum(1)), scores[:, 1].tolist()
        (True, [-inf, -inf, -inf])
    """
    if indices is None:
        arguments.check_indices(indices)  # raises
    return scores_at(indexer_call(iq, ik, w, indices, mask, scale, relu, deterministic, backend))


def indexer_topk(
    iq: Tensor, ik: Tensor, w: Tensor, topk: int, *, scale: float = 1.0, relu: bool = True,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    block_size: int = 4096, backend: str = "auto",
) -> TopKIndices:  # fmt: skip
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
    call = indexer_call(iq, ik, w, None, mask, scale, relu, False, backend, topk=topk)
    with torch.no_grad():
        return dispatch.topk(call.detach(), topk, block_size)


def check_topk(topk: object, block_size: object, mask: object) -> None:
    """Raises ValueError unless these can be the arguments of a top-k."""
    check_positive(topk=topk, block_size=block_size)
    if isinstance(mask, SparseMask) and mask.topk_length is not None:
        raise ValueError(
            "mask.topk_length must be None for indexer_topk, which has no slots yet (use k_start and k_end), got "
            f"{shown(mask.topk_length)}"
        )


def indexer_call(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, mask: SparseMask, scale: float, relu: bool,
    deterministic: bool, backend: str, *, s_kv: int | None = None, topk: int | None = None,
) -> IndexerCall:  # fmt: skip
    """Validates the arguments. `s_kv` is the number of keys in the sequence, where `ik` is a shard of them.

    With `topk` it is a call that selects `topk` keys.
    """
    iq = arguments.check_queries("iq", iq)
    ik = arguments.check_keys("ik", ik, iq, iq.shape[2])
    w = arguments.check_per_head("w", w, iq)
    scale = check_number("scale", scale)
    check_bool(relu=relu, deterministic=deterministic)
    s_kv = ik.shape[0] if s_kv is None else s_kv
    if indices is not None:
        indices = arguments.check_same_device(arguments.check_indices(indices, iq.shape[0]), iq)
    slots = topk or (s_kv if indices is None else indices.shape[1])
    bounds = arguments.mask_bounds(mask, iq, s_kv, slots)
    call = IndexerCall(iq, ik, w, indices, bounds, scale, relu, deterministic, backend)
    if topk is None:
        dispatch.choose("scores_at", iq, backend)
    else:
        dispatch.choose_topk(call, topk)
    return call


def scores_at(call: IndexerCall) -> Tensor:
    """Scores of a validated call, differentiable."""
    scores: Tensor = _ScoresAt.apply(call.iq, call.ik, call.w, call)  # type: ignore[no-untyped-call]
    return scores


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: IndexerCall) -> Tensor:
        ctx.save_for_backward(iq, ik, w)
        ctx.call = call.without_tensors()
        return dispatch.scores_at(call._replace(iq=iq, ik=ik, w=w))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w = ctx.saved_tensors
        call = ctx.call._replace(iq=iq, ik=ik, w=w)
        d_iq, d_ik, d_w = dispatch.scores_at_backward(call, grad.contiguous(), iq.dtype)
        return d_iq, d_ik.to(ik.dtype), d_w.to(w.dtype), None
