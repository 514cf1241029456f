"""The ring schedule: every rank's keys are sent around the ring, stage by stage.

    stage 0      every rank has its own keys
    stage s      rank r has the keys of rank r - offsets[s], received from the rank that had them a stage before

Three rules reduce bytes and work:

- An offset at which no rank sees anything is skipped: a sliding window stops after its halo.
- A block of keys stops at the last rank that sees it, and only the rows that some later rank sees are sent on. Under a
  causal zigzag, sending towards lower ranks, the late chunks stop at rank 0: three quarters of the bytes of the usual
  ring.
- Gradients of keys follow the keys and return to the owner from the last rank. They start at the first rank that
  computes on visiting keys, so they hold only the rows seen so far.

The ring sends in whichever direction moves fewer bytes; that can differ between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy as np

from attnmesh.core import ranges
from attnmesh.core.ranges import hull
from attnmesh.plan.blocks import Kind, Patch
from attnmesh.plan.program import Floats, Ints, Kernels, Messages, Round
from attnmesh.plan.schedule import GroupSpec, GroupStep, GroupTile, single
from attnmesh.plan.shards import Shards
from attnmesh.plan.vectorized import RingStages, vectorized
from attnmesh.plan.workload import PENDING_PARTS, GroupedWorkload, RankSizes, key_rows, relayout, row_coverage

NOTHING = range(0)


@dataclass(frozen=True)
class Stage:
    """What a rank does at one stage. All ranges are rows of the shard of the rank `block`."""

    block: int  # the rank that owns these keys
    keys: range  # the rows that were received; may be empty
    came_from: int  # the rank that had them a stage before
    seen: range  # the rows that this rank's queries see; empty: they are only forwarded
    patch: Patch  # the queries against the rows `seen`
    next_keys: range  # the rows that are sent on; empty: this is the last stop
    next_rank: int  # to this rank; at the last stop, the owner
    grads_in: range  # the rows whose gradients were received with them
    grads_out: range  # the rows whose gradients are sent to next_rank: grads_in and what this stage has seen


@dataclass(frozen=True)
class RingPlan:
    """The route of every rank's keys around the ring."""

    shards: Shards
    offsets: tuple[int, ...]  # 0 first; at stage s rank r holds keys of rank (r - offsets[s]) % world

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The stages of `rank`, in order."""
        return self._stages[rank]

    def returns(self, rank: int) -> tuple[int, int, range]:
        """The last stop of the rank's own keys: (stage, rank there, rows of gradients that return)."""
        stage = self._last[rank]
        return stage, self._holder(rank, stage), self._grads[rank][stage]

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        return sum(stage.patch.pairs for stage in self.stages(rank))

    def rows_sent(self, rank: int) -> int:
        """The rows of keys the rank sends in a forward; a row is 2 x kv_heads x head_dim x batch elements."""
        return sum(len(stage.next_keys) for stage in self.stages(rank))

    def grad_rows_sent(self, rank: int) -> int:
        """The rows of key gradients the rank sends in a backward, in float32."""
        return sum(len(stage.grads_out) for stage in self.stages(rank))

    def moved(self, grad_weight: float) -> float:
        """What all ranks send, in rows of keys; a row of gradients counts as `grad_weight` of them."""
        ranks = range(self.world)
        grads = grad_weight * sum(map(self.grad_rows_sent, ranks)) if grad_weight else 0.0
        return sum(map(self.rows_sent, ranks)) + grads

    def _holder(self, block: int, stage: int) -> int:
        return (block + self.offsets[stage]) % self.world

    @cached_property
    def _carried(self) -> list[list[range]]:
        """For every block and stage, the rows that are sent there: those seen there or later."""
        carried = []
        for block in range(self.world):
            rows = [NOTHING] * len(self.offsets)
            needed = NOTHING
            for stage in reversed(range(1, len(self.offsets))):
                needed = _hull(needed, hull(self.shards.patch(self._holder(block, stage), block).seen))
                rows[stage] = needed
            rows[0] = range(ranges.size(self.shards.keys[block]))
            carried.append(rows)
        return carried

    @cached_property
    def _grads(self) -> list[list[range]]:
        """For every block and stage, the rows of gradients that exist after the stage (those of stage 0 stay local)."""
        known = []
        for block in range(self.world):
            rows, seen = [NOTHING], NOTHING
            for stage in range(1, len(self.offsets)):
                seen = _hull(seen, hull(self.shards.patch(self._holder(block, stage), block).seen))
                rows.append(seen if self._carried[block][stage] else NOTHING)
            known.append(rows)
        return known

    @cached_property
    def _last(self) -> list[int]:
        """For every block, the last stage that it reaches."""
        return [max(s for s, rows in enumerate(carried) if rows or s == 0) for carried in self._carried]

    @cached_property
    def _stages(self) -> list[tuple[Stage, ...]]:
        return [tuple(self._stage(rank, s) for s in range(len(self.offsets))) for rank in range(self.world)]

    def _stage(self, rank: int, stage: int) -> Stage:
        block = (rank - self.offsets[stage]) % self.world
        keys = self._carried[block][stage]
        goes_on = stage < self._last[block]
        # A rank's own keys are all local, seen or not; of visiting keys only the rows that are seen are used.
        seen = keys if stage == 0 else hull(self.shards.patch(rank, block).seen) if keys else NOTHING
        return Stage(
            block=block,
            keys=keys,
            came_from=self._holder(block, max(0, stage - 1)),
            seen=seen,
            patch=self.shards.patch(rank, block, seen),
            next_keys=self._carried[block][stage + 1] if goes_on else NOTHING,
            next_rank=self._holder(block, stage + 1) if goes_on else block,
            grads_in=self._grads[block][stage - 1] if stage > 1 and keys else NOTHING,
            grads_out=self._grads[block][stage],
        )


