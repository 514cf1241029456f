"""`SparseDecode`: sparse decode over ranks that hold parts of the positions of a paged cache.

Each rank selects the top-k among its keys. The candidates of all ranks, scores and positions, are all-gathered, and the
top-k of them is that of all keys: a key that is not among the top-k of its rank has k better ones there. Each rank then
attends over the selected keys that it holds, and the states are exchanged and merged::

    top-k       scores and positions [B, T, topk] of each rank  ->  [ranks, ...]  ->  positions of all, on every rank
    attention   q [B, T, h, D], with `heads` all-gathered  ->  states [H, ...] of each rank  ->  merged

Without `heads`, ranks hold the same queries and all of them receive the merged state (an all-gather). With `heads`, a
rank holds some of the heads, and receives the state of those (an all-to-all).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import OBJECT, Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.core.ranges import InterleavedShard
from attnmesh.core.state import State, accumulation_dtype, add_sinks, merge
from attnmesh.ops.sparse.arguments import RowBounds, TopKIndices, merge_topk
from attnmesh.ops.sparse.decode import attend, check_tokens, decode_call, indexer_step, select, slots_read
from attnmesh.ops.sparse.paged import IndexerStep, SparseDecodeCall
from attnmesh.ops.storage import Stored, storage_of
from attnmesh.parallel.decode.core import StateExchange, all_gather_states
from attnmesh.parallel.executor import score_checks
from attnmesh.parallel.sparse.groups import checksum, comm_or_solo
from attnmesh.utils.text import format_ranks
from attnmesh.utils.validation import check_bool, check_list, check_positive, check_tensor, shown

Group = Comm | ProcessGroup | DeviceMesh | None


class SparseDecode:
    """Sparse decode over ranks that hold the positions of every sequence in turn; every rank makes one.

    Args:
        cp: a comm, process group or one-dimensional mesh; None is this rank alone.
        interleave: the number of consecutive positions per rank. `shard` is what `BlockCache(shard=...)` takes.
        heads: the number of query heads of every rank, in rank order; None if all ranks hold all heads.
        check_indices: compare a checksum of the indices over ranks, which synchronizes with a GPU.

    Pools and block tables belong to this rank's cache; positions count the whole sequence, the same on all
    ranks. All ranks make the same calls in the same order; otherwise every rank raises ValueError.

    Examples:
        >>> kv, q = torch.randn(1, 1, 9, 96), torch.randn(1, 1, 4, 96)  # 9 tokens, of which the last is new
        >>> indices = torch.tensor([[[0, 3, 8]]], dtype=torch.int32)
        >>> sizes = dict(num_blocks=2, block_size=4, max_sequences=1, max_length=16, device="cpu")
        >>> spec = am.CacheSpec(layers=1, kv_heads=1, head_dim=96, value_dim=64, latent=True, storage="fp32")
        >>> def rank(comm):
        ...     sparse = am.sparse.SparseDecode(comm)
        ...     cache = am.BlockCache(spec, **sizes, shard=sparse.shard)
        ...     cache.write(0, cache.append([cache.allocate(9)], 9), kv)  # stores this rank's positions
        ...     return sparse.attention(q, cache.keys(0), cache.block_table, indices, scale=0.1, d_v=64)[0]
        >>> whole = am.sparse_attention(q[0], kv[0, 0], indices[0], scale=0.1, d_v=64)[0]
        >>> [torch.allclose(out[0], whole, atol=1e-5) for out in am.run_virtual(3, rank)]
        [True, True, True]
    """

    def __init__(
        self, cp: Group = None, *, interleave: int = 1, heads: Sequence[int] | None = None,
        check_indices: bool = True,
    ) -> None:  # fmt: skip
        self.cp = comm_or_solo("cp", cp)
        self._number = self.cp.log.number("SparseDecode")  # before an error that only this rank may raise
        check_positive(interleave=interleave)
        check_bool(check_indices=check_indices)
        self.check_indices = check_indices
        self.shard = InterleavedShard(self.cp.world, self.cp.rank, interleave)
        self.heads: tuple[int, ...] | None = None
        if heads is not None:
            self.heads = tuple(check_list("heads", heads, "numbers of heads"))
            if len(self.heads) != self.cp.world:
                raise ValueError(f"heads must be {self.cp.world} numbers, one per rank, got {shown(heads)}")
            for n in self.heads:
                check_positive(heads=n)

    def indexer_topk(
        self, iq: Tensor, pool: Stored, block_table: Tensor, w: Tensor, topk: int, *, cur_pos: Sequence[int] | Tensor,
        scale: float = 1.0, relu: bool = True, backend: str = "auto",
    ) -> TopKIndices:  # fmt: skip
        """`attnmesh.sparse.paged_indexer_topk` over the keys of all ranks: positions, the same bits on every rank.

        iq and w are the same on all ranks; `cur_pos` are positions in the whole sequence.
        """

        def check() -> tuple[IndexerStep, SharedValues]:
            step = indexer_step(iq, pool, block_table, w, topk, cur_pos, None, scale, relu, backend)
            first, end = (self.shard.length(x.clamp(min=0)) for x in (step.first, step.end))
            step = step._replace(first=first, end=end)
            if step.iq.device.type == "cpu":  # a fault on one rank is an error on all
                slots_read(step)
            return step, self._shared_values(step.iq, pool, backend, topk=topk, scale=step.scale, relu=relu)

        step = check_on_all_ranks(self.cp, "SparseDecode.indexer_topk", check)
        with propagate_failure(self.cp):
            own = select(step)
            assert own.scores is not None
            positions = torch.where(own.indices < 0, -1, self.shard.position(own.indices.clamp(min=0)))
            if self.cp.world == 1:
                return own
            scores, indices = (
                all_gather_states(self.cp, x.contiguous()).flatten(1, 2) for x in (own.scores, positions.int())
            )
            candidates = [TopKIndices(*both, own.lengths) for both in zip(indices, scores, strict=True)]
            merged, found, lengths = merge_topk(candidates, topk)
            assert found is not None
            shape = (*step.iq.shape[:2], topk)
            return TopKIndices(merged.view(shape), found.view(shape), lengths.view(shape[:2]))

    def attention(
        self, q: Tensor, pool: Stored, block_table: Tensor, indices: Tensor | TopKIndices, *, scale: float,
        d_v: int | None = None, sinks: Tensor | None = None, split_size: int | None = None, backend: str = "auto",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`attnmesh.sparse.paged_sparse_decode_attention` over the keys of all ranks: out and lse of this rank's heads.

        `indices` are positions in the whole sequence, and the same on all ranks. `sinks` are of this rank's
        heads, and added once. Where all ranks hold all heads, they are compared as in `ContextParallel`.
        """

        def check() -> tuple[SparseDecodeCall, SharedValues]:
            check_tensor("block_table", block_table)
            call = decode_call(
                q, pool, block_table, indices, scale, d_v, sinks, self.shard, split_size,
                accumulation_dtype(check_tokens("q", q).dtype),
            )  # fmt: skip
            if self.heads is not None and q.shape[2] != self.heads[self.cp.rank]:
                raise ValueError(f"q must have {self.heads[self.cp.rank]} heads on this rank (heads), got {q.shape[2]}")
            if q.device.type == "cpu":  # a fault on one rank is an error on all
                call.keys.slots(call.indices, call.used)
            return call, self._shared_values(
                call.q, pool, backend, topk=call.indices.shape[2], scale=call.scale, d_v=call.d_v,
                heads=q.shape[2] if self.heads is None else self.heads, sinks=sinks is not None,
                counts=call.counts is not None, split_size=split_size,
                **(checks.compared(sinks=sinks) if self.heads is None and self.cp.world > 1 else {}),
            )  # fmt: skip

        checks = score_checks(self.cp)
        call = check_on_all_ranks(self.cp, "SparseDecode.attention", check)
        if sinks is not None:
            checks.count()
        self._check_same_indices(call)
        with propagate_failure(self.cp):
            state = self._attend(call, backend)
            if call.sinks is not None:
                state = add_sinks(state, call.sinks)
            return state.out.to(call.q.dtype), state.lse

    def _attend(self, call: SparseDecodeCall, backend: str) -> State:
        """The merged state [B, T, h, ...] of this rank's heads over the keys of all ranks, without sinks."""
        cp, exchange = self.cp, None if self.heads is None else StateExchange(self.cp, self.heads)
        q = call.q
        if exchange is not None:
            q = exchange.gather_heads(q.permute(2, 0, 1, 3).contiguous()).permute(1, 2, 0, 3)
        out, lse, _ = attend(call.without_sinks(q), backend)
        if cp.world == 1:
            return State(out, lse)
        packed = torch.cat([out, lse[..., None]], -1)
        if exchange is None:
            parts = all_gather_states(cp, packed.contiguous())
        else:
            parts = exchange.all_to_all(packed.permute(2, 0, 1, 3).contiguous()).permute(0, 2, 3, 1, 4)
        return merge([State(part[..., :-1], part[..., -1]) for part in parts])

    def _check_same_indices(self, call: SparseDecodeCall) -> None:
        """Raises ValueError on every rank if the indices of any differ: a key would be missing, or count twice."""
        if self.cp.world == 1 or not self.check_indices:
            return
        with propagate_failure(self.cp):
            indices = call.indices.flatten(0, 1)
            low = torch.zeros(len(indices), dtype=torch.int32, device=indices.device)
            slots = low + indices.shape[1] if call.counts is None else call.counts.flatten().clamp(0, indices.shape[1])
            own = checksum(indices, RowBounds(low, torch.full_like(low, torch.iinfo(torch.int32).max), slots, 0))
        first, *rest = torch.cat(self.cp.all_gather(own, [(1,)] * self.cp.world)).tolist()
        if others := [rank for rank, other in enumerate(rest, 1) if other != first]:
            raise ValueError(
                f"indices must be the same on every rank: those of {format_ranks(others)} differ from rank 0's"
            )

    def _shared_values(self, q: Tensor, pool: Stored, backend: str, **more: object) -> SharedValues:
        """The values that must be equal on all ranks."""
        return {
            OBJECT: self._number,
            "batch": q.shape[0], "tokens": q.shape[1], "width": q.shape[3], "dtype": q.dtype, "device": q.device.type,
            "interleave": self.shard.interleave, "storage": storage_of(pool), "check_indices": self.check_indices,
            "backend": backend, **more,
        }  # fmt: skip
