"""The ring schedule: its stages as arrays over ranks, its rounds, its peak memory and its tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import numpy as np

from attnmesh.core import ranges
from attnmesh.core.visibility import Kind, Patch
from attnmesh.ops.merge import PENDING_PARTS
from attnmesh.plan.ring import RingPlan, ring_plan, rows_in
from attnmesh.plan.shards import Shards
from attnmesh.planner.program import Floats, Ints, Kernels, Messages, Round
from attnmesh.planner.sizes import GroupedWorkload, RankSizes, key_rows, relayout, row_coverage
from attnmesh.planner.specs.base import GroupSpec, GroupTile, NamedTiles, single
from attnmesh.planner.vectorized import RingStages, vectorized

# Stages as arrays over ranks.

_MAX_CUT_SEGMENTS = 8  # segments of the mask up to which the blocks of a patch are counted exactly


def ring_stages(shards: Shards, groups: Sequence[Sequence[int]]) -> Iterator[RingStages]:
    """The stages of the rings of all rank groups; the i-th rank of each holds the i-th shard."""
    arrays = vectorized(shards)
    if arrays is not None:
        return arrays.ring(groups)
    plan = ring_plan(shards)
    return concurrent_stages([plan_stages(plan, group) for group in groups])


def plan_stages(plan: RingPlan, ranks: Sequence[int], *, computes: bool = True) -> Iterator[RingStages]:
    """The stages of a plan whose i-th rank is the rank `ranks[i]`. An outer ring only moves keys."""
    for at in range(len(plan.offsets)):
        step = plan.offsets[min(at + 1, len(plan.offsets) - 1)]
        rows = []
        for i, rank in enumerate(ranks):
            stage = plan.stages(i)[at]
            work = (stage.patch.pairs, kernel_calls(stage.patch)) if computes else (0, 0)
            causal = causal_squares(stage.patch) if computes else (0, 0)
            next_rank, own_rank = (ranks[(owner + step) % plan.world] for owner in (stage.block, i))
            rows.append(
                (
                    rank, *work, ranges.size(stage.keys), ranks[stage.block], next_rank, rows_in(stage.sent), own_rank,
                    rows_in(stage.own_sent), *causal,
                )
            )  # fmt: skip
        yield RingStages(*np.array(rows, dtype=np.int64).reshape(-1, len(RingStages._fields)).T)


def concurrent_stages(rings: Iterable[Iterator[RingStages]]) -> Iterator[RingStages]:
    """The stages of several rings of different ranks; those with fewer stages finish earlier."""
    for stages in zip_longest(*rings):
        present = [stage for stage in stages if stage is not None]
        yield RingStages(*map(np.concatenate, zip(*present, strict=True)))


def causal_squares(patch: Patch) -> tuple[int, int]:
    """Pairs in the causal squares among a patch's blocks, and their number: kernels have another speed there."""
    if patch.segments > _MAX_CUT_SEGMENTS:
        return 0, 0
    squares = [block for block in patch.blocks if block.kind is Kind.CAUSAL]
    pairs = (
        len(block.q) * (len(block.q) + 1) // 2 * (1 if block.sequences is None else len(block.sequences))
        for block in squares
    )
    return sum(pairs), len(squares)


def kernel_calls(patch: Patch) -> int:
    """Kernel calls of a patch by estimate: one per block, or one for all of many, as the Triton kernels take them."""
    return len(patch.blocks) if patch.segments <= _MAX_CUT_SEGMENTS else min(1, patch.pairs)


# Rounds: the loops of parallel/ring.py, one round per stage.


class PartsCount:
    """The number of partial results that every rank has computed; one ring may continue the state of another."""

    def __init__(self, sizes: RankSizes) -> None:
        self.parts: Ints = np.zeros(sizes.world, dtype=np.int64)


