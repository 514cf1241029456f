"""Which keys some queries see, as kernels need it: cut into rectangles, and as two bounds per row.

A patch is a mask over ranges of queries and keys. Fused kernels need no mask for two shapes: FULL rectangles and
CAUSAL squares. `Patch.blocks` cuts a patch so that as much of it as possible is one of these:

    zigzag, a rank's own keys          one causal square: rows and keys are the same ascending positions
    zigzag, keys from an earlier rank  all rows x the early piece, full
    zigzag, keys from a later rank     the late rows x both pieces, full
    a shifted diagonal                 full | causal square | full
    documents                          a causal (or full) square for each document

What is left is PARTIAL: windows, strides that do not match, many tiny documents. A patch has one part for each of the
disjoint intervals per query of its mask that contains a visible pair. Any part, PARTIAL or not, is also described
exactly by two integers per row (`Patch.bounds`): row i sees the keys `first[i] <= j < end[i]`, because keys are in
ascending order.
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
from attnmesh.core.mask import MAX_INTERVALS, Coverage, Intervals, Mask, coverage, sequence_groups, sequence_intervals
from attnmesh.core.ranges import InterleavedShard, Ranges, rows_between

# More segments than this, of fewer rows each on average, cost less as one masked block than as one call each.
_MANY, _FEW_ROWS = 8, 32
_LONG_SEGMENT = 256  # rows: cutting a block of this length is faster than counting its pairs
_FEW_RANGES = 256  # up to which the positions that a run of queries sees are compared with each run of keys
_FARTHEST = 1 << 40  # no position is larger


class Kind(enum.Enum):
    """How the rows of a block see its keys."""

    FULL = "full"  # every row sees every key
    CAUSAL = "causal"  # square; row i sees keys 0..i of the block
    PARTIAL = "partial"  # given by the bounds of its part


@dataclass(frozen=True)
class Block:
    """Local rows `q` against local keys `k` (both contiguous index ranges) in one part of the mask."""

    q: range
    k: range
    kind: Kind
    part: int = 0
    sequences: range | None = None  # of the batch; None: all of it


class Visibility(Protocol):
    """What kernels need to know about the visible keys of every row."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Rectangles that together contain every visible pair of every sequence exactly once."""

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`first` and `end`, int32 [parts, sequences or 1, rows], non-decreasing along rows.

        In each part, row i sees the keys `first[i] <= j < end[i]`; no key twice.
        """

    def unseen(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows that see no key, and keys of the blocks that no row sees; None if there are none.

        Both are boolean, [sequences or 1, rows] and [sequences or 1, keys].
        """

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The positions of the queries and of the keys, int32."""


@dataclass(frozen=True)
class Patch:
    """The queries at positions `q` against the keys at positions `k` under `mask`."""

    mask: Mask
    q: Ranges
    k: Ranges

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Rectangles that contain every visible pair exactly once; FULL and CAUSAL wherever possible."""
        return tuple(
            replace(block, part=index, sequences=sequences)
            for sequences, parts in self.parts
            for index, part in enumerate(parts)
            for block in part.blocks
        )

    @cached_property
    def parts(self) -> tuple[tuple[range | None, tuple[Part, ...]], ...]:
        """For each group of sequences with the same mask, its intervals that contain a visible pair of this patch."""
        if not self.q or not self.k:
            return tuple((sequences, ()) for sequences, _ in sequence_groups(self.mask))
        start, stop = min(0, self.q[0][0], self.k[0][0]), max(run[-1] for run in (*self.q, *self.k)) + 1
        return tuple(
            (sequences, tuple(part for part in (Part(each, self.q, self.k) for each in intervals) if part.seen))
            for sequences, intervals in sequence_intervals(self.mask, stop, start)
        )

    @cached_property
    def turns(self) -> tuple[Patch, ...]:
        """Patches of at most MAX_INTERVALS parts that together are this one: itself if it has no more."""
        most = max((len(parts) for _, parts in self.parts), default=0)
        if most <= MAX_INTERVALS:
            return (self,)
        starts = range(0, most, MAX_INTERVALS)
        return tuple(_Turn(self.mask, self.q, self.k, self, at) for at in starts)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`first` and `end`, int32 [parts, sequences or 1, rows]: see `Visibility`."""
        return _patch_bounds(self, device)

    def unseen(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows that see no key, and keys of the blocks that no row sees: see `Visibility`."""
        return _patch_unseen(self, device)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The positions of the queries and of the keys, int32."""
        return _patch_positions(self, device)

    @cached_property
    def seen(self) -> Ranges:
        """The key rows that some query sees, as disjoint ascending ranges."""
        return ranges.merged(rows for _, parts in self.parts for part in parts for rows in part.seen)

    @cached_property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs: the work of this patch, in all `mask.sequences` or in one."""
        return sum(
            part.pairs * (1 if sequences is None else len(sequences))
            for sequences, parts in self.parts
            for part in parts
        )

    @cached_property
    def segments(self) -> int:
        """The number of query segments that the mask and the runs make: about the number of blocks."""
        return sum(part.segments for _, parts in self.parts for part in parts)


