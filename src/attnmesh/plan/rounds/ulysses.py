"""Rounds of Ulysses: rows traded for heads, what follows between those with the same heads, and the trade back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.core import ranges
from attnmesh.plan.program import Bundle, Ints, Messages, Round
from attnmesh.plan.rounds.sizes import laid_out
from attnmesh.plan.rounds.travel import MOST_MESSAGES, Travel, TravelSums
from attnmesh.plan.ulysses import HeadShare, head_share, replicated
from attnmesh.plan.workload import Shape, Workload


@dataclass(frozen=True)
class Trade:
    """Ranks that trade, `ranks` neighbours at a time, and what one rank's part of a row weighs on every rank."""

    workload: Workload
    ranks: int

    @property
    def shares(self) -> list[HeadShare]:
        """The heads of the i-th rank of every group."""
        shape = self.workload.shape
        return [head_share(shape.q_heads, shape.kv_heads, self.ranks, i) for i in range(self.ranks)]

    def shapes(self) -> list[Shape]:
        """What every rank computes with, after the trade."""
        mine = [self.workload.shape.of(share) for share in self.shares]
        return mine * (self.workload.shards.world // self.ranks)

    def there_and_back(self, *, backward: bool) -> tuple[Messages | Bundle, Messages | Bundle]:
        """Forward: q, k and v there, out (and lse) back. Backward: the gradient of out there, those of q, k, v back."""
        workload, shapes = self.workload, self.shapes()
        rows = np.array([ranges.size(held) for held in workload.shards.queries], dtype=np.int64)
        keys = np.array([ranges.size(held) for held in workload.shards.keys], dtype=np.int64)
        query = np.array([shape.query_row for shape in shapes], dtype=np.int64)
        key = np.array([shape.key_row for shape in shapes], dtype=np.int64)
        lse = np.array([shape.lse_row if workload.lse else 0 for shape in shapes], dtype=np.int64)
        if not backward:
            return self._traded([(rows, query), (keys, key)], back=False), self._traded(
                [(rows, query + lse)], back=True
            )
        if replicated(workload.shape.q_heads, workload.shape.kv_heads, self.ranks):
            key = np.array([shape.key_grad_row for shape in shapes], dtype=np.int64)
        return self._traded([(rows, query + lse)], back=False), self._traded([(rows, query), (keys, key)], back=True)

    def copies(self, *, backward: bool) -> tuple[Ints, Ints]:
        """Bytes that every rank lays out anew on the way there, its own part too, and on the way back."""
        workload, shape = self.workload, self.workload.shape
        rows = np.array([ranges.size(held) for held in workload.shards.queries], dtype=np.int64)
        keys = np.array([ranges.size(held) for held in workload.shards.keys], dtype=np.int64)
        queries, key_rows = rows * shape.query_row, keys * shape.key_row
        return (queries, queries + key_rows) if backward else (queries + key_rows, queries)

    def _traded(self, parts: list[tuple[Ints, Ints]], *, back: bool) -> Messages | Bundle:
        """Each part: rows of one rank, and what a row of the other's heads weighs."""
        world = self.workload.shards.world
        if world * (self.ranks - 1) <= MOST_MESSAGES:
            group = np.arange(world, dtype=np.int64) // self.ranks
            source = np.repeat(np.arange(world, dtype=np.int64), self.ranks)
            target = np.repeat(group * self.ranks, self.ranks) + np.tile(np.arange(self.ranks), world)
            kept = source != target
            source, target = source[kept], target[kept]
            nbytes = sum((rows[source] * weight[target] for rows, weight in parts), np.zeros(len(source), np.int64))
            return (Travel(target, source, nbytes) if back else Travel(source, target, nbytes)).weighing(
                np.ones(world, dtype=np.int64)
            )
        return self._summed(parts, back=back)

    def _summed(self, parts: list[tuple[Ints, Ints]], *, back: bool) -> Bundle:
        world, ranks_per_node = self.workload.shards.world, self.workload.ranks_per_node
        ranks = np.arange(world)
        group, node = ranks // self.ranks, ranks // ranks_per_node

        def others(values: Ints, by: Ints) -> Ints:
            return np.bincount(by, values)[by].astype(np.int64) - values

        # Ranks of a node are neighbours, so a node lies within a group or the other way around.
        near = node if ranks_per_node < self.ranks else group
        out_near = sum((rows * others(weight, near) for rows, weight in parts), np.zeros(world, np.int64))
        out_all = sum((rows * others(weight, group) for rows, weight in parts), np.zeros(world, np.int64))
        in_near = sum((weight * others(rows, near) for rows, weight in parts), np.zeros(world, np.int64))
        in_all = sum((weight * others(rows, group) for rows, weight in parts), np.zeros(world, np.int64))
        sums = TravelSums(
            group, out_near, in_near, out_all - out_near, in_all - in_near, np.full(world, self.ranks - 1, np.int64)
        )
        ones = np.ones(world, dtype=np.int64)
        return sums.back_weighing(ones) if back else sums.weighing(ones)


def traded(trade: Trade, between: Iterator[Round], *, backward: bool) -> Iterator[Round]:
    """The trade there, the rounds between, and the trade back."""
    there, back = trade.there_and_back(backward=backward)
    packed, unpacked = trade.copies(backward=backward)
    yield Round("trade rows for heads", {"there": there}, (laid_out(packed, calls=2 * trade.ranks + 1),), ("there",))
    yield from between
    yield Round("pack", work=(laid_out(unpacked, calls=trade.ranks + 1),))
    yield Round("trade heads for rows", {"back": back}, (), ("back",))
    yield Round("unpack", work=(laid_out(unpacked, calls=trade.ranks),))
