"""Plans of thousands of ranks as arrays: rings, two-level rings and all-gathers of banded masks.

The same stages as those of the plans in `ring.py`, `two_level.py` and `allgather.py`, computed for all ranks at once.
They serve masks that are a band along the diagonal and shards of a few contiguous runs; anything else, and every
workload of at most `MAX_PLANNED_RANKS` ranks, is read from the plans that executors follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnmesh.core.masks import And, Causal, Full, Mask, SlidingWindow
from attnmesh.core.ranges import Ranges
from attnmesh.plan.program import MAX_LISTED_MESSAGES, Ints, RowTraffic, RowTrafficTotals
from attnmesh.plan.shards import Shards

MAX_PLANNED_RANKS = 16
"""Ranks up to which estimates read the plans that executors follow."""


class RingStages(NamedTuple):
    """One stage of all ranks of some rings; entry i is of rank `rank[i]`."""

    rank: Ints
    pairs: Ints  # that it computes
    calls: Ints  # kernel calls
    rows: Ints  # of the keys that are there
    owner: Ints  # of these keys
    next_rank: Ints  # the rank that has them next
    next_rows: Ints  # rows that are sent to it, and their gradients; those of the others return to the owner
    own_rank: Ints  # the rank that has this rank's own keys next
    own_rows: Ints  # rows of own keys that are sent to it
    causal_pairs: Ints  # of the pairs, those in causal squares
    causal_calls: Ints


@dataclass(frozen=True)
class Gathered:
    """What every rank gathers and computes; entry r is rank r's, 0 for ranks of other groups."""

    pairs: Ints
    calls: Ints
    rows: Ints  # gathered, its own included
    own: Ints  # keys that it holds
    traffic: RowTraffic | RowTrafficTotals
    causal: tuple[Ints, Ints]  # pairs and calls of the causal squares among them


UNBOUNDED = 1 << 40
"""Beyond any position."""


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
    """Positions `start <= p < stop`; the last dimension is the runs of a shard, ascending, some empty."""

    start: Ints
    stop: Ints

    @property
    def size(self) -> Ints:
        """The number of positions of every shard."""
        sizes: Ints = (self.stop - self.start).sum(-1)
        return sizes

    def at(self, index: Any) -> Runs:
        """Some of the shards."""
        return Runs(self.start[index], self.stop[index])


def runs_of(shards: Sequence[Ranges], most: int = 8) -> Runs | None:
    """The runs of shards as arrays; None if some have a step, or more than `most` runs."""
    width = max((len(held) for held in shards), default=0)
    if width > most or any(run.step != 1 and len(run) > 1 for held in shards for run in held):
        return None
    ends = np.zeros((2, len(shards), max(width, 1)), dtype=np.int64)
    for i, held in enumerate(shards):
        for j, run in enumerate(held):
            ends[:, i, j] = run[0], run[-1] + 1
    return Runs(ends[0], ends[1])


def pairs(band: Band, queries: Runs, keys: Runs) -> Ints:
    """The number of visible (query, key) pairs between shards."""
    begin, end = queries.start[..., :, None], queries.stop[..., :, None]
    low, high = keys.start[..., None, :], keys.stop[..., None, :]
    count = np.maximum(end - begin, 0)
    seen = _clamped_sum(begin + band.end, end + band.end, low, high) if band.end < UNBOUNDED else high * count
    hidden = _clamped_sum(begin + band.first, end + band.first, low, high) if band.first > -UNBOUNDED else low * count
    visible: Ints = (seen - hidden).sum((-1, -2))
    return visible


