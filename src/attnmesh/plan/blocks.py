"""The visible part of some queries against some keys, cut into rectangles that fused kernels serve.

A patch is a mask over ranges of queries and keys. Fused kernels need no mask for two shapes: FULL rectangles and
CAUSAL squares. `Patch.blocks` cuts a patch so that as much of it as possible is one of these:

    zigzag, a rank's own keys          one causal square: rows and keys are the same ascending positions
    zigzag, keys from an earlier rank  all rows x the early piece, full
    zigzag, keys from a later rank     the late rows x both pieces, full
    a shifted diagonal                 full | causal square | full
    documents                          a causal (or full) square for each document

What is left is PARTIAL: windows, strides that do not match, many tiny documents. Any patch, PARTIAL or not, is
also described exactly by two integers per row (`Patch.bounds`): row i sees the keys `first[i] <= j < end[i]`, because
keys are in ascending order.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.masks import Coverage, Mask
from attnmesh.core.ranges import Ranges, rows_between

# More segments than this, of fewer rows each on average, cost less as one masked block than as one call each.
_MANY, _FEW_ROWS = 8, 32


class Kind(enum.Enum):
    """How the rows of a block see its keys."""

    FULL = "full"  # every row sees every key
    CAUSAL = "causal"  # square; row i sees keys 0..i of the block
    PARTIAL = "partial"  # given by the bounds


@dataclass(frozen=True)
class Block:
    """Local rows `q` against local keys `k` (both contiguous index ranges)."""

    q: range
    k: range
    kind: Kind


class Visibility(Protocol):
    """What kernels need to know about the visible keys of every row."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Rectangles that together contain every visible pair exactly once."""

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`first` and `end`, int32, one entry per row, non-decreasing: row i sees keys `first[i] <= j < end[i]`."""

    def unseen(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows that see no key, and keys of the blocks that no row sees, as boolean masks; None if there are none."""


