"""The indexer's loss: how far its softmax is from where attention looks, KL(target || softmax(scores)) a row."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse import check, indexer
from attnmesh.ops.sparse.choose import choose
from attnmesh.ops.sparse.dense_kl import dense_kl
from attnmesh.ops.sparse.kl import row_kl
from attnmesh.ops.sparse.lse import Base, check_base, convert_lse
from attnmesh.ops.sparse.mask import Rows, SparseMask
from attnmesh.ops.sparse.target import AttentionTarget

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
