"""Arguments of the sparse functions: `SparseMask`, `TopKIndices`, bases of an lse, and their validation.

A *slot* is a column of `indices` [s_q, topk]: slot j of row i holds the index of one key, or of none.

`SparseCall` and `IndexerCall` are arguments that have been checked, as every backend takes them. Slot j of row i is
valid if `bounds` says so; its key is row `indices[i, j] - bounds.k_offset` of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnmesh.utils.optional import installed
from attnmesh.utils.validation import check_bool, check_count, check_positive, check_tensor, shown

Base = Literal["e", "2"]

_INT32_MAX = torch.iinfo(torch.int32).max
_LOG = {"e": 1.0, "2": math.log(2.0)}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Masks.


class RowBounds(NamedTuple):
    """A mask as kernels take it: slot j of row i is valid iff `j < slots[i]` and `lo[i] <= index < hi[i]`.

    lo, hi and slots are int32 [s_q]. Indices count keys from the start of the sequence; the key of an index is row
    `index - k_offset` in memory.
    """

    lo: Tensor
    hi: Tensor
    slots: Tensor
    k_offset: int

    def valid(self, indices: Tensor) -> Tensor:
        """Whether each slot of `indices` [s_q, topk] is valid, bool [s_q, topk]."""
        slot = torch.arange(indices.shape[1], device=indices.device)
        in_range = (indices >= self.lo[:, None]) & (indices < self.hi[:, None])
        return in_range & (slot < self.slots[:, None])

    def mask_rows(self, keep: Tensor) -> RowBounds:
        """The bounds with no visible key in rows where `keep` [s_q] is False."""
        return self._replace(hi=torch.where(keep, self.hi, 0))

    def narrow(self, start: int, stop: int) -> RowBounds:
        """The bounds of rows [start, stop)."""
        return RowBounds(self.lo[start:stop], self.hi[start:stop], self.slots[start:stop], self.k_offset)


@dataclass(frozen=True, eq=False)
class SparseMask:
    """Conditions for a slot to be valid, besides that it holds the index of a key (0 <= index < s_kv). All must hold.

    Args:
        topk_length: [s_q]; only this many leading slots of a row are valid.
        causal: row i is at position `q_start + i`, or `q_positions[i]`. Key j stands for the tokens
            [j * k_stride, (j + 1) * k_stride) and is visible from position p once all of them are:
            `j < (p + 1) // k_stride`.
        q_start: the position of the first row.
        q_positions: [s_q]; positions of the rows, instead of `q_start`.
        k_stride: tokens per key.
        k_start, k_end: [s_q]; the range of keys visible to a row (its document, in a packed batch).
        k_offset: the index of the first key in memory, where the keys are a part of a longer sequence; indices count
            from the start of that sequence.

    Examples:
        >>> q, kv = torch.randn(3, 2, 16), torch.randn(3, 16)
        >>> indices = torch.tensor([[0, 1, 2]] * 3, dtype=torch.int32)
        >>> out, lse = am.sparse_attention(q, kv, indices, scale=0.25, mask=am.SparseMask(causal=True))
        >>> torch.allclose(out[0], kv[0].expand(2, 16))  # the first row attends to one key
        True
    """

    topk_length: Tensor | None = None
    causal: bool = False
    q_start: int = 0
    q_positions: Tensor | None = None
    k_stride: int = 1
    k_start: Tensor | None = None
    k_end: Tensor | None = None
    k_offset: int = 0

    def __post_init__(self) -> None:
        check_positive(k_stride=self.k_stride)
        check_bool(causal=self.causal)
        for name in ("q_start", "k_offset"):
            check_count(name, getattr(self, name), most=2**62)
        for name in ("topk_length", "q_positions", "k_start", "k_end"):
            _check_integers(name, getattr(self, name))
        if self.q_start and self.q_positions is not None:
            raise ValueError(f"q_start={self.q_start} and q_positions exclude each other, got both")
        if not self.causal and (self.q_start or self.q_positions is not None or self.k_stride != 1):
            raise ValueError(
                f"q_start={self.q_start}, q_positions and k_stride={self.k_stride} require causal=True, got False"
            )

    @cached_property
    def numbers(self) -> tuple[int, ...] | None:
        """All that its bounds depend on, besides sizes; None if there are tensors."""
        if any(x is not None for x in (self.topk_length, self.q_positions, self.k_start, self.k_end)):
            return None
        return self.causal, self.q_start, self.k_stride, self.k_offset

    def bounds(self, s_q: int, s_kv: int, topk: int, device: torch.device) -> RowBounds:
        """The mask as kernels take it. Never synchronizes with the device."""
        end = self.k_offset + s_kv
        if end > _INT32_MAX:
            raise ValueError(f"indices are int32: k_offset={self.k_offset} plus {s_kv} keys exceeds {_INT32_MAX}")
        given = self.k_start, self.k_end, self.q_positions, self.topk_length
        if (
            device.type == "cuda"
            and not torch.compiler.is_compiling()
            and installed("triton")
            and all(x is None or x.device == device for x in given)
        ):
            from attnmesh.ops.sparse import triton_bounds

            for name, x in zip(("k_start", "k_end", "q_positions", "topk_length"), given, strict=True):
                _check_rows(name, x, s_q)
            rows = triton_bounds.bounds(
                s_q, *given, first=self.k_offset, end=end, q_start=self.q_start, k_stride=self.k_stride, topk=topk,
                causal=self.causal, device=device,
            )  # fmt: skip
            return RowBounds(*rows, self.k_offset)
        lo = _per_row("k_start", self.k_start, self.k_offset, s_q, device)
        hi = _per_row("k_end", self.k_end, end, s_q, device)
        if self.causal:
            if self.q_positions is None:
                positions = torch.arange(self.q_start, self.q_start + s_q, device=device)
            else:
                positions = _per_row("q_positions", self.q_positions, 0, s_q, device)
            # Clamp first: a position may be the largest integer, and adding 1 would overflow.
            positions = positions.clamp(-1, end * self.k_stride)
            hi = torch.minimum(hi, torch.div(positions + 1, self.k_stride, rounding_mode="floor"))
        slots = _per_row("topk_length", self.topk_length, topk, s_q, device).clamp(0, topk)
        bounds = torch.stack((lo.clamp(self.k_offset, end), hi.clamp(self.k_offset, end), slots)).int()
        lo, hi, slots = bounds.unbind()  # as aligned as by `triton_bounds`: launches repeat
        return RowBounds(lo, hi, slots, self.k_offset)


def _check_integers(name: str, given: object) -> None:
    if given is None:
        return
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64) or given.ndim != 1:
        got = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else shown(given)
        raise ValueError(f"{name} must be an int32 or int64 tensor [s_q], got {got}")


def _per_row(name: str, given: Tensor | None, default: int, s_q: int, device: torch.device) -> Tensor:
    if given is None:
        return torch.full((s_q,), default, dtype=torch.int64, device=device)
    _check_rows(name, given, s_q)
    return given.to(device, torch.int64)


def _check_rows(name: str, given: Tensor | None, s_q: int) -> None:
    if given is not None and given.shape[0] != s_q:
        raise ValueError(f"{name} must be [{s_q}], one number per row of q, got [{given.shape[0]}]")


# Top-k indices.


class TopKIndices(NamedTuple):
    """Selected keys per row.

    `indices` [s_q, topk] int32, ascending, then -1; `scores` [s_q, topk], -inf where the index is -1, or None if not
    known; `lengths` [s_q] int32, the number of selected keys.

    Examples:
        >>> top = am.indexer_topk(torch.randn(3, 2, 8), torch.randn(10, 8), torch.rand(3, 2), topk=12)
        >>> top.lengths.tolist(), top.indices[0].tolist()
        ([10, 10, 10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -1])
    """

    indices: Tensor
    scores: Tensor | None
    lengths: Tensor


def empty_topk(*rows: int, topk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the indices, scores and lengths of `TopKIndices`."""
    return (
        torch.empty(*rows, topk, dtype=torch.int32, device=device),
        torch.empty(*rows, topk, dtype=torch.float32, device=device),
        torch.empty(*rows, dtype=torch.int32, device=device),
    )


