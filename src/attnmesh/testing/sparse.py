"""Sparse attention and its indexer: random problems, reference functions, and problems sharded over a grid of ranks.

Indices name keys at random: some twice, some that do not exist, and in one row none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm, SubComm
from attnmesh.core.layouts import Layout
from attnmesh.ops.sparse import attention, indexer, indexer_loss, reference
from attnmesh.ops.sparse.arguments import SparseMask, convert_lse
from attnmesh.ops.sparse.indexer_loss import AttentionTarget
from attnmesh.parallel.sparse.api import SparseParallel

SCALE, INDEX_SCALE = 0.3, 0.7  # of the attention scores and of the indexer's

Results = dict[str, Tensor]

# Which dimensions of a problem and of its results ranks hold shards of: rows or keys over cp, heads over tp.
_ROWS_AND_HEADS = {"q", "lse", "grad_out", "grad_lse", "out", "dq"}
_HEADS = {"sinks", "dsinks"}
_KEYS = {"kv", "v", "ik", "dkv", "d_ik"}
_REPLICATED = {"mean"}
_MASK_ROWS = ("topk_length", "q_positions", "k_start", "k_end")
_FLOAT32 = {"lse", "grad_lse", "grad_scores", "grad_loss"}  # never narrower


@dataclass(frozen=True)
class SparseProblem:
    """Inputs of all sparse functions, and the gradients of their results."""

    q: Tensor
    kv: Tensor
    v: Tensor
    sinks: Tensor
    lse: Tensor  # natural, of more keys than the indices name: heads differ in mass
    iq: Tensor
    ik: Tensor
    w: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    grad_scores: Tensor
    grad_loss: Tensor
    indices: Tensor
    mask: SparseMask

    @property
    def length(self) -> int:
        """The number of query rows."""
        return self.q.shape[0]

    @property
    def key_length(self) -> int:
        """The number of keys."""
        return self.kv.shape[0]

    @property
    def d_v(self) -> int:
        """The width of the values."""
        return self.v.shape[1]

    @property
    def all_keys_mask(self) -> SparseMask:
        """The mask without `topk_length`, which functions over all keys do not take."""
        return replace(self.mask, topk_length=None)

    def change(self, change: Callable[[str, Tensor], Tensor]) -> SparseProblem:
        """Return the problem with every tensor changed; the mask stays."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "mask"}
        return SparseProblem(**{name: change(name, x) for name, x in tensors.items()}, mask=self.mask)

    def to(self, dtype: torch.dtype) -> SparseProblem:
        """Return the problem in another precision; what is float32 by its meaning is never narrower."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.change(lambda name, x: x.to(wide if name in _FLOAT32 else dtype) if x.is_floating_point() else x)

    def on(self, device: torch.device | str) -> SparseProblem:
        """Return the problem on a device; the mask's tensors are moved by the functions."""
        return self.change(lambda _, x: x.to(device))

    def leaves(self, *names: str) -> list[Tensor]:
        """Return copies of these tensors that require gradients."""
        return [getattr(self, name).detach().clone().requires_grad_() for name in names]

    def poisoned(self, over_indices: bool = True) -> SparseProblem:
        """Return the problem with NaN in the keys that no row may read, by its indices or by the mask alone."""
        if over_indices:
            read = _counts(self.indices, self.key_length, self.mask) > 0
        else:
            read = visible_keys(self.length, self.key_length, self.mask)
        used = read.any(0)[:, None]
        kv, v, ik = (torch.where(used, x, torch.nan) for x in (self.kv, self.v, self.ik))
        return replace(self, kv=kv, v=v, ik=ik)

    def shard(self, place: GridRank) -> SparseProblem:
        """Return what one rank of a grid holds."""
        per_row: dict[str, Any] = {
            name: place.rows(x) for name in _MASK_ROWS if (x := getattr(self.mask, name)) is not None
        }
        mask = replace(self.mask, **per_row)
        heads = split_heads(self.q.shape[1], place.tp.world)[place.tp.rank]

        def own(name: str, x: Tensor) -> Tensor:
            if name in _HEADS:
                return x[heads].contiguous()
            x = place.rows(x)
            return (x[:, heads] if name in _ROWS_AND_HEADS else x).contiguous()

        return replace(self.change(own), mask=mask)


