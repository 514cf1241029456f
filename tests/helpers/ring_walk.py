"""Ring plans followed message by message, without a process and without tensors of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property
from itertools import combinations, pairwise

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.mask import sequence_intervals
from attnmesh.core.ranges import Ranges
from attnmesh.plan.ring import RingPlan, Transfers, packed_once
from attnmesh.plan.shards import Shards
from helpers.masks import covered, visible_pairs


def rows_in(runs: Ranges) -> list[int]:
    return [row for run in runs for row in run]


class Truth:
    """What brute force says about shards: the visible pairs, and the rows of keys that ranks must have."""

    def __init__(self, problem: Shards) -> None:
        self.problem = problem
        self.queries = [ranges.as_tensor(held) for held in problem.queries]
        self.keys = [ranges.as_tensor(held) for held in problem.keys]

    @cached_property
    def visible(self) -> Tensor:
        """[sequences or 1, queries, keys], by position."""
        lengths = (
            max((int(held[-1]) + 1 for held in side if len(held)), default=0) for side in (self.queries, self.keys)
        )
        queries, keys = ((range(length),) for length in lengths)
        return visible_pairs(self.problem.mask, queries, keys)

    @staticmethod
    def _end(shards: list[Tensor]) -> int:
        return max((int(held.max()) + 1 for held in shards if len(held)), default=0)

    def seen(self, rank: int, block: int) -> set[int]:
        """The rows of the keys of `block` that some query of `rank` sees in some sequence."""
        sees = self.visible[:, self.queries[rank]][:, :, self.keys[block]].any(1).any(0)
        return set(sees.nonzero().flatten().tolist())

    def needed(self, rank: int, block: int) -> set[int]:
        """The same; of intervals that contain their query, from the first to the last row of each run of keys."""
        q, found = self.queries[rank], set()
        for _, intervals in sequence_intervals(self.problem.mask, max(self._end(self.queries), self._end(self.keys))):
            for part in intervals:
                first, end = (bound[:, None] for bound in part.key_ranges(q))
                at = 0
                for run in self.problem.keys[block]:
                    k = torch.arange(run.start, run.stop, run.step)
                    rows = ((first <= k) & (k < end)).any(0).nonzero().flatten().tolist()
                    if rows and part.contains_query:
                        rows = list(range(rows[0], rows[-1] + 1))
                    found |= {at + row for row in rows}
                    at += len(run)
        return found

    def all_needed(self) -> dict[tuple[int, int], set[int]]:
        ranks = range(self.problem.world)
        return {(rank, block): self.needed(rank, block) for rank in ranks for block in ranks}


def check_route(plan: RingPlan, needed: dict[tuple[int, int], set[int]]) -> None:
    """Every rank has exactly the rows it needs at every stage, and gradients of all of them return exactly once.

    A row is a pair of its owner and its place in the owner's shard.
    """
    own = {rank: [(rank, row) for row in range(ranges.size(keys))] for rank, keys in enumerate(plan.shards.keys)}
    held = dict(own)
    grads: dict[int, list[Counter]] = {}
    home = {block: [Counter() for _ in rows] for block, rows in own.items()}
    for at in range(plan.count):
        stages = [plan.stages(rank)[at] for rank in range(plan.world)]
        for rank, stage in enumerate(stages):
            offsets = [plan.offsets[visit] for visit in plan.visits(at)]
            assert [block.owner for block in stage.blocks] == [(rank - offset) % plan.world for offset in offsets]
            assert len(held[rank]) == stage.size
            for owner, rows, places in stage.blocks:
                assert all(a.stop < b.start for a, b in pairwise(rows))
                assert set(rows_in(rows)) == (needed[rank, owner] if at else {row for _, row in own[rank]})
                assert [row for piece in places for row in piece.rows] == rows_in(rows)
                there = [held[rank][to] for piece in places for to in piece.to]
                assert there == [(owner, row) for row in rows_in(rows)]
            expected = [ranges.as_tensor(plan.shards.keys[owner])[row] for owner, row in held[rank]]
            assert ranges.as_tensor(stage.patch.k).tolist() == expected
            assert at == 0 or expected == sorted(expected)
            assert stage.patch.q == plan.shards.queries[rank]
            if at:
                grads.setdefault(rank, [Counter() for _ in held[rank]])
                for row, found in zip(held[rank], grads[rank], strict=True):
                    found[row, rank] += 1
            assert not (at == 0 and (stage.sent or stage.received or stage.from_owner or stage.returned))
            assert all(len(transfer.rows) == 1 for transfer in (*stage.sent, *stage.returned))
            check_packed(stage.own_sent)
        after = [plan.stages(rank)[at + 1] for rank in range(plan.world)] if at + 1 < plan.count else []
        check_matched(
            [transfer for stage in stages for transfer in (*stage.sent, *stage.own_sent)],
            [transfer for stage in after for transfer in (*stage.received, *stage.from_owner)],
        )
        check_matched(
            [transfer for stage in stages for transfer in stage.returned],
            [transfer for stage in stages for transfer in stage.own_returned],
        )
        for stage in stages:
            for transfer in stage.returned:
                for row, to in zip(rows_in(transfer.rows), rows_in(transfer.to), strict=True):
                    home[transfer.target][to] += grads[transfer.source][row]
        arriving = {rank: [None] * stage.size for rank, stage in enumerate(after)}
        arriving_grads = {rank: [Counter() for _ in rows] for rank, rows in arriving.items()}
        for rank, stage in enumerate(after):
            for transfers, source_rows in ((stage.received, held), (stage.from_owner, own)):
                for transfer in transfers:
                    assert len(transfer.to) == 1
                    assert transfer.target == rank
                    for row, to in zip(rows_in(transfer.rows), rows_in(transfer.to), strict=True):
                        assert arriving[rank][to] is None, "received twice"
                        arriving[rank][to] = source_rows[transfer.source][row]
                        if source_rows is held:
                            arriving_grads[rank][to] = grads[transfer.source][row]
        held, grads = arriving, arriving_grads
    for block, rows in own.items():
        others = [rank for rank in range(plan.world) if rank != block]
        expected = Counter(((block, row), rank) for rank in others for row in needed[rank, block])
        assert sum(home[block], Counter()) == expected
        assert all(row == (block, at) for at in range(len(rows)) for row, _ in home[block][at])


def check_packed(transfers: Transfers) -> None:
    """Every message is of the rows it needs, of which a copy is made once."""
    places, copies = packed_once(transfers)
    packed = {to: row for rows, at in copies for row, to in zip(rows_in(rows), at, strict=True)}
    assert sorted(packed) == list(range(len(packed)))
    for transfer, place in zip(transfers, places, strict=True):
        assert [packed[to] for to in place] == rows_in(transfer.rows)
    for (rows, _), (others, _) in combinations(copies, 2):
        assert rows != others


def check_matched(sent: Transfers, received: Transfers) -> None:
    """Messages between two ranks match in order."""
    between = [defaultdict(list), defaultdict(list)]
    for side, transfers in zip(between, (sent, received), strict=True):
        for transfer in transfers:
            assert transfer.source != transfer.target
            assert transfer.size == ranges.size(transfer.to) > 0
            side[transfer.source, transfer.target].append(transfer)
    assert between[0] == between[1]


def check_pairs(plan: RingPlan, count: Tensor) -> None:
    """Adds the pairs that all ranks compute to a count [sequences or 1, queries, keys] by position."""
    for rank in range(plan.world):
        for stage in plan.stages(rank):
            queries, keys = ranges.as_tensor(stage.patch.q), ranges.as_tensor(stage.patch.k)
            count[:, queries[:, None], keys] += covered(stage.patch)
