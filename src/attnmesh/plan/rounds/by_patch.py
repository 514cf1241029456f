"""Rings, rings of rings and gatherings from the plans that executors follow, patch by patch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attnmesh.plan.allgather import gather_plan
from attnmesh.plan.ring import ring_plan
from attnmesh.plan.rounds.gather import Gathered, gathered_of
from attnmesh.plan.rounds.stages import Stages, side_by_side, stages_of
from attnmesh.plan.shards import Shards
from attnmesh.plan.two_level import two_level_plan


@dataclass(frozen=True)
class ByPatch:
    """What a spread's plans say."""

    shards: Shards

    def ring(self, lanes: Sequence[Sequence[int]], grad_weight: float) -> Iterator[Stages]:
        """The stages of one ring that every lane of ranks turns for itself."""
        plan = ring_plan(self.shards, grad_weight=grad_weight)
        return side_by_side([stages_of(plan, lane) for lane in lanes])

    def two_level(
        self, ranks_per_node: int, grad_weight: float
    ) -> tuple[Iterator[Stages], Callable[[int], Iterator[Stages]]]:
        """The stages of the outer rings, and those of all inner rings at an outer stage."""
        plan = two_level_plan(self.shards, ranks_per_node, grad_weight=grad_weight)
        nodes = range(plan.nodes)
        lanes = [[node * ranks_per_node + i for node in nodes] for i in range(ranks_per_node)]
        outer = side_by_side([stages_of(plan.outer(i), lane, computes=False) for i, lane in enumerate(lanes)])

        def turn(stage: int) -> Iterator[Stages]:
            rings = [plan.inner_ring(node, stage, grad_weight) for node in nodes]
            return side_by_side(
                [stages_of(ring, range(n * ranks_per_node, (n + 1) * ranks_per_node)) for n, ring in enumerate(rings)]
            )

        return outer, turn

    def gathered(self, lanes: Sequence[Sequence[int]], world: int, node: int) -> Gathered:
        """What every rank of every lane gathers."""
        return gathered_of(gather_plan(self.shards), lanes, world)
