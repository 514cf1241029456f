"""The Ulysses schedules: their all-to-alls, and the rounds, peak memory and tiles of what runs between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.core import ranges
from attnmesh.plan.shards import node_shards
from attnmesh.plan.ulysses import HeadShare, head_share, replicated
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.program import Exchange, Floats, Ints, Round, all_to_all
from attnmesh.planner.sizes import GroupedWorkload, RankSizes, key_rows, query_rows, relayout
from attnmesh.planner.specs.base import GroupSpec, NamedTiles, ScheduleSpec, Tile


@dataclass(frozen=True)
class HeadAllToAll:
    """The all-to-all among every `ranks` consecutive ranks, and what they hold after it."""

    workload: Workload
    ranks: int

    @property
    def shares(self) -> list[HeadShare]:
        """The heads of the i-th rank of every all-to-all."""
        shape, whole = self.workload.shape, self.workload.reproducible
        return [head_share(shape.q_heads, shape.kv_heads, self.ranks, i, whole_groups=whole) for i in range(self.ranks)]

    @property
    def replicated(self) -> bool:
        """Whether some kv head is on several ranks."""
        shape = self.workload.shape
        return not self.workload.reproducible and replicated(shape.q_heads, shape.kv_heads, self.ranks)

    def shapes(self) -> list[Shape]:
        """The tensors that every rank computes with."""
        mine = [self.workload.shape.with_heads(len(share.q), len(share.kv)) for share in self.shares]
        return mine * (self.workload.world // self.ranks)

    def grouped(self) -> GroupedWorkload:
        """The ranks with the same heads as groups, which hold the shards of whole nodes."""
        shards = node_shards(self.workload.shards, self.ranks)
        assert shards is not None, "see why_not"
        rows = [ranges.size(queries) for queries in shards.queries for _ in range(self.ranks)]
        segments = [len(share.segments) for share in self.shares] * shards.world
        groups: dict[Shape, list[list[int]]] = {}
        for i, share in enumerate(self.shares):
            if share.q:
                shape = self.workload.shape.with_heads(len(share.q), len(share.kv))
                groups.setdefault(shape, []).append(list(range(i, self.workload.world, self.ranks)))
        return GroupedWorkload(
            self.workload, shards, groups, RankSizes.of(self.shapes(), rows, segments, mask=shards.mask)
        )

    def exchanges(self, *, backward: bool) -> tuple[Exchange, Exchange]:
        """The two exchanges. Forward: q, k, v, then out (and lse). Backward: dout, then dq, dk, dv."""
        workload, shapes = self.workload, self.shapes()
        rows, keys = query_rows(workload.shards), key_rows(workload.shards)
        query = np.array([shape.query_row for shape in shapes], dtype=np.int64)
        key = np.array([shape.key_row for shape in shapes], dtype=np.int64)
        out = np.array([shape.out_row + (shape.lse_row if workload.lse else 0) for shape in shapes], dtype=np.int64)
        if not backward:
            inputs = self._exchange([(rows, query), (keys, key)], back=False)
            return inputs, self._exchange([(rows, out)], back=True)
        if self.replicated:
            key = np.array([shape.key_grad_row for shape in shapes], dtype=np.int64)
        inputs = self._exchange([(rows, out)], back=False)
        return inputs, self._exchange([(rows, query), (keys, key)], back=True)

    def copied_bytes(self, *, backward: bool) -> tuple[Ints, Ints]:
        """Bytes that every rank repacks, its own part included: before the first exchange, and around the second."""
        shape = self.workload.shape
        rows = query_rows(self.workload.shards)
        inputs, outputs = rows * shape.query_row, rows * shape.out_row
        inputs += key_rows(self.workload.shards) * shape.key_row
        return (outputs, inputs) if backward else (inputs, outputs)

    def _exchange(self, parts: list[tuple[Ints, Ints]], *, back: bool) -> Exchange:
        """Each part: the rows of one rank, and the bytes of a row of the other's heads."""
        exchange = all_to_all(parts, self.ranks, self.workload.ranks_per_node)
        return exchange.returned() if back else exchange


