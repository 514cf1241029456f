"""Masks: which keys a query attends to, as pure functions of position.

Every mask lets a query attend to one interval of positions, `first <= k < end`, that contains the query itself and
whose two ends are non-decreasing in the query position. Intervals intersect to intervals, so any conjunction (`Causal()
& Documents(...)`) is again such a mask. Everything follows from one function (`key_ranges`): whether a pair is allowed
(`allows`), what a range of queries needs of a range of keys (`coverage`), and the arguments of kernels (two integers
per row).
"""

from __future__ import annotations

import bisect
import enum
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnmesh.core.validation import check_count, check_tensor, check_type, shown

# A bound that no position reaches, on either side; far inside int64, so that arithmetic does not overflow.
_FAR = 1 << 60


class Coverage(enum.Enum):
    """How much of a range of keys a range of queries attends to."""

    EMPTY = "nothing: skip it"
    FULL = "everything: compute it without a mask"
    PARTIAL = "some of it: compute it with the mask"


class Mask(ABC):
    """Which keys a query attends to. Immutable and hashable; combine masks with `&`."""

    @abstractmethod
    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The half-open interval of key positions visible to each query position; both ends non-decreasing in `q`."""

    @abstractmethod
    def key_range(self, q: int) -> tuple[int, int]:
        """`key_ranges` for one position, in plain integers, for planning without tensors."""

    def check(self, length: int) -> None:
        """Raises ValueError if this mask does not fit a sequence of `length` positions."""
        check_count("length", length)

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Whether the query at `q_pos` attends to the key at `k_pos`, elementwise with broadcasting."""
        _check_positions(q_pos, k_pos)
        first, end = self.key_ranges(q_pos.long())
        return (k_pos >= first) & (k_pos < end)

    def coverage(self, q: range, k: range) -> Coverage:
        """How much of the keys at positions `k` the queries at positions `q` attend to (ascending ranges, any step).

        Exact: EMPTY if and only if no pair is allowed, FULL if and only if all are.
        """
        if not q or not k:
            return Coverage.EMPTY
        first, end = self.key_range(q[-1])[0], self.key_range(q[0])[1]
        if first <= k[0] and k[-1] < end:  # the latest start and the earliest end hold for every query between
            return Coverage.FULL
        first, end = self.key_range(q[0])[0], self.key_range(q[-1])[1]
        if end <= k[0] or k[-1] < first:
            return Coverage.EMPTY
        if q.step == 1:  # intervals of adjacent queries leave no gap, since each contains its own query
            return Coverage.PARTIAL if _intersects(k, first, end) else Coverage.EMPTY
        return Coverage.PARTIAL if any(_intersects(k, *self.key_range(p)) for p in q) else Coverage.EMPTY

    def boundaries(self, q: range) -> list[int]:
        """Document boundaries inside `q`: good positions to split a block."""
        return []

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        parts = [part for mask in (self, other) for part in (mask.parts if isinstance(mask, And) else (mask,))]
        distinct = tuple(dict.fromkeys(part for part in parts if part != Full()))
        if not distinct:
            return Full()
        return distinct[0] if len(distinct) == 1 else And(distinct)


@dataclass(frozen=True)
class Full(Mask):
    """Every query attends to every key."""

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _filled(q, -_FAR), _filled(q, _FAR)

    def key_range(self, q: int) -> tuple[int, int]:
        return -_FAR, _FAR


@dataclass(frozen=True)
class Causal(Mask):
    """A query attends to itself and earlier positions: keys `k <= q`."""

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _filled(q, -_FAR), q + 1

    def key_range(self, q: int) -> tuple[int, int]:
        return -_FAR, q + 1


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query attends to `left` keys before itself, itself, and `right` keys after: `q - left <= k <= q + right`."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, width in (("left", self.left), ("right", self.right)):
            check_count(f"SlidingWindow.{name}", width)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q - self.left, q + (self.right + 1)

    def key_range(self, q: int) -> tuple[int, int]:
        return q - self.left, q + self.right + 1