def ring_rounds(
    stages: Iterator[RingStages], sizes: RankSizes, count: PartsCount, *, backward: bool, name: str = "keys",
    finish: bool = True,
) -> Iterator[Round]:  # fmt: skip
    """The next keys are sent while these are computed. `finish`: the last stage also rounds the results.

    In a backward, gradients follow their keys one stage behind and return to the owner at the end.
    """
    gradients: dict[str, Messages] = {}
    for at, (stage, last) in enumerate(_with_last(stages)):
        work = _work(at, stage, sizes, count, last=last, finish=finish, backward=backward)
        if at and backward:  # gradients of visiting keys are added to those received with them
            added = sizes.by_rank(stage.rank, stage.rows) * sizes.key_grad_row
            work = (*work, relayout(added, calls=2, overlapped=True))
        posted = {f"{name} {at + 1}": key_messages(stage, sizes)} | gradients
        yield Round(f"{name} {at}", posted, work, tuple(posted))
        gradients = {f"{name} gradients {at}": grad_messages(stage, sizes)} if at and backward else {}
    if backward:
        yield Round(f"{name} return", gradients, (), tuple(gradients))


def key_messages(stage: RingStages, sizes: RankSizes) -> Messages:
    """The keys that are sent after a stage: from the ranks that have them, and from their owners."""
    return _two_targets(stage, stage.next_rows, (stage.own_rank, stage.own_rows), sizes.key_row)


def grad_messages(stage: RingStages, sizes: RankSizes) -> Messages:
    """The gradients that are sent after a stage but the first: to the ranks that have the keys next, and to owners."""
    return _two_targets(stage, stage.next_rows, (stage.owner, stage.rows - stage.next_rows), sizes.key_grad_row)


def _two_targets(stage: RingStages, rows: Ints, other: tuple[Ints, Ints], row_bytes: Ints) -> Messages:
    targets, sent = np.concatenate([stage.next_rank, other[0]]), np.concatenate([rows, other[1]])
    sources = np.concatenate([stage.rank, stage.rank])
    return Messages.sized(sources, targets, sent * row_bytes[sources])


def _work(
    at: int, stage: RingStages, sizes: RankSizes, count: PartsCount, *, last: bool, finish: bool, backward: bool
) -> tuple[Kernels, ...]:
    """The kernels of a stage: own keys are packed at the first, partial results are merged, and rounded at the last."""
    pairs, calls = sizes.by_rank(stage.rank, stage.pairs), sizes.by_rank(stage.rank, stage.calls)
    before = count.parts
    count.parts = before + calls
    causal = sizes.by_rank(stage.rank, stage.causal_pairs), sizes.by_rank(stage.rank, stage.causal_calls)
    attention = sizes.attention(pairs, calls, backward=backward, causal=causal, single=last and not at)
    merge = sizes.merge(before, count.parts, last=finish and last)
    packed = sizes.by_rank(stage.rank, stage.own_rows)
    if not packed.any():
        return attention, merge
    return relayout(packed * sizes.key_row), attention, merge


def _with_last(stages: Iterator[RingStages]) -> Iterator[tuple[RingStages, bool]]:
    """Every stage, and whether it is the last."""
    stage = next(stages, None)
    while stage is not None:
        after = next(stages, None)
        yield stage, after is None
        stage = after


# Peak memory.


