"""Which of the slots that a query names are valid: one form for every reason, a range of keys and a count a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
