"""Which of the slots that a query names are valid: one form for every reason, a range of keys and a count a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.validation import check_positive

_LAST = torch.iinfo(torch.int32).max


class Rows(NamedTuple):
    """What kernels get: slot j of row i is valid iff `j < slots[i]` and `lo[i] <= index < hi[i]`; int32, [s_q] each.

    An index counts keys from the beginning of the sequence. Its row in memory is `index - k_offset`.
    """

    lo: Tensor
    hi: Tensor
    slots: Tensor
    k_offset: int

    def valid(self, indices: Tensor) -> Tensor:
        """The valid slots of `indices` [s_q, topk], as booleans."""
        slot = torch.arange(indices.shape[1], device=indices.device)
        named = (indices >= self.lo[:, None]) & (indices < self.hi[:, None])
        return named & (slot < self.slots[:, None])

    def only(self, counted: Tensor) -> Rows:
        """The same, but that rows which are not counted [s_q] see nothing."""
        return self._replace(hi=torch.where(counted, self.hi, 0))

    def part(self, start: int, stop: int) -> Rows:
        """The same for some of the rows."""
        return Rows(self.lo[start:stop], self.hi[start:stop], self.slots[start:stop], self.k_offset)


@dataclass(frozen=True, eq=False)
class SparseMask:
    """What a slot must meet to be valid, beside naming a key that exists (0 <= index < s_kv). All of it must hold.

    `topk_length` [s_q]: only so many leading slots of a row count. `causal`: row i stands at position `q_start + i`, or
    at `q_positions[i]`; key j stands for the tokens from `j * k_stride` up to `(j + 1) * k_stride` and is seen from
    position p once all of them are there: `j < (p + 1) // k_stride`. `k_start`, `k_end` [s_q]: a row's own range of
    keys (its document, in a packed batch). `k_offset`: the index of the first key given, where keys are a stretch of a
    longer sequence; indices count from that sequence's beginning.
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
        for name in ("q_start", "k_offset"):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise ValueError(f"{name} must be a non-negative integer, got {n!r}")
        for name in ("topk_length", "q_positions", "k_start", "k_end"):
            _check_numbers(name, getattr(self, name))
        if self.q_start and self.q_positions is not None:
            raise ValueError(f"q_start={self.q_start} and q_positions both say where the rows stand: give one")
        if not self.causal and (self.q_start or self.q_positions is not None or self.k_stride != 1):
            raise ValueError(
                f"q_start={self.q_start}, q_positions and k_stride={self.k_stride} only set the causal limit: "
                "give them with causal=True"
            )

    def rows(self, s_q: int, s_kv: int, topk: int, device: torch.device) -> Rows:
        """The mask as kernels take it. Nothing is read back from the device."""
        end = self.k_offset + s_kv
        if end > _LAST:
            raise ValueError(f"indices are int32: k_offset={self.k_offset} and {s_kv} keys go past {_LAST}")
        lo = _each_row("k_start", self.k_start, self.k_offset, s_q, device)
        hi = _each_row("k_end", self.k_end, end, s_q, device)
        if self.causal:
            if self.q_positions is None:
                at = torch.arange(self.q_start, self.q_start + s_q, device=device)
            else:
                at = _each_row("q_positions", self.q_positions, 0, s_q, device)
            # Clamped first: a position may be the largest integer there is.
            at = at.clamp(-1, end * self.k_stride)
            hi = torch.minimum(hi, torch.div(at + 1, self.k_stride, rounding_mode="floor"))
        slots = _each_row("topk_length", self.topk_length, topk, s_q, device).clamp(0, topk)
        lo, hi = (x.clamp(self.k_offset, end).int() for x in (lo, hi))
        return Rows(lo, hi, slots.int(), self.k_offset)


def _check_numbers(name: str, given: object) -> None:
    if given is None:
        return
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64) or given.ndim != 1:
        what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(f"{name} must be an int32 or int64 tensor [s_q], got {what}")