@lru_cache(maxsize=256)
def ring_plan(shards: Shards, *, grad_weight: float = 0.0) -> RingPlan:
    """The ring that moves the fewest bytes; a row of gradients counts as `grad_weight` rows of keys."""
    return min(both_directions(shards, needed_offsets(shards)), key=lambda plan: plan.moved(grad_weight))


def needed_offsets(shards: Shards) -> list[int]:
    """The offsets at which some rank sees some of the keys it would receive."""
    world = shards.world
    return [o for o in range(1, world) if any(shards.patch(r, (r - o) % world).seen for r in range(world))]


def both_directions(shards: Shards, offsets: list[int]) -> tuple[RingPlan, RingPlan]:
    """The ring that sends towards higher ranks and the one that sends towards lower ranks."""
    return RingPlan(shards, (0, *offsets)), RingPlan(shards, (0, *reversed(offsets)))


def _hull(a: range, b: range) -> range:
    if not a or not b:
        return a or b
    return range(min(a.start, b.start), max(a.stop, b.stop))


# Stages as arrays over ranks.

_MAX_CUT_SEGMENTS = 8  # segments of the mask up to which the blocks of a patch are counted exactly


def ring_stages(shards: Shards, groups: Sequence[Sequence[int]], grad_weight: float) -> Iterator[RingStages]:
    """The stages of the rings of all rank groups; the i-th rank of each holds the i-th shard."""
    arrays = vectorized(shards)
    if arrays is not None:
        return arrays.ring(groups, grad_weight)
    plan = ring_plan(shards, grad_weight=grad_weight)
    return concurrent_stages([plan_stages(plan, group) for group in groups])


