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
from attnmesh.plan.program import MAX_LISTED_MESSAGES, Floats, Ints, RowTraffic, RowTrafficTotals
from attnmesh.plan.shards import Shards

MAX_PLANNED_RANKS = 16
"""Ranks up to which estimates read the plans that executors follow."""


class RingStages(NamedTuple):
    """One stage of all ranks of some rings; entry i is of rank `rank[i]`."""

    rank: Ints
    pairs: Ints  # that it computes
    calls: Ints  # kernel calls
    seen: Ints  # rows of the visiting keys that its queries see
    next_rank: Ints  # where keys and gradients are sent next
    next_rows: Ints  # rows of keys that are sent
    grad_rows: Ints  # rows of gradients that are sent
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

    def rows(self, first: Ints, stop: Ints) -> Runs:
        """The positions of the rows `first <= row < stop` of every shard."""
        sizes = self.stop - self.start
        begins = np.cumsum(sizes, -1) - sizes
        lower, upper = (np.clip(at[..., None] - begins, 0, sizes) for at in (first, stop))
        return Runs(self.start + lower, self.start + np.maximum(lower, upper))


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


def seen_rows(band: Band, queries: Runs, keys: Runs) -> tuple[Ints, Ints]:
    """The key rows from the first to the last that some query sees; `stop <= start` if none does."""
    sizes = (keys.stop - keys.start)[..., None, :]
    begins = np.cumsum(sizes, -1) - sizes
    # Consecutive queries see adjacent ranges, so a run of queries sees one run of positions.
    first, end = queries.start[..., :, None] + band.first, queries.stop[..., :, None] - 1 + band.end
    low = np.maximum(keys.start[..., None, :], first)
    high = np.minimum(keys.stop[..., None, :], end)
    there = (low < high) & (queries.start < queries.stop)[..., :, None]
    shift = begins - keys.start[..., None, :]
    start: Ints = np.where(there, low + shift, UNBOUNDED).min((-1, -2))
    stop: Ints = np.where(there, high + shift, -UNBOUNDED).max((-1, -2))
    return start, stop


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
    grad_weight: float  # bytes of a gradient row over bytes of a key row; 0: no gradients are sent
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

    def seen(self, stage: int) -> tuple[Ints, Ints, Ints]:
        """For every place: whose keys are there, and the first and last row of them that is seen."""
        offset = self._offsets[stage]
        block = (np.arange(self._size) - offset[:, None]) % self._size
        if stage == 0:
            return block, np.zeros_like(block), self.keys.size
        kept = np.take_along_axis(self._direction.carried[stage], block, 1) > 0
        start, stop = (self._by_direction(side, stage) for side in (0, 1))
        return block, np.where(kept, start, 0), np.where(kept, stop, 0)

    @property
    def _size(self) -> int:
        return int(self.ranks.shape[1])

    @cached_property
    def _needed(self) -> dict[int, tuple[Ints, Ints]]:
        """The offsets at which some rank sees something, ascending, with the rows seen."""
        seen = {offset: self._seen_at(offset) for offset in range(1, self._size)}
        return {offset: (start, stop) for offset, (start, stop) in seen.items() if (start < stop).any()}

    def _seen_at(self, offset: int) -> tuple[Ints, Ints]:
        """For every place: the rows that it sees of the keys `offset` places before it."""
        block = (np.arange(self._size) - offset) % self._size
        return seen_rows(self.band, self.queries, self.keys.at((slice(None), block)))

    @cached_property
    def _seen(self) -> list[tuple[Ints, Ints]]:
        """The rows seen at offset 0 and at every needed offset, ascending."""
        size = self.keys.size
        return [(np.zeros_like(size), size), *self._needed.values()]

    @cached_property
    def _up(self) -> _Direction:
        return self._sent_in_order([0, *range(1, len(self._seen))])

    @cached_property
    def _down(self) -> _Direction:
        return self._sent_in_order([0, *reversed(range(1, len(self._seen)))])

    @cached_property
    def _downwards(self) -> NDArray[np.bool_]:
        """For every ring: whether it sends towards lower ranks, because that moves fewer bytes."""
        up, down = (direction.moved(self.grad_weight) for direction in (self._up, self._down))
        if self.same_direction:
            up, down = np.full_like(up, up.sum()), np.full_like(down, down.sum())
        return down < up

    @cached_property
    def _direction(self) -> _Direction:
        down = self._downwards
        if not down.any():
            return self._up
        if down.all():
            return self._down
        choose = down[None, :, None]
        grads = None
        if self._up.grads is not None and self._down.grads is not None:
            grads = np.where(choose, self._down.grads, self._up.grads)
        return _Direction(np.where(choose, self._down.carried, self._up.carried), grads)

    @cached_property
    def _offsets(self) -> Ints:
        """[stage, ring]"""
        needed = np.array(list(self._needed), dtype=np.int64)
        chosen = np.where(self._downwards[None, :], needed[::-1, None], needed[:, None])
        return np.concatenate([np.zeros((1, len(self.ranks)), dtype=np.int64), chosen])

    def _by_direction(self, side: int, stage: int) -> Ints:
        up, down = self._seen[stage][side], self._seen[len(self._seen) - stage][side]
        return np.where(self._downwards[:, None], down, up)

    def _sent_in_order(self, order: list[int]) -> _Direction:
        """The rows that are sent of every block, [stage, ring, block], if offsets are visited in this order."""
        size = self.keys.size
        carried = np.zeros((len(order), *size.shape), dtype=np.int64)
        carried[0] = size
        start, stop = np.full_like(size, UNBOUNDED), np.full_like(size, -UNBOUNDED)
        for stage in reversed(range(1, len(order))):
            first, last = self._of_blocks(order[stage])
            start, stop = np.minimum(start, first), np.maximum(stop, last)
            carried[stage] = np.maximum(stop - start, 0)
        if not self.grad_weight:
            return _Direction(carried, None)
        grads = np.zeros_like(carried)
        start, stop = np.full_like(size, UNBOUNDED), np.full_like(size, -UNBOUNDED)
        for stage in range(1, len(order)):
            first, last = self._of_blocks(order[stage])
            start, stop = np.minimum(start, first), np.maximum(stop, last)
            grads[stage] = np.where(carried[stage] > 0, np.maximum(stop - start, 0), 0)
        return _Direction(carried, grads)

    def _of_blocks(self, at: int) -> tuple[Ints, Ints]:
        """For every block: the rows seen of it at the at-th offset."""
        offset = self._up_offsets[at]
        start, stop = (np.concatenate((side[:, offset:], side[:, :offset]), 1) for side in self._seen[at])
        return start, stop

    @cached_property
    def _up_offsets(self) -> list[int]:
        return [0, *self._needed]

    def _stage(self, at: int) -> RingStages:
        block, start, stop = self.seen(at)
        found = np.zeros_like(block)
        if self.computes:
            groups = np.arange(len(self.ranks))[:, None]
            found = pairs(self.band, self.queries, self.keys.at((groups, block)))
        direction, places = self._direction, self._size
        goes_on = np.zeros(block.shape, dtype=bool)
        rows, after = np.zeros_like(block), block
        if at + 1 < self.stages:
            rows = np.take_along_axis(direction.carried[at + 1], block, 1)
            goes_on = rows > 0
            after = np.where(goes_on, (block + self._offsets[at + 1][:, None]) % places, block)
        grads = np.zeros_like(block) if direction.grads is None else np.take_along_axis(direction.grads[at], block, 1)
        next_rank = np.take_along_axis(self.ranks, after, 1)
        calls = (found > 0).astype(np.int64)
        is_causal = at == 0 and self.own_keys and self.band == (-UNBOUNDED, 1)  # own keys make one causal square
        columns = (
            self.ranks, found, calls, np.maximum(stop - start, 0), next_rank, rows, grads, found * is_causal,
            calls * is_causal,
        )  # fmt: skip
        return RingStages(*(column.reshape(-1) for column in columns))


