"""The all-gather schedule: its rounds, its peak memory and its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from attnmesh.core import ranges
from attnmesh.plan.allgather import gather_plan, groups_that_fill, head_groups
from attnmesh.plan.leaves import leaf_plan, leaf_size
from attnmesh.plan.shards import Shards
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.program import Exchange, Floats, Kernels, Messages, Round, concurrent_rounds
from attnmesh.planner.sizes import GroupedWorkload, RankSizes, copy, relayout, row_coverage
from attnmesh.planner.specs.base import GroupSpec, GroupTile, NamedTiles
from attnmesh.planner.specs.ring import causal_squares, kernel_calls
from attnmesh.planner.vectorized import Gathered, vectorized


def workload_head_groups(workload: Workload, shards: Shards, shape: Shape) -> list[range]:
    """The groups of kv heads on the workload's device."""
    if workload.device == "cpu":
        return head_groups(shape.kv_heads)
    return head_groups(shape.kv_heads, groups_that_fill(shards, shape.batch, shape.q_heads))


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


def _rounds(
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
        return concurrent_rounds([self._rounds(grouped, shape, backward=backward) for shape in grouped.groups])

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

    def _rounds(self, grouped: GroupedWorkload, shape: Shape, *, backward: bool) -> Iterator[Round]:
        """Rank groups with the same heads gather in the same groups of heads."""
        workload, sizes = grouped.workload, grouped.sizes
        heads = [len(group) for group in workload_head_groups(workload, grouped.shards, shape)]
        name = "keys" if len(grouped.groups) == 1 else f"keys of {shape.q_heads}/{shape.kv_heads} heads"
        groups = grouped.groups[shape]
        if workload.reproducible:
            yield from _rounds_of_leaves(grouped, groups, heads, name, backward=backward)
            return
        part = gathered(grouped.shards, groups, sizes.world, workload.ranks_per_node)
        yield from _rounds(part, heads, sizes, name, backward=backward)

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
    yield from _rounds(part, heads, sizes, name, backward=backward, returned=returned)
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