def canonicalize(
    indices: Tensor, scores: Tensor | None = None, *, s_kv: int | None = None, unique: bool = False
) -> TopKIndices:
    """Sorts the indices of every row in ascending order, and the scores with them. Indices of no key become -1, last.

    An index is of no key if it is negative or, with `s_kv` given, at least s_kv. `unique` keeps the first slot of each
    key, in the given order, and drops the others. Scores of dropped and unused slots are -inf.

    All ranks must hold the slots of a row in the same order, because slots are summed over ranks by position.

    Examples:
        >>> am.sparse.canonicalize(torch.tensor([[7, 2, -1, 2]], dtype=torch.int32), s_kv=8, unique=True).indices
        tensor([[ 2,  7, -1, -1]], dtype=torch.int32)
    """
    indices = check_indices(indices)
    if scores is not None:
        check_tensor("scores", scores)
        if scores.shape != indices.shape or scores.dtype not in _DTYPES or scores.device != indices.device:
            raise ValueError(
                f"scores must be {list(indices.shape)}, the shape of indices, floating point on {indices.device}, got "
                f"{shown(scores)}"
            )
    if s_kv is not None:
        check_count("s_kv", s_kv)
    check_bool(unique=unique)
    in_range = (indices >= 0) & (indices < (_INT32_MAX if s_kv is None else s_kv))
    keys, order = indices.masked_fill(~in_range, _INT32_MAX).sort(dim=1, stable=True)
    if unique:
        duplicate = torch.zeros_like(in_range)
        duplicate[:, 1:] = keys[:, 1:] == keys[:, :-1]
        keys, second = keys.masked_fill(duplicate, _INT32_MAX).sort(dim=1, stable=True)
        order = order.gather(1, second)
    used = keys < _INT32_MAX
    if scores is not None:
        scores = scores.gather(1, order).masked_fill(~used, -torch.inf)
    return TopKIndices(keys.masked_fill(~used, -1), scores, used.sum(1, dtype=torch.int32))


