"""The two-level ring schedule: its rounds, its peak memory and its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from attnmesh.plan.shards import Shards, Workload
from attnmesh.plan.two_level import two_level_plan
from attnmesh.planner.program import Floats, Messages, Round
from attnmesh.planner.sizes import RankSizes, key_rows, relayout
from attnmesh.planner.specs.base import NamedTiles, ScheduleSpec, Tile, single
from attnmesh.planner.specs.ring import (
    PartsCount,
    RingBuffers,
    concurrent_stages,
    grad_messages,
    key_messages,
    key_source,
    plan_stages,
    ring_rounds,
)
from attnmesh.planner.vectorized import RingStages, vectorized

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
            name = key_source(offset, plan.nodes, "node n")
            stages = max(len(ring.offsets) for ring in rings)
            new = [NamedTiles[Tile](f"{name}, inner stage {s}", []) for s in range(stages)]
            for node, ring in enumerate(rings):
                first = ((node - offset) % plan.nodes) * per_node  # the first rank whose keys the node has
                for i in range(per_node):
                    for step, stage in zip(new, ring.stages(i), strict=False):
                        rank, keys = node * per_node + i, single(first + stage.block)
                        if stage.patch.pairs:
                            step.tiles.append(Tile(rank, heads, single(rank), keys, stage.patch.pairs))
            steps += new
        return steps
