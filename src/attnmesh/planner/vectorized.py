"""Plans of thousands of ranks as arrays: rings, two-level rings and all-gathers of banded masks.

The stages of the plans in `plan/ring.py`, `two_level.py` and `allgather.py`, computed for all ranks at once: 4,096
ranks have 17 million patches, too many to plan one by one. They serve masks that are a band along the diagonal and
shards of a few contiguous runs; anything else, and every workload of at most `MAX_PLANNED_RANKS` ranks, is read from
the plans that executors follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnmesh.core.masks import And, Causal, Full, Mask, SlidingWindow
from attnmesh.core.ranges import Ranges
from attnmesh.plan.shards import Shards
from attnmesh.planner.program import MAX_LISTED_MESSAGES, Exchange, Ints, Messages, MessageTotals
from attnmesh.utils.progress import reported

MAX_PLANNED_RANKS = 16
"""Ranks up to which estimates read the plans that executors follow."""


class RingStages(NamedTuple):
    """One stage of all ranks of some rings; entry i is of rank `rank[i]`, which has one for each of its blocks."""

    rank: Ints
    pairs: Ints  # that it computes
    calls: Ints  # kernel calls
    rows: Ints  # of the keys that are there
    owner: Ints  # of these keys
    next_rank: Ints  # the rank that has them next
    next_rows: Ints  # rows that are sent to it, and their gradients; gradients of other rows return to the owner
    own_rank: Ints  # the rank that has this rank's own keys next
    own_rows: Ints  # rows of own keys that are sent to it
    packed_rows: Ints  # rows of own keys that are copied to be sent
    causal_pairs: Ints  # of the pairs, those in causal squares
    causal_calls: Ints


@dataclass(frozen=True)
class Gathered:
    """What every rank gathers and computes; entry r is rank r's, 0 for ranks of other groups."""

    pairs: Ints
    calls: Ints
    rows: Ints  # gathered, its own included
    own: Ints  # keys that it holds
    traffic: Exchange  # in rows
    causal: tuple[Ints, Ints]  # pairs and calls of the causal squares among them


UNBOUNDED = 1 << 40
"""Beyond any position."""

_KEPT_POSITIONS = 1 << 22  # positions at offsets of a ring that are not computed twice


class Band(NamedTuple):
    """A query at p attends to the keys `p + first <= k < p + end`."""

    first: int
    end: int


def band_of(mask: Mask) -> Band | None:
    """A mask as a band; None if it is not one."""
    match mask:
        case Full():
            return Band(-UNBOUNDED, UNBOUNDED)
        case Causal():
            return Band(-UNBOUNDED, 1)
        case SlidingWindow(left, right):
            return Band(-left, right + 1)
        case And(parts):
            bands = [band_of(part) for part in parts]
            known = [band for band in bands if band is not None]
            if len(known) == len(bands):
                return Band(max(band.first for band in known), min(band.end for band in known))
    return None


class Runs(NamedTuple):
    """Positions `start <= p < stop`; the last dimension is the runs of a shard, ascending, some empty.

    There are few runs and many shards. What is computed of them is computed run by run, over all shards at once, and in
    memory each run of all shards is contiguous: numpy takes ten times as long to reduce a last dimension of two.
    """

    start: Ints
    stop: Ints

    @staticmethod
    def of(columns: Sequence[tuple[Ints, Ints]]) -> Runs:
        """From the start and the stop of every run."""
        start, stop = (np.moveaxis(np.stack(side), 0, -1) for side in zip(*columns, strict=True))
        return Runs(start, stop)

    @property
    def columns(self) -> list[tuple[Ints, Ints]]:
        """The start and the stop of every run."""
        return [(self.start[..., i], self.stop[..., i]) for i in range(self.start.shape[-1])]

    @property
    def size(self) -> Ints:
        """The number of positions of every shard."""
        return _total([stop - start for start, stop in self.columns])

    def at(self, index: Any) -> Runs:
        """Some of the shards."""
        return Runs.of([(start[index], stop[index]) for start, stop in self.columns])


def _total(parts: Sequence[Ints]) -> Ints:
    return functools.reduce(np.add, parts)


