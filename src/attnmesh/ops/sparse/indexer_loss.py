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
from attnmesh.ops.sparse import arguments, indexer
from attnmesh.ops.sparse.arguments import Base, RowBounds, SparseMask, check_base, convert_lse
from attnmesh.ops.sparse.attention import normalize_rows
from attnmesh.ops.sparse.backend import Backend, select_backend
from attnmesh.ops.sparse.indexer import IndexerCall
from attnmesh.utils.validation import check_choice, check_count, check_number, check_tensor, shown

Mode = Literal["sparse", "dense"]
Reduction = Literal["sum", "mean_rows", "none"]

_MAX_CHUNK_SLOTS = 1 << 23  # rows times keys of a chunk


def indexer_kl_loss(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    indices: Tensor | None = None,
    target: Tensor | None = None,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    lse: Tensor | None = None,
    attn_scale: float | None = None,
    lse_base: Base = "e",
    mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
    mode: Mode = "sparse",
    scale: float = 1.0,
    relu: bool = True,
    reduction: Reduction = "sum",
    row_mask: Tensor | None = None,
    global_rows: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """KL(p || softmax(index scores)) of every row, summed over rows. Gradients flow to iq, ik and w; p is a constant.

    Rows of p are normalized here; a row without mass has loss 0, and 0 log 0 is 0.

    Args:
        iq, ik, w, scale, relu: the indexer, as in `indexer_scores_at`.
        indices: int32 [s_q, topk]; the keys of the "sparse" loss.
        target: [s_q, topk]; p of the "sparse" loss. By default p is the `attention_distribution` of the attention
            arguments q, k, lse and attn_scale.
        q, k, lse, attn_scale, lse_base: the queries, keys, lse and softmax scale of attention. With mode="dense" lse
            must be that of dense attention.
        mode: "sparse", over the keys in `indices`; "dense", over all keys that `mask` shows, for the warm-up. The dense
            loss needs far less memory than [s_q, s_kv].
        reduction: "sum"; "mean_rows", the mean over `global_rows` rows, by default the rows that count; or "none",
            [s_q].
        row_mask: bool [s_q]; rows where it is False do not count, and may hold any values.
        global_rows: the number of rows over all ranks, where rows are sharded.

    Examples:
        >>> iq, ik, w = torch.randn(3, 2, 8, requires_grad=True), torch.randn(10, 8), torch.rand(3, 2)
        >>> indices = torch.tensor([[0, 4, 9]] * 3, dtype=torch.int32)
        >>> target = torch.rand(3, 3)  # or q, k, lse and attn_scale of the attention to learn from
        >>> loss = am.indexer_kl_loss(iq, ik, w, indices, target)
        >>> loss.backward()
        >>> loss.item() >= 0, iq.grad.shape
        (True, torch.Size([3, 2, 8]))
    """
    loss = loss_call(
        iq, ik, w, indices, target, q, k, lse, attn_scale, lse_base, mask, mode, scale, relu, reduction, row_mask,
        global_rows, deterministic, backend,
    )  # fmt: skip
    return reduce_rows(_row_losses(loss), reduction, row_mask, global_rows)


class AttentionTarget(NamedTuple):
    """The attention that the indexer learns to predict; `lse` is natural."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    backend: Backend

    def narrow_keys(self, keys: slice) -> AttentionTarget:
        """The target over some of the keys."""
        return self._replace(k=self.k[keys])

    def at(self, indices: Tensor, bounds: RowBounds) -> Tensor:
        """The probabilities of the slots, summed over heads: [s_q, topk]."""
        lse = self.lse.to(accumulation_dtype(self.q.dtype))
        with torch.no_grad():
            return self.backend.distribution(
                self.q, self.k, indices, bounds, lse, scale=self.scale, head_group=self.q.shape[1]
            )[0]


class LossCall(NamedTuple):
    """Validated arguments: a loss over the slots of `indices`, or over all keys if it is None.

    p is `target`, or is computed from `source`.
    """

    indexer: IndexerCall
    indices: Tensor | None
    bounds: RowBounds
    target: Tensor | None
    source: AttentionTarget | None


def loss_call(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, target: Tensor | None, q: Tensor | None,
    k: Tensor | None, lse: Tensor | None, attn_scale: float | None, lse_base: Base, mask: SparseMask, mode: Mode,
    scale: float, relu: bool, reduction: Reduction, row_mask: Tensor | None, global_rows: int | Tensor | None,
    deterministic: bool, backend: str, s_kv: int | None = None,
) -> LossCall:  # fmt: skip
    """Validates the arguments. `s_kv` is the number of keys in the sequence, where `ik` is a shard of them."""
    call = indexer.indexer_call(iq, ik, w, scale, relu, deterministic, backend)
    check_choice("mode", mode, get_args(Mode))
    check_choice("reduction", reduction, get_args(Reduction))
    check_base("lse_base", lse_base)
    mask = arguments.check_mask(mask)
    _check_row_arguments(call.iq, row_mask, global_rows)
    if mode == "sparse" and indices is None:
        raise ValueError('indices must be given with mode="sparse" (mode="dense" is over all keys), got None')
    if mode == "dense":
        for name, given in (("indices", indices), ("target", target), ("mask.topk_length", mask.topk_length)):
            if given is not None:
                raise ValueError(f'{name} must be None with mode="dense", which is over all keys, got {shown(given)}')
    if indices is not None:
        indices = arguments.check_same_device(arguments.check_indices(indices, call.iq.shape[0]), call.iq)
    source = None
    if target is None:
        source = _attention_target(q, k, lse, attn_scale, lse_base, call, backend)
    elif any(given is not None for given in (q, k, lse, attn_scale)):
        raise ValueError("target and (q, k, lse, attn_scale) exclude each other, got both")
    else:
        assert indices is not None
        target = _check_target(target, indices)
    s_kv = call.ik.shape[0] if s_kv is None else s_kv
    bounds = arguments.mask_bounds(mask, call.iq, s_kv, s_kv if indices is None else indices.shape[1])
    if row_mask is not None:
        bounds = bounds.mask_rows(row_mask)
    return LossCall(call, indices, bounds, target, source)


def _check_target(target: object, indices: Tensor) -> Tensor:
    target = check_tensor("target", target)
    if target.shape != indices.shape or target.device != indices.device or not target.is_floating_point():
        raise ValueError(
            f"target must be floating point {list(indices.shape)} on {indices.device} like indices, got {shown(target)}"
        )
    return target.detach()


def _attention_target(
    q: Tensor | None, k: Tensor | None, lse: Tensor | None, attn_scale: float | None, lse_base: Base,
    call: IndexerCall, backend: str,
) -> AttentionTarget:  # fmt: skip
    if q is None or k is None or lse is None or attn_scale is None:
        missing = [name for name, x in (("q", q), ("k", k), ("lse", lse), ("attn_scale", attn_scale)) if x is None]
        raise ValueError(f"without target, q, k, lse and attn_scale must be given, got None for {', '.join(missing)}")
    q = arguments.check_queries("q", q)
    k = arguments.check_keys("k", k, q, q.shape[2])
    check_base("lse_base", lse_base)
    lse = arguments.check_per_head("lse", lse, q).detach().to(accumulation_dtype(q.dtype))
    lse = convert_lse(lse, lse_base, "e")
    if q.device != call.iq.device:
        raise ValueError(f"q must be on {call.iq.device} like iq, got {q.device}")
    if q.shape[0] != call.iq.shape[0] or k.shape[0] != call.ik.shape[0]:
        raise ValueError(
            f"attention and indexer must have the same rows and keys: q has {q.shape[0]} rows and iq "
            f"{call.iq.shape[0]}, k has {k.shape[0]} keys and ik {call.ik.shape[0]}"
        )
    scale = check_number("attn_scale", attn_scale)
    return AttentionTarget(q.detach(), k.detach(), lse, scale, select_backend(q, backend))


def _check_row_arguments(iq: Tensor, row_mask: object, global_rows: object) -> None:
    s_q = iq.shape[0]
    if row_mask is not None and (
        not isinstance(row_mask, Tensor) or row_mask.dtype != torch.bool or row_mask.shape != (s_q,)
    ):
        got = f"{row_mask.dtype} {list(row_mask.shape)}" if isinstance(row_mask, Tensor) else shown(row_mask)
        raise ValueError(f"row_mask must be bool [{s_q}], got {got}")
    if isinstance(row_mask, Tensor) and row_mask.device != iq.device:
        raise ValueError(f"row_mask must be on {iq.device} like iq, got {row_mask.device}")
    if isinstance(global_rows, Tensor):
        if global_rows.ndim or global_rows.dtype.is_complex:
            raise ValueError(f"global_rows must be one number, got {shown(global_rows)}")
    elif global_rows is not None:
        check_count("global_rows", global_rows, least=1, most=2**53)


def _row_losses(loss: LossCall) -> Tensor:
    """[s_q], differentiable."""
    call, indices, bounds, p, source = loss
    if indices is None:
        assert source is not None
        dense: Tensor = _DenseKL.apply(call.iq, call.ik, call.w, call, source, bounds)  # type: ignore[no-untyped-call]
        return dense
    if p is None:
        assert source is not None
        p = source.at(indices, bounds)
    return row_kl(indexer.scores_at(call, indices, bounds), p)


def reduce_rows(
    losses: Tensor, reduction: Reduction, row_mask: Tensor | None, global_rows: int | Tensor | None
) -> Tensor:
    """The loss from the losses [s_q] of the rows."""
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


def score_gradient(p: Tensor, scores: Tensor, log_z: Tensor, mass: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the scores of a chunk [s_q, keys], given that of the row losses [s_q]."""
    has_mass = (mass > 0)[:, None]
    safe_mass = torch.where(mass > 0, mass, 1.0)[:, None]
    d_scores = torch.exp(scores - log_z[:, None]) - p.to(scores.dtype) / safe_mass
    return torch.where(has_mass, d_scores, 0.0) * grad[:, None]


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
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: IndexerCall, target: AttentionTarget, bounds: RowBounds
    ) -> Tensor:
        sums = KLSums(iq)
        for keys, indices, chunk in key_chunks(iq.shape[0], ik.shape[0], bounds):
            scores = call.backend.scores_at(iq, ik[keys], w, indices, chunk, scale=call.scale, relu=call.relu)
            sums.add(target.narrow_keys(keys).at(indices, chunk), scores)
        ctx.save_for_backward(iq, ik, w, sums.log_z, sums.mass)
        ctx.rest = call.without_tensors(), target, bounds
        return sums.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w, log_z, mass = ctx.saved_tensors
        call, target, bounds = ctx.rest
        d_iq, d_ik, d_w = (torch.zeros_like(x, dtype=log_z.dtype) for x in (iq, ik, w))
        for keys, indices, chunk in key_chunks(iq.shape[0], ik.shape[0], bounds):
            scores = call.backend.scores_at(iq, ik[keys], w, indices, chunk, scale=call.scale, relu=call.relu)
            p = target.narrow_keys(keys).at(indices, chunk)
            grads = call.backend.dense_scores_backward(
                iq, ik[keys], w, chunk, score_gradient(p, scores, log_z, mass, grad),
                scale=call.scale, relu=call.relu, dtype=d_iq.dtype,
            )  # fmt: skip
            for total, part in zip((d_iq, d_ik[keys], d_w), grads, strict=True):
                total += part
        return d_iq.to(iq.dtype), d_ik.to(ik.dtype), d_w.to(w.dtype), None, None, None