@dataclass(frozen=True)
class _Direction:
    """One direction: rows of keys received at each stage, [stage, ring, block], and rows of gradients sent."""

    carried: Ints
    grads: Ints | None

    def moved(self, grad_weight: float) -> Floats:
        """For every ring: everything that is sent, in rows of keys."""
        keys: Floats = self.carried[1:].sum((0, 2)).astype(np.float64)
        return keys if self.grads is None else keys + grad_weight * self.grads.sum((0, 2))


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

    def ring(self, groups: Sequence[Sequence[int]], grad_weight: float) -> Iterator[RingStages]:
        """The stages of the rings of all rank groups."""
        places = np.arange(len(groups[0]), dtype=np.int64)
        rings = VectorizedRings(
            self.band, _with_ring_dim(self.queries), _with_ring_dim(self.keys), places[None], grad_weight
        )
        ranks = np.array(groups, dtype=np.int64)
        for stage in rings.all_stages():
            tiled = {name: np.tile(column, len(groups)) for name, column in stage._asdict().items()}
            tiled["rank"], tiled["next_rank"] = (ranks[:, at].reshape(-1) for at in (stage.rank, stage.next_rank))
            yield RingStages(**tiled)

    def two_level(
        self, ranks_per_node: int, grad_weight: float
    ) -> tuple[Iterator[RingStages], Callable[[int], Iterator[RingStages]]]:
        """The stages of the outer rings, and a function from an outer stage to the stages of all inner rings."""
        nodes = len(self.queries.start) // ranks_per_node
        ranks: Ints = np.arange(nodes * ranks_per_node, dtype=np.int64).reshape(nodes, ranks_per_node)
        queries, keys = (
            Runs(*(side.reshape(nodes, ranks_per_node, -1) for side in runs)) for runs in (self.queries, self.keys)
        )
        of_nodes = Runs(*(side.reshape(1, nodes, -1) for side in queries))
        by_place = Runs(*(side.swapaxes(0, 1) for side in keys))
        outer = VectorizedRings(
            self.band, of_nodes, by_place, ranks.T.copy(), grad_weight, same_direction=True, computes=False
        )

        def inner(stage: int) -> Iterator[RingStages]:
            block, start, stop = outer.seen(stage)
            there = by_place.at((np.arange(ranks_per_node)[:, None], block)).rows(start, stop)
            visiting = Runs(*(side.swapaxes(0, 1) for side in there))
            return VectorizedRings(self.band, queries, visiting, ranks, grad_weight, own_keys=stage == 0).all_stages()

        return outer.all_stages(), inner

    def gathered(self, groups: Sequence[Sequence[int]], world: int, ranks_per_node: int) -> Gathered:
        """What every rank of every group gathers."""
        return _gathered(self.band, self.queries, self.keys, np.array(groups, dtype=np.int64), world, ranks_per_node)


def _with_ring_dim(runs: Runs) -> Runs:
    return Runs(runs.start[None], runs.stop[None])


def vectorized(shards: Shards) -> VectorizedShards | None:
    """The shards as arrays, where there are too many ranks for the plans and the arrays can express them."""
    return VectorizedShards.of(shards) if shards.world > MAX_PLANNED_RANKS else None