def random_sparse_problem(
    length: int = 11,
    key_length: int = 13,
    *,
    heads: int = 7,
    topk: int = 6,
    width: int = 12,
    d_v: int = 8,
    index_heads: int = 3,
    index_width: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **mask: Any,
) -> SparseProblem:
    """Return a random problem on the CPU, the same on every rank. `mask` are the fields of a `SparseMask`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    indices = torch.randint(-1, key_length + 1, (length, topk), generator=generator, dtype=torch.int32, device="cpu")
    indices[(indices == key_length // 2) | (indices == key_length - 2)] = 0  # two keys that no row names
    indices.view(-1)[::17] = torch.iinfo(torch.int32).max
    indices.view(-1)[5::19] = torch.iinfo(torch.int32).min
    lse = 3 + normal(length, heads)
    if length > 3:
        indices[3] = -1  # a row that sees nothing
        lse[2], lse[3, 0] = -torch.inf, torch.inf  # heads without mass
    return SparseProblem(
        q=normal(length, heads, width), kv=normal(key_length, width), v=normal(key_length, d_v), sinks=normal(heads),
        lse=lse, iq=normal(length, index_heads, index_width), ik=normal(key_length, index_width),
        w=normal(length, index_heads), grad_out=normal(length, heads, d_v), grad_lse=normal(length, heads),
        grad_scores=normal(length, topk), grad_loss=normal(length), indices=indices, mask=SparseMask(**mask),
    ).to(dtype)  # fmt: skip


def visible_keys(length: int, key_length: int, mask: SparseMask) -> Tensor:
    """Return [length, key_length]: the keys that the mask shows to each row, whatever its indices name."""
    every = torch.arange(key_length, dtype=torch.int32, device="cpu").expand(length, -1)
    return reference.valid_slots(every, key_length, replace(mask, topk_length=None))


def _counts(indices: Tensor, key_length: int, mask: SparseMask) -> Tensor:
    """Return [length, key_length]: how often a row names a key."""
    return reference.key_counts(indices, reference.valid_slots(indices, key_length, mask), key_length)


class OneDevice:
    """The functions of one device, under the names they have in `SparseParallel`."""

    sparse_attention = staticmethod(attention.sparse_attention)
    attention_distribution = staticmethod(attention.attention_distribution)
    indexer_scores_at = staticmethod(indexer.indexer_scores_at)
    indexer_topk = staticmethod(indexer.indexer_topk)
    indexer_kl_loss = staticmethod(indexer_loss.indexer_kl_loss)


class _TopK(NamedTuple):
    indices: Tensor
    scores: Tensor


class Reference:
    """The same functions in plain torch operations over all keys; exact in float64."""

    @staticmethod
    def sparse_attention(
        q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, mask: SparseMask, d_v: int | None = None,
        v: Tensor | None = None, sinks: Tensor | None = None, return_attn_sum: bool = False, **_: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return out and lse, and with `return_attn_sum` the probabilities summed over heads."""
        counts = _counts(indices, len(kv), mask).to(q.dtype)
        out, lse = reference.attend(q, kv, kv[:, :d_v] if v is None else v, counts, scale, sinks)
        if not return_attn_sum:
            return out, lse
        with torch.no_grad():
            total = Reference.attention_distribution(q, kv, indices, lse, scale=scale, mask=mask)
        return out, lse, total

    @staticmethod
    def attention_distribution(
        q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, *, scale: float, mask: SparseMask,
        lse_base: Any = "e", normalize: bool = False, head_group: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the probabilities of the named keys, summed over heads or over groups of heads."""
        natural = convert_lse(lse, lse_base, "e")
        shares = _probabilities(q, k, natural, scale)
        groups = shares.sum(0) if head_group is None else torch.stack([x.sum(0) for x in shares.split(head_group)])
        total = _at_indices(groups, indices, mask, 0.0)
        mass = total.sum(-1, keepdim=True)
        return total / torch.where(mass > 0, mass, 1.0) if normalize else total

    @staticmethod
    def indexer_scores_at(
        iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, *, scale: float, mask: SparseMask
    ) -> Tensor:
        """Return the indexer's scores of the named keys."""
        return _at_indices(reference.index_scores(iq, ik, w, scale), indices, mask, -torch.inf)

    @staticmethod
    def indexer_topk(iq: Tensor, ik: Tensor, w: Tensor, topk: int, *, mask: SparseMask, scale: float = 1.0) -> _TopK:
        """Return the best keys of each row in ascending order, and the best scores in descending order."""
        visible = visible_keys(len(iq), len(ik), mask)
        scores = reference.index_scores(iq, ik, w, scale).masked_fill(~visible, -torch.inf)
        keys = reference.topk_keys(scores, visible, topk)
        padded = [row + [-1] * (topk - len(row)) for row in keys]
        return _TopK(
            torch.tensor(padded, dtype=torch.int32, device="cpu"), scores.sort(descending=True).values[:, :topk]
        )

    @staticmethod
    def indexer_kl_loss(
        iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, target: AttentionTarget, *, mask: SparseMask,
        scale: float, reduction: str, row_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the KL divergence of each row, or its mean over the rows of `row_mask`."""
        p, scores = _probabilities(*target[:4]).sum(0), reference.index_scores(iq, ik, w, scale)
        if indices is None:
            rows = reference.kl(p, scores, visible_keys(len(iq), len(ik), mask))
        else:
            p, scores = (_at_indices(x, indices, mask, 0.0) for x in (p, scores))
            rows = reference.kl(p, scores, reference.valid_slots(indices, len(ik), mask))
        return rows if reduction == "none" or row_mask is None else rows[row_mask].mean()


Functions = OneDevice | Reference | SparseParallel


def _probabilities(q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Return [heads, length, key_length]: the probability of every key; 0 where a head has no mass."""
    return torch.where(torch.isinf(lse).T[..., None], 0.0, reference.distribution(q, k, lse, scale))


def _at_indices(x: Tensor, indices: Tensor, mask: SparseMask, otherwise: float) -> Tensor:
    """Gather [..., length, key_length] at the indices: [..., length, topk]."""
    valid = reference.valid_slots(indices, x.shape[-1], mask)
    at = torch.where(valid, indices, 0).long().expand(*x.shape[:-1], -1)
    padded = torch.nn.functional.pad(x, (0, 1))  # an entry for index 0 where there are no keys
    return torch.where(valid, padded.gather(-1, at), otherwise)


@dataclass(frozen=True)
class GridRank:
    """One rank of a grid: heads are sharded over `tp`, the sequence over `cp`. Rank = cp rank x tp + tp rank."""

    tp: Comm
    cp: Comm
    layout: Layout

    @classmethod
    def of(cls, comm: Comm, tp: int, layout: Layout) -> GridRank:
        """Return this rank's place in a grid with `tp` ranks per row."""
        first = comm.rank // tp * tp
        along_tp = SubComm(comm, range(first, first + tp))
        return cls(along_tp, SubComm(comm, range(comm.rank - first, comm.world, tp)), layout)

    def rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor."""
        return self.layout.shard(x, 0, self.cp.world, self.cp.rank)

    def gather(self, name: str, x: Tensor, problem: SparseProblem) -> list[Tensor]:
        """Return the whole of a result on every rank; of a result that all tp ranks hold, the copy of each of them."""
        if name not in _HEADS | _REPLICATED:
            length = problem.key_length if name in _KEYS else problem.length
            counts = [self.layout.local_length(length, self.cp.world, rank) for rank in range(self.cp.world)]
            x = self.layout.unshard(self.cp.all_gather(x.contiguous(), [(n, *x.shape[1:]) for n in counts]), 0)
        if name not in _ROWS_AND_HEADS | _HEADS:
            return self.tp.all_gather(x, [x.shape] * self.tp.world)
        dim = 0 if name in _HEADS else 1
        counts = [part.stop - part.start for part in split_heads(problem.q.shape[1], self.tp.world)]
        shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in counts]
        return [torch.cat(self.tp.all_gather(x.contiguous(), shapes), dim)]


def split_heads(heads: int, tp: int) -> list[slice]:
    """Return the heads of each tp rank, unevenly: the last rank has most."""
    ends = [heads * (rank + 1) * (rank + 2) // (tp * (tp + 1)) for rank in range(tp)]
    ends = [max(end, rank + 1) for rank, end in enumerate(ends)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
