"""`SparseParallel`: the sparse functions with heads sharded over tp ranks and the sequence over cp ranks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import OBJECT, Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.core.layouts import Contiguous, Layout, check_layout, positions_checksum
from attnmesh.ops.sparse import arguments
from attnmesh.ops.sparse.arguments import (
    Base,
    IndexerCall,
    SparseCall,
    SparseMask,
    TopKIndices,
    check_base,
    convert_lse,
)
from attnmesh.ops.sparse.attention import attention_call, normalize_rows
from attnmesh.ops.sparse.indexer import check_topk, indexer_call
from attnmesh.ops.sparse.indexer_loss import AttentionTarget, LossCall, Reduction, loss_call, reduce_rows
from attnmesh.parallel.compiling import not_compiled
from attnmesh.parallel.sparse import indexer
from attnmesh.parallel.sparse.attention import attend, distribution
from attnmesh.parallel.sparse.groups import (
    RowSharding,
    SparseGroups,
    check_same_indices,
    check_same_sinks,
    comm_or_solo,
    mask_summary,
    requiring_grad,
)
from attnmesh.parallel.sparse.keys import SequenceSharding, exchange_keys
from attnmesh.utils.validation import check_bool, check_choice, check_count, check_positive

Group = Comm | ProcessGroup | DeviceMesh | None
Schedule = Literal["allgather", "ring"]
LossRows = Literal["replicated", "scattered"]


class SparseParallel:
    """The sparse functions over ranks; every rank makes one. Methods take this rank's shards of the arguments.

    Heads are sharded over tp: a rank passes its heads of `q`, any number, and of `lse` and `sinks`; keys, the indexer
    and indices are replicated over tp. The sequence is sharded over cp: a rank passes the rows
    `layout.shard(x, 0, cp.world, cp.rank)` of queries (q, lse, indices, iq, w) and keys (kv, v, ik).

    Args:
        tp, cp: a comm, process group or one-dimensional mesh; None is a group of this rank alone.
        length: the number of queries over all cp ranks; by default all ranks hold equally many.
        key_length: the number of keys over all cp ranks; by default `length`.
        layout: which rows each cp rank holds.
        schedule: how keys reach the queries of other cp ranks. "allgather" gathers them in each call and gives the bits
            of one device (on a CPU, except where BLAS takes another path for fewer rows). "ring" passes KV shards
            around, so no rank holds the whole sequence.
        check_indices: compare a checksum of given indices over tp ranks, which synchronizes with a GPU.
        loss_rows: how tp ranks compute the rows of `indexer_kl_loss`, which all of them hold. "replicated": every rank
            computes all rows after an all-reduce of the target. "scattered": every rank computes some rows after a
            reduce-scatter, which sends and computes less and gives all ranks the same bits of the gradients.

    Indices count keys of the whole sequence. So is `mask`: row i is at `q_start` plus its position in the
    sequence, unless `q_positions` gives the positions of this rank's rows; per-row tensors are of this rank's rows.

    `sinks` are the same on all cp ranks, which compare a checksum in the first 128 calls of a group and in every 251st.

    All ranks make the same objects and the same calls in the same order, forward and backward; otherwise every rank
    raises ValueError. Gradients equal one device: a tensor that several ranks hold gets its whole gradient on
    each of them.

    Examples:
        >>> q, kv = torch.randn(7, 4, 96), torch.randn(7, 96)
        >>> indices, causal = torch.arange(7, dtype=torch.int32).expand(7, 7), am.SparseMask(causal=True)
        >>> def rank(comm):
        ...     sparse = am.SparseParallel(cp=comm, length=7)
        ...     mine = [sparse.layout.shard(x, 0, comm.world, comm.rank) for x in (q, kv, indices)]
        ...     return sparse.sparse_attention(*mine, scale=0.1, mask=causal)[0]
        >>> whole = am.sparse_attention(q, kv, indices, scale=0.1, mask=causal)[0]
        >>> torch.allclose(torch.cat(am.run_virtual(2, rank)), whole, atol=1e-5)
        True
    """

    @not_compiled("a SparseParallel is constructed outside of a compiled graph")
    def __init__(
        self, *, tp: Group = None, cp: Group = None, length: int | None = None, key_length: int | None = None,
        layout: Layout = Contiguous(),  # noqa: B008  (immutable)
        schedule: Schedule = "allgather", check_indices: bool = True, loss_rows: LossRows = "replicated",
    ) -> None:  # fmt: skip
        self._groups = SparseGroups(comm_or_solo("tp", tp), comm_or_solo("cp", cp))
        self._number = self._groups.number("SparseParallel")  # before an error that only this rank may raise
        check_layout("layout", layout)
        check_choice("schedule", schedule, get_args(Schedule))
        check_choice("loss_rows", loss_rows, get_args(LossRows))
        check_bool(check_indices=check_indices)
        for name, n in (("length", length), ("key_length", key_length)):
            if n is not None:
                check_count(name, n)
        self.layout, self.schedule, self.check_indices = layout, schedule, check_indices
        self.loss_rows = loss_rows
        self.length, self.key_length = length, length if key_length is None else key_length

    @property
    def tp(self) -> Comm:
        """The ranks over which heads are sharded."""
        return self._groups.tp

    @property
    def cp(self) -> Comm:
        """The ranks over which the sequence is sharded."""
        return self._groups.cp

    def sparse_attention(
        self, q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, d_v: int | None = None,
        v: Tensor | None = None,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        sinks: Tensor | None = None, return_attn_sum: bool = False, deterministic: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`attnmesh.sparse_attention` of this rank's rows and heads; `return_attn_sum` is summed over all heads."""

        def check() -> tuple[tuple[SparseCall, SequenceSharding], SharedValues]:
            sharding = self._sharding("q", q, "kv", kv)
            local_mask = self._local_mask(mask, sharding)
            call = attention_call(
                q, kv, indices, scale, d_v, v, local_mask, deterministic, backend, sharding.key_length, sinks=sinks,
                attn_sum=return_attn_sum,
            )  # fmt: skip
            return (call, sharding), self._shared_values(
                sharding, call.q, mask, backend, width=call.q.shape[2], d_v=call.d_v, topk=call.indices.shape[1],
                scale=call.scale, values=v is not None, sinks=sinks is not None,
                return_attn_sum=return_attn_sum, deterministic=deterministic,
                gradients=requiring_grad(q=q, kv=kv, v=v, sinks=sinks),
            )  # fmt: skip

        call, sharding = check_on_all_ranks(self._groups, "SparseParallel.sparse_attention", check)
        self._check_same_indices(call)
        if sinks is not None:
            check_same_sinks(sinks, self._groups)
        with propagate_failure(self._groups):
            out, lse, dist = attend(call, sinks, sharding, return_attn_sum)
            if not return_attn_sum:
                return out, lse
            return out, lse, self._replicated_rows(call.q).reduce_heads(dist)

    def attention_distribution(
        self, q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, *, scale: float,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        lse_base: Base = "e", head_group: int | None = None, normalize: bool = False, backend: str = "auto",
    ) -> Tensor:  # fmt: skip
        """`attnmesh.attention_distribution` of this rank's rows, summed over the heads of all ranks, then normalized.

        `head_group` must be None where heads are sharded, because a group could span ranks.
        """

        def check() -> tuple[tuple[SparseCall, SequenceSharding, Tensor], SharedValues]:
            sharding = self._sharding("q", q, "k", k)
            check_bool(normalize=normalize)
            local_mask = self._local_mask(mask, sharding)
            call = attention_call(
                q, k, indices, scale, None, None, local_mask, False, backend, sharding.key_length, k_name="k"
            )
            check_base("lse_base", lse_base)
            natural = convert_lse(arguments.check_per_head("lse", lse, call.q).detach(), lse_base, "e")
            if head_group is not None:
                check_positive(head_group=head_group)
                if self.tp.world > 1:
                    raise ValueError(
                        f"head_group must be None where heads are sharded over {self.tp.world} tp ranks, "
                        f"got {head_group}"
                    )
            return (call._replace(q=call.q.detach(), k=call.k.detach()), sharding, natural), self._shared_values(
                sharding, call.q, mask, backend, width=call.q.shape[2], topk=call.indices.shape[1],
                scale=call.scale, lse_base=lse_base, head_group=head_group, normalize=normalize,
            )  # fmt: skip

        call, sharding, natural = check_on_all_ranks(self._groups, "SparseParallel.attention_distribution", check)
        self._check_same_indices(call)
        heads = call.q.shape[1]
        with propagate_failure(self._groups), torch.no_grad():
            dist = distribution(
                call,
                exchange_keys([call.k], sharding),
                natural,
                heads if head_group is None else min(head_group, heads),
            )
            if head_group is None:
                dist = self._replicated_rows(call.q).reduce_heads(dist[0])
            return normalize_rows(dist) if normalize else dist

    def indexer_scores_at(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, *, scale: float = 1.0, relu: bool = True,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        deterministic: bool = False, backend: str = "auto",
    ) -> Tensor:  # fmt: skip
        """`attnmesh.sparse.indexer_scores_at` of this rank's rows, the same on every tp rank."""

        def check() -> tuple[tuple[IndexerCall, SequenceSharding], SharedValues]:
            sharding = self._sharding("iq", iq, "ik", ik)
            call = indexer_call(
                iq, ik, w, arguments.check_indices(indices), self._local_mask(mask, sharding), scale, relu,
                deterministic, backend, s_kv=sharding.key_length,
            )  # fmt: skip
            return (call, sharding), self._shared_values(
                sharding, call.iq, mask, backend, **_indexer_values(call), topk=indices.shape[-1],
                gradients=requiring_grad(iq=iq, ik=ik, w=w),
            )  # fmt: skip

        call, sharding = check_on_all_ranks(self._groups, "SparseParallel.indexer_scores_at", check)
        self._check_same_indices(call)
        with propagate_failure(self._groups):
            return indexer.scores_at(call, sharding, self._replicated_rows(call.iq))

    def indexer_topk(
        self, iq: Tensor, ik: Tensor, w: Tensor, topk: int, *, scale: float = 1.0, relu: bool = True,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        block_size: int = 4096, backend: str = "auto",
    ) -> TopKIndices:  # fmt: skip
        """`attnmesh.indexer_topk` of this rank's rows over the keys of all ranks, the same bits on every tp rank.

        Each tp rank computes some of the rows, and the results are all-gathered.
        """

        def check() -> tuple[tuple[IndexerCall, SequenceSharding], SharedValues]:
            sharding = self._sharding("iq", iq, "ik", ik)
            check_topk(topk, block_size, mask)
            local_mask = self._local_mask(mask, sharding)
            call = indexer_call(
                iq, ik, w, None, local_mask, scale, relu, False, backend, s_kv=sharding.key_length, topk=topk
            )
            return (call.detach(), sharding), self._shared_values(
                sharding, call.iq, mask, backend, **_indexer_values(call), topk=topk, block_size=block_size
            )

        call, sharding = check_on_all_ranks(self._groups, "SparseParallel.indexer_topk", check)
        rows = RowSharding(self.tp, call.iq.shape[0], scattered=self.tp.world > 1)
        with propagate_failure(self._groups), torch.no_grad():
            return indexer.topk_keys(call, topk, block_size, sharding, rows)

    def indexer_kl_loss(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, target: Tensor | AttentionTarget, *,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        scale: float = 1.0, relu: bool = True, reduction: Reduction = "sum", row_mask: Tensor | None = None,
        deterministic: bool = False, backend: str = "auto",
    ) -> Tensor:  # fmt: skip
        """`attnmesh.indexer_kl_loss` of the whole sequence, on every rank; of this rank's rows if reduction="none".

        Every rank calls backward on its own loss, with the same weight. A `target` tensor is over the heads of all
        ranks, an `AttentionTarget` has this rank's rows, keys and heads. "mean_rows" is the mean over the rows of all
        ranks.
        """

        def check() -> tuple[tuple[LossCall, SequenceSharding], SharedValues]:
            sharding = self._sharding("iq", iq, "ik", ik)
            local_mask = self._local_mask(mask, sharding)
            loss = loss_call(
                iq, ik, w, indices, target, local_mask, scale, relu, reduction, row_mask, deterministic, backend,
                sharding.key_length,
            )  # fmt: skip
            source = loss.source
            return (loss, sharding), self._shared_values(
                sharding, loss.indexer.iq, mask, backend, **_indexer_values(loss.indexer),
                topk=None if indices is None else indices.shape[-1], reduction=reduction,
                target=None if source is None else (source.q.shape[2], source.q.dtype, source.scale),
                row_mask=row_mask is not None, loss_rows=self.loss_rows, deterministic=deterministic,
                gradients=requiring_grad(iq=iq, ik=ik, w=w),
            )  # fmt: skip

        loss, sharding = check_on_all_ranks(self._groups, "SparseParallel.indexer_kl_loss", check)
        self._check_same_indices(loss.indexer)
        scattered = self.loss_rows == "scattered" and self.tp.world > 1
        row_sharding = RowSharding(self.tp, loss.indexer.iq.shape[0], scattered=scattered)
        with propagate_failure(self._groups):
            losses = indexer.row_losses(loss, sharding, row_sharding)
            total = indexer.global_row_count(sharding, row_mask) if reduction == "mean_rows" else None
            partial = reduce_rows(losses, reduction, row_mask, total)
            return partial if reduction == "none" else indexer.sum_over_sequence(partial, self.cp)

    def _sharding(self, q_name: str, q: object, k_name: str, k: object) -> SequenceSharding:
        """Raises ValueError unless this rank passes the queries and keys that it holds."""
        queries = arguments.check_queries(q_name, q)
        keys = arguments.check_keys(k_name, k, queries, queries.shape[2])
        world = self.cp.world
        length = queries.shape[0] * world if self.length is None else self.length
        key_length = keys.shape[0] * world if self.key_length is None else self.key_length
        ring = self.schedule == "ring"
        sharding = SequenceSharding(self._groups, self.layout, ring, length, key_length, queries.device)
        sharding.check_rows(q_name, queries.shape[0], length)
        sharding.check_rows(k_name, keys.shape[0], key_length)
        return sharding

    def _local_mask(self, mask: object, sharding: SequenceSharding) -> SparseMask:
        return sharding.local_mask(arguments.check_mask(mask))

    def _replicated_rows(self, q: Tensor) -> RowSharding:
        return RowSharding(self.tp, q.shape[0], scattered=False)

    def _check_same_indices(self, call: SparseCall | IndexerCall) -> None:
        if self.check_indices and call.indices is not None:
            check_same_indices(call.indices, call.bounds, self._groups)

    def _shared_values(
        self, sharding: SequenceSharding, q: Tensor, mask: SparseMask, backend: str, **more: object
    ) -> SharedValues:
        """The values that must be equal on all ranks."""
        inferred = " (rows per rank times world size; set it where ranks hold different numbers)"
        return {
            OBJECT: self._number,
            "length" + ("" if self.length is not None else inferred): sharding.length,
            "key_length" + ("" if self.key_length is not None else inferred): sharding.key_length,
            "layout": self.layout,
            "positions of layout": positions_checksum(self.layout, sharding.length, self.cp.world),
            "schedule": self.schedule, "check_indices": self.check_indices,
            "dtype": q.dtype, "device": q.device.type, "mask": mask_summary(mask), "backend": backend, **more,
        }  # fmt: skip


def _indexer_values(call: IndexerCall) -> SharedValues:
    return {
        "indexer heads": call.iq.shape[1], "width": call.iq.shape[2], "scale": call.scale, "relu": call.relu,
        "dtype of w": call.w.dtype,
    }  # fmt: skip
