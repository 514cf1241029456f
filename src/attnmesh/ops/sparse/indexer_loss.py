"""Where attention looks, as a target for its indexer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse import arguments as check
from attnmesh.ops.sparse import indexer
from attnmesh.ops.sparse.arguments import Base, Rows, SparseMask, check_base, convert_lse
from attnmesh.ops.sparse.attention import normalized
from attnmesh.ops.sparse.backend import Backend, choose
from attnmesh.ops.sparse.indexer import Indexing


class AttentionTarget(NamedTuple):
    """The distribution of attention over its heads, from its natural lse."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    backend: Backend

    def over(self, keys: slice) -> AttentionTarget:
        """The same, where only some of the keys are at hand."""
        return self._replace(k=self.k[keys])

    def at(self, indices: Tensor, rows: Rows) -> Tensor:
        """The head-summed probabilities of these slots."""
        lse = self.lse.to(accumulation_dtype(self.q.dtype))
        with torch.no_grad():
            return self.backend.distribution(
                self.q, self.k, indices, rows, lse, scale=self.scale, head_group=self.q.shape[1]
            )[0]


def row_kl(scores: Tensor, target: Tensor) -> Tensor:
    """[s_q] from scores [s_q, topk], -inf where a slot does not count, and a target that need not be normalized."""
    rows: Tensor = _RowKL.apply(scores, target)  # type: ignore[no-untyped-call]
    return rows


class _RowKL(torch.autograd.Function):
    """The gradient of a row is softmax(scores) - p: nothing but scores and p needs to be kept."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor) -> Tensor:
        counts = scores != -torch.inf  # a score that is NaN does count: it must show
        p = normalized(torch.where(counts, target.to(scores.dtype), 0.0))
        log_z = torch.logsumexp(scores, -1, keepdim=True)
        ctx.save_for_backward(scores, p, log_z)
        # where, before the product: 0 log 0 is 0, and a slot without mass may have any score.
        return torch.where(p > 0, p * (p.log() - scores + log_z), 0.0).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, p, log_z = ctx.saved_tensors
        mass = p.sum(-1, keepdim=True)  # 1, or 0 in a row that costs nothing
        q = torch.where(mass > 0, torch.exp(scores - log_z), 0.0)
        return (q - p) * grad[:, None], None


_MOST_SLOTS = 1 << 23  # of all rows at a time


def dense_kl(call: Indexing, target: AttentionTarget, rows: Rows) -> Tensor:
    """[s_q], differentiable in the indexer's tensors."""
    loss: Tensor = _DenseKL.apply(call.iq, call.ik, call.w, call, target, rows)  # type: ignore[no-untyped-call]
    return loss


class Sums:
    """What the loss of every row is made of, over the keys met so far: `log_z` and `mass` normalize I and p."""

    def __init__(self, iq: Tensor) -> None:
        wide = accumulation_dtype(iq.dtype)
        self.mass, self._p_log_p, self._p_scores = (iq.new_zeros(iq.shape[0], dtype=wide) for _ in range(3))
        self.log_z = torch.full_like(self.mass, -torch.inf)

    def meet(self, p: Tensor, scores: Tensor) -> None:
        """Add keys: their mass, and their scores, -inf where they are not seen."""
        p = p.to(scores.dtype)
        self.log_z = torch.logaddexp(self.log_z, torch.logsumexp(scores, -1))
        self.mass += p.sum(-1)
        self._p_log_p += torch.special.xlogy(p, p).sum(-1)
        self._p_scores += torch.where(p > 0, p * scores, 0.0).sum(-1)

    def loss(self) -> Tensor:
        """[s_q]; a row without mass costs nothing."""
        some_mass = torch.where(self.mass > 0, self.mass, 1.0)
        loss = (self._p_log_p - self._p_scores) / some_mass - some_mass.log() + self.log_z
        return torch.where(self.mass > 0, loss, 0.0)


def score_gradient(p: Tensor, scores: Tensor, log_z: Tensor, mass: Tensor, grad: Tensor) -> Tensor:
    """What the loss of each row says about the scores of some keys, [s_q, keys]."""
    counts = (mass > 0)[:, None]
    some_mass = torch.where(mass > 0, mass, 1.0)[:, None]
    return torch.where(counts, torch.exp(scores - log_z[:, None]) - p.to(scores.dtype) / some_mass, 0.0) * grad[:, None]


class Stretch(NamedTuple):
    """Some of the keys, each of them a slot of every row: `indices` take no memory, `rows` say where each row stops."""

    keys: slice
    indices: Tensor
    rows: Rows


