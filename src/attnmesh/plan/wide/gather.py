"""Gatherings of thousands of ranks: those of plan/gather.py, a source at a time for all targets at once."""

from __future__ import annotations

import numpy as np

from attnmesh.plan.program import Ints
from attnmesh.plan.rounds.gather import Gathered
from attnmesh.plan.rounds.travel import MOST_MESSAGES, Travel, TravelSums
from attnmesh.plan.wide.band import FAR, Band, Runs, pairs


def wide_gathered(band: Band, queries: Runs, keys: Runs, ranks: Ints, world: int, node: int) -> Gathered:
    """What every rank gathers where the i-th rank of each lane, `ranks[lane, i]`, has the i-th queries and keys."""
    views = _views(band, queries, keys)
    places = ranks.shape[1]
    rows = np.array([_overlap(keys.at(source), views) for source in range(places)])  # [source, target]
    columns = np.zeros((6, world), dtype=np.int64)
    runs = queries.start < queries.stop
    sides, calls = queries.stop - queries.start, np.ones(places, dtype=np.int64)
    squares = np.zeros((2, places), dtype=np.int64)
    if band == (-FAR, 1):
        squares = np.stack([(sides * (sides + 1) // 2).sum(-1), runs.sum(-1)])
    if band.end < FAR:  # a run meets itself, and the keys before it
        calls = np.maximum(runs.sum(-1) + (runs & (queries.start > 0)).sum(-1), 1)
    known = [pairs(band, queries, views), calls, views.size, keys.size, *squares]
    columns[:, ranks] = np.stack(known)[:, None, :]
    np.fill_diagonal(rows, 0)
    if ranks.size * (places - 1) <= MOST_MESSAGES:
        source, target = np.nonzero(rows)
        sent = np.tile(rows[source, target], len(ranks))
        travel: Travel | TravelSums = Travel(ranks[:, source].reshape(-1), ranks[:, target].reshape(-1), sent)
    else:
        travel = _summed(rows, ranks, world, node)
    return Gathered(columns[0], columns[1], columns[2], columns[3], travel, (columns[4], columns[5]))


def _views(band: Band, queries: Runs, keys: Runs) -> Runs:
    """The key positions that each shard of queries sees, as runs that do not overlap."""
    total = int(keys.stop.max(initial=0))
    empty = queries.start >= queries.stop
    start = np.where(empty, 0, np.clip(queries.start + band.first, 0, total))
    stop = np.where(empty, 0, np.clip(queries.stop - 1 + band.end, 0, total))
    before = np.maximum.accumulate(np.concatenate([np.zeros_like(stop[:, :1]), stop[:, :-1]], 1), 1)
    start = np.maximum(start, before)  # neither end ever moves back
    return Runs(start, np.maximum(start, stop))


def _overlap(held: Runs, views: Runs) -> Ints:
    """How many of the positions of one shard every view holds."""
    low = np.maximum(held.start[None, None, :], views.start[:, :, None])
    high = np.minimum(held.stop[None, None, :], views.stop[:, :, None])
    shared: Ints = np.maximum(high - low, 0).sum((-1, -2))
    return shared


def _summed(rows: Ints, ranks: Ints, world: int, node: int) -> TravelSums:
    near_out, near_in, far_out, far_in, sends, group = np.zeros((6, world), dtype=np.int64)
    for lane, members in enumerate(ranks):
        nodes = members // node
        group[members] = lane
        sends[members] = (rows > 0).sum(1)
        for place, rank in enumerate(members):
            near = nodes == nodes[place]
            near_out[rank], far_out[rank] = rows[place, near].sum(), rows[place, ~near].sum()
            near_in[rank], far_in[rank] = rows[near, place].sum(), rows[~near, place].sum()
    return TravelSums(group, near_out, near_in, far_out, far_in, sends)