def sort_by_key(scores: Tensor, indices: Tensor) -> TopKIndices:
    """Sorts selected keys by index; a slot whose score is -inf is not selected."""
    selected = scores > -torch.inf
    indices, order = indices.masked_fill(~selected, _INT32_MAX).sort(dim=1)
    selected = selected.gather(1, order)
    return TopKIndices(indices.masked_fill(~selected, -1), scores.gather(1, order), selected.sum(1, dtype=torch.int32))


def merge_topk(candidates: Sequence[TopKIndices], topk: int) -> TopKIndices:
    """The top-k keys of several chunks of keys, given the top-k of each chunk; the lowest index wins a tie.

    Scores and indices are totally ordered, so the order of the candidates does not matter.
    """
    scores = [chunk.scores for chunk in candidates if chunk.scores is not None]
    if len(scores) != len(candidates):
        raise ValueError("candidates must have scores")
    merged = sort_by_key(torch.cat(scores, 1), torch.cat([chunk.indices for chunk in candidates], 1))
    assert merged.scores is not None
    best = merged.scores.argsort(dim=1, descending=True, stable=True)[:, :topk]
    return sort_by_key(merged.scores.gather(1, best), merged.indices.gather(1, best))


# Bases of an lse.


def convert_lse(lse: Tensor, src: Base, dst: Base) -> Tensor:
    """Converts an lse from base `src` to base `dst`, "e" or "2". Infinities are unchanged.

    `merge` takes -inf for a row without keys. FlashMLA writes +inf there: see `merge`.

    Examples:
        >>> am.sparse.convert_lse(torch.tensor([1.0, float("-inf")]), "2", "e")
        tensor([0.6931,   -inf])
    """
    if check_tensor("lse", lse).dtype not in _DTYPES:
        raise ValueError(f"lse must be floating point, got {shown(lse)}")
    check_base("src", src)
    check_base("dst", dst)
    return lse if src == dst else lse * (_LOG[src] / _LOG[dst])


def check_base(name: str, base: object) -> None:
    """Raises ValueError unless `base` is "e" or "2"."""
    if not isinstance(base, str) or base not in _LOG:
        raise ValueError(f"{name} must be 'e' (natural) or '2', got {shown(base)}")


# Validation: each function returns the argument in the form that kernels take, or raises ValueError.