def stretches(s_q: int, s_kv: int, rows: Rows) -> Iterator[Stretch]:
    """All keys, in stretches."""
    n = max(128, _MOST_SLOTS // max(1, s_q))
    for begin in range(0, s_kv if s_q else 0, n):
        keys = slice(begin, min(begin + n, s_kv))
        first, size = rows.k_offset + begin, keys.stop - begin
        indices = torch.arange(first, first + size, dtype=torch.int32, device=rows.lo.device).expand(s_q, size)
        yield Stretch(keys, indices, rows._replace(slots=(rows.hi - first).clamp(0, size), k_offset=first))


class _DenseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: Indexing, target: AttentionTarget, rows: Rows
    ) -> Tensor:
        sums = Sums(iq)
        for keys, indices, some in stretches(iq.shape[0], ik.shape[0], rows):
            scores = call.backend.scores_at(iq, ik[keys], w, indices, some, scale=call.scale, relu=call.relu)
            sums.meet(target.over(keys).at(indices, some), scores)
        ctx.save_for_backward(iq, ik, w, sums.log_z, sums.mass)
        ctx.rest = call.without_tensors(), target, rows
        return sums.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w, log_z, mass = ctx.saved_tensors
        call, target, rows = ctx.rest
        d_iq, d_ik, d_w = (torch.zeros_like(x, dtype=log_z.dtype) for x in (iq, ik, w))
        for keys, indices, some in stretches(iq.shape[0], ik.shape[0], rows):
            scores = call.backend.scores_at(iq, ik[keys], w, indices, some, scale=call.scale, relu=call.relu)
            found = call.backend.stretch_backward(
                iq, ik[keys], w, some, score_gradient(target.over(keys).at(indices, some), scores, log_z, mass, grad),
                scale=call.scale, relu=call.relu, dtype=d_iq.dtype,
            )  # fmt: skip
            for total, part in zip((d_iq, d_ik[keys], d_w), found, strict=True):
                total += part
        return d_iq.to(iq.dtype), d_ik.to(ik.dtype), d_w.to(w.dtype), None, None, None


Mode = Literal["sparse", "dense"]
Reduction = Literal["sum", "mean_rows", "none"]


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
    """How far the indexer is from attention: KL(p || softmax(I)), summed over rows.

    "sparse": over the keys that `indices` name; p is `target` [s_q, topk], or `attention_distribution` of attention's
    (q, k, lse, attn_scale). "dense": over all keys that `mask` shows, for the warm-up; p from the same, with
    the lse of dense attention. Keys are streamed: memory stays far below [s_q, s_kv]. Rows of p are normalized here; a
    row without mass costs nothing, and 0 log 0 is 0. p is a constant; gradients flow to iq, ik and w. Indexer shapes as
    in `indexer_scores_at`.

    `reduction`: "sum", "mean_rows" (over `global_rows`, or the rows that count: give the number over all ranks where
    rows are spread) or "none" ([s_q]). `row_mask` [s_q]: rows that are False do not count, and
    may hold anything.
    """
    loss = checked(
        iq, ik, w, indices, target, q, k, lse, attn_scale, lse_base, mask, mode, scale, relu, reduction, row_mask,
        global_rows, deterministic, backend,
    )  # fmt: skip
    return reduced(_each_row(loss), reduction, row_mask, global_rows)


class Losing(NamedTuple):
    """A checked loss over the slots of `indices`, or all keys; what to match is `target`, or comes from `source`."""

    call: indexer.Indexing
    indices: Tensor | None
    rows: Rows
    target: Tensor | None
    source: AttentionTarget | None


def checked(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, target: Tensor | None, q: Tensor | None,
    k: Tensor | None, lse: Tensor | None, attn_scale: float | None, lse_base: Base, mask: SparseMask, mode: Mode,
    scale: float, relu: bool, reduction: Reduction, row_mask: Tensor | None, global_rows: int | Tensor | None,
    deterministic: bool, backend: str, s_kv: int | None = None,
) -> Losing:  # fmt: skip
    """A loss that can be served, or ValueError. `s_kv`: how many keys there are, where `ik` is only some of them."""
    call = indexer.checked(iq, ik, w, scale, relu, deterministic, backend)
    check_choices(mode, reduction)
    mask = check.check_mask(mask)
    check_counted(call.iq.shape[0], row_mask, global_rows)
    if mode == "sparse" and indices is None:
        raise ValueError('indices must be given with mode="sparse"; mode="dense" goes over all keys')
    if mode == "dense" and (indices is not None or target is not None or mask.topk_length is not None):
        raise ValueError('mode="dense" goes over all keys: give no indices, target or topk_length')
    if indices is not None:
        indices = check.same_device(check.check_indices(indices, call.iq.shape[0]), call.iq)
    source = None
    if target is None:
        source = target_from(q, k, lse, attn_scale, lse_base, call, backend)
    elif any(given is not None for given in (q, k, lse, attn_scale)):
        raise ValueError("give target, or q, k, lse and attn_scale to compute it from, not both")
    else:
        assert indices is not None
        target = check_target(target, indices)
    s_kv = call.ik.shape[0] if s_kv is None else s_kv
    rows = check.rows_of(mask, call.iq, s_kv, s_kv if indices is None else indices.shape[1])
    if row_mask is not None:
        rows = rows.only(row_mask)
    return Losing(call, indices, rows, target, source)