def _each_row(name: str, given: Tensor | None, otherwise: int, s_q: int, device: torch.device) -> Tensor:
    if given is None:
        return torch.full((s_q,), otherwise, dtype=torch.int64, device=device)
    if given.shape[0] != s_q:
        raise ValueError(f"{name} must be [{s_q}], a number for each row of q, got [{given.shape[0]}]")
    return given.to(device, torch.int64)


Base = Literal["e", "2"]
_LOG = {"e": 1.0, "2": math.log(2.0)}


def convert_lse(lse: Tensor, src: Base, dst: Base) -> Tensor:
    """An lse in base `src` ("e" or "2") as one in base `dst`. Infinite ones stay what they are."""
    check_base("src", src)
    check_base("dst", dst)
    return lse if src == dst else lse * (_LOG[src] / _LOG[dst])


def check_base(name: str, base: object) -> None:
    """Raise ValueError unless this names a base."""
    if base not in _LOG:
        raise ValueError(f"{name} must be 'e' (natural) or '2', got {base!r}")


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_indices(indices: object, s_q: int | None = None) -> Tensor:
    """`indices` as [s_q, topk] int32, or ValueError. [s_q, 1, topk] is taken too: one kv head."""
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices must be an int32 tensor, got {got}")
    shape = list(indices.shape)
    if indices.ndim == 3 and shape[1] == 1:
        indices = indices[:, 0]
    if indices.ndim != 2 or not indices.shape[1] or (s_q is not None and indices.shape[0] != s_q):
        rows = "s_q" if s_q is None else s_q
        raise ValueError(f"indices must be [{rows}, topk] or [{rows}, 1, topk] with topk >= 1, got {shape}")
    return indices if indices.stride(1) == 1 or indices.shape[1] == 1 else indices.contiguous()


def check_queries(name: str, q: object) -> Tensor:
    """`q` as it is, [s_q, heads, d], or ValueError."""
    if not isinstance(q, Tensor) or q.ndim != 3 or not q.shape[1] or not q.shape[2]:
        got = list(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"{name} must be a tensor [s_q, heads, d], got {got}")
    if q.dtype not in _DTYPES:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {q.dtype}")
    return _packed_columns(q)


def check_keys(name: str, k: object, q: Tensor, width: int | None) -> Tensor:
    """`k` as [s_kv, width] like `q`, or ValueError. [s_kv, 1, width] is taken too."""
    if not isinstance(k, Tensor):
        raise ValueError(f"{name} must be a tensor [s_kv, d], got {type(k).__name__}")
    shape = list(k.shape)
    if k.ndim == 3 and shape[1] == 1:
        k = k[:, 0]
    if k.ndim != 2 or not k.shape[1] or (width is not None and k.shape[1] != width):
        d = "d" if width is None else width
        raise ValueError(f"{name} must be [s_kv, {d}] or [s_kv, 1, {d}] (one kv head), got {shape}")
    if k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"{name} must be {q.dtype} on {q.device} as its queries are, got {k.dtype} on {k.device}")
    return _packed_columns(k)


def check_per_head(name: str, x: object, q: Tensor) -> Tensor:
    """A number for each row and head of `q`, [s_q, heads] on its device, or ValueError."""
    if not isinstance(x, Tensor) or x.shape != q.shape[:2]:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [s_q, heads] = {list(q.shape[:2])}, got {got}")
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(f"{name} must be floating point on {q.device}, got {x.dtype} on {x.device}")
    return x