def check_indices(indices: object, s_q: int | None = None) -> Tensor:
    """`indices` as int32 [s_q, topk]; [s_q, 1, topk] (one kv head) is also accepted."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        got = indices.dtype if isinstance(indices, Tensor) else f"{type(indices).__name__} {shown(indices)}"
        raise ValueError(f"indices must be an int32 tensor, got {got}")
    check_tensor("indices", indices)
    shape = list(indices.shape)
    if indices.ndim == 3 and shape[1] == 1:
        indices = indices[:, 0]
    if indices.ndim != 2 or not indices.shape[1] or (s_q is not None and indices.shape[0] != s_q):
        rows = "s_q" if s_q is None else s_q
        raise ValueError(f"indices must be [{rows}, topk] or [{rows}, 1, topk] with topk >= 1, got {shape}")
    return contiguous_features(indices)


def check_queries(name: str, q: object) -> Tensor:
    """`q` as [s_q, heads, d]."""
    q = check_tensor(name, q, "[s_q, heads, d]")
    if q.ndim != 3 or not q.shape[1] or not q.shape[2]:
        raise ValueError(f"{name} must be a tensor [s_q, heads, d], got {list(q.shape)}")
    if q.dtype not in _DTYPES:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {q.dtype}")
    return contiguous_features(q)


def check_keys(name: str, k: object, q: Tensor, width: int | None) -> Tensor:
    """`k` as [s_kv, width] with the dtype and device of `q`; [s_kv, 1, width] (one kv head) is also accepted."""
    k = check_tensor(name, k, "[s_kv, d]")
    shape = list(k.shape)
    if k.ndim == 3 and shape[1] == 1:
        k = k[:, 0]
    if k.ndim != 2 or not k.shape[1] or (width is not None and k.shape[1] != width):
        d = "d" if width is None else width
        raise ValueError(f"{name} must be [s_kv, {d}] or [s_kv, 1, {d}] (one kv head), got {shape}")
    if k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"{name} must be {q.dtype} on {q.device} like its queries, got {k.dtype} on {k.device}")
    return contiguous_features(k)


def check_per_head(name: str, x: object, q: Tensor) -> Tensor:
    """`x` as [s_q, heads] on the device of `q`."""
    x = check_tensor(name, x, "[s_q, heads]")
    if x.shape != q.shape[:2]:
        raise ValueError(f"{name} must be [s_q, heads] = {list(q.shape[:2])}, got {list(x.shape)}")
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(f"{name} must be floating point on {q.device}, got {x.dtype} on {x.device}")
    return x


def check_mask(mask: object) -> SparseMask:
    """`mask` as a SparseMask."""
    if not isinstance(mask, SparseMask):
        raise ValueError(f"mask must be a SparseMask, got {type(mask).__name__} {shown(mask)}")
    return mask


def mask_bounds(mask: object, q: Tensor, s_kv: int, topk: int) -> RowBounds:
    """`mask` as kernels take it, for the rows of `q`."""
    return check_mask(mask).bounds(q.shape[0], s_kv, topk, q.device)


def check_sinks(sinks: object, q: Tensor) -> None:
    """Raises ValueError unless `sinks` is [heads] on the device of `q`, or None."""
    if sinks is None:
        return
    sinks = check_tensor("sinks", sinks, "[heads]")
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be [heads] = [{q.shape[1]}], got {list(sinks.shape)}")
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(f"sinks must be floating point on {q.device}, got {sinks.dtype} on {sinks.device}")


def check_same_device(indices: Tensor, q: Tensor) -> Tensor:
    """`indices`, which must be on the device of `q`."""
    if indices.device != q.device:
        raise ValueError(f"indices must be on {q.device} like q, got {indices.device}")
    return indices


def as_rows(x: Tensor) -> Tensor:
    """Keys or indices that have been checked, as kernels take them."""
    return contiguous_features(x[:, 0] if x.ndim == 3 else x)


def contiguous_features(x: Tensor) -> Tensor:
    """Kernels read whole rows of features; the other dimensions may have any stride."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# Calls of the sparse functions: arguments that have been checked, as every backend takes them.


class SparseCall(NamedTuple):
    """Attention of q [s_q, heads, d] over the keys k [s_kv, d] of `indices` int32 [s_q, topk].

    The values are v [s_kv, d_v] or, if it is None, the first d_v features of the keys. All have contiguous features.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    indices: Tensor
    bounds: RowBounds
    scale: float
    d_v: int
    deterministic: bool
    backend: str

    def without_tensors(self) -> SparseCall:
        """The arguments that autograd does not save itself."""
        return self._replace(q=None, k=None, v=None)  # type: ignore[arg-type]

    def over(self, keys: Sequence[Tensor], indices: Tensor, bounds: RowBounds) -> SparseCall:
        """The call over other keys (and values), with their indices."""
        return self._replace(k=keys[0], v=None if self.v is None else keys[1], indices=indices, bounds=bounds)


class IndexerCall(NamedTuple):
    """Index scores of iq [s_q, heads, d] with weights w [s_q, heads], for keys ik [s_kv, d].

    They are of the keys of `indices` int32 [s_q, topk]; None is for operations over all keys.
    """

    iq: Tensor
    ik: Tensor
    w: Tensor
    indices: Tensor | None
    bounds: RowBounds
    scale: float
    relu: bool
    deterministic: bool
    backend: str

    def without_tensors(self) -> IndexerCall:
        """The arguments that autograd does not save itself."""
        return self._replace(iq=None, ik=None, w=None)  # type: ignore[arg-type]

    def over(self, ik: Tensor, indices: Tensor | None, bounds: RowBounds) -> IndexerCall:
        """The call over other keys, with their indices."""
        return self._replace(ik=ik, indices=indices, bounds=bounds)

    def detach(self) -> IndexerCall:
        """The call without gradients."""
        return self._replace(iq=self.iq.detach(), ik=self.ik.detach(), w=self.w.detach())