@dataclass(frozen=True)
class Patch:
    """The queries at positions `q` against the keys at positions `k` under `mask`."""

    mask: Mask
    q: Ranges
    k: Ranges

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Rectangles that together contain every visible pair exactly once; FULL and CAUSAL wherever possible."""
        if self._is_one_causal_square():
            n = ranges.size(self.q)
            return (Block(range(n), range(n), Kind.CAUSAL),)
        cut = []
        q_at = 0
        for q in self.q:
            k_at = 0
            for k in self.k:
                cut += [_moved(block, q_at, k_at) for block in _cut(self.mask, q, k)]
                k_at += len(k)
            q_at += len(q)
        return tuple(_coalesced(cut))

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`first` and `end`, int32, one entry per row, non-decreasing: row i sees keys `first[i] <= j < end[i]`."""
        return _patch_bounds(self, device)

    def unseen(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows that see no key, and keys of the blocks that no row sees, as boolean masks; None if there are none."""
        return _patch_unseen(self, device)

    @cached_property
    def seen(self) -> range:
        """The key rows from the first to the last that some query sees; empty if none does."""
        at, first, last = 0, None, -1
        for k in self.k:
            rows = [row for q in self.q for row in _outermost(self.mask, q, k)]
            if rows:
                first, last = at + min(rows) if first is None else first, at + max(rows)
            at += len(k)
        return range(0) if first is None else range(first, last + 1)

    @cached_property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs: the work of this patch."""
        if self.segments <= _MANY or "blocks" in self.__dict__:
            return sum(self._pairs(block) for block in self.blocks)
        # For many documents it is faster to count row by row than to cut blocks.
        first, end = bounds_of(self.mask, ranges.as_tensor(self.q), ranges.as_tensor(self.k))
        return int((end - first).sum())

    @cached_property
    def segments(self) -> int:
        """The number of query segments that the mask and the runs make: about the number of blocks."""
        return sum(1 + len(self.mask.boundaries(run)) for run in self.q)

    def _pairs(self, block: Block) -> int:
        if block.kind is Kind.FULL:
            return len(block.q) * len(block.k)
        if block.kind is Kind.CAUSAL:
            return len(block.q) * (len(block.q) + 1) // 2
        first, end = self.bounds(torch.device("cpu"))
        rows = slice(block.q.start, block.q.stop)
        first = first[rows].clamp(block.k.start, block.k.stop)
        end = end[rows].clamp(block.k.start, block.k.stop)
        return int((end - first).sum())

    def _is_one_causal_square(self) -> bool:
        if not self.q or self.q != self.k:
            return False
        start, last = self.q[0][0], self.q[-1][-1]
        # The last row sees the first key, so every row sees all keys before it; and a row's view ends at itself.
        return self.mask.key_range(last)[0] <= start and self.mask.key_range(start)[1] == start + 1 and start < last


@lru_cache(maxsize=128)
def _patch_bounds(patch: Patch, device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached: every layer of a model uses the same few patches.
    return bounds_of(patch.mask, ranges.as_tensor(patch.q, device), ranges.as_tensor(patch.k, device))


@lru_cache(maxsize=128)
def _patch_unseen(patch: Patch, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    cpu = torch.device("cpu")
    rows, keys = unseen_of(*patch.bounds(cpu), ranges.size(patch.k))
    reached = key_hull(patch.blocks)
    keys[: reached.start] = keys[reached.stop :] = False
    rows_or_none, keys_or_none = (x.to(device) if x.any() else None for x in (rows, keys))
    return rows_or_none, keys_or_none


def key_hull(blocks: Sequence[Block]) -> range:
    """The keys from the first to the last that some block includes."""
    return range(
        min((block.k.start for block in blocks), default=0), max((block.k.stop for block in blocks), default=0)
    )


def unseen_of(first: Tensor, end: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Whether each row sees no key, and whether each of so many keys is seen by no row. The host does not wait."""
    some = (first < end).int()
    edges = torch.zeros(keys + 1, dtype=torch.int32, device=first.device)
    edges.index_add_(0, first, some).index_add_(0, end, -some)
    return some == 0, edges[:-1].cumsum(0) == 0


def bounds_of(mask: Mask, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
    """The key indices each query sees, as `[first, end)`; both position tensors ascending."""
    first, end = mask.key_ranges(q_positions)
    return (
        torch.searchsorted(k_positions, first.contiguous(), out_int32=True),
        torch.searchsorted(k_positions, end.contiguous(), out_int32=True),
    )


def _outermost(mask: Mask, q: range, k: range) -> list[int]:
    """The first and the last row of `k` that some query of `q` sees, if any does."""
    if mask.coverage(q, k) is Coverage.EMPTY:
        return []
    # Visible ranges are non-decreasing: the first query that sees anything sees the first row, the last one the last.
    # Queries before the first see only positions before the keys, those after the last only positions after them.
    early = bisect_left(q, True, key=lambda p: mask.key_range(p)[1] > k[0])
    late = bisect_left(q, True, key=lambda p: mask.key_range(p)[0] > k[-1]) - 1
    early_rows = next(rows for rows in (rows_between(k, *mask.key_range(p)) for p in q[early:]) if rows)
    late_rows = next(rows for rows in (rows_between(k, *mask.key_range(p)) for p in reversed(q[: late + 1])) if rows)
    return [early_rows[0], late_rows[-1]]


def _cut(mask: Mask, q: range, k: range) -> Iterator[Block]:
    """The blocks of one query run against one key run."""
    segments = list(_segments(mask, q))
    if len(segments) > _MANY and len(q) < _FEW_ROWS * len(segments):
        keys = rows_between(k, mask.key_range(q[0])[0], mask.key_range(q[-1])[1])
        if keys:
            yield Block(range(len(q)), keys, Kind.PARTIAL)
        return
    for rows in segments:
        part = q[rows.start : rows.stop]
        keys = rows_between(k, mask.key_range(part[0])[0], mask.key_range(part[-1])[1])
        seen = k[keys.start : keys.stop]
        verdict = mask.coverage(part, seen)
        if verdict is Coverage.EMPTY:
            continue
        if verdict is Coverage.FULL:
            blocks = iter([Block(range(len(part)), range(len(seen)), Kind.FULL)])
        elif _is_diagonal(mask, part, seen):
            blocks = _along_diagonal(part, seen)
        else:
            blocks = iter([Block(range(len(part)), range(len(seen)), Kind.PARTIAL)])
        for block in blocks:
            yield _moved(block, rows.start, keys.start)


def _segments(mask: Mask, q: range) -> Iterator[range]:
    """The rows of `q` between the cuts of the mask (one segment per document)."""
    edges = [q.start, *mask.boundaries(q), q[-1] + 1]
    for begin, stop in pairwise(edges):
        rows = rows_between(q, begin, stop)
        if rows:
            yield rows


def _is_diagonal(mask: Mask, q: range, k: range) -> bool:
    """Whether, inside one segment, only the causal edge cuts: row views start at or before `k` and end at the row."""
    same_step = q.step == k.step or len(q) == 1 or len(k) == 1
    starts_before = mask.key_range(q[-1])[0] <= k[0]
    ends_at_itself = all(mask.key_range(p)[1] == p + 1 for p in (q[0], q[-1]))
    return same_step and starts_before and ends_at_itself


def _along_diagonal(q: range, k: range) -> Iterator[Block]:
    """Full, causal square, full: row a sees the first `a + shift` keys."""
    step = q.step if len(q) > 1 else k.step
    shift = (q[0] - k[0]) // step + 1
    top = max(0, 1 - shift)  # the first row that sees a key
    left = top + shift - 1  # it sees these and one more
    side = min(len(q) - top, len(k) - left)
    rows, below = range(top, top + side), range(top + side, len(q))
    # Rows from `top` on all see the keys left of the square; rows below it see every key.
    if left > 0:
        yield Block(rows, range(left), Kind.FULL)
    yield Block(rows, range(left, left + side), Kind.CAUSAL)
    if below:
        yield Block(below, range(len(k)), Kind.FULL)


def _moved(block: Block, q_by: int, k_by: int) -> Block:
    return replace(
        block,
        q=range(block.q.start + q_by, block.q.stop + q_by),
        k=range(block.k.start + k_by, block.k.stop + k_by),
    )


def _coalesced(blocks: list[Block]) -> list[Block]:
    """Adjacent FULL rectangles joined: every kernel call less is one partial result less to merge."""
    done: dict[Block, None] = {}  # an ordered set
    ending: dict[tuple[str, range, int], Block] = {}  # FULL blocks by where another could be joined to them
    for block in blocks:
        if block.kind is Kind.CAUSAL and len(block.q) == 1:
            block = replace(block, kind=Kind.FULL)
        while block.kind is Kind.FULL:
            left = ending.get(("same rows", block.q, block.k.start))
            above = ending.get(("same keys", block.k, block.q.start))
            other = left if left in done else above if above in done else None
            if other is None:
                ending["same rows", block.q, block.k.stop] = block
                ending["same keys", block.k, block.q.stop] = block
                break
            del done[other]
            block = Block(range(other.q.start, block.q.stop), range(other.k.start, block.k.stop), Kind.FULL)
        done[block] = None
    return list(done)
