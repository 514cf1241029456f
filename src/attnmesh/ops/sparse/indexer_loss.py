"""The KL loss that trains the indexer: KL(attention distribution || softmax(index scores)) per row.

The "dense" loss is over all visible keys, computed one chunk of keys at a time. With mass m = sum p and index scores I,
the loss of a row is sum(p log p) / m - log m - sum(p I) / m + log sum exp(I): sums over keys, so one pass is enough.
The backward pass is a second one, because softmax(I) - p / m needs both normalizations first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse import arguments, dispatch, indexer
from attnmesh.ops.sparse.arguments import Base, IndexerCall, RowBounds, SparseCall, SparseMask, check_base, convert_lse
from attnmesh.ops.sparse.attention import normalize_rows
from attnmesh.utils.validation import check_choice, check_number, check_tensor, shown

Reduction = Literal["sum", "mean_rows", "none"]

_MAX_CHUNK_SLOTS = 1 << 23  # rows times keys of a chunk


class AttentionTarget(NamedTuple):
    """The attention that an indexer learns to predict: its queries, keys, lse and softmax scale.

    `indexer_kl_loss` takes it as the target, and computes its `attention_distribution`. Over all keys, `lse` must be
    that of dense attention.

    Examples:
        >>> q, kv = torch.randn(3, 4, 16), torch.randn(10, 16)
        >>> every = torch.arange(10, dtype=torch.int32).expand(3, 10)
        >>> _, lse = am.sparse_attention(q, kv, every, scale=0.25)
        >>> target = am.sparse.AttentionTarget(q, kv, lse, scale=0.25)
        >>> iq, ik, w = torch.randn(3, 2, 8), torch.randn(10, 8), torch.rand(3, 2)
        >>> am.indexer_kl_loss(iq, ik, w, None, target).item() >= 0  # over all keys
        True
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    lse_base: Base = "e"


