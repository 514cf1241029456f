"""The mask as tiles: shards cut into bands, and how many pairs each band of queries sees of each band of keys.

A band never reaches beyond a shard. So all pairs of a tile have their queries on one rank and their keys on one rank,
and every schedule computes all of them at once: the same tiles serve every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from attnmesh.core import ranges
from attnmesh.core.masks import Coverage, Mask
from attnmesh.core.ranges import Ranges
from attnmesh.plan.shards import Shards

_BANDS = 64  # about so many rows of tiles: more cannot be told apart on a phone
_MOST_BANDS = 256  # with more runs than these there is nothing to see


@dataclass(frozen=True)
class Band:
    """Some neighbouring positions of one rank's shard."""

    rank: int
    positions: range


def bands(shards: tuple[Ranges, ...]) -> list[Band]:
    """All shards cut into bands of about equal size, rank by rank."""
    runs = sum(map(len, shards))
    if runs > _MOST_BANDS:
        raise ValueError(f"a report shows at most {_MOST_BANDS} runs of positions, and these shards have {runs}")
    each = sum(map(ranges.size, shards)) / _BANDS  # positions of a band, where runs allow it
    return [
        Band(rank, part)
        for rank, shard in enumerate(shards)
        for run in shard
        for part in _cut(run, max(1, min(len(run), round(len(run) / each))))
    ]


def pair_counts(shards: Shards, queries: list[Band], keys: list[Band]) -> list[list[int]]:
    """How many pairs are visible in every tile: a row for each band of queries, a column for each band of keys."""
    return [[visible_pairs(shards.mask, q.positions, k.positions) for k in keys] for q in queries]


def visible_pairs(mask: Mask, q: range, k: range) -> int:
    """How many of the keys `k` the queries `q` see, in all."""
    verdict = mask.coverage(q, k)
    if verdict is Coverage.EMPTY:
        return 0
    if verdict is Coverage.FULL:
        return len(q) * len(k)
    first, end = mask.key_ranges(torch.arange(q.start, q.stop, q.step))
    # How many keys lie before a position: what lies before the end of a view and not before its start is seen.
    before_end, before_first = (_rows_before(k, at) for at in (end, first))
    return int((before_end - before_first).sum())


def _rows_before(k: range, position: torch.Tensor) -> torch.Tensor:
    return (-((k.start - position) // k.step)).clamp(0, len(k))


def _cut(run: range, parts: int) -> list[range]:
    edges = [len(run) * at // parts for at in range(parts + 1)]
    return [run[a:b] for a, b in pairwise(edges)]