def plan_stages(plan: RingPlan, ranks: Sequence[int], *, computes: bool = True) -> Iterator[RingStages]:
    """The stages of a plan whose i-th rank is the rank `ranks[i]`. An outer ring only moves keys."""
    stages = [plan.stages(i) for i in range(plan.world)]
    for at in range(len(plan.offsets)):
        rows = [
            (
                ranks[i], mine[at].patch.pairs if computes else 0, _calls(mine[at].patch) if computes else 0,
                len(mine[at].seen),
                ranks[mine[at].next_rank], len(mine[at].next_keys), len(mine[at].grads_out),
                *(causal_squares(mine[at].patch) if computes else (0, 0)),
            )
            for i, mine in enumerate(stages)
        ]  # fmt: skip
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


def _calls(patch: Patch) -> int:
    """Kernel calls of a patch; an estimate for many documents."""
    return len(patch.blocks) if patch.segments <= _MAX_CUT_SEGMENTS else min(patch.segments, patch.pairs)


# Rounds: the loops of parallel/ring.py, one round per stage.


class PartsCount:
    """The number of partial results that every rank has computed; one ring may continue the state of another."""

    def __init__(self, sizes: RankSizes) -> None:
        self.parts: Ints = np.zeros(sizes.world, dtype=np.int64)


def ring_forward(
    stages: Iterator[RingStages], sizes: RankSizes, count: PartsCount, *, name: str = "keys", finish: bool = True
) -> Iterator[Round]:
    """The next keys are sent while these are computed. `finish`: the last stage also rounds the results."""
    for at, (stage, last) in enumerate(_with_last(stages)):
        work = _work(at, stage, sizes, count, last=last, finish=finish, backward=False)
        posted = {f"{name} {at + 1}": key_messages(stage, sizes)}
        yield Round(f"{name} {at}", posted, work, tuple(posted))


def ring_backward(
    stages: Iterator[RingStages], sizes: RankSizes, count: PartsCount, *, name: str = "keys", finish: bool = True
) -> Iterator[Round]:
    """Keys are sent as in the forward; their gradients follow one stage behind and return to the owner at the end."""
    gradients: dict[str, Messages] = {}
    for at, (stage, last) in enumerate(_with_last(stages)):
        work = _work(at, stage, sizes, count, last=last, finish=finish, backward=True)
        if at:  # gradients of visiting keys are added to those received with them
            added = sizes.by_rank(stage.rank, stage.grad_rows) * sizes.key_grad_row
            work = (*work, relayout(added, calls=2, overlapped=True))
        posted = {f"{name} {at + 1}": key_messages(stage, sizes)} | gradients
        yield Round(f"{name} {at}", posted, work, tuple(posted))
        gradients = {f"{name} gradients {at}": grad_messages(stage, sizes)} if at else {}
    yield Round(f"{name} return", gradients, (), tuple(gradients))


def key_messages(stage: RingStages, sizes: RankSizes) -> Messages:
    """The keys that are sent after a stage."""
    return Messages.sized(stage.rank, stage.next_rank, stage.next_rows * sizes.key_row[stage.rank])


