"""The indexer's loss over ranks, row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm
from attnmesh.ops.sparse.dense_kl import Sums, score_gradient, stretches
from attnmesh.ops.sparse.indexer import Indexing
from attnmesh.ops.sparse.kl import row_kl
from attnmesh.ops.sparse.loss import Losing
from attnmesh.ops.sparse.mask import Rows
from attnmesh.ops.sparse.target import AttentionTarget
from attnmesh.parallel.sparse.indexer import Totals, scores_at
from attnmesh.parallel.sparse.row_share import RowShare, alike_from_mine, mine_of_alike
from attnmesh.parallel.sparse.spread import Spread
from attnmesh.parallel.sparse.visits import at_slots, bring


def each_row(loss: Losing, spread: Spread, share: RowShare) -> Tensor:
    """[s_q], differentiable: every tp rank works out its share of the rows, and has them all in the end."""
    call, indices, rows, target, source = loss
    mine = call._replace(iq=mine_of_alike(call.iq, share), w=mine_of_alike(call.w, share))
    if indices is None:
        assert source is not None
        kl = dense_rows(mine, source, rows, spread, share)
    else:
        if source is None:
            assert target is not None
            p = share.mine(target)  # of all heads already
        else:
            p = share.over_heads(_target_at(source, indices, rows, spread))
        kl = row_kl(scores_at(mine, share.mine(indices), share.mine_of(rows), spread, share), p)
    return alike_from_mine(kl, share)


def _target_at(source: AttentionTarget, indices: Tensor, rows: Rows, spread: Spread) -> Tensor:
    """[s_q, topk] over this rank's heads."""
    with torch.no_grad():
        return at_slots(
            bring([source.k], spread),
            indices,
            rows,
            0.0,
            lambda visit, here: source._replace(k=visit.keys[0]).at(here.indices, here.rows),
        )


def dense_rows(mine: Indexing, source: AttentionTarget, rows: Rows, spread: Spread, share: RowShare) -> Tensor:
    """The loss over all keys of the rows of the share; `source` and `rows` are of all rows."""
    loss: Tensor = _DenseRows.apply(  # type: ignore[no-untyped-call]
        mine.iq, mine.ik, mine.w, mine, source, rows, spread, share
    )
    return loss


class _DenseRows(torch.autograd.Function):
    """As on one device, a stretch of a visiting block at a time; heads are summed up before anything else happens."""

    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: Indexing, source: AttentionTarget, rows: Rows,
        spread: Spread, share: RowShare,
    ) -> Tensor:  # fmt: skip
        sums = Sums(iq)
        keys = bring([ik, source.k], spread)
        for visit in keys.visits():
            index_keys, attention_keys = visit.keys
            there = source._replace(k=attention_keys)
            for part, indices, some in stretches(share.rows, index_keys.shape[0], keys.rows_at(visit, rows)):
                p = share.over_heads(there.over(part).at(indices, some))
                scores = call.backend.scores_at(
                    iq, index_keys[part], w, share.mine(indices), share.mine_of(some), scale=call.scale, relu=call.relu
                )
                sums.meet(p, scores)
        ctx.save_for_backward(iq, ik, w, sums.log_z, sums.mass)
        ctx.rest = call.without_tensors(), source, rows, spread, share
        return sums.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w, log_z, mass = ctx.saved_tensors
        call, source, rows, spread, share = ctx.rest
        keys = bring([ik, source.k], spread)
        homing, total = keys.homing(), Totals(iq, w, alone=False)
        for visit in keys.visits():
            index_keys, attention_keys = visit.keys
            d_ik = torch.zeros_like(index_keys, dtype=log_z.dtype)
            there = source._replace(k=attention_keys)
            for part, indices, some in stretches(share.rows, index_keys.shape[0], keys.rows_at(visit, rows)):
                p = share.over_heads(there.over(part).at(indices, some))
                mine, some = share.mine(indices), share.mine_of(some)
                scores = call.backend.scores_at(iq, index_keys[part], w, mine, some, scale=call.scale, relu=call.relu)
                d_iq, to_keys, d_w = call.backend.stretch_backward(
                    iq, index_keys[part], w, some, score_gradient(p, scores, log_z, mass, grad), scale=call.scale,
                    relu=call.relu, dtype=total.dtype,
                )  # fmt: skip
                total.add(d_iq, d_w)
                d_ik[part] += to_keys
            if ctx.needs_input_grad[1]:
                homing.leave(visit, [d_ik])
        found = share.over_ranks(homing.home()[0]).to(ik.dtype) if ctx.needs_input_grad[1] else None
        return total.d_iq.to(iq.dtype), found, total.d_w.to(w.dtype), None, None, None, None, None


def over_sequence(part: Tensor, cp: Comm) -> Tensor:
    """The loss of all rows from that of this rank's. Every rank follows its gradient, each for its own part."""
    if cp.world == 1:
        return part
    total: Tensor = _OverSequence.apply(part, cp)  # type: ignore[no-untyped-call]
    return total


class _OverSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cp: Comm) -> Tensor:
        return cp.all_reduce(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def counted_rows(spread: Spread, row_mask: Tensor | None) -> int | Tensor:
    """How many rows of the whole sequence count."""
    if row_mask is None:
        return spread.length
    return spread.ranks.cp.all_reduce(row_mask.sum())