def seen_positions(band: Band, queries: Runs, keys: Runs) -> Runs:
    """Of every run of keys, the positions from the first to the last that some query sees; `stop = start` if none."""
    # Consecutive queries see adjacent ranges, so a run of queries sees one run of positions.
    first, end = queries.start[..., :, None] + band.first, queries.stop[..., :, None] - 1 + band.end
    low = np.maximum(keys.start[..., None, :], first)
    high = np.minimum(keys.stop[..., None, :], end)
    there = (low < high) & (queries.start < queries.stop)[..., :, None]
    start: Ints = np.where(there, low, UNBOUNDED).min(-2)
    stop: Ints = np.where(there, high, -UNBOUNDED).max(-2)
    none = start >= stop
    return Runs(np.where(none, keys.start, start), np.where(none, keys.start, stop))


def shared_rows(a: Runs, b: Runs) -> Ints:
    """The number of positions that are in the same run of both."""
    shared: Ints = np.maximum(np.minimum(a.stop, b.stop) - np.maximum(a.start, b.start), 0).sum(-1)
    return shared


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
        return len(self._seen)

    def all_stages(self) -> Iterator[RingStages]:
        """The stages, in order."""
        return map(self._stage, range(self.stages))

    def here(self, at: int) -> tuple[Ints, Runs]:
        """For every place at a stage: whose keys are there, and their positions."""
        block = self._block(at)
        return block, _of_each(self._rows(at), block)

    @property
    def _size(self) -> int:
        return int(self.ranks.shape[1])

    @cached_property
    def _seen(self) -> dict[int, Runs]:
        """For every needed offset, ascending, and every block: its positions that are at that offset."""
        found = {0: self.keys}
        for offset in range(1, self._size):
            holder = (np.arange(self._size) + offset) % self._size
            seen = seen_positions(self.band, self.queries.at((slice(None), holder)), self.keys)
            if (seen.start < seen.stop).any():
                found[offset] = seen
        return found

    @cached_property
    def _downwards(self) -> NDArray[np.bool_]:
        """For every ring: whether it sends towards lower ranks, because that takes fewer messages."""
        after_0 = list(self._seen.values())[1:]
        up, down = (self._connections(order) for order in (after_0, after_0[::-1]))
        if self.same_direction:
            up, down = np.full_like(up, up.sum()), np.full_like(down, down.sum())
        return down < up

    def _connections(self, seen: list[Runs]) -> Ints:
        """For every ring: how often a rank sends something to another, as `RingPlan.connections`."""
        count, before = np.zeros(len(self.ranks), dtype=np.int64), np.zeros_like(self.ranks)
        for at, here in enumerate(seen):
            shared = shared_rows(here, seen[at + 1]) if at + 1 < len(seen) else np.zeros_like(before)
            rows = here.size
            count += (3 * (shared > 0) + 2 * (before < rows) + (shared < rows)).sum(1)
            before = shared
        return count

    @cached_property
    def _offsets(self) -> Ints:
        """[stage, ring]"""
        needed = np.array(list(self._seen)[1:], dtype=np.int64)
        chosen = np.where(self._downwards[None, :], needed[::-1, None], needed[:, None])
        return np.concatenate([np.zeros((1, len(self.ranks)), dtype=np.int64), chosen])

    def _block(self, at: int) -> Ints:
        """For every place: whose keys are there at a stage."""
        block: Ints = (np.arange(self._size) - self._offsets[at][:, None]) % self._size
        return block

    def _rows(self, at: int) -> Runs:
        """For every block: its positions that are at the rank that has it at a stage."""
        seen = list(self._seen.values())
        up, down = seen[at], seen[-at]
        choose = self._downwards[:, None, None]
        return Runs(np.where(choose, down.start, up.start), np.where(choose, down.stop, up.stop))

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
            step = self._offsets[at + 1][:, None]
            after, own_after = (block + step) % self._size, (np.arange(self._size) + step) % self._size
        calls = (found > 0).astype(np.int64)
        is_causal = at == 0 and self.own_keys and self.band == (-UNBOUNDED, 1)  # own keys make one causal square
        owner, next_rank, own_rank = (np.take_along_axis(self.ranks, places, 1) for places in (block, after, own_after))
        columns = RingStages(
            rank=self.ranks, pairs=found, calls=calls, rows=rows, owner=owner, next_rank=next_rank, next_rows=next_rows,
            own_rank=own_rank, own_rows=own_rows, causal_pairs=found * is_causal, causal_calls=calls * is_causal,
        )  # fmt: skip
        return RingStages(*(column.reshape(-1) for column in columns))