def grad_messages(stage: RingStages, sizes: RankSizes) -> Messages:
    """The gradients that are sent after a stage."""
    return Messages.sized(stage.rank, stage.next_rank, stage.grad_rows * sizes.key_grad_row[stage.rank])


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
    if at:
        return attention, merge
    return relayout(sizes.by_rank(stage.rank, stage.next_rows) * sizes.key_row), attention, merge


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
        zeros = np.zeros(self.world, dtype=np.int64)
        self.keys, self.grads, self.returned = zeros.copy(), zeros.copy(), zeros.copy()  # rows in buffers
        self.own_parts, self.parts, self.visiting = np.zeros((3, self.world))  # in whole rows of queries, and of keys

    def add_ring(self, stages: Iterator[RingStages], *, own_keys: bool = True) -> None:
        """Count all stages of a ring. `own_keys`: ranks hold their own keys at the first stage."""
        for at, stage in enumerate(stages):
            self.add_stage(stage, first=at == 0)
            covered = row_coverage(stage.calls)
            np.add.at(self.parts, stage.rank, covered)
            if at == 0 and own_keys:
                np.maximum.at(self.own_parts, stage.rank, covered)
            else:
                np.maximum.at(self.visiting, stage.rank, covered * stage.seen)

    def add_stage(self, stage: RingStages, *, first: bool) -> None:
        """Count the buffers of one stage; gradients of the first stage stay on their rank."""
        np.maximum.at(self.keys, stage.next_rank, stage.next_rows)
        if first:
            np.maximum.at(self.keys, stage.rank, stage.next_rows)
        else:
            np.maximum.at(self.grads, stage.rank, stage.grad_rows)
            np.maximum.at(self.returned, stage.next_rank, stage.grad_rows)

    def key_bytes(self, sizes: RankSizes) -> Ints:
        """Two buffers of keys: one is computed on while the other is filled."""
        return 2 * self.keys * sizes.key_row

    def grad_bytes(self, sizes: RankSizes) -> Ints:
        """Two buffers of gradients in flight, and one for the own gradients that return."""
        return (2 * self.grads + self.returned) * sizes.key_grad_row

    def forward_bytes(self, sizes: RankSizes, *, cpu: bool) -> Floats:
        """Key buffers and states."""
        return self.key_bytes(sizes) + sizes.state_bytes(self.parts, cpu=cpu)

    def backward_bytes(self, sizes: RankSizes, own: Ints) -> Floats:
        """Key and gradient buffers, and partial gradients of the `own` and of visiting keys."""
        buffers = self.key_bytes(sizes) + self.grad_bytes(sizes)
        partial = (np.minimum(self.own_parts, PENDING_PARTS) * own + self.visiting) * sizes.key_row
        results = sizes.rows * (sizes.query_sum_row + sizes.query_row) + own * (sizes.key_grad_row + sizes.key_row)
        peak: Floats = np.maximum(buffers + partial + sizes.query_grad_bytes(self.parts), results)
        return peak


class RingSpec(GroupSpec):
    """The keys of every rank are sent once around the ring."""

    name = "ring"

    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """One round per stage."""
        stages = ring_stages(grouped.shards, grouped.all_groups, grouped.workload.grad_weight(backward))
        return (ring_backward if backward else ring_forward)(stages, grouped.sizes, PartsCount(grouped.sizes))

    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Buffers and partial results do not grow with the number of ranks."""
        sizes, groups = grouped.sizes, grouped.all_groups
        buffers = RingBuffers(sizes.world)
        buffers.add_ring(ring_stages(grouped.shards, groups, grouped.workload.grad_weight(backward)))
        if not backward:
            return buffers.forward_bytes(sizes, cpu=grouped.workload.device == "cpu")
        own = np.zeros(sizes.world, dtype=np.int64)
        for group in groups:
            own[group] = key_rows(grouped.shards)
        return buffers.backward_bytes(sizes, own)

    def group_tiles(self, grouped: GroupedWorkload) -> list[GroupStep]:
        """At stage s the ranks compute on the keys that are `offsets[s]` places before them."""
        plan = ring_plan(grouped.shards)
        steps = [GroupStep(key_source(offset, plan.world), []) for offset in plan.offsets]
        for shape, groups in grouped.groups.items():
            for index, group in enumerate(groups):
                for i, rank in enumerate(group):
                    for step, stage in zip(steps, plan.stages(i), strict=True):
                        keys, kv_heads = single(stage.block), range(shape.kv_heads)
                        step.tiles.append(GroupTile(rank, index, kv_heads, i, keys, stage.patch.pairs))
        return steps


def key_source(offset: int, world: int, what: str = "rank r") -> str:
    """The rank (or node) whose keys are present at an offset, counted in the shorter direction around the ring."""
    if offset == 0:
        return f"keys of {what}"
    return f"keys of {what} - {offset}" if 2 * offset <= world else f"keys of {what} + {world - offset}"


RING = RingSpec()
