"""Masks that are a band along the diagonal, and what runs of positions see of one another under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attnmesh.core.masks import And, Causal, Full, Mask, SlidingWindow
from attnmesh.core.ranges import Ranges
from attnmesh.plan.program import Ints

FAR = 1 << 40
"""Further than any position."""


class Band(NamedTuple):
    """A query at p sees the keys `p + first <= k < p + end`."""

    first: int
    end: int


def band_of(mask: Mask) -> Band | None:
    """The band that a mask is; None if it is none."""
    match mask:
        case Full():
            return Band(-FAR, FAR)
        case Causal():
            return Band(-FAR, 1)
        case SlidingWindow(left, right):
            return Band(-left, right + 1)
        case And(parts):
            bands = [band_of(part) for part in parts]
            known = [band for band in bands if band is not None]
            if len(known) == len(bands):
                return Band(max(band.first for band in known), min(band.end for band in known))
    return None


class Runs(NamedTuple):
    """Positions `start <= p < stop`; the last dimension are the runs of a shard, in ascending order, some empty."""

    start: Ints
    stop: Ints

    @property
    def size(self) -> Ints:
        """How many positions every shard holds."""
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
    """The runs of shards; None if they have steps, or more runs than arrays are good for."""
    width = max((len(held) for held in shards), default=0)
    if width > most or any(run.step != 1 and len(run) > 1 for held in shards for run in held):
        return None
    ends = np.zeros((2, len(shards), max(width, 1)), dtype=np.int64)
    for i, held in enumerate(shards):
        for j, run in enumerate(held):
            ends[:, i, j] = run[0], run[-1] + 1
    return Runs(ends[0], ends[1])


def pairs(band: Band, queries: Runs, keys: Runs) -> Ints:
    """How many (query, key) pairs are visible between shards."""
    begin, end = queries.start[..., :, None], queries.stop[..., :, None]
    low, high = keys.start[..., None, :], keys.stop[..., None, :]
    count = np.maximum(end - begin, 0)
    seen = _clamped_sum(begin + band.end, end + band.end, low, high) if band.end < FAR else high * count
    hidden = _clamped_sum(begin + band.first, end + band.first, low, high) if band.first > -FAR else low * count
    visible: Ints = (seen - hidden).sum((-1, -2))
    return visible


def seen_rows(band: Band, queries: Runs, keys: Runs) -> tuple[Ints, Ints]:
    """The key rows from the first to the last that some query sees; `stop <= start` if none does."""
    sizes = (keys.stop - keys.start)[..., None, :]
    begins = np.cumsum(sizes, -1) - sizes
    # What neighbours see leaves no gap, so a run of queries sees one run of positions.
    first, end = queries.start[..., :, None] + band.first, queries.stop[..., :, None] - 1 + band.end
    low = np.maximum(keys.start[..., None, :], first)
    high = np.minimum(keys.stop[..., None, :], end)
    there = (low < high) & (queries.start < queries.stop)[..., :, None]
    shift = begins - keys.start[..., None, :]
    start: Ints = np.where(there, low + shift, FAR).min((-1, -2))
    stop: Ints = np.where(there, high + shift, -FAR).max((-1, -2))
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