@dataclass(frozen=True)
class _Turn(Patch):
    """The parts of a patch from one on, at most MAX_INTERVALS."""

    whole: Patch
    at: int

    @cached_property
    def parts(self) -> tuple[tuple[range | None, tuple[Part, ...]], ...]:
        stop = self.at + MAX_INTERVALS
        return tuple((sequences, parts[self.at : stop]) for sequences, parts in self.whole.parts)


@dataclass(frozen=True)
class Part:
    """One interval of keys per query: the queries at positions `q` against the keys at positions `k`."""

    intervals: Intervals
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
                cut += [_moved(block, q_at, k_at) for block in _cut(self.intervals, q, k)]
                k_at += len(k)
            q_at += len(q)
        return tuple(_coalesced(cut))

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`first` and `end`, int32, one entry per row, non-decreasing."""
        return _part_bounds(self, device)

    @cached_property
    def seen(self) -> Ranges:
        """The key rows that some query sees, as disjoint ascending ranges.

        Of intervals that contain their query, from the first to the last row of each run of keys.
        """
        at, found = 0, []
        for k in self.k:
            rows = [row for q in self.q for row in _rows_seen(self.intervals, q, k)]
            if rows and self.intervals.contains_query:
                rows = [range(min(row.start for row in rows), max(row.stop for row in rows))]
            found += [range(at + row.start, at + row.stop) for row in rows]
            at += len(k)
        return ranges.merged(found)

    @cached_property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs."""
        long = ranges.size(self.q) >= _LONG_SEGMENT * self.segments
        if self.segments <= _MANY or long or "blocks" in self.__dict__:
            return sum(self._pairs(block) for block in self.blocks)
        # For many short documents it is faster to count row by row than to cut blocks.
        first, end = self.bounds(torch.device("cpu"))
        return int((end - first).sum())

    @cached_property
    def segments(self) -> int:
        """The number of query segments."""
        return sum(1 + len(self.intervals.boundaries(run)) for run in self.q)

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
        if not self.q or self.q != self.k or not self.intervals.contains_query:
            return False
        start, last = self.q[0][0], self.q[-1][-1]
        sees = self.intervals.key_range
        # The last row sees the first key, so every row sees all keys before it; and every row's view ends at itself.
        ends_at_itself = all(sees(p)[1] == p + 1 for run in self.q for p in (run[0], run[-1]))
        ends_at_itself = ends_at_itself and not any(
            sees(boundary)[1] != boundary + 1 for run in self.q for boundary in self.intervals.boundaries(run)
        )
        return sees(last)[0] <= start and ends_at_itself and start < last