@dataclass
class RingBuffers:
    """The largest messages and the partial results of rings, by rank: what determines their memory."""

    world: int

    def __post_init__(self) -> None:
        # Rows in buffers: keys, own keys that are sent while others are here, gradients, and own ones that return.
        self.keys, self.own, self.grads, self.returned = np.zeros((4, self.world), dtype=np.int64)
        self.own_parts, self.parts, self.visiting = np.zeros((3, self.world))  # in whole rows of queries, and of keys
        self.calls = np.zeros(self.world, dtype=np.int64)

    def add_ring(self, stages: Iterator[RingStages], *, own_keys: bool = True) -> None:
        """Count all stages of a ring. `own_keys`: ranks hold their own keys at the first stage."""
        for at, stage in enumerate(stages):
            self.add_stage(stage, first=at == 0)
            covered = row_coverage(stage.calls)
            np.add.at(self.parts, stage.rank, covered)
            np.add.at(self.calls, stage.rank, stage.calls)
            if at == 0 and own_keys:
                np.maximum.at(self.own_parts, stage.rank, covered)
            else:
                np.maximum.at(self.visiting, stage.rank, covered * stage.rows)

    def add_stage(self, stage: RingStages, *, first: bool) -> None:
        """Count the buffers of one stage; gradients of the first stage stay on their rank."""
        if first:  # no keys of others are here: the keys that are sent take their place
            np.maximum.at(self.keys, stage.rank, stage.own_rows)
            return
        np.maximum.at(self.own, stage.rank, stage.own_rows)
        np.maximum.at(self.keys, stage.rank, stage.rows)
        np.maximum.at(self.grads, stage.rank, stage.rows)
        np.maximum.at(self.returned, stage.owner, stage.rows - stage.next_rows)

    def key_bytes(self, sizes: RankSizes) -> Ints:
        """Two buffers of keys, one to compute on while the other is filled, and one of own keys that are sent."""
        return (2 * self.keys + self.own) * sizes.key_row

    def grad_bytes(self, sizes: RankSizes) -> Ints:
        """Two buffers of gradients in flight, and one for the own gradients that return."""
        return (2 * self.grads + self.returned) * sizes.key_grad_row

    def forward_bytes(self, sizes: RankSizes, *, cpu: bool) -> Floats:
        """Key buffers and states, which are merged beside the buffers if there are many."""
        return self.key_bytes(sizes) + sizes.state_bytes(self.parts, cpu=cpu)

    def whole_forward_bytes(self, sizes: RankSizes, *, cpu: bool) -> Floats:
        """As above, for all parts of a result: if they are few, they are merged when the buffers are gone."""
        waiting = self.key_bytes(sizes) + self.parts * sizes.rows * (sizes.out_row + sizes.lse_row)
        merging = sizes.state_bytes(self.parts, cpu=cpu)
        many = self.forward_bytes(sizes, cpu=cpu)
        return np.where(self.calls < PENDING_PARTS, np.maximum(waiting, merging), many)

    def backward_bytes(self, sizes: RankSizes, own: Ints) -> Floats:
        """Key and gradient buffers, and partial gradients of the `own` and of visiting keys."""
        buffers = self.key_bytes(sizes) + self.grad_bytes(sizes)
        partial = (np.minimum(self.own_parts, PENDING_PARTS) * own + self.visiting) * sizes.key_row
        results = sizes.rows * (sizes.query_sum_row + sizes.query_row) + own * (sizes.key_grad_row + sizes.key_row)
        peak: Floats = np.maximum(buffers + partial + sizes.query_grad_bytes(self.parts), results)
        return peak


@lru_cache(maxsize=32)
def _ring_buffers(shards: Shards, groups: tuple[tuple[int, ...], ...], world: int) -> RingBuffers:
    """The buffers of the rings of all rank groups. They do not depend on heads and batch, which plans differ in."""
    buffers = RingBuffers(world)
    buffers.add_ring(ring_stages(shards, groups))
    return buffers


class RingSpec(GroupSpec):
    """The keys of every rank are sent once around the ring."""

    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """One round per stage."""
        stages = ring_stages(grouped.shards, grouped.all_groups)
        return ring_rounds(stages, grouped.sizes, PartsCount(grouped.sizes), backward=backward)

    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Buffers and partial results do not grow with the number of ranks."""
        sizes, groups = grouped.sizes, grouped.all_groups
        buffers = _ring_buffers(grouped.shards, tuple(map(tuple, groups)), sizes.world)
        if not backward:
            return buffers.whole_forward_bytes(sizes, cpu=grouped.workload.device == "cpu")
        own = np.zeros(sizes.world, dtype=np.int64)
        for group in groups:
            own[group] = key_rows(grouped.shards)
        return buffers.backward_bytes(sizes, own)

    def group_tiles(self, grouped: GroupedWorkload) -> list[NamedTiles[GroupTile]]:
        """At stage s the ranks compute on the keys that are `offsets[s]` places before them."""
        plan = ring_plan(grouped.shards)
        steps = [NamedTiles[GroupTile](key_source(offset, plan.world), []) for offset in plan.offsets]
        for shape, groups in grouped.groups.items():
            for group in groups:
                for i, rank in enumerate(group):
                    for step, stage in zip(steps, plan.stages(i), strict=True):
                        keys, kv_heads = single(stage.block), range(shape.kv_heads)
                        step.tiles.append(GroupTile(rank, kv_heads, i, keys, stage.patch.pairs))
        return steps


def key_source(offset: int, world: int, what: str = "rank r") -> str:
    """The rank (or node) whose keys are present at an offset, counted in the shorter direction around the ring."""
    if offset == 0:
        return f"keys of {what}"
    return f"keys of {what} - {offset}" if 2 * offset <= world else f"keys of {what} + {world - offset}"
