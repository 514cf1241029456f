"""The indexer and its loss over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm, propagate_failure
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse import dispatch
from attnmesh.ops.sparse.arguments import IndexerCall, RowBounds, TopKIndices, merge_topk
from attnmesh.ops.sparse.indexer_loss import KLSums, LossCall, TargetCall, dense_gradients, key_chunks, row_kl
from attnmesh.parallel.sparse.groups import RowSharding, gather_replicated, shard_replicated
from attnmesh.parallel.sparse.keys import KeyExchange, KVShard, SequenceSharding, exchange_keys, map_slots


def topk_keys(
    call: IndexerCall, topk: int, block_size: int, sharding: SequenceSharding, rows: RowSharding
) -> TopKIndices:
    """The top-k of the keys of all ranks, for every row: each tp rank computes its shard of the rows."""
    call = call._replace(iq=rows.shard(call.iq), w=rows.shard(call.w), bounds=rows.shard_bounds(call.bounds))
    best: TopKIndices | None = None
    keys = exchange_keys([call.ik], sharding)
    for shard in keys.shards():
        over = call.over(shard.tensors[0], None, keys.local_bounds(shard, call.bounds))
        part = dispatch.topk(over, topk, block_size)
        part = part._replace(indices=keys.global_indices(shard, part.indices))
        best = part if best is None else merge_topk([best, part], topk)
    assert best is not None
    return _gather_topk(best, rows) if rows.scattered else best


def _gather_topk(shard: TopKIndices, rows: RowSharding) -> TopKIndices:
    """The rows of all tp ranks, the same bits on each, in one all-gather: scores are sent as int32."""
    assert shard.scores is not None
    dtype, topk = shard.scores.dtype, shard.indices.shape[1]
    gathered = rows.gather(torch.cat((shard.indices, shard.scores.contiguous().view(torch.int32)), 1))
    indices = gathered[:, :topk].contiguous()
    scores = gathered[:, topk:].contiguous().view(dtype)
    return TopKIndices(indices, scores, (indices >= 0).sum(1, dtype=torch.int32))


def scores_at(call: IndexerCall, sharding: SequenceSharding, rows: RowSharding) -> Tensor:
    """Scores of slots, differentiable. The call is of the rows that this tp rank computes."""
    scores: Tensor = _ScoresAt.apply(call.iq, call.ik, call.w, call, sharding, rows)  # type: ignore[no-untyped-call]
    return scores


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: IndexerCall, sharding: SequenceSharding, rows: RowSharding
    ) -> Tensor:
        ctx.save_for_backward(iq, ik, w)
        ctx.rest = call.without_tensors(), sharding, rows
        ctx.number = sharding.groups.calls
        call = call._replace(iq=iq, ik=ik, w=w)
        assert call.indices is not None
        return map_slots(
            exchange_keys([ik], sharding), call.indices, call.bounds, -torch.inf,
            lambda shard, slots: dispatch.scores_at(call.over(shard.tensors[0], slots.indices, slots.bounds)),
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w = ctx.saved_tensors
        call, sharding, rows = ctx.rest
        call = call._replace(iq=iq, ik=ik, w=w)
        sharding.groups.note("backward of indexer scores", ctx.number)
        with propagate_failure(sharding.groups):
            keys = exchange_keys([ik], sharding)
            slots, grad_return = keys.slots(call.indices, call.bounds), keys.grad_return()
            total = _RowGrads(iq, w, keys.single)
            for shard in keys.shards():
                local = slots(shard)
                over = call.over(shard.tensors[0], local.indices, local.bounds)
                own_grad = local.gather(grad).contiguous()
                d_iq, d_ik, d_w = dispatch.scores_at_backward(over, own_grad, total.dtype)
                total.add(d_iq, d_w)
                if ctx.needs_input_grad[1]:
                    grad_return.send(shard, [d_ik])
            d_keys = rows.reduce_grad(grad_return.collect()[0]).to(ik.dtype) if ctx.needs_input_grad[1] else None
        return total.d_iq.to(iq.dtype), d_keys, total.d_w.to(w.dtype), None, None, None


class _RowGrads:
    """Gradients of iq and w, summed over KV shards and rounded once."""

    d_iq: Tensor
    d_w: Tensor

    def __init__(self, iq: Tensor, w: Tensor, single: bool) -> None:
        wide = accumulation_dtype(iq.dtype)
        self.dtype = iq.dtype if single else wide
        self.d_iq, self.d_w = torch.zeros_like(iq, dtype=self.dtype), torch.zeros_like(w, dtype=wide)

    def add(self, d_iq: Tensor, d_w: Tensor) -> None:
        """Add the gradients of a shard."""
        self.d_iq += d_iq
        self.d_w += d_w


# The loss.


def row_losses(loss: LossCall, sharding: SequenceSharding, rows: RowSharding) -> Tensor:
    """[s_q], differentiable: every tp rank computes its shard of the rows, and returns all of them."""
    call, target, source = loss
    every = call.bounds
    call = call._replace(iq=shard_replicated(call.iq, rows), w=shard_replicated(call.w, rows))
    if call.indices is None:
        assert source is not None
        losses: Tensor = _DenseKL.apply(  # type: ignore[no-untyped-call]
            call.iq, call.ik, call.w, call, source, sharding, rows
        )
    else:
        if source is None:
            assert target is not None
            p = rows.shard(target)  # already over all heads
        else:
            p = rows.reduce_heads(_target_at(source, call.indices, every, sharding))
        call = call._replace(indices=rows.shard(call.indices), bounds=rows.shard_bounds(every))
        losses = row_kl(scores_at(call, sharding, rows), p)
    return gather_replicated(losses, rows)


def _target_at(source: TargetCall, indices: Tensor, bounds: RowBounds, sharding: SequenceSharding) -> Tensor:
    """[s_q, topk] over the heads of this rank."""
    with torch.no_grad():
        return map_slots(
            exchange_keys([source.k], sharding), indices, bounds, 0.0,
            lambda shard, slots: source._replace(k=shard.tensors[0]).at(slots.indices, slots.bounds),
        )  # fmt: skip


class _DenseKL(torch.autograd.Function):
    """The loss over all keys, one chunk of a KV shard at a time.

    The indexer's tensors are of the rows that this tp rank computes; `source` and the bounds are of all rows, because
    the target is summed over the heads of all tp ranks first.
    """

    @staticmethod
    def forward(
        ctx: Any, iq: Tensor, ik: Tensor, w: Tensor, call: IndexerCall, source: TargetCall,
        sharding: SequenceSharding, rows: RowSharding,
    ) -> Tensor:  # fmt: skip
        sums = KLSums(iq)
        call = call._replace(iq=iq, ik=ik, w=w)
        keys = exchange_keys([ik, source.k], sharding)
        for shard in keys.shards():
            for _, p, over in _chunks(call, source, keys, shard, rows):
                sums.add(p, dispatch.scores_at(over))
        ctx.save_for_backward(iq, ik, w, sums.log_z, sums.mass)
        ctx.rest = call.without_tensors(), source, sharding, rows
        ctx.number = sharding.groups.calls
        return sums.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        iq, ik, w, log_z, mass = ctx.saved_tensors
        call, source, sharding, rows = ctx.rest
        call = call._replace(iq=iq, ik=ik, w=w)
        sharding.groups.note("backward of the indexer loss", ctx.number)
        with propagate_failure(sharding.groups):
            keys = exchange_keys([ik, source.k], sharding)
            grad_return, total = keys.grad_return(), _RowGrads(iq, w, single=False)
            for shard in keys.shards():
                d_ik = torch.zeros_like(shard.tensors[0], dtype=log_z.dtype)
                for part, p, over in _chunks(call, source, keys, shard, rows):
                    d_iq, d_keys, d_w = dense_gradients(over, p, log_z, mass, grad)
                    total.add(d_iq, d_w)
                    d_ik[part] += d_keys
                if ctx.needs_input_grad[1]:
                    grad_return.send(shard, [d_ik])
            d_own = rows.reduce_grad(grad_return.collect()[0]).to(ik.dtype) if ctx.needs_input_grad[1] else None
        return total.d_iq.to(iq.dtype), d_own, total.d_w.to(w.dtype), None, None, None, None


def _chunks(
    call: IndexerCall, source: TargetCall, keys: KeyExchange, shard: KVShard, rows: RowSharding
) -> Iterator[tuple[slice, Tensor, IndexerCall]]:
    """The chunks of the keys of a shard: where they are, p of the rows of this tp rank, and the indexer over them."""
    index_keys, attention_keys = shard.tensors
    target = source._replace(k=attention_keys)
    for part, indices, chunk in key_chunks(rows.rows, index_keys.shape[0], keys.local_bounds(shard, call.bounds)):
        p = rows.reduce_heads(target.narrow_keys(part).at(indices, chunk))
        yield part, p, call.over(index_keys[part], rows.shard(indices), rows.shard_bounds(chunk))


def sum_over_sequence(partial: Tensor, cp: Comm) -> Tensor:
    """The loss of all rows, given that of the rows of this rank. The gradient reaches the rows of every rank."""
    if cp.world == 1:
        return partial
    total: Tensor = _SumOverSequence.apply(partial, cp)  # type: ignore[no-untyped-call]
    return total


class _SumOverSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, cp: Comm) -> Tensor:
        return cp.all_reduce(partial)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def global_row_count(sharding: SequenceSharding, row_mask: Tensor | None) -> int | Tensor:
    """The number of rows of the whole sequence that count."""
    if row_mask is None:
        return sharding.length
    return sharding.groups.cp.all_reduce(row_mask.sum())
