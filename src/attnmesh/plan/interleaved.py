"""`InterleavedPatch`: queries against the keys that one rank stores, where positions are interleaved over ranks.

A `Patch` describes keys as runs of positions, and interleaved positions may be as many runs as keys. But the keys that
a query attends to are one range of the indices on a rank, and `InterleavedShard.length` maps both of its ends::

    ranks = 2, rank 1, interleave 1     key positions   1  3  5  7  9
    query 6 under Causal                sees            x  x  x          indices [0, 3)
    query 6 under SlidingWindow(3)      sees               x  x          indices [1, 3)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from attnmesh.core.intervals import Intervals
from attnmesh.core.ranges import InterleavedShard
from attnmesh.plan.blocks import Block, Kind, unseen_of


@dataclass(frozen=True)
class InterleavedPatch:
    """The queries at positions `q` against the keys at indices `keys` of a rank's `shard`: a `Visibility`."""

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