def runs_of(shards: Sequence[Ranges], most: int = 8) -> Runs | None:
    """The runs of shards as arrays; None if some have a step, or more than `most` runs."""
    width = max((len(held) for held in shards), default=0)
    if width > most or any(run.step != 1 and len(run) > 1 for held in shards for run in held):
        return None
    ends = np.zeros((max(width, 1), 2, len(shards)), dtype=np.int64)
    for i, held in enumerate(shards):
        for j, run in enumerate(held):
            ends[j, :, i] = run[0], run[-1] + 1
    return Runs.of([(start, stop) for start, stop in ends])


def pairs(band: Band, queries: Runs, keys: Runs) -> Ints:
    """The number of visible (query, key) pairs between shards."""
    return _total([_run_pairs(band, q, k) for q in queries.columns for k in keys.columns])


def _run_pairs(band: Band, queries: tuple[Ints, Ints], keys: tuple[Ints, Ints]) -> Ints:
    begin, end, low, high = np.broadcast_arrays(*queries, *keys)
    first, last = begin + band.end, end + (band.end - 1)  # ends of the keys of the first and of the last query
    from_first, from_last = begin + band.first, end + (band.first - 1)
    all_seen = (first >= high) & (from_last <= low) & (begin < end)
    visible = np.where(all_seen, (end - begin) * (high - low), 0)
    some = ~all_seen & (last > low) & (from_first < high) & (begin < end)
    if some.any():  # few of thousands of ranks
        visible[some] = _some_pairs(band, begin[some], end[some], low[some], high[some])
    return visible


def _some_pairs(band: Band, begin: Ints, end: Ints, low: Ints, high: Ints) -> Ints:
    count = end - begin
    seen = _clamped_sum(begin + band.end, end + band.end, low, high) if band.end < UNBOUNDED else high * count
    hidden = _clamped_sum(begin + band.first, end + band.first, low, high) if band.first > -UNBOUNDED else low * count
    visible: Ints = seen - hidden
    return visible


def seen_positions(band: Band, queries: Runs, keys: Runs) -> Runs:
    """Of every run of keys, the positions from the first to the last that some query sees; `stop = start` if none."""
    columns = []
    for first_key, end_key in keys.columns:
        starts, stops = [], []
        for begin, end in queries.columns:
            # Consecutive queries see adjacent ranges, so a run of queries sees one run of positions.
            low = np.maximum(first_key, begin + band.first) if band.first > -UNBOUNDED else first_key
            high = np.minimum(end_key, end - 1 + band.end) if band.end < UNBOUNDED else end_key
            there = (low < high) & (begin < end)
            starts.append(np.where(there, low, UNBOUNDED))
            stops.append(np.where(there, high, -UNBOUNDED))
        start, stop = functools.reduce(np.minimum, starts), functools.reduce(np.maximum, stops)
        none = start >= stop
        columns.append((np.where(none, first_key, start), np.where(none, first_key, stop)))
    return Runs.of(columns)


def shared_rows(a: Runs, b: Runs) -> Ints:
    """The number of positions that are in the same run of both."""
    return _total(
        [
            np.maximum(np.minimum(a_stop, b_stop) - np.maximum(a_start, b_start), 0)
            for (a_start, a_stop), (b_start, b_stop) in zip(a.columns, b.columns, strict=True)
        ]
    )


def _clamped_sum(begin: Ints, end: Ints, low: Ints, high: Ints) -> Ints:
    """The sum of `clamp(p, low, high)` over `begin <= p < end`."""
    count = np.maximum(end - begin, 0)
    below, above = np.clip(low - begin, 0, count), np.clip(end - high, 0, count)
    inside = np.maximum(count - below - above, 0)
    first = begin + below
    between: Ints = (2 * first + inside - 1) * inside // 2
    total: Ints = np.where(inside > 0, between, 0) + low * below + high * (count - below - inside)
    return total