class UlyssesSpec(ScheduleSpec):
    """An all-to-all among all ranks, or within nodes; then `between` among the ranks with the same heads."""

    def __init__(self, between: GroupSpec, *, within_nodes: bool) -> None:
        self.between, self.within_nodes = between, within_nodes

    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """The all-to-all, the rounds between, and the all-to-all back."""
        exchange = self._all_to_all(workload)
        inputs, outputs = exchange.exchanges(backward=backward)
        packed, unpacked = exchange.copied_bytes(backward=backward)
        first, last = ("output gradients", "gradients") if backward else ("queries, keys and values", "outputs")
        pack = relayout(packed, calls=2 * exchange.ranks + 1)
        yield Round("all-to-all: rows to heads", {first: inputs}, (pack,), (first,))
        yield from self.between.group_rounds(exchange.grouped(), backward=backward)
        yield Round("pack", work=(relayout(unpacked, calls=exchange.ranks + 1),))
        yield Round("all-to-all: heads to rows", {last: outputs}, (), (last,))
        yield Round("unpack", work=(relayout(unpacked, calls=exchange.ranks),))

    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """All rows of some heads, twice during an all-to-all, and what the schedule between takes."""
        exchange = self._all_to_all(workload)
        grouped = exchange.grouped()
        sizes, own = grouped.sizes, RankSizes.of_workload(workload)
        lse = workload.lse * sizes.rows * sizes.lse_row
        queries, outs = sizes.rows * sizes.query_row, sizes.rows * sizes.out_row
        keys = np.repeat(key_rows(grouped.shards), exchange.ranks)
        attention = self.between.group_memory(grouped, backward=backward)
        if not backward:
            # The exchange back: q and out, out contiguous, then rows first; of the own rows, parts and the result.
            back: Floats = keys * sizes.key_row + queries + 3 * outs + 2 * own.rows * own.out_row + 3 * lse
            computing: Floats = queries + keys * sizes.key_row + attention
            return np.maximum(computing, back)
        saved = queries + outs + keys * sizes.key_row + sizes.rows * sizes.lse_row
        computing = outs + lse + attention
        back = 2 * queries + lse + own.rows * own.query_row + _key_grad_bytes(exchange, sizes, keys)
        peak: Floats = saved + np.maximum(computing, back)
        return peak

    def tiles(self, workload: Workload) -> list[NamedTiles[Tile]]:
        """The tiles between the two exchanges."""
        exchange, shape = self._all_to_all(workload), workload.shape
        shares, ranks, queries_per_key = exchange.shares, exchange.ranks, shape.q_heads // shape.kv_heads
        between = [
            NamedTiles(
                name if self.within_nodes else "attention",
                [each.placed(shares[each.rank % ranks], queries_per_key, ranks) for each in tiles if each.pairs],
            )
            for name, tiles in self.between.group_tiles(exchange.grouped())
        ]
        return [NamedTiles("all-to-all: rows to heads", []), *between, NamedTiles("all-to-all: heads to rows", [])]

    def _all_to_all(self, workload: Workload) -> HeadAllToAll:
        return HeadAllToAll(workload, workload.ranks_per_node if self.within_nodes else workload.world)


def _key_grad_bytes(exchange: HeadAllToAll, sizes: RankSizes, keys: Ints) -> Floats:
    """dk and dv: computed, contiguous, rows first; and of the own rows, parts from all ranks and their sum."""
    shape = exchange.workload.shape
    row = sizes.key_grad_row if exchange.replicated else sizes.key_row
    own = key_rows(exchange.workload.shards)
    first = np.arange(len(own)) // exchange.ranks
    rows = np.bincount(first, row)[first]  # a row from every rank of the all-to-all
    nbytes: Floats = keys * (np.maximum(row, sizes.key_row) + 2 * row) + own * (rows + shape.key_row)
    return nbytes
