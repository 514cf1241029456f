"""`SparseParallel`: the sparse family with its heads and its sequence spread over ranks."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Contiguous, Layout
from attnmesh.core.validation import check_count, check_positive
from attnmesh.ops.sparse import attention as one_device
from attnmesh.ops.sparse import check
from attnmesh.ops.sparse import indexer as one_indexer
from attnmesh.ops.sparse import loss as one_loss
from attnmesh.ops.sparse.attention import normalized
from attnmesh.ops.sparse.canonical import Slots
from attnmesh.ops.sparse.loss import Mode, Reduction, reduced
from attnmesh.ops.sparse.lse import Base, check_base, convert_lse
from attnmesh.ops.sparse.mask import Rows, SparseMask
from attnmesh.parallel.sparse import indexer, loss
from attnmesh.parallel.sparse.attention import attend, distribute
from attnmesh.parallel.sparse.facts import gradients, in_words
from attnmesh.parallel.sparse.ranks import SparseGroups, comm_or_solo
from attnmesh.parallel.sparse.row_share import RowShare
from attnmesh.parallel.sparse.same_indices import check_same_indices
from attnmesh.parallel.sparse.spread import Spread
from attnmesh.parallel.sparse.visits import bring

Group = Comm | ProcessGroup | DeviceMesh | None
Bringing = Literal["gathered", "sharded"]
LossRows = Literal["replicated", "scattered"]


class SparseParallel:
    """The sparse family over ranks, one object a rank. Methods are the functions of one device, over all ranks.

    `tp` and `cp` are comms, process groups or meshes of one dimension; None is not spread. Heads are spread over tp: a
    rank gives the heads it has (any number) of `q`, and with them `lse` and `sinks`; keys, the indexer and indices
    are the same on every tp rank. The sequence is spread over cp: a rank gives rows `layout.shard(x, 0, cp.world,
    cp.rank)` of the `length` queries (q, lse, indices, iq, w) and of the `key_length` keys (kv, v, ik; as many as
    queries unless said). Without `length` all ranks hold equally many.

    `keys` is how keys come to the queries of other cp ranks: "gathered" for each call, which gives the bits of one
    device (on a CPU but for BLAS, which may go another way for fewer rows); or "sharded": blocks of them visit in a
    ring, and nothing holds the whole sequence.

    Indices are the numbers of keys in the whole sequence. `mask` speaks of it, too: row i stands at `q_start` plus its
    place in the sequence, unless `q_positions` says where this rank's rows stand; what it says of each row is of this
    rank's rows. All ranks make the same calls in the same order, forward and backward, or get ValueError on every
    one. Group indices are given, tp ranks compare a checksum of them, which a GPU has to be waited for:
    `check_indices=False` trusts them. Gradients are those of one device: what several ranks hold alike gets the whole
    gradient on each of them.
    """

    def __init__(
        self,
        *,
        tp: Group = None,
        cp: Group = None,
        length: int | None = None,
        key_length: int | None = None,
        layout: Layout = Contiguous(),  # noqa: B008  (immutable)
        keys: Bringing = "gathered",
        check_indices: bool = True,
    ) -> None:
        if not isinstance(layout, Layout):
            raise ValueError(f"layout must be a layout (Contiguous(), Zigzag(), ...), got {layout!r}")
        if keys not in get_args(Bringing):
            raise ValueError(f'keys must be "gathered" or "sharded", got {keys!r}')
        for name, n in (("length", length), ("key_length", key_length)):
            if n is not None:
                check_count(name, n)
        self.layout, self.keys, self.check_indices = layout, keys, check_indices
        self.length, self.key_length = length, length if key_length is None else key_length
        self._ranks = SparseGroups(comm_or_solo(tp), comm_or_solo(cp))

    @property
    def tp(self) -> Comm:
        """The ranks that share the heads."""
        return self._ranks.tp

    @property
    def cp(self) -> Comm:
        """The ranks that share the sequence."""
        return self._ranks.cp

    def sparse_attention(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        scale: float,
        d_v: int | None = None,
        v: Tensor | None = None,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        sinks: Tensor | None = None,
        return_attn_sum: bool = False,
        deterministic: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, ...]:
        """`attnmesh.sparse_attention` of this rank's rows and heads; `return_attn_sum` is summed over all heads."""

        def check_arguments() -> tuple[tuple[one_device.Attending, Spread], SharedValues]:
            spread = self._spread("q", q, "kv", kv)
            call = one_device.checked(
                q, kv, indices, scale, d_v, v, self._mask(mask, spread), deterministic, backend, spread.key_length
            )
            check.check_sink(sinks, call.q)
            return (call, spread), self._facts(
                spread, call.q, mask, backend, width=call.q.shape[2], d_v=call.d_v, topk=call.indices.shape[1],
                scale=call.scale, values=v is not None, sinks=sinks is not None,
                return_attn_sum=return_attn_sum, deterministic=deterministic,
                gradients=gradients(q=q, kv=kv, v=v, sinks=sinks),
            )  # fmt: skip

        call, spread = check_on_all_ranks(self._ranks, "SparseParallel.sparse_attention", check_arguments)
        self._check_indices(call.indices, call.rows)
        out, lse, dist = attend(call, sinks, spread, return_attn_sum)
        if not return_attn_sum:
            return out, lse
        return out, lse, self._all_rows(call.q).over_heads(dist)

    def attention_distribution(
        self,
        q: Tensor,
        k: Tensor,
        indices: Tensor,
        lse: Tensor,
        *,
        scale: float,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        lse_base: Base = "e",
        head_group: int | None = None,
        normalize: bool = False,
        backend: str = "auto",
    ) -> Tensor:
        """`attnmesh.attention_distribution` of this rank's rows, over the heads of all ranks, normalized after that.

        `head_group` must be None where heads are spread: a group could not be told from another rank's.
        """

        def check_arguments() -> tuple[tuple[one_device.Attending, Spread, Tensor], SharedValues]:
            spread = self._spread("q", q, "k", k)
            call = one_device.checked(
                q, k, indices, scale, None, None, self._mask(mask, spread), False, backend, spread.key_length
            )
            check_base("lse_base", lse_base)
            natural = convert_lse(check.check_per_head("lse", lse, call.q).detach(), lse_base, "e")
            if head_group is not None:
                check_positive(head_group=head_group)
                if self.tp.world > 1:
                    world = self.tp.world
                    raise ValueError(
                        f"head_group must be None where {world} tp ranks share the heads, got {head_group}"
                    )
            return (call._replace(q=call.q.detach(), k=call.k.detach()), spread, natural), self._facts(
                spread, call.q, mask, backend, width=call.q.shape[2], topk=call.indices.shape[1],
                scale=call.scale, lse_base=lse_base, head_group=head_group, normalize=normalize,
            )  # fmt: skip

        call, spread, natural = check_on_all_ranks(
            self._ranks, "SparseParallel.attention_distribution", check_arguments
        )
        self._check_indices(call.indices, call.rows)
        heads = call.q.shape[1]
        with torch.no_grad():
            dist = distribute(
                call, bring([call.k], spread), natural, heads if head_group is None else min(head_group, heads)
            )
            if head_group is None:
                dist = self._all_rows(call.q).over_heads(dist[0])
            return normalized(dist) if normalize else dist

    def indexer_scores_at(
        self,
        iq: Tensor,
        ik: Tensor,
        w: Tensor,
        indices: Tensor,
        *,
        scale: float = 1.0,
        relu: bool = True,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        deterministic: bool = False,
        backend: str = "auto",
    ) -> Tensor:
        """`attnmesh.indexer_scores_at` of this rank's rows, the same on every tp rank."""

        def check_arguments() -> tuple[tuple[one_indexer.Indexing, Tensor, Rows, Spread], SharedValues]:
            spread = self._spread("iq", iq, "ik", ik)
            call = one_indexer.checked(iq, ik, w, scale, relu, deterministic, backend)
            named = check.same_device(check.check_indices(indices, call.iq.shape[0]), call.iq)
            rows = check.rows_of(self._mask(mask, spread), call.iq, spread.key_length, named.shape[1])
            return (call, named, rows, spread), self._facts(
                spread, call.iq, mask, backend, **_indexer_facts(call), topk=named.shape[1],
                gradients=gradients(iq=iq, ik=ik, w=w),
            )  # fmt: skip

        call, named, rows, spread = check_on_all_ranks(self._ranks, "SparseParallel.indexer_scores_at", check_arguments)
        self._check_indices(named, rows)
        return indexer.scores_at(call, named, rows, spread, self._all_rows(call.iq))

    def indexer_topk(
        self,
        iq: Tensor,
        ik: Tensor,
        w: Tensor,
        topk: int,
        *,
        scale: float = 1.0,
        relu: bool = True,
        mask: SparseMask = SparseMask(),  # noqa: B008  (immutable)
        block: int = 4096,
        backend: str = "auto",
    ) -> Slots:
        """`attnmesh.indexer_topk` of this rank's rows: the best of all keys, the same bits on every tp rank.

        Each tp rank scores its share of the rows, and they exchange what they have found.
        """

        def check_arguments() -> tuple[tuple[one_indexer.Indexing, Rows, Spread], SharedValues]:
            spread = self._spread("iq", iq, "ik", ik)
            one_indexer.check_choosing(topk, block, mask)
            call = one_indexer.checked(iq, ik, w, scale, relu, False, backend)
            rows = check.rows_of(self._mask(mask, spread), call.iq, spread.key_length, topk)
            found = call._replace(iq=call.iq.detach(), ik=call.ik.detach(), w=call.w.detach())
            return (found, rows, spread), self._facts(
                spread, call.iq, mask, backend, **_indexer_facts(call), topk=topk, block=block
            )

        call, rows, spread = check_on_all_ranks(self._ranks, "SparseParallel.indexer_topk", check_arguments)
        share = RowShare(self.tp, call.iq.shape[0], scattered=self.tp.world > 1)
        with torch.no_grad():
            return indexer.choose_keys(call, topk, rows, block, spread, share)

    def indexer_kl_loss(
        self,
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
        rows: LossRows = "replicated",
    ) -> Tensor:
        """`attnmesh.indexer_kl_loss` of the whole sequence, on every rank; `reduction="none"`: of this rank's rows.

        Every rank takes the backward from its own copy of the loss, and all weigh it alike. A `target` given is over
        the heads of all ranks. "mean_rows" counts the rows of all ranks, unless `global_rows` says how many.

        `rows` is who works on the rows that all tp ranks hold: "replicated", every rank on all of them after one
        all-reduce of the target; "scattered", every rank on its share after a reduce-scatter, which moves and computes
        less, and gives every rank the same bits of the gradients by construction.
        """

        def check_arguments() -> tuple[tuple[one_loss.Losing, Spread], SharedValues]:
            spread = self._spread("iq", iq, "ik", ik)
            if rows not in get_args(LossRows):
                raise ValueError(f'rows must be "replicated" or "scattered", got {rows!r}')
            found = one_loss.checked(
                iq, ik, w, indices, target, q, k, lse, attn_scale, lse_base, self._mask(mask, spread), mode, scale,
                relu, reduction, row_mask, global_rows, deterministic, backend, spread.key_length,
            )  # fmt: skip
            source = found.source
            return (found, spread), self._facts(
                spread, found.call.iq, mask, backend, **_indexer_facts(found.call),
                topk=None if found.indices is None else found.indices.shape[1], mode=mode, reduction=reduction,
                target=None if source is None else (source.q.shape[2], source.q.dtype, source.scale, lse_base),
                row_mask=row_mask is not None, rows=rows, deterministic=deterministic,
                global_rows=global_rows if isinstance(global_rows, int | None) else "a tensor",
                gradients=gradients(iq=iq, ik=ik, w=w),
            )  # fmt: skip

        found, spread = check_on_all_ranks(self._ranks, "SparseParallel.indexer_kl_loss", check_arguments)
        if found.indices is not None:
            self._check_indices(found.indices, found.rows)
        share = RowShare(self.tp, found.call.iq.shape[0], scattered=rows == "scattered" and self.tp.world > 1)
        each = loss.each_row(found, spread, share)
        if reduction == "mean_rows" and global_rows is None:
            global_rows = loss.counted_rows(spread, row_mask)
        part = reduced(each, reduction, row_mask, global_rows)
        return part if reduction == "none" else loss.over_sequence(part, self.cp)

    def _spread(self, q_name: str, q: object, k_name: str, k: object) -> Spread:
        """Who holds what in this call; ValueError unless this rank has its share of it."""
        queries = check.check_queries(q_name, q)
        keys = check.check_keys(k_name, k, queries, queries.shape[2])
        world = self.cp.world
        length = queries.shape[0] * world if self.length is None else self.length
        key_length = keys.shape[0] * world if self.key_length is None else self.key_length
        spread = Spread(self._ranks, self.layout, self.keys == "sharded", length, key_length, queries.device)
        spread.check(f"queries ({q_name})", queries.shape[0], length)
        spread.check(f"keys ({k_name})", keys.shape[0], key_length)
        return spread

    def _mask(self, mask: object, spread: Spread) -> SparseMask:
        return spread.local_mask(check.check_mask(mask))

    def _all_rows(self, q: Tensor) -> RowShare:
        return RowShare(self.tp, q.shape[0], scattered=False)

    def _check_indices(self, indices: Tensor, rows: Rows) -> None:
        if self.check_indices:
            check_same_indices(indices, rows, self._ranks)

    def _facts(self, spread: Spread, q: Tensor, mask: SparseMask, backend: str, **more: object) -> SharedValues:
        """What must be equal on all ranks."""
        inferred = " (rows a rank x world; give it where they differ)"
        return {
            "length" + ("" if self.length is not None else inferred): spread.length,
            "key_length" + ("" if self.key_length is not None else inferred): spread.key_length,
            "layout": self.layout, "keys": self.keys, "check_indices": self.check_indices,
            "dtype": q.dtype, "device": q.device.type, "mask": in_words(mask), "backend": backend, **more,
        }  # fmt: skip


def _indexer_facts(call: one_indexer.Indexing) -> SharedValues:
    return {
        "indexer heads": call.iq.shape[1], "width": call.iq.shape[2], "scale": call.scale, "relu": call.relu,
        "dtype of w": call.w.dtype,
    }  # fmt: skip
