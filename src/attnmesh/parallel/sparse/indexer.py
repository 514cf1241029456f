"""The indexer over ranks: scores at slots, and the exact top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.arguments import Rows, Slots, reselect
from attnmesh.ops.sparse.indexer import Indexing
from attnmesh.ops.sparse.indexer_loss import AttentionTarget, Losing, Sums, row_kl, score_gradient, stretches
from attnmesh.parallel.sparse.groups import RowShare, alike_from_mine, mine_of_alike
from attnmesh.parallel.sparse.keys import Spread, at_slots, bring


def choose_keys(call: Indexing, topk: int, rows: Rows, block: int, spread: Spread, share: RowShare) -> Slots:
    """The best keys of all, of every row: each tp rank finds those of its share of the rows."""
    iq, w, rows = share.mine(call.iq), share.mine(call.w), share.mine_of(rows)
    best: Slots | None = None
    keys = bring([call.ik], spread)
    for visit in keys.visits():
        found = call.backend.topk(
            iq, visit.keys[0], w, topk, keys.rows_at(visit, rows), scale=call.scale, relu=call.relu, block=block
        )
        found = found._replace(indices=keys.keys_of(visit, found.indices))
        best = found if best is None else reselect([best, found], topk)
    assert best is not None
    return _from_shares(best, share) if share.scattered else best


def _from_shares(mine: Slots, share: RowShare) -> Slots:
    """The finished rows of all tp ranks: the same bits on each, whoever found them. Scores travel as they are."""
    assert mine.scores is not None
    dtype, topk = mine.scores.dtype, mine.indices.shape[1]
    whole = share.whole(torch.cat((mine.indices, mine.scores.contiguous().view(torch.int32)), 1))
    indices = whole[:, :topk].contiguous()
    scores = whole[:, topk:].contiguous().view(dtype)
    return Slots(indices, scores, (indices >= 0).sum(1, dtype=torch.int32))


def scores_at(call: Indexing, indices: Tensor, rows: Rows, spread: Spread, share: RowShare) -> Tensor:
    """Scores of slots, differentiable. `call`, `indices` and `rows` are of the rows of `share`."""
    scores: Tensor = _ScoresAt.apply(  # type: ignore[no-untyped-call]
        call.iq, call.ik, call.w, call, indices, rows, spread, share
    )
    return scores


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: Indexing, indices: Tensor, rows: Rows, spread: Spread,
        share: RowShare,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(iq, ik, w)
        ctx.rest = call.without_tensors(), indices, rows, spread, share
        return at_slots(
            bring([ik], spread),
            indices,
            rows,
            -torch.inf,
            lambda visit, here: call.backend.scores_at(
                iq, visit.keys[0], w, here.indices, here.rows, scale=call.scale, relu=call.relu
            ),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w = ctx.saved_tensors
        call, indices, rows, spread, share = ctx.rest
        keys = bring([ik], spread)
        slots, homing = keys.slots(indices, rows), keys.homing()
        total = Totals(iq, w, keys.alone)
        for visit in keys.visits():
            here = slots(visit)
            d_iq, d_ik, d_w = call.backend.scores_at_backward(
                iq, visit.keys[0], w, here.indices, here.rows, here.take(grad).contiguous(), scale=call.scale,
                relu=call.relu, deterministic=call.deterministic, dtype=total.dtype,
            )  # fmt: skip
            total.add(d_iq, d_w)
            if ctx.needs_input_grad[1]:
                homing.leave(visit, [d_ik])
        to_keys = share.over_ranks(homing.home()[0]).to(ik.dtype) if ctx.needs_input_grad[1] else None
        return total.d_iq.to(iq.dtype), to_keys, total.d_w.to(w.dtype), None, None, None, None, None


class Totals:
    """Gradients of the indexer's rows, over the keys of all visits: rounded once."""

    d_iq: Tensor
    d_w: Tensor

    def __init__(self, iq: Tensor, w: Tensor, alone: bool) -> None:
        wide = accumulation_dtype(iq.dtype)
        self.dtype = iq.dtype if alone else wide
        self.d_iq, self.d_w = torch.zeros_like(iq, dtype=self.dtype), torch.zeros_like(w, dtype=wide)

    def add(self, d_iq: Tensor, d_w: Tensor) -> None:
        """Those of some more keys."""
        self.d_iq += d_iq
        self.d_w += d_w


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