def _each_row(loss: Losing) -> Tensor:
    """[s_q], differentiable."""
    call, indices, rows, p, source = loss
    if indices is None:
        assert source is not None
        return dense_kl(call, source, rows)
    if p is None:
        assert source is not None
        p = source.at(indices, rows)
    return row_kl(indexer.scores_at(call, indices, rows), p)


def check_choices(mode: object, reduction: object) -> None:
    """Raise ValueError unless both are known."""
    if mode not in ("sparse", "dense"):
        raise ValueError(f'mode must be "sparse" or "dense", got {mode!r}')
    if reduction not in ("sum", "mean_rows", "none"):
        raise ValueError(f'reduction must be "sum", "mean_rows" or "none", got {reduction!r}')


def check_target(target: object, indices: Tensor) -> Tensor:
    """A given target, or ValueError."""
    if not isinstance(target, Tensor) or target.shape != indices.shape or target.device != indices.device:
        got = f"{list(target.shape)} on {target.device}" if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target must be {list(indices.shape)}, one a slot, on {indices.device}, got {got}")
    return target.detach()


def target_from(
    q: Tensor | None, k: Tensor | None, lse: Tensor | None, attn_scale: float | None, lse_base: Base,
    call: indexer.Indexing, backend: str,
) -> AttentionTarget:  # fmt: skip
    """Where attention looks, from its queries and keys; or ValueError."""
    if q is None or k is None or lse is None or attn_scale is None:
        missing = [name for name, x in (("q", q), ("k", k), ("lse", lse), ("attn_scale", attn_scale)) if x is None]
        raise ValueError(f"without target, attention's q, k, lse and attn_scale must be given; missing: {missing}")
    q = check.check_queries("q", q)
    k = check.check_keys("k", k, q, q.shape[2])
    check_base("lse_base", lse_base)
    lse = check.check_per_head("lse", lse, q).detach().to(accumulation_dtype(q.dtype))
    lse = convert_lse(lse, lse_base, "e")
    if q.device != call.iq.device:
        raise ValueError(f"q must be on {call.iq.device} as iq is, got {q.device}")
    if q.shape[0] != call.iq.shape[0] or k.shape[0] != call.ik.shape[0]:
        raise ValueError(
            f"attention and indexer must have the same rows and keys: q has {q.shape[0]} rows and iq "
            f"{call.iq.shape[0]}, k has {k.shape[0]} keys and ik {call.ik.shape[0]}"
        )
    scale = check.check_scale("attn_scale", attn_scale)
    return AttentionTarget(q.detach(), k.detach(), lse, scale, choose(q, backend))


def check_counted(n: int, row_mask: object, global_rows: object) -> None:
    """Raise ValueError unless these say which of `n` rows count, and how many there are."""
    if row_mask is not None and (
        not isinstance(row_mask, Tensor) or row_mask.dtype != torch.bool or row_mask.shape != (n,)
    ):
        got = f"{row_mask.dtype} {list(row_mask.shape)}" if isinstance(row_mask, Tensor) else repr(row_mask)
        raise ValueError(f"row_mask must be bool [{n}], got {got}")
    if isinstance(global_rows, Tensor):
        if global_rows.ndim:
            raise ValueError(f"global_rows must be one number, got a tensor {list(global_rows.shape)}")
    elif global_rows is not None and (
        isinstance(global_rows, bool) or not isinstance(global_rows, int) or global_rows < 1
    ):
        raise ValueError(f"global_rows must be at least 1, got {global_rows!r}")


def reduced(rows: Tensor, reduction: Reduction, row_mask: Tensor | None, global_rows: int | Tensor | None) -> Tensor:
    """The loss from that of each row."""
    count: int | Tensor = rows.shape[0]
    if row_mask is not None:
        rows = torch.where(row_mask, rows, 0.0)
        count = row_mask.sum()
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    count = count if global_rows is None else global_rows
    if isinstance(count, Tensor):
        return rows.sum() / count.clamp(min=1)
    return rows.sum() / max(1, count)