def _of_each(runs: Runs, block: Ints) -> Runs:
    """The runs of the blocks that places have, [ring, place, run]."""
    rings = np.arange(len(block))[:, None]
    return runs.at((rings, block))


def _gathered(band: Band, queries: Runs, keys: Runs, ranks: Ints, world: int, ranks_per_node: int) -> Gathered:
    """What every rank gathers where the i-th rank of each group, `ranks[group, i]`, holds the i-th queries and keys."""
    visible = _visible_runs(band, queries, keys)
    places = ranks.shape[1]
    rows = np.array([_overlap(keys.at(source), visible) for source in range(places)])  # [source, target]
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
    np.fill_diagonal(rows, 0)
    if ranks.size * (places - 1) <= MAX_LISTED_MESSAGES:
        source, target = np.nonzero(rows)
        sent = np.tile(rows[source, target], len(ranks))
        traffic: RowTraffic | RowTrafficTotals = RowTraffic(
            ranks[:, source].reshape(-1), ranks[:, target].reshape(-1), sent
        )
    else:
        traffic = _totals(rows, ranks, world, ranks_per_node)
    return Gathered(columns[0], columns[1], columns[2], columns[3], traffic, (columns[4], columns[5]))


def _visible_runs(band: Band, queries: Runs, keys: Runs) -> Runs:
    """The key positions that each shard of queries sees, as disjoint runs."""
    total = int(keys.stop.max(initial=0))
    empty = queries.start >= queries.stop
    start = np.where(empty, 0, np.clip(queries.start + band.first, 0, total))
    stop = np.where(empty, 0, np.clip(queries.stop - 1 + band.end, 0, total))
    before = np.maximum.accumulate(np.concatenate([np.zeros_like(stop[:, :1]), stop[:, :-1]], 1), 1)
    start = np.maximum(start, before)  # both ends are non-decreasing
    return Runs(start, np.maximum(start, stop))


def _overlap(held: Runs, visible: Runs) -> Ints:
    """The number of positions of one shard that every shard of queries sees."""
    low = np.maximum(held.start[None, None, :], visible.start[:, :, None])
    high = np.minimum(held.stop[None, None, :], visible.stop[:, :, None])
    shared: Ints = np.maximum(high - low, 0).sum((-1, -2))
    return shared


def _totals(rows: Ints, ranks: Ints, world: int, ranks_per_node: int) -> RowTrafficTotals:
    intra_out, intra_in, inter_out, inter_in, sends, group = np.zeros((6, world), dtype=np.int64)
    for index, members in enumerate(ranks):
        nodes = members // ranks_per_node
        group[members] = index
        sends[members] = (rows > 0).sum(1)
        for place, rank in enumerate(members):
            near = nodes == nodes[place]
            intra_out[rank], inter_out[rank] = rows[place, near].sum(), rows[place, ~near].sum()
            intra_in[rank], inter_in[rank] = rows[near, place].sum(), rows[~near, place].sum()
    return RowTrafficTotals(group, intra_out, intra_in, inter_out, inter_in, sends)


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
        places = np.arange(len(groups[0]), dtype=np.int64)
        rings = VectorizedRings(self.band, _with_ring_dim(self.queries), _with_ring_dim(self.keys), places[None])
        ranks = np.array(groups, dtype=np.int64)
        for stage in rings.all_stages():
            tiled = {name: np.tile(column, len(groups)) for name, column in stage._asdict().items()}
            for name in ("rank", "owner", "next_rank", "own_rank"):
                tiled[name] = ranks[:, getattr(stage, name)].reshape(-1)
            yield RingStages(**tiled)

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
    return VectorizedShards.of(shards) if shards.world > MAX_PLANNED_RANKS else None