def indexer_kl_loss(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, target: Tensor | AttentionTarget, *,
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    scale: float = 1.0, relu: bool = True, reduction: Reduction = "sum", row_mask: Tensor | None = None,
    deterministic: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """KL(p || softmax(index scores)) of every row, summed over rows. Gradients flow to iq, ik and w; p is a constant.

    Rows of p are normalized here; a row without mass has loss 0, and 0 log 0 is 0.

    Args:
        iq, ik, w, scale, relu: the indexer, as in `indexer_scores_at`.
        indices: int32 [s_q, topk], the keys of the sparse loss. None is the dense loss, over all keys that `mask`
            shows, for the warm-up: it needs far less memory than [s_q, s_kv].
        target: p at the indices, [s_q, topk], or the `AttentionTarget` whose `attention_distribution` p is.
        reduction: "sum"; "mean_rows", the mean over the rows that count; or "none", [s_q].
        row_mask: bool [s_q]; rows where it is False do not count, and may hold any values.

    Examples:
        >>> iq, ik, w = torch.randn(3, 2, 8, requires_grad=True), torch.randn(10, 8), torch.rand(3, 2)
        >>> indices = torch.tensor([[0, 4, 9]] * 3, dtype=torch.int32)
        >>> target = torch.rand(3, 3)  # or the `AttentionTarget` to learn from
        >>> loss = am.indexer_kl_loss(iq, ik, w, indices, target)
        >>> loss.backward()
        >>> loss.item() >= 0, iq.grad.shape
        (True, torch.Size([3, 2, 8]))
    """
    loss = loss_call(iq, ik, w, indices, target, mask, scale, relu, reduction, row_mask, deterministic, backend)
    return reduce_rows(_row_losses(loss), reduction, row_mask)


class TargetCall(NamedTuple):
    """A validated `AttentionTarget`; `lse` is natural."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    backend: str

    def narrow_keys(self, keys: slice) -> TargetCall:
        """The target over some of the keys."""
        return self._replace(k=self.k[keys])

    def call(self, indices: Any, bounds: RowBounds) -> SparseCall:
        """The attention over the keys of some slots."""
        return SparseCall(self.q, self.k, None, indices, bounds, self.scale, self.q.shape[2], False, self.backend)

    def at(self, indices: Tensor, bounds: RowBounds) -> Tensor:
        """The probabilities of the slots, summed over heads: [s_q, topk]."""
        with torch.no_grad():
            return dispatch.distribution(self.call(indices, bounds), self.lse, self.q.shape[1])[0]


class LossCall(NamedTuple):
    """Validated arguments: a loss over the slots of the indexer's indices, or over all keys if it has none.

    p is `target`, or is computed from `source`.
    """

    indexer: IndexerCall
    target: Tensor | None
    source: TargetCall | None


def loss_call(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, target: Tensor | AttentionTarget, mask: SparseMask,
    scale: float, relu: bool, reduction: Reduction, row_mask: Tensor | None, deterministic: bool, backend: str,
    s_kv: int | None = None,
) -> LossCall:  # fmt: skip
    """Validates the arguments. `s_kv` is the number of keys in the sequence, where `ik` is a shard of them."""
    check_choice("reduction", reduction, get_args(Reduction))
    mask = arguments.check_mask(mask)
    if indices is None and mask.topk_length is not None:
        raise ValueError(f"mask.topk_length must be None without indices, got {shown(mask.topk_length)}")
    call = indexer.indexer_call(iq, ik, w, indices, mask, scale, relu, deterministic, backend, s_kv=s_kv)
    _check_row_mask(call.iq, row_mask)
    given, source = None, None
    if isinstance(target, AttentionTarget):
        source = _target_call(target, call)
    else:
        given = _check_target(target, call.indices)
    if row_mask is not None:
        call = call._replace(bounds=call.bounds.mask_rows(row_mask))
    return LossCall(call, given, source)


def _check_target(target: object, indices: Tensor | None) -> Tensor:
    if not isinstance(target, Tensor) or indices is None:
        wanted = "an AttentionTarget with indices=None" if indices is None else "a tensor or an AttentionTarget"
        raise ValueError(f"target must be {wanted}, got {type(target).__name__} {shown(target)}")
    target = check_tensor("target", target)
    if target.shape != indices.shape or target.device != indices.device or not target.is_floating_point():
        raise ValueError(
            f"target must be floating point {list(indices.shape)} on {indices.device} like indices, got {shown(target)}"
        )
    return target.detach()


def _target_call(given: AttentionTarget, call: IndexerCall) -> TargetCall:
    q = arguments.check_queries("target.q", given.q)
    k = arguments.check_keys("target.k", given.k, q, q.shape[2])
    check_base("target.lse_base", given.lse_base)
    lse = arguments.check_per_head("target.lse", given.lse, q).detach().to(accumulation_dtype(q.dtype))
    lse = convert_lse(lse, given.lse_base, "e")
    if q.device != call.iq.device:
        raise ValueError(f"target.q must be on {call.iq.device} like iq, got {q.device}")
    if q.shape[0] != call.iq.shape[0] or k.shape[0] != call.ik.shape[0]:
        raise ValueError(
            f"target and indexer must have the same rows and keys: q has {q.shape[0]} rows and iq "
            f"{call.iq.shape[0]}, k has {k.shape[0]} keys and ik {call.ik.shape[0]}"
        )
    target = TargetCall(q.detach(), k.detach(), lse, check_number("target.scale", given.scale), call.backend)
    dispatch.check_backend("distribution", target.call(call.indices, call.bounds), q.shape[1])
    return target


def _check_row_mask(iq: Tensor, row_mask: object) -> None:
    s_q = iq.shape[0]
    if row_mask is not None and (
        not isinstance(row_mask, Tensor) or row_mask.dtype != torch.bool or row_mask.shape != (s_q,)
    ):
        got = f"{row_mask.dtype} {list(row_mask.shape)}" if isinstance(row_mask, Tensor) else shown(row_mask)
        raise ValueError(f"row_mask must be bool [{s_q}], got {got}")
    if isinstance(row_mask, Tensor) and row_mask.device != iq.device:
        raise ValueError(f"row_mask must be on {iq.device} like iq, got {row_mask.device}")


def _row_losses(loss: LossCall) -> Tensor:
    """[s_q], differentiable."""
    call, p, source = loss
    if call.indices is None:
        assert source is not None
        dense: Tensor = _DenseKL.apply(call.iq, call.ik, call.w, call, source)  # type: ignore[no-untyped-call]
        return dense
    if p is None:
        assert source is not None
        p = source.at(call.indices, call.bounds)
    return row_kl(indexer.scores_at(call), p)


def reduce_rows(
    losses: Tensor, reduction: Reduction, row_mask: Tensor | None, global_rows: int | Tensor | None = None
) -> Tensor:
    """The loss from the losses [s_q] of the rows, which may be a shard of `global_rows`."""
    count: int | Tensor = losses.shape[0]
    if row_mask is not None:
        losses = torch.where(row_mask, losses, 0.0)
        count = row_mask.sum()
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = count if global_rows is None else global_rows
    if isinstance(count, Tensor):
        return losses.sum() / count.clamp(min=1)
    return losses.sum() / max(1, count)


# Over slots that are in memory.


def row_kl(scores: Tensor, target: Tensor) -> Tensor:
    """KL(target || softmax(scores)) [s_q] of scores [s_q, topk], -inf at invalid slots; normalizes the target."""
    losses: Tensor = _RowKL.apply(scores, target)  # type: ignore[no-untyped-call]
    return losses


class _RowKL(torch.autograd.Function):
    """The gradient is softmax(scores) - p, so only scores and p are saved."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor) -> Tensor:
        valid = scores != -torch.inf  # a NaN score stays valid, so that the loss is NaN
        p = normalize_rows(torch.where(valid, target.to(scores.dtype), 0.0))
        log_z = torch.logsumexp(scores, -1, keepdim=True)
        ctx.save_for_backward(scores, p, log_z)
        # where, before the product: 0 log 0 is 0, and a slot without mass may have any score.
        return torch.where(p > 0, p * (p.log() - scores + log_z), 0.0).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, p, log_z = ctx.saved_tensors
        mass = p.sum(-1, keepdim=True)  # 1, or 0 in a row whose loss is 0
        q = torch.where(mass > 0, torch.exp(scores - log_z), 0.0)
        return (q - p) * grad[:, None], None


# Over all keys, one chunk at a time.


class KLSums:
    """Running sums of the loss of every row over chunks of keys: `log_z` and `mass` normalize I and p."""

    def __init__(self, iq: Tensor) -> None:
        wide = accumulation_dtype(iq.dtype)
        self.mass, self._p_log_p, self._p_scores = (iq.new_zeros(iq.shape[0], dtype=wide) for _ in range(3))
        self.log_z = torch.full_like(self.mass, -torch.inf)

    def add(self, p: Tensor, scores: Tensor) -> None:
        """Add a chunk: p and scores [s_q, keys], -inf where a key is not visible."""
        p = p.to(scores.dtype)
        self.log_z = torch.logaddexp(self.log_z, torch.logsumexp(scores, -1))
        self.mass += p.sum(-1)
        self._p_log_p += torch.special.xlogy(p, p).sum(-1)
        self._p_scores += torch.where(p > 0, p * scores, 0.0).sum(-1)

    def loss(self) -> Tensor:
        """[s_q]; 0 for a row without mass."""
        safe_mass = torch.where(self.mass > 0, self.mass, 1.0)
        loss = (self._p_log_p - self._p_scores) / safe_mass - safe_mass.log() + self.log_z
        return torch.where(self.mass > 0, loss, 0.0)


def dense_gradients(
    call: IndexerCall, p: Tensor, log_z: Tensor, mass: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of iq, ik and w of a chunk of keys, unrounded, given that of the row losses [s_q]."""
    scores = dispatch.scores_at(call)
    has_mass = (mass > 0)[:, None]
    safe_mass = torch.where(mass > 0, mass, 1.0)[:, None]
    d_scores = torch.exp(scores - log_z[:, None]) - p.to(scores.dtype) / safe_mass
    d_scores = torch.where(has_mass, d_scores, 0.0) * grad[:, None]
    return dispatch.scores_at_backward(call._replace(indices=None), d_scores, log_z.dtype)


class KeyChunk(NamedTuple):
    """A chunk of keys, with one slot per key in every row. `indices` is expanded and takes no memory."""

    keys: slice
    indices: Tensor
    bounds: RowBounds


def key_chunks(s_q: int, s_kv: int, bounds: RowBounds) -> Iterator[KeyChunk]:
    """All keys, in chunks of bounded size."""
    n = max(128, _MAX_CHUNK_SLOTS // max(1, s_q))
    for begin in range(0, s_kv if s_q else 0, n):
        keys = slice(begin, min(begin + n, s_kv))
        first, size = bounds.k_offset + begin, keys.stop - begin
        indices = torch.arange(first, first + size, dtype=torch.int32, device=bounds.lo.device).expand(s_q, size)
        yield KeyChunk(keys, indices, bounds._replace(slots=(bounds.hi - first).clamp(0, size), k_offset=first))


class _DenseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: IndexerCall, target: TargetCall
    ) -> Tensor:  # fmt: skip
        sums = KLSums(iq)
        call = call._replace(iq=iq, ik=ik, w=w)
        for keys, indices, chunk in key_chunks(iq.shape[0], ik.shape[0], call.bounds):
            sums.add(
                target.narrow_keys(keys).at(indices, chunk), dispatch.scores_at(call.over(ik[keys], indices, chunk))
            )
        ctx.save_for_backward(iq, ik, w, sums.log_z, sums.mass)
        ctx.rest = call.without_tensors(), target
        return sums.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w, log_z, mass = ctx.saved_tensors
        call, target = ctx.rest
        call = call._replace(iq=iq, ik=ik, w=w)
        d_iq, d_ik, d_w = (torch.zeros_like(x, dtype=log_z.dtype) for x in (iq, ik, w))
        for keys, indices, chunk in key_chunks(iq.shape[0], ik.shape[0], call.bounds):
            p = target.narrow_keys(keys).at(indices, chunk)
            grads = dense_gradients(call.over(ik[keys], indices, chunk), p, log_z, mass, grad)
            for total, part in zip((d_iq, d_ik[keys], d_w), grads, strict=True):
                total += part
        return d_iq.to(iq.dtype), d_ik.to(ik.dtype), d_w.to(w.dtype), None, None
