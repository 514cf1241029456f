"""The indexer over ranks: scores at slots, and the exact top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.canonical import Slots
from attnmesh.ops.sparse.indexer import Indexing
from attnmesh.ops.sparse.mask import Rows
from attnmesh.ops.sparse.select import reselect
from attnmesh.parallel.sparse.row_share import RowShare
from attnmesh.parallel.sparse.spread import Spread
from attnmesh.parallel.sparse.visits import at_slots, bring


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