def check_scale(name: str, scale: object) -> float:
    """A finite number, or ValueError."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"{name} must be a finite number, got {scale!r}")
    return float(scale)


def check_mask(mask: object) -> SparseMask:
    """A mask of this family, or ValueError."""
    if not isinstance(mask, SparseMask):
        raise ValueError(f"mask must be a SparseMask, got {type(mask).__name__}")
    return mask


def rows_of(mask: object, q: Tensor, s_kv: int, topk: int) -> Rows:
    """The mask as kernels take it, or ValueError."""
    return check_mask(mask).rows(q.shape[0], s_kv, topk, q.device)


def check_sink(sinks: object, q: Tensor) -> None:
    """Raise ValueError unless there is a sink for each head, or none."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.shape != q.shape[1:2]:
        got = list(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(f"sinks must be [heads] = [{q.shape[1]}], got {got}")
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(f"sinks must be floating point on {q.device}, got {sinks.dtype} on {sinks.device}")


def same_device(indices: Tensor, q: Tensor) -> Tensor:
    """Indices where the queries are, or ValueError."""
    if indices.device != q.device:
        raise ValueError(f"indices must be on {q.device} as q is, got {indices.device}")
    return indices


def _packed_columns(x: Tensor) -> Tensor:
    """Kernels read whole rows of features; everything else may be strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Slots(NamedTuple):
    """Chosen keys: `indices` [s_q, topk] int32, ascending, -1 last; `scores` (None: not known); `length` [s_q]."""

    indices: Tensor
    scores: Tensor | None
    length: Tensor


def canonicalize(
    indices: Tensor, scores: Tensor | None = None, *, s_kv: int | None = None, unique: bool = False
) -> Slots:
    """The slots of every row in ascending order of their keys, what names none as -1 at the end; scores go along.

    An index names no key when it is negative or, if `s_kv` is given, past it. `unique` keeps the first slot that names
    a key, in the order given, and drops the others. Scores of dropped and unused slots are -inf.
    """
    indices = check_indices(indices)
    if scores is not None and (not isinstance(scores, Tensor) or scores.shape != indices.shape):
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be {list(indices.shape)}, one a slot, got {got}")
    if s_kv is not None and (isinstance(s_kv, bool) or not isinstance(s_kv, int) or s_kv < 0):
        raise ValueError(f"s_kv must be a non-negative integer, got {s_kv!r}")
    limit = torch.iinfo(torch.int32).max
    named = (indices >= 0) & (indices < (limit if s_kv is None else s_kv))
    keys, order = indices.masked_fill(~named, limit).sort(dim=1, stable=True)
    if unique:
        again = torch.zeros_like(named)
        again[:, 1:] = keys[:, 1:] == keys[:, :-1]
        keys, second = keys.masked_fill(again, limit).sort(dim=1, stable=True)
        order = order.gather(1, second)
    used = keys < limit
    if scores is not None:
        scores = scores.gather(1, order).masked_fill(~used, -torch.inf)
    return Slots(keys.masked_fill(~used, -1), scores, used.sum(1, dtype=torch.int32))


def in_order(scores: Tensor, indices: Tensor) -> Slots:
    """Chosen slots in ascending order of their keys; a slot whose score is -inf was not chosen."""
    chosen = scores > -torch.inf
    indices, order = indices.masked_fill(~chosen, _LAST).sort(dim=1)
    chosen = chosen.gather(1, order)
    return Slots(indices.masked_fill(~chosen, -1), scores.gather(1, order), chosen.sum(1, dtype=torch.int32))


def reselect(candidates: Sequence[Slots], topk: int) -> Slots:
    """The best `topk` of what was chosen from several stretches of keys; the lowest key wins a tie.

    Exact if each stretch gave its own best `topk`: what is not among those is not among the best of all.
    """
    scores = [slots.scores for slots in candidates if slots.scores is not None]
    if len(scores) != len(candidates):
        raise ValueError("candidates must come with their scores")
    every = in_order(torch.cat(scores, 1), torch.cat([slots.indices for slots in candidates], 1))
    assert every.scores is not None
    best = every.scores.argsort(dim=1, descending=True, stable=True)[:, :topk]
    return in_order(every.scores.gather(1, best), every.indices.gather(1, best))
