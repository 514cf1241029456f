"""What each schedule costs: its program, the load of every rank, its peak memory, and its steps.

Every schedule of `ContextParallel` has one record, a `ScheduleSpec`, in `SPECS`.
`program` is the one source: `explain`, the cost model, the simulator and the report read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from attnmesh.core import ranges
from attnmesh.core.visibility import Kind, Patch
from attnmesh.ops.merge import PENDING_PARTS
from attnmesh.plan.allgather import gather_plan, groups_that_fill, head_groups
from attnmesh.plan.leaves import leaf_plan, leaf_size
from attnmesh.plan.ring import Block, Joined, RingPlan, joined_blocks, packed_once, ring_plan, rows_in
from attnmesh.plan.shards import SCHEDULES, Shape, Shards, Workload, node_shards
from attnmesh.plan.two_level import two_level_plan
from attnmesh.plan.ulysses import HeadShare, head_share, replicated
from attnmesh.planner.program import (
    Exchange,
    Floats,
    Ints,
    Kernels,
    Load,
    Messages,
    Program,
    Round,
    all_to_all,
    concurrent_rounds,
    program_loads,
)
from attnmesh.planner.sizes import GroupedWorkload, RankSizes, copy, key_rows, query_rows, relayout, row_coverage
from attnmesh.planner.vectorized import Gathered, RingStages, vectorized
from attnmesh.utils.validation import check_bool, check_choice, check_type

# `ScheduleSpec`: what describes a schedule, its communication rounds, its peak memory and its tiles.


T = TypeVar("T")


class Tile(NamedTuple):
    """A rank computes the queries of some shards against the keys of some shards, for some query heads."""

    rank: int
    heads: range  # query heads
    queries: range  # the ranks whose queries these are
    keys: range  # the ranks whose keys these are
    pairs: int  # visible (query, key) pairs per head


class GroupTile(NamedTuple):
    """A tile of a rank group: places in the group instead of ranks, and key heads of the group instead of all."""

    rank: int
    kv_heads: range
    query: int  # the place in the group whose queries these are
    keys: range  # the places whose keys these are
    pairs: int

    def placed(self, share: HeadShare, queries_per_key: int, ranks: int) -> Tile:
        """The tile of ranks, where the rank has the heads `share` and a place of the group is `ranks` ranks."""
        first = max(share.q.start, (share.kv.start + self.kv_heads.start) * queries_per_key)
        stop = min(share.q.stop, (share.kv.start + self.kv_heads.stop) * queries_per_key)
        queries = range(self.query * ranks, (self.query + 1) * ranks)
        keys = range(self.keys.start * ranks, self.keys.stop * ranks)
        return Tile(self.rank, range(first, stop), queries, keys, self.pairs)


class NamedTiles(NamedTuple, Generic[T]):
    """The tiles of one step."""

    name: str
    tiles: list[T]


class ScheduleSpec(ABC):
    """The description of one schedule. It requires that the schedule can serve the workload."""

    @abstractmethod
    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """What all ranks compute and send, round by round."""

    @abstractmethod
    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """Peak bytes by rank, see `schedules.peak_bytes`."""

    @abstractmethod
    def tiles(self, workload: Workload) -> list[NamedTiles[Tile]]:
        """The tiles of a forward: one entry for every round for which `schedules.is_step` is true."""


class GroupSpec(ScheduleSpec):
    """A schedule that several rank groups can run at once, each over the same shards: a ring, an all-gather."""

    @abstractmethod
    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """The rounds of all groups."""

    @abstractmethod
    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Peak bytes by rank."""

    @abstractmethod
    def group_tiles(self, grouped: GroupedWorkload) -> list[NamedTiles[GroupTile]]:
        """The tiles of a forward of all groups."""

    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """The rounds of one group of all ranks."""
        return self.group_rounds(GroupedWorkload.of(workload), backward=backward)

    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """Peak bytes of one group of all ranks."""
        return self.group_memory(GroupedWorkload.of(workload), backward=backward)

    def tiles(self, workload: Workload) -> list[NamedTiles[Tile]]:
        """The tiles of one group of all ranks."""
        shape = workload.shape
        share = HeadShare(range(shape.q_heads), range(shape.kv_heads), ())
        return [
            NamedTiles(name, [each.placed(share, shape.q_heads // shape.kv_heads, 1) for each in tiles if each.pairs])
            for name, tiles in self.group_tiles(GroupedWorkload.of(workload))
        ]


def single(rank: int) -> range:
    """A range of one rank."""
    return range(rank, rank + 1)


# The ring schedule: its stages as arrays over ranks, its rounds, its peak memory and its tiles.


# Stages as arrays over ranks.

_MAX_CUT_SEGMENTS = 8  # segments of the mask up to which the blocks of a patch are counted exactly


def ring_stages(shards: Shards, groups: Sequence[Sequence[int]], joined: int = 1) -> Iterator[RingStages]:
    """The stages of the rings of all rank groups; the i-th rank of each holds the i-th shard."""
    arrays = vectorized(shards)
    if arrays is not None and joined == 1:
        return arrays.ring(groups)
    plan = ring_plan(shards, joined)
    return concurrent_stages([plan_stages(plan, group) for group in groups])


def plan_stages(plan: RingPlan, ranks: Sequence[int], *, computes: bool = True) -> Iterator[RingStages]:
    """The stages of a plan whose i-th rank is the rank `ranks[i]`. An outer ring only moves keys."""
    for at in range(plan.count):
        visits = plan.visits(at)
        after = plan.visits(at + 1) if at + 1 < plan.count else range(0)
        rows = []
        for i, rank in enumerate(ranks):
            stage = plan.stages(i)[at]
            work = (stage.patch.pairs, kernel_calls(stage.patch)) if computes else (0, 0)
            causal = causal_squares(stage.patch) if computes else (0, 0)
            packed = sum(len(to) for _, to in packed_once(stage.own_sent)[1])
            for visit, block, own in zip_longest(visits, stage.blocks, after):
                mine = (rank, 0) if own is None else (ranks[plan.holder(i, own)], rows_in(plan.sent_by_owner(i, own)))
                rows.append((rank, *work, *_visiting(plan, ranks, visit, block), *mine, packed, *causal))
                work, packed, causal = (0, 0), 0, (0, 0)  # of the rank, not of a block
        yield RingStages(*np.array(rows, dtype=np.int64).reshape(-1, len(RingStages._fields)).T)


def _visiting(
    plan: RingPlan, ranks: Sequence[int], visit: int | None, block: Block | None
) -> tuple[int, int, int, int]:
    """The rows of a block, its owner, the rank that has it next, and the rows that are sent to it."""
    if visit is None or block is None:
        return 0, ranks[0], ranks[0], 0
    sent = plan.passed_on(block.owner, visit)
    after = plan.holder(block.owner, visit + plan.joined) if sent else block.owner
    return ranges.size(block.rows), ranks[block.owner], ranks[after], rows_in(sent)


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
    packed = sizes.by_rank(stage.rank, stage.packed_rows)
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
            calls = self._totals(stage.rank, stage.calls)
            covered = row_coverage(calls)
            self.parts += covered
            self.calls += calls
            if at == 0 and own_keys:
                self.own_parts = np.maximum(self.own_parts, covered)
            else:
                self.visiting = np.maximum(self.visiting, covered * self._totals(stage.rank, stage.rows))

    def add_stage(self, stage: RingStages, *, first: bool) -> None:
        """Count the buffers of one stage; gradients of the first stage stay on their rank."""
        packed = self._totals(stage.rank, stage.packed_rows)
        if first:  # no keys of others are here: the keys that are sent take their place
            self.keys = np.maximum(self.keys, packed)
            return
        rows = self._totals(stage.rank, stage.rows)
        self.own = np.maximum(self.own, packed)
        self.keys = np.maximum(self.keys, rows)
        self.grads = np.maximum(self.grads, rows)
        self.returned = np.maximum(self.returned, self._totals(stage.owner, stage.rows - stage.next_rows))

    def _totals(self, ranks: Ints, values: Ints) -> Ints:
        """Values of ranks, added up by rank."""
        return np.bincount(ranks, values, self.world).astype(np.int64)

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
def _ring_buffers(shards: Shards, groups: tuple[tuple[int, ...], ...], world: int, joined: int) -> RingBuffers:
    """The buffers of the rings of all rank groups. Heads and batch, which plans differ in, only change `joined`."""
    buffers = RingBuffers(world)
    buffers.add_ring(ring_stages(shards, groups, joined))
    return buffers


def _joined(grouped: GroupedWorkload) -> Joined:
    """How many blocks a stage joins: only in rings whose ranks are all on one node."""
    workload = grouped.workload
    if workload.world != grouped.shards.world:
        return Joined()
    return joined_blocks(workload.shards, workload.shape.key_row, workload.ranks_per_node, workload.device)


class RingSpec(GroupSpec):
    """The keys of every rank are sent once around the ring."""

    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """One round per stage."""
        joined = _joined(grouped)
        stages = ring_stages(grouped.shards, grouped.all_groups, joined.backward if backward else joined.forward)
        return ring_rounds(stages, grouped.sizes, PartsCount(grouped.sizes), backward=backward)

    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Buffers and partial results do not grow with the number of ranks."""
        sizes, groups, joined = grouped.sizes, grouped.all_groups, _joined(grouped)
        blocks = joined.backward if backward else joined.forward
        buffers = _ring_buffers(grouped.shards, tuple(map(tuple, groups)), sizes.world, blocks)
        if not backward:
            return buffers.whole_forward_bytes(sizes, cpu=grouped.workload.device == "cpu")
        own = np.zeros(sizes.world, dtype=np.int64)
        for group in groups:
            own[group] = key_rows(grouped.shards)
        return buffers.backward_bytes(sizes, own)

    def group_tiles(self, grouped: GroupedWorkload) -> list[NamedTiles[GroupTile]]:
        """At every stage the ranks compute on the keys that are some offsets before them."""
        plan = ring_plan(grouped.shards, _joined(grouped).forward)
        offsets = ([plan.offsets[visit] for visit in plan.visits(at)] for at in range(plan.count))
        steps = [NamedTiles[GroupTile](key_source(of_stage, plan.world), []) for of_stage in offsets]
        for shape, groups in grouped.groups.items():
            for group in groups:
                for i, rank in enumerate(group):
                    for step, stage in zip(steps, plan.stages(i), strict=True):
                        for owner, rows, _ in stage.blocks:
                            pairs = grouped.shards.patch(i, owner, rows if owner != i else None).pairs
                            step.tiles.append(GroupTile(rank, range(shape.kv_heads), i, single(owner), pairs))
        return steps


def key_source(offsets: Sequence[int], world: int, what: str = "rank r") -> str:
    """The ranks (or node) whose keys are present at some offsets, counted in the shorter direction around the ring."""

    def signed(offset: int) -> str:
        if offset == 0:
            return ""
        return f" - {offset}" if 2 * offset <= world else f" + {world - offset}"

    return "keys of " + ", ".join(what + signed(offset) for offset in offsets)


# The two-level ring schedule: its rounds, its peak memory and its tiles.

# Rounds: at every outer stage the next node's keys are sent while the inner rings run once.

Inner = Callable[[int], Iterator[RingStages]]
"""From an outer stage to the stages of all inner rings."""


def _stages(shards: Shards, ranks_per_node: int) -> tuple[Iterator[RingStages], Inner]:
    """The stages of the outer rings, and of the inner rings."""
    arrays = vectorized(shards)
    if arrays is not None:
        return arrays.two_level(ranks_per_node)
    plan = two_level_plan(shards, ranks_per_node)
    nodes = range(plan.nodes)
    groups = [[node * ranks_per_node + i for node in nodes] for i in range(ranks_per_node)]
    outer = concurrent_stages([plan_stages(plan.outer(i), group, computes=False) for i, group in enumerate(groups)])

    def inner(stage: int) -> Iterator[RingStages]:
        rings = [plan.inner_ring(node, stage) for node in nodes]
        return concurrent_stages(
            [plan_stages(ring, range(n * ranks_per_node, (n + 1) * ranks_per_node)) for n, ring in enumerate(rings)]
        )

    return outer, inner


def _rounds(outer: Iterator[RingStages], inner: Inner, sizes: RankSizes, *, backward: bool) -> Iterator[Round]:
    """An outer stage has the rounds of its longest inner ring."""
    count, gradients = PartsCount(sizes), dict[str, Messages]()
    for t, stage in enumerate(outer):
        keys = {f"keys between nodes {t + 1}": key_messages(stage, sizes)}
        rounds = ring_rounds(inner(t), sizes, count, backward=backward, name=f"keys {t}.", finish=False)
        yield from _during(rounds, keys | gradients)
        gradients = {}
        if t and backward:
            rows = sizes.by_rank(stage.rank, stage.rows)
            yield Round(f"add gradients {t}", work=(relayout(rows * sizes.key_grad_row, calls=2),))
            gradients = {f"gradients between nodes {t}": grad_messages(stage, sizes)}
    last = sizes.merge(count.parts, count.parts, last=True)
    yield Round("return" if backward else "finish", gradients, (last,), tuple(gradients))


def _during(inner: Iterator[Round], exchanges: dict[str, Messages]) -> Iterator[Round]:
    """Rounds with more exchanges, which start in the first round and are waited for in the last."""
    rounds = list(inner)
    rounds[0] = replace(rounds[0], starts={**exchanges, **rounds[0].starts})
    rounds[-1] = replace(rounds[-1], waits=(*rounds[-1].waits, *exchanges))
    yield from rounds


@lru_cache(maxsize=32)
def _buffers(shards: Shards, ranks_per_node: int) -> tuple[RingBuffers, RingBuffers]:
    """The buffers of the outer and of the inner rings, which do not depend on heads and batch."""
    outer, inner = _stages(shards, ranks_per_node)
    between, within = RingBuffers(shards.world), RingBuffers(shards.world)
    for at, stage in enumerate(outer):
        between.add_stage(stage, first=at == 0)
        within.add_ring(inner(at), own_keys=at == 0)
    return between, within


class TwoLevelRingSpec(ScheduleSpec):
    """A ring within every node, and a ring between nodes."""

    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """One round per stage of the inner rings, for every outer stage."""
        outer, inner = _stages(workload.shards, workload.ranks_per_node)
        return _rounds(outer, inner, RankSizes.of_workload(workload), backward=backward)

    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """The buffers of both rings."""
        sizes = RankSizes.of_workload(workload)
        between, within = _buffers(workload.shards, workload.ranks_per_node)
        if not backward:
            return between.key_bytes(sizes) + within.forward_bytes(sizes, cpu=workload.device == "cpu")
        # Visiting keys have sums of gradients on this rank, as its own keys have.
        visiting = between.keys * (sizes.key_grad_row + sizes.key_row)
        outside = between.key_bytes(sizes) + between.grad_bytes(sizes) + visiting
        return outside + within.backward_bytes(sizes, key_rows(workload.shards))

    def tiles(self, workload: Workload) -> list[NamedTiles[Tile]]:
        """At an outer stage the ranks of a node compute on the keys of one node, stage by stage of the inner ring."""
        plan = two_level_plan(workload.shards, workload.ranks_per_node)
        heads, per_node = range(workload.shape.q_heads), plan.ranks_per_node
        steps: list[NamedTiles[Tile]] = []
        for turn, offset in enumerate(plan.outer_offsets):
            rings = [plan.inner_ring(node, turn) for node in range(plan.nodes)]
            name = key_source([offset], plan.nodes, "node n")
            stages = max(ring.count for ring in rings)
            new = [NamedTiles[Tile](f"{name}, inner stage {s}", []) for s in range(stages)]
            for node, ring in enumerate(rings):
                first = ((node - offset) % plan.nodes) * per_node  # the first rank whose keys the node has
                for i in range(per_node):
                    for step, stage in zip(new, ring.stages(i), strict=False):
                        rank, keys = node * per_node + i, single(first + stage.blocks[0].owner)
                        if stage.patch.pairs:
                            step.tiles.append(Tile(rank, heads, single(rank), keys, stage.patch.pairs))
            steps += new
        return steps


# The all-gather schedule: its rounds, its peak memory and its tiles.


def workload_head_groups(workload: Workload, shards: Shards, shape: Shape) -> list[range]:
    """The groups of kv heads on the workload's device."""
    if workload.device == "cpu":
        return head_groups(shape.kv_heads)
    most = groups_that_fill(shards, shape.batch, shape.q_heads, reproducible=workload.reproducible)
    return head_groups(shape.kv_heads, most)


# Rounds: a group of kv heads per round, its keys one round ahead of its attention.


def gathered(shards: Shards, groups: Sequence[Sequence[int]], world: int, ranks_per_node: int) -> Gathered:
    """What every rank of every rank group gathers; the i-th rank of each holds the i-th shard."""
    arrays = vectorized(shards)
    if arrays is not None:
        return arrays.gathered(groups, world, ranks_per_node)
    plan = gather_plan(shards)
    pairs, calls, rows, own, *causal = columns = np.zeros((6, world), dtype=np.int64)
    for i in range(plan.world):
        patch = plan.patch(i)
        held = ranges.size(plan.shards.keys[i])
        mine = plan.pairs(i), kernel_calls(patch), plan.rows(i), held, *causal_squares(patch)
        columns[:, [group[i] for group in groups]] = np.array(mine)[:, None]
    ends = [(s, t) for s in range(plan.world) for t in range(plan.world) if s != t]
    traffic = Messages.of((group[s], group[t], plan.rows_sent(s, t)) for group in groups for s, t in ends)
    return Gathered(pairs, calls, rows, own, traffic, (causal[0], causal[1]))


def _rounds_of_part(
    part: Gathered, heads: Sequence[int], sizes: RankSizes, name: str, *, backward: bool,
    returned: Messages | None = None,
) -> Iterator[Round]:  # fmt: skip
    """The keys of the next group of heads are sent while this group is computed. `heads` is the kv heads of each group.

    In a backward, the gradients of the previous group return to their owners at the same time: the rows that were
    gathered, or `returned`.
    """
    back = part.traffic.returned() if returned is None else returned
    gradients: dict[str, Exchange] = {}
    for at, count in enumerate((*heads, 0)):
        posted = {f"{name} {at}": part.traffic.scaled(sizes.key_row * count // sum(heads))} if count else {}
        work = [_pack(part, sizes, count, sum(heads))] if count else []
        if at:
            work += _attention(part, sizes, heads[at - 1], sum(heads), backward=backward)
        if not backward and not count and len(heads) > 1:
            work.append(copy(sizes.rows * sizes.out_row * (part.pairs > 0)))  # the groups' outputs are concatenated
        yield Round(f"{name} {at}", posted | gradients, tuple(work), (*posted, *gradients))
        gradients = {}
        if at and backward:
            row = sizes.key_grad_row * heads[at - 1] // sum(heads)
            gradients = {f"{name} gradients {at}": back.scaled(row)}
    if backward:
        yield Round(f"{name} return", gradients, (), tuple(gradients))


def _pack(part: Gathered, sizes: RankSizes, heads: int, of: int) -> Kernels:
    """The own keys of a group: into a message, if some rank needs them, and among the gathered keys."""
    copies = 1 + (part.traffic.sent(sizes.world) > 0)
    return relayout(copies * part.own * sizes.key_row * heads // of, calls=4)


def _attention(part: Gathered, sizes: RankSizes, heads: int, of: int, *, backward: bool) -> list[Kernels]:
    share = heads / of
    kernels = sizes.attention(part.pairs, part.calls, backward=backward, causal=part.causal)
    if backward:
        after = relayout(part.rows * sizes.key_grad_row * share, calls=2)  # into the message that returns
    else:
        after = sizes.merge(np.zeros_like(part.calls), part.calls, last=True)
        after = replace(after.scaled(share), overlapped=True)  # runs of queries finish on streams of their own
    return [kernels.scaled(share), after]


class AllGatherSpec(GroupSpec):
    """The keys that a rank sees are gathered, a few kv heads at a time."""

    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """One round more than there are groups of heads."""
        return concurrent_rounds([self._gathered_rounds(grouped, shape, backward=backward) for shape in grouped.groups])

    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Gathered keys of two groups of heads, and the results."""
        sizes, workload = grouped.sizes, grouped.workload
        peak = np.zeros(sizes.world)
        for shape, groups in grouped.groups.items():
            largest = max(map(len, workload_head_groups(workload, grouped.shards, shape)))
            share = np.full(sizes.world, largest / shape.kv_heads)  # of all heads, in the largest group
            part = gathered(grouped.shards, groups, sizes.world, workload.ranks_per_node)
            nbytes = _backward_bytes if backward else _forward_bytes
            ranks = np.array(groups).reshape(-1)
            peak[ranks] = nbytes(part, share, sizes, cpu=workload.device == "cpu")[ranks]
        return peak

    def group_tiles(self, grouped: GroupedWorkload) -> list[NamedTiles[GroupTile]]:
        """Every rank computes all its pairs for one group of heads after another."""
        merged = []
        for steps in zip_longest(*(self._tiles(grouped, shape) for shape in grouped.groups)):
            present = [step for step in steps if step is not None]  # groups with fewer steps finish earlier
            merged.append(NamedTiles(present[0].name, [tile for step in present for tile in step.tiles]))
        return merged

    def _gathered_rounds(self, grouped: GroupedWorkload, shape: Shape, *, backward: bool) -> Iterator[Round]:
        """Rank groups with the same heads gather in the same groups of heads."""
        workload, sizes = grouped.workload, grouped.sizes
        heads = [len(group) for group in workload_head_groups(workload, grouped.shards, shape)]
        name = "keys" if len(grouped.groups) == 1 else f"keys of {shape.q_heads}/{shape.kv_heads} heads"
        groups = grouped.groups[shape]
        if workload.reproducible:
            return _rounds_of_leaves(grouped, groups, heads, name, backward=backward)
        part = gathered(grouped.shards, groups, sizes.world, workload.ranks_per_node)
        return _rounds_of_part(part, heads, sizes, name, backward=backward)

    def _tiles(self, grouped: GroupedWorkload, shape: Shape) -> list[NamedTiles[GroupTile]]:
        shards, groups, exchange = grouped.shards, grouped.groups[shape], list[NamedTiles[GroupTile]]()
        if grouped.workload.reproducible:
            leaves = leaf_plan(shards, leaf_size(grouped.workload.device))
            shards = leaves.shards
            exchange = [NamedTiles("exchange queries", [])] if leaves.moves else []
        plan = gather_plan(shards)
        steps = [*exchange, NamedTiles[GroupTile]("send the first keys", [])]
        for kv_heads in workload_head_groups(grouped.workload, grouped.shards, shape):
            tiles = [
                GroupTile(rank, kv_heads, i, range(plan.world), plan.pairs(i))
                for group in groups
                for i, rank in enumerate(group)
            ]
            several = f"KV heads {kv_heads.start} to {kv_heads[-1]}"
            steps.append(NamedTiles(several if len(kv_heads) > 1 else f"KV head {kv_heads.start}", tiles))
        return [*steps, *exchange]


def _rounds_of_leaves(
    grouped: GroupedWorkload, groups: Sequence[Sequence[int]], heads: Sequence[int], name: str, *, backward: bool
) -> Iterator[Round]:  # fmt: skip
    """The rounds with reproducible=True: queries in whole leaves, and gradients of keys once for each node."""
    workload, sizes = grouped.workload, grouped.sizes
    plan = leaf_plan(grouped.shards, leaf_size(workload.device))
    ranks = range(plan.given.world)
    ends = [(s, t) for s in ranks for t in ranks if s != t]

    def messages(rows: Callable[[int, int], int]) -> Messages:
        return Messages.of((group[s], group[t], rows(s, t)) for group in groups for s, t in ends)

    moved, returned = messages(plan.rows_moved), messages(plan.rows_returned)
    outputs = sizes.out_row + workload.lse * sizes.lse_row
    there, back = (outputs, sizes.query_row) if backward else (sizes.query_row, outputs)
    if plan.moves:
        exchange = f"{name}: rows to leaves"
        yield Round(exchange, {exchange: moved.scaled(there)}, (), (exchange,))
    part = gathered(plan.shards, groups, sizes.world, workload.ranks_per_node)
    yield from _rounds_of_part(part, heads, sizes, name, backward=backward, returned=returned)
    if plan.moves:
        exchange = f"{name}: rows to shards"
        yield Round(exchange, {exchange: moved.returned().scaled(back)}, (), (exchange,))


def _forward_bytes(part: Gathered, share: Floats, sizes: RankSizes, *, cpu: bool) -> Floats:
    """Keys of two groups and own keys to be sent; results of earlier groups, which are concatenated at the end."""
    results = sizes.rows * (sizes.out_row + sizes.lse_row)
    states = sizes.state_bytes(row_coverage(part.calls), cpu=cpu)
    computing = _key_bytes(part, share, sizes) + (1 - share) * results + share * states
    peak: Floats = np.maximum(computing, np.where(share < 1, 2 * results, 0))
    return peak


def _backward_bytes(part: Gathered, share: Floats, sizes: RankSizes, *, cpu: bool) -> Floats:
    """Of one group: gradients of its keys as kernels leave them, in the messages sent, and in the messages received."""
    parts = row_coverage(part.calls)
    partial = np.minimum(parts, 2) * part.rows * sizes.key_row
    sent = (part.rows + part.traffic.sent(sizes.world)) * sizes.key_grad_row
    totals = part.own * sizes.key_grad_row + sizes.rows * sizes.query_row
    return _key_bytes(part, share, sizes) + totals + share * (partial + sent + sizes.query_grad_bytes(parts))


def _key_bytes(part: Gathered, share: Floats, sizes: RankSizes) -> Floats:
    keys: Floats = 2 * (part.rows + part.own) * sizes.key_row * share
    return keys


# The Ulysses schedules: their all-to-alls, and the rounds, peak memory and tiles of what runs between them.


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


SPECS: dict[str, ScheduleSpec] = {
    "ring": RingSpec(),
    "allgather": AllGatherSpec(),
    "ulysses": UlyssesSpec(RingSpec(), within_nodes=False),
    "ulysses+ring": UlyssesSpec(RingSpec(), within_nodes=True),
    "ulysses+allgather": UlyssesSpec(AllGatherSpec(), within_nodes=True),
    "ring+ring": TwoLevelRingSpec(),
}


def program(schedule: str, workload: Workload, *, backward: bool) -> Program:
    """The program of all ranks under a schedule that can serve the workload, forward or backward.

    A program is plain data: `rounds()` generates the messages and kernels of each round.

    Examples:
        >>> ring = program("ring", workload, backward=False)
        >>> ring.world, [each.name for each in ring.rounds()][:3]
        (8, ['keys 0', 'keys 1', 'keys 2'])
    """
    check_choice("schedule", schedule, SCHEDULES)
    check_type("workload", workload, Workload)
    check_bool(backward=backward)
    return Program(schedule, workload.world, lambda: SPECS[schedule].rounds(workload, backward=backward))


def loads(schedule: str, workload: Workload, *, backward: bool) -> list[Load]:
    """What every rank computes and sends."""
    return program_loads(program(schedule, workload, backward=backward), workload.ranks_per_node)


def peak_bytes(schedule: str, workload: Workload, *, backward: bool) -> Ints:
    """The memory that the schedule allocates besides its inputs, in bytes by rank.

    Forward: until the results are returned, including them and what is saved for the backward. Backward: besides
    q, k, v, out, lse and the gradient of out; gradients and what the forward saved included. Workspaces of kernels
    are not counted. Not of a reproducible workload, which raises ValueError.
    """
    if workload.reproducible:
        raise ValueError("workload must not be reproducible: the memory of reproducible=True is not estimated")
    return np.ceil(SPECS[schedule].memory(workload, backward=backward)).astype(np.int64)


class Message(NamedTuple):
    """What a rank sends to another during a step."""

    source: int
    target: int
    nbytes: int
    what: str


@dataclass(frozen=True)
class Step:
    """One step of a forward: the tiles that ranks compute, and the messages in flight meanwhile."""

    name: str
    tiles: list[Tile]
    messages: list[Message]


def steps(schedule: str, workload: Workload) -> list[Step]:
    """The forward, step by step: what every rank computes, and the messages that travel at the same time."""
    spec = SPECS[schedule]
    rounds = [round_ for round_ in spec.rounds(workload, backward=False) if is_step(round_)]
    return [
        Step(name, tiles, _messages(round_)) for round_, (name, tiles) in zip(rounds, spec.tiles(workload), strict=True)
    ]


def is_step(round_: Round) -> bool:
    """Whether a round of a forward computes attention or starts an exchange, not only copies and merges."""
    return bool(round_.starts) or any(kernels.kind == "attention" for kernels in round_.work)


def _messages(round_: Round) -> list[Message]:
    """The messages that a round starts. Exchanges are named after what is sent, with a number behind."""
    sent = []
    for name, messages in round_.starts.items():
        if not isinstance(messages, Messages):
            raise ValueError(f"steps need single messages, but exchange {name!r} only has totals: use fewer ranks")
        what = name.rstrip("0123456789. ")
        columns = (messages.source.tolist(), messages.target.tolist(), messages.nbytes.tolist())
        sent += [Message(*message, what) for message in zip(*columns, strict=True)]
    return sent