def bounds_of(intervals: Intervals, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
    """The key indices each query sees, as `[first, end)`, int32; both position tensors ascending."""
    first, end = intervals.key_ranges(q_positions)
    found = torch.searchsorted(k_positions, first.contiguous(), out_int32=True)
    return found, torch.maximum(found, torch.searchsorted(k_positions, end.contiguous(), out_int32=True))


def stacked_bounds(parts: Sequence[tuple[range | None, Sequence[tuple[Tensor, Tensor]]]], rows: int) -> Tensor:
    """`first` and `end`, int32 [2, parts, sequences or 1, rows], from the bounds of every group of sequences."""
    most = max([1, *(len(bounds) for _, bounds in parts)])
    groups = []
    for sequences, bounds in parts:
        device = bounds[0][0].device if bounds else None
        found = [torch.stack(pair) for pair in bounds]
        empty = torch.zeros(2, rows, dtype=torch.int32, device=device)
        group = torch.stack([*found, *[empty] * (most - len(found))], 1)[:, :, None]
        groups.append(group if sequences is None else group.expand(-1, -1, len(sequences), -1))
    device = next((bounds[0][0].device for _, bounds in parts if bounds), None)
    return torch.cat([group.to(device) for group in groups], 2)


@lru_cache(maxsize=128)
def _part_bounds(part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached: every layer of a model uses the same few patches.
    return bounds_of(part.intervals, ranges.as_tensor(part.q, device), ranges.as_tensor(part.k, device))


@lru_cache(maxsize=128)
def _patch_bounds(patch: Patch, device: torch.device) -> tuple[Tensor, Tensor]:
    groups = [(sequences, [part.bounds(device) for part in parts]) for sequences, parts in patch.parts]
    first, end = stacked_bounds(groups, ranges.size(patch.q)).to(device)
    return first, end


@lru_cache(maxsize=128)
def _patch_positions(patch: Patch, device: torch.device) -> tuple[Tensor, Tensor]:
    q, k = (ranges.as_tensor(side, device).to(torch.int32) for side in (patch.q, patch.k))
    return q, k


@lru_cache(maxsize=128)
def _patch_unseen(patch: Patch, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    rows, keys = unseen_of(*patch.bounds(torch.device("cpu")), ranges.size(patch.k))
    reached = key_hull(patch.blocks)
    keys[:, : reached.start] = keys[:, reached.stop :] = False
    rows_or_none, keys_or_none = (x.to(device) if x.any() else None for x in (rows, keys))
    return rows_or_none, keys_or_none


def key_hull(blocks: Sequence[Block]) -> range:
    """The keys from the first to the last that some block includes."""
    return range(
        min((block.k.start for block in blocks), default=0), max((block.k.stop for block in blocks), default=0)
    )


def unseen_of(first: Tensor, end: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Whether each row sees no key, and whether each of so many keys is seen by no row, for every sequence.

    `first` and `end` are [parts, sequences, rows]. The host does not wait.
    """
    some = (first < end).int()
    edges = torch.zeros(first.shape[1], keys + 1, dtype=torch.int32, device=first.device)
    for part in range(first.shape[0]):
        edges.scatter_add_(1, first[part].long(), some[part]).scatter_add_(1, end[part].long(), -some[part])
    return some.sum(0) == 0, edges[:, :-1].cumsum(1) == 0


def _rows_seen(intervals: Intervals, q: range, k: range) -> Sequence[range]:
    """The rows of `k` that some query of `q` sees; of intervals that contain their query, the first to the last."""
    if not intervals.contains_query:
        seen = _positions_seen(intervals, q)
        if len(seen) > _FEW_RANGES:
            return intervals.rows_seen(q, k)
        return ranges.merged(rows_between(k, run.start, run.stop) for run in seen)
    if q.step == 1:
        return intervals.rows_seen(q, k)
    # Visible ranges are non-decreasing: the first query that sees anything sees the first row, the last one the last.
    # Queries before the first see only positions before the keys, those after the last only positions after them.
    early = bisect_left(q, True, key=lambda p: intervals.key_range(p)[1] > k[0])
    late = bisect_left(q, True, key=lambda p: intervals.key_range(p)[0] > k[-1]) - 1
    early_rows = next((rows for rows in (rows_between(k, *intervals.key_range(p)) for p in q[early:]) if rows), None)
    if early_rows is None:
        return []
    late_rows = next(rows for rows in (rows_between(k, *intervals.key_range(p)) for p in q[late::-1]) if rows)
    return [range(early_rows.start, late_rows.stop)]


@lru_cache(maxsize=4096)
def _positions_seen(intervals: Intervals, q: range) -> Ranges:
    """The positions that some query of `q` sees: the same for the keys of all ranks."""
    rows = intervals.rows_seen(q, range(-_FARTHEST, _FARTHEST))
    return tuple(range(run.start - _FARTHEST, run.stop - _FARTHEST) for run in rows)


def _cut(intervals: Intervals, q: range, k: range) -> Iterator[Block]:
    """The blocks of one query run against one key run."""
    segments = list(_segments(intervals, q))
    if len(segments) > _MANY and len(q) < _FEW_ROWS * len(segments):
        keys = rows_between(k, intervals.key_range(q[0])[0], intervals.key_range(q[-1])[1])
        if coverage(intervals, q, k) is not Coverage.EMPTY:
            yield Block(range(len(q)), keys, Kind.PARTIAL)
        return
    for rows in segments:
        part = q[rows.start : rows.stop]
        keys = rows_between(k, intervals.key_range(part[0])[0], intervals.key_range(part[-1])[1])
        seen = k[keys.start : keys.stop]
        verdict = coverage(intervals, part, seen)
        if verdict is Coverage.EMPTY:
            continue
        if verdict is Coverage.FULL:
            blocks = iter([Block(range(len(part)), range(len(seen)), Kind.FULL)])
        elif (ahead := _diagonal(intervals, part, seen)) is not None:
            blocks = _along_diagonal(part, seen, ahead)
        else:
            blocks = iter([Block(range(len(part)), range(len(seen)), Kind.PARTIAL)])
        for block in blocks:
            yield _moved(block, rows.start, keys.start)


def _segments(intervals: Intervals, q: range) -> Iterator[range]:
    """The rows of `q` between the cuts of the mask (one segment per document)."""
    edges = [q.start, *intervals.boundaries(q), q[-1] + 1]
    for begin, stop in pairwise(edges):
        rows = rows_between(q, begin, stop)
        if rows:
            yield rows


def _diagonal(intervals: Intervals, q: range, k: range) -> int | None:
    """How far ahead of its row every row's view ends, if only that diagonal cuts this segment; else None.

    Inside a segment an end moves by at most one per position, so the same distance at both ends holds between them.
    """
    if q.step != k.step and len(q) > 1 and len(k) > 1:
        return None
    ahead = intervals.key_range(q[0])[1] - q[0] - 1
    step = q.step if len(q) > 1 else k.step
    if intervals.key_range(q[-1])[1] - q[-1] - 1 != ahead or intervals.key_range(q[-1])[0] > k[0]:
        return None
    return ahead if ahead == 0 or step == 1 else None


def _along_diagonal(q: range, k: range, ahead: int) -> Iterator[Block]:
    """Full, causal square, full: row a sees the first `a + shift` keys."""
    step = q.step if len(q) > 1 else k.step
    shift = (q[0] + ahead - k[0]) // step + 1
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


@dataclass(frozen=True)
class InterleavedPatch:
    """The queries at positions `q` against the keys at indices `keys` of a rank's `shard`: a `Visibility`.

    A `Patch` describes keys as runs of positions, and interleaved positions may have one run per key. But the keys that
    a query attends to are one range of the indices on a rank, and `InterleavedShard.length` maps both of its ends::

        ranks = 2, rank 1, interleave 1     key positions   1  3  5  7  9
        query 6 under Causal                sees            x  x  x          indices [0, 3)
        query 6 under SlidingWindow(3)      sees               x  x          indices [1, 3)
    """

    intervals: Intervals
    q: range
    shard: InterleavedShard
    keys: range

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The keys that all queries see, FULL, and those before and after them, PARTIAL."""
        rows, keys = range(len(self.q)), len(self.keys)
        if not rows or not keys:
            return ()
        first, end = self._bounds
        common = range(int(first[-1]), int(end[0]))
        if not common:
            return (Block(rows, range(keys), Kind.PARTIAL),)
        cut = (range(common.start), Kind.PARTIAL), (common, Kind.FULL), (range(common.stop, keys), Kind.PARTIAL)
        return tuple(Block(rows, part, kind) for part, kind in cut if part)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The keys first[i] <= j < end[i] that row i sees, on the CPU."""
        first, end = self.intervals.key_ranges(torch.arange(self.q.start, self.q.stop, device="cpu"))
        low, high = (
            (self.shard.length(x.clamp(0, self.q.stop)) - self.keys.start).clamp(0, len(self.keys)).to(torch.int32)
            for x in (first, end)
        )
        return low, high

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`first` and `end`, int32 [1, 1, rows]: see `Visibility`."""
        return _on_device(self, device)

    def unseen(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Rows that see no key, and keys that no row sees: see `Visibility`."""
        rows, keys = unseen_of(*self.bounds(torch.device("cpu")), len(self.keys))
        rows_or_none, keys_or_none = (x.to(device) if x.any() else None for x in (rows, keys))
        return rows_or_none, keys_or_none

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The positions of the queries and of the keys, int32."""
        q, k = (torch.arange(x.start, x.stop, device=device) for x in (self.q, self.keys))
        return q.to(torch.int32), self.shard.position(k).to(torch.int32)


@lru_cache(maxsize=128)
def _on_device(patch: InterleavedPatch, device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached: every layer of a model uses the same few patches.
    first, end = (x[None, None].to(device) for x in patch._bounds)
    return first, end