@dataclass(frozen=True, init=False)
class Documents(Mask):
    """Several documents packed into one sequence: a query attends to the keys of its own document.

    `lengths` are the lengths of the documents in order; they must add up to the length of the sequence.
    """

    lengths: tuple[int, ...]

    def __init__(self, lengths: Iterable[int]) -> None:
        try:
            if isinstance(lengths, str | Set | Mapping):
                raise TypeError("not a list")
            given = tuple(lengths)
            counts = tuple(operator.index(n) for n in given)
        except (TypeError, RuntimeError):  # of a tensor without data
            raise ValueError(f"Documents.lengths must all be integers >= 0, got {shown(lengths)}") from None
        if any(n < 0 for n in counts) or any(isinstance(n, bool) for n in given):
            raise ValueError(f"Documents.lengths must all be integers >= 0, got {_brief(given)}")
        check_count("the sum of Documents.lengths", sum(counts))
        object.__setattr__(self, "lengths", counts)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The boundaries of the documents: 0, the running sums, the total. Empty documents have none."""
        return tuple(dict.fromkeys(itertools.accumulate(self.lengths, initial=0)))

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        bounds = torch.tensor(self.bounds, device=q.device)
        after = torch.bucketize(q.contiguous(), bounds, right=True)  # index of the first boundary after the query
        # Positions outside all documents attend to nothing.
        last = bounds.numel() - 1
        return bounds[(after - 1).clamp(0, last)], bounds[after.clamp(0, last)]

    def key_range(self, q: int) -> tuple[int, int]:
        after = bisect.bisect_right(self.bounds, q)
        last = len(self.bounds) - 1
        return self.bounds[min(max(after - 1, 0), last)], self.bounds[min(after, last)]

    def check(self, length: int) -> None:
        check_count("length", length)
        if self.bounds[-1] != length:
            raise ValueError(
                f"Documents.lengths must add up to the sequence length {length}, but {_brief(self.lengths)} "
                f"add up to {self.bounds[-1]}"
            )

    def boundaries(self, q: range) -> list[int]:
        return [b for b in self.bounds if q and q[0] < b <= q[-1]]


@dataclass(frozen=True)
class And(Mask):
    """The intersection of `parts`. Created by `&`."""

    parts: tuple[Mask, ...]

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.parts[0].key_ranges(q)
        for part in self.parts[1:]:
            other_first, other_end = part.key_ranges(q)
            first, end = torch.maximum(first, other_first), torch.minimum(end, other_end)
        return first, end

    def key_range(self, q: int) -> tuple[int, int]:
        intervals = [part.key_range(q) for part in self.parts]
        return max(first for first, _ in intervals), min(end for _, end in intervals)

    def check(self, length: int) -> None:
        for part in self.parts:
            part.check(length)

    def boundaries(self, q: range) -> list[int]:
        return sorted({boundary for part in self.parts for boundary in part.boundaries(q)})


def check_mask(name: str, mask: object) -> None:
    """Raise ValueError unless `mask` is a mask."""
    check_type(name, mask, Mask, "an attnmesh mask (Full(), Causal(), ...)")


def _check_positions(q_pos: object, k_pos: object) -> None:
    q, k = check_tensor("q_pos", q_pos), check_tensor("k_pos", k_pos)
    for name, x in (("q_pos", q), ("k_pos", k)):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
    if q.device != k.device:
        raise ValueError(f"q_pos and k_pos must be on the same device, got {q.device} and {k.device}")
    if any(a != b and 1 not in (a, b) for a, b in zip(reversed(q.shape), reversed(k.shape), strict=False)):
        raise ValueError(f"q_pos and k_pos must broadcast, got {list(q.shape)} and {list(k.shape)}")


def _filled(q: Tensor, bound: int) -> Tensor:
    return torch.full_like(q, bound, dtype=torch.int64)  # positions may be narrower integers


def _intersects(k: range, first: int, end: int) -> bool:
    """Whether some key of the ascending range `k` lies in `[first, end)`."""
    at = max(0, -(-(first - k.start) // k.step))  # index of the first key >= first
    return at < len(k) and k[at] < end


def _brief(lengths: tuple[object, ...]) -> str:
    first = ", ".join(map(shown, lengths[:8]))
    return f"({first}, ... {len(lengths)} in all)" if len(lengths) > 8 else f"({first})"


def parse_mask(name: str) -> Mask:
    """The mask for the option `causal`, `full` or `window:N`."""
    kind, _, width = name.partition(":")
    if kind == "window" and width.isascii() and width.isdigit() and int(width):
        return Causal() & SlidingWindow(int(width) - 1)
    if name not in ("causal", "full"):
        raise ValueError(f"mask must be causal, full or window:N (the last N keys, N at least 1), got {name!r}")
    return Causal() if name == "causal" else Full()