@dataclass(frozen=True)
class VectorizedRings:
    """Rings of the same size that run at once: queries, keys and rank of every place, as arrays [ring, place]."""

    band: Band
    queries: Runs
    keys: Runs
    ranks: Ints
    same_direction: bool = False  # whether all rings must have the same direction
    computes: bool = True  # the outer ring of a two-level ring only moves keys
    own_keys: bool = True  # whether every place starts with the keys of its own queries

    @property
    def stages(self) -> int:
        """The number of stages, the first one on own keys included."""
        return len(self._needed) + 1

    def all_stages(self) -> Iterator[RingStages]:
        """The stages, in order."""
        try:
            for at in range(self.stages):
                yield self._stage(at)
        finally:
            self._recent.clear()

    def here(self, at: int) -> tuple[Ints, Runs]:
        """For every place at a stage: whose keys are there, and their positions."""
        block = self._block(at)
        return block, _of_each(self._rows(at), block)

    @property
    def _size(self) -> int:
        return int(self.ranks.shape[1])

    @cached_property
    def _recent(self) -> dict[int, Runs]:
        """What `_seen` has computed, by offset: all of a small ring, the latest of a large one."""
        return {}

    def _seen(self, offset: int) -> Runs:
        """For every block: its positions that are needed at an offset."""
        if offset == 0:
            return self.keys
        found = self._recent.get(offset)
        if found is None:
            holder = _wrapped(np.arange(self._size) + offset, self._size)
            found = seen_positions(self.band, self.queries.at((slice(None), holder)), self.keys)
            if len(self._recent) >= max(_KEPT_POSITIONS // max(self.keys.start.size, 1), 4):
                del self._recent[next(iter(self._recent))]
            self._recent[offset] = found
        return found

    @cached_property
    def _needed(self) -> list[int]:
        """The offsets besides 0 that are needed, ascending."""
        return self._offsets_and_directions[0]

    @property
    def _downwards(self) -> NDArray[np.bool_]:
        """For every ring: whether it sends towards lower ranks, because that takes fewer messages."""
        return self._offsets_and_directions[1]

    @cached_property
    def _offsets_and_directions(self) -> tuple[list[int], NDArray[np.bool_]]:
        """Both in one pass: the positions at all offsets of thousands of ranks would take gigabytes.

        A direction counts how often a rank sends something to another, as `RingPlan.connections`. What two consecutive
        offsets share is sent on, in either direction; what an offset does not share with the offset before comes from
        the owner, and gradients of what it does not share with the next offset return there.
        """
        up, down = np.zeros((2, len(self.ranks)), dtype=np.int64)
        needed, before, here, none = list[int](), np.zeros_like(self.ranks), None, np.zeros_like(self.ranks)

        def count(shared: Ints) -> None:
            nonlocal up, down
            assert here is not None
            rows = here.size
            fewer_before, fewer_after = before < rows, shared < rows
            up = up + (3 * (shared > 0) + 2 * fewer_before + fewer_after).sum(1)
            down = down + (3 * (before > 0) + 2 * fewer_after + fewer_before).sum(1)

        for offset in reported(range(1, self._size), self._size):
            seen = self._seen(offset)
            if not any((start < stop).any() for start, stop in seen.columns):
                continue
            if here is not None:
                shared = shared_rows(here, seen)
                count(shared)
                before = shared
            here = seen
            needed.append(offset)
        if here is not None:
            count(none)
        if self.same_direction:
            up, down = np.full_like(up, up.sum()), np.full_like(down, down.sum())
        return needed, down < up

    def _offset(self, at: int) -> Ints:
        """The offset of every ring at a stage."""
        if at == 0:
            return np.zeros(len(self.ranks), dtype=np.int64)
        return np.where(self._downwards, self._needed[-at], self._needed[at - 1])

    def _block(self, at: int) -> Ints:
        """For every place: whose keys are there at a stage."""
        return _wrapped(np.arange(self._size) + (self._size - self._offset(at)[:, None]), self._size)

    def _rows(self, at: int) -> Runs:
        """For every block: its positions that are at the rank that has it at a stage."""
        if at == 0:
            return self.keys
        down = self._downwards
        if down.all() or not down.any():
            return self._seen(self._needed[-at] if down.all() else self._needed[at - 1])
        both = zip(self._seen(self._needed[-at]).columns, self._seen(self._needed[at - 1]).columns, strict=True)
        choose = down[:, None]
        return Runs.of([(np.where(choose, a, c), np.where(choose, b, d)) for (a, b), (c, d) in both])

    @cached_property
    def _is_identity(self) -> bool:
        return np.array_equal(self.ranks, np.arange(self._size)[None])

    def _ranks_at(self, places: Ints) -> Ints:
        return places if self._is_identity else np.take_along_axis(self.ranks, places, 1)

    def _stage(self, at: int) -> RingStages:
        block, here = self.here(at)
        found, rows = np.zeros_like(block), here.size
        if self.computes:
            found = pairs(self.band, self.queries, here)
        next_rows, own_rows, after, own_after = np.zeros_like(block), np.zeros_like(block), block, block
        if at + 1 < self.stages:
            of_blocks, next_of_blocks = self._rows(at), self._rows(at + 1)
            shared = shared_rows(of_blocks, next_of_blocks) if at else np.zeros_like(block)
            next_rows, own_rows = np.take_along_axis(shared, block, 1), next_of_blocks.size - shared
            step = self._offset(at + 1)[:, None]
            after, own_after = (_wrapped(places + step, self._size) for places in (block, np.arange(self._size)))
        calls = (found > 0).astype(np.int64)
        is_causal = at == 0 and self.own_keys and self.band == (-UNBOUNDED, 1)  # own keys make one causal square
        owner, next_rank, own_rank = (self._ranks_at(places) for places in (block, after, own_after))
        columns = RingStages(
            rank=self.ranks, pairs=found, calls=calls, rows=rows, owner=owner, next_rank=next_rank, next_rows=next_rows,
            own_rank=own_rank, own_rows=own_rows, packed_rows=own_rows, causal_pairs=found * is_causal,
            causal_calls=calls * is_causal,
        )  # fmt: skip
        return RingStages(*(column.reshape(-1) for column in columns))


def _wrapped(places: Ints, size: int) -> Ints:
    """`places % size` of places below `2 * size`, in a fraction of the time."""
    return np.where(places < size, places, places - size)


def _of_each(runs: Runs, block: Ints) -> Runs:
    """The runs of the blocks that places have, [ring, place, run]."""
    rings = np.arange(len(block))[:, None]
    return runs.at((rings, block))


def _gathered(band: Band, queries: Runs, keys: Runs, ranks: Ints, world: int, ranks_per_node: int) -> Gathered:
    """What every rank gathers where the i-th rank of each group, `ranks[group, i]`, holds the i-th queries and keys."""
    visible = _visible_runs(band, queries, keys)
    places = ranks.shape[1]
    columns = np.zeros((6, world), dtype=np.int64)
    runs = queries.start < queries.stop
    sides, calls = queries.stop - queries.start, np.ones(places, dtype=np.int64)
    causal = np.zeros((2, places), dtype=np.int64)
    if band == (-UNBOUNDED, 1):
        causal = np.stack([(sides * (sides + 1) // 2).sum(-1), runs.sum(-1)])
    if band.end < UNBOUNDED:  # one call for a run's own keys and one for the keys before it
        calls = np.maximum(runs.sum(-1) + (runs & (queries.start > 0)).sum(-1), 1)
    known = [pairs(band, queries, visible), calls, visible.size, keys.size, *causal]
    columns[:, ranks] = np.stack(known)[:, None, :]
    if ranks.size * (places - 1) <= MAX_LISTED_MESSAGES:
        rows = np.array([_overlap(keys.at(source), visible) for source in range(places)])  # [source, target]
        np.fill_diagonal(rows, 0)
        source, target = np.nonzero(rows)
        sent = np.tile(rows[source, target], len(ranks))
        traffic: Exchange = Messages(ranks[:, source].reshape(-1), ranks[:, target].reshape(-1), sent)
    else:
        traffic = _totals(keys, visible, ranks, world, ranks_per_node)
    return Gathered(columns[0], columns[1], columns[2], columns[3], traffic, (columns[4], columns[5]))


def _visible_runs(band: Band, queries: Runs, keys: Runs) -> Runs:
    """The key positions that each shard of queries sees, as disjoint runs."""
    total = int(keys.stop.max(initial=0))
    empty = queries.start >= queries.stop
    start = np.where(empty, 0, np.clip(queries.start + band.first, 0, total))
    stop = np.where(empty, 0, np.clip(queries.stop - 1 + band.end, 0, total))
    before = np.maximum.accumulate(np.concatenate([np.zeros_like(stop[:, :1]), stop[:, :-1]], 1), 1)
    start = np.maximum(start, before)  # both ends are non-decreasing
    return Runs.of(Runs(start, np.maximum(start, stop)).columns)


def _overlap(held: Runs, visible: Runs) -> Ints:
    """The number of positions of one shard that every shard of queries sees."""
    return _total(
        [
            np.maximum(np.minimum(stop, end) - np.maximum(start, begin), 0)
            for start, stop in held.columns
            for begin, end in visible.columns
        ]
    )


def _totals(keys: Runs, visible: Runs, ranks: Ints, world: int, ranks_per_node: int) -> MessageTotals:
    """Added up source by source: the rows between all pairs of thousands of ranks would take gigabytes."""
    nodes, places = ranks // ranks_per_node, ranks.shape[1]
    out, into, sends = np.zeros((3, places), dtype=np.int64)
    near_out, near_in = np.zeros((2, *ranks.shape), dtype=np.int64)
    for source in reported(range(places), places):
        rows = _overlap(keys.at(source), visible)
        rows[source] = 0
        out[source], sends[source] = rows.sum(), np.count_nonzero(rows)
        into += rows
        near = (nodes == nodes[:, source, None]) * rows
        near_out[:, source] = near.sum(1)
        near_in += near
    group = np.broadcast_to(np.arange(len(ranks))[:, None], ranks.shape)
    columns = np.zeros((6, world), dtype=np.int64)
    known = (group, near_out, near_in, out - near_out, into - near_in, np.broadcast_to(sends, ranks.shape))
    columns[:, ranks] = np.stack(known)
    return MessageTotals(*columns)


@dataclass(frozen=True)
class VectorizedShards:
    """Shards as arrays, [rank, run]."""

    band: Band
    queries: Runs
    keys: Runs

    @staticmethod
    def of(shards: Shards) -> VectorizedShards | None:
        """None where the mask is no band (documents), or shards are not a few contiguous runs (stripes)."""
        band, queries, keys = band_of(shards.mask), runs_of(shards.queries), runs_of(shards.keys)
        return None if band is None or queries is None or keys is None else VectorizedShards(band, queries, keys)

    def ring(self, groups: Sequence[Sequence[int]]) -> Iterator[RingStages]:
        """The stages of the rings of all rank groups."""
        ranks = np.array(groups, dtype=np.int64)
        if np.array_equal(ranks, self._ring.ranks):
            yield from self._ring.all_stages()
            return
        for stage in self._ring.all_stages():
            tiled = {name: np.tile(column, len(groups)) for name, column in stage._asdict().items()}
            for name in ("rank", "owner", "next_rank", "own_rank"):
                tiled[name] = ranks[:, getattr(stage, name)].reshape(-1)
            yield RingStages(**tiled)

    def pairs_of(self, rank: int) -> Ints:
        """The (query, key) pairs of a rank's queries and each rank's keys."""
        return pairs(self.band, self.queries.at(rank), self.keys)

    @cached_property
    def _ring(self) -> VectorizedRings:
        """A ring of all shards, whose offsets and directions a forward and a backward share."""
        places = np.arange(len(self.queries.start), dtype=np.int64)
        return VectorizedRings(self.band, _with_ring_dim(self.queries), _with_ring_dim(self.keys), places[None])

    def two_level(self, ranks_per_node: int) -> tuple[Iterator[RingStages], Callable[[int], Iterator[RingStages]]]:
        """The stages of the outer rings, and a function from an outer stage to the stages of all inner rings."""
        nodes = len(self.queries.start) // ranks_per_node
        ranks: Ints = np.arange(nodes * ranks_per_node, dtype=np.int64).reshape(nodes, ranks_per_node)
        queries, keys = (
            Runs(*(side.reshape(nodes, ranks_per_node, -1) for side in runs)) for runs in (self.queries, self.keys)
        )
        of_nodes = Runs(*(side.reshape(1, nodes, -1) for side in queries))
        by_place = Runs(*(side.swapaxes(0, 1) for side in keys))
        outer = VectorizedRings(self.band, of_nodes, by_place, ranks.T.copy(), same_direction=True, computes=False)

        def inner(stage: int) -> Iterator[RingStages]:
            visiting = Runs(*(side.swapaxes(0, 1) for side in outer.here(stage)[1]))
            return VectorizedRings(self.band, queries, visiting, ranks, own_keys=stage == 0).all_stages()

        return outer.all_stages(), inner

    def gathered(self, groups: Sequence[Sequence[int]], world: int, ranks_per_node: int) -> Gathered:
        """What every rank of every group gathers."""
        return _gathered(self.band, self.queries, self.keys, np.array(groups, dtype=np.int64), world, ranks_per_node)


def _with_ring_dim(runs: Runs) -> Runs:
    return Runs(runs.start[None], runs.stop[None])


def vectorized(shards: Shards) -> VectorizedShards | None:
    """The shards as arrays, where there are too many ranks for the plans and the arrays can express them."""
    return _arrays(shards) if shards.world > MAX_PLANNED_RANKS else None


@functools.lru_cache(maxsize=32)
def _arrays(shards: Shards) -> VectorizedShards | None:
    return VectorizedShards.of(shards)
