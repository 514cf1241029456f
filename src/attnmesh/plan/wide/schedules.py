"""Rings, rings of rings and gatherings of many ranks, where their masks and shards are simple enough for arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Ints
from attnmesh.plan.rounds.gather import Gathered
from attnmesh.plan.rounds.stages import Stages
from attnmesh.plan.shards import Shards
from attnmesh.plan.wide.band import Band, Runs, band_of, runs_of
from attnmesh.plan.wide.gather import wide_gathered
from attnmesh.plan.wide.ring import WideRings


@dataclass(frozen=True)
class WideSpread:
    """A spread as arrays, [rank, run]."""

    band: Band
    queries: Runs
    keys: Runs

    @staticmethod
    def of(shards: Shards) -> WideSpread | None:
        """None where the mask is no band (documents), or shards are not a few runs without steps (stripes)."""
        band, queries, keys = band_of(shards.mask), runs_of(shards.queries), runs_of(shards.keys)
        return None if band is None or queries is None or keys is None else WideSpread(band, queries, keys)

    def ring(self, lanes: Sequence[Sequence[int]], grad_weight: float) -> Iterator[Stages]:
        """The stages of one ring that every lane of ranks turns for itself."""
        places = np.arange(len(lanes[0]), dtype=np.int64)
        rings = WideRings(self.band, _one(self.queries), _one(self.keys), places[None], grad_weight)
        ranks = np.array(lanes, dtype=np.int64)
        for stage in rings.rounds():
            tiled = {name: np.tile(column, len(lanes)) for name, column in stage._asdict().items()}
            tiled["rank"], tiled["next_rank"] = (ranks[:, at].reshape(-1) for at in (stage.rank, stage.next_rank))
            yield Stages(**tiled)

    def two_level(
        self, ranks_per_node: int, grad_weight: float
    ) -> tuple[Iterator[Stages], Callable[[int], Iterator[Stages]]]:
        """The stages of the outer rings, and those of all inner rings at an outer stage."""
        nodes = len(self.queries.start) // ranks_per_node
        ranks: Ints = np.arange(nodes * ranks_per_node, dtype=np.int64).reshape(nodes, ranks_per_node)
        queries, keys = (
            Runs(*(side.reshape(nodes, ranks_per_node, -1) for side in runs)) for runs in (self.queries, self.keys)
        )
        of_nodes = Runs(*(side.reshape(1, nodes, -1) for side in queries))
        by_place = Runs(*(side.swapaxes(0, 1) for side in keys))
        outer = WideRings(self.band, of_nodes, by_place, ranks.T.copy(), grad_weight, alike=True, computes=False)

        def turn(stage: int) -> Iterator[Stages]:
            block, start, stop = outer.seen(stage)
            there = by_place.at((np.arange(ranks_per_node)[:, None], block)).rows(start, stop)
            visiting = Runs(*(side.swapaxes(0, 1) for side in there))
            return WideRings(self.band, queries, visiting, ranks, grad_weight, home=stage == 0).rounds()

        return outer.rounds(), turn

    def gathered(self, lanes: Sequence[Sequence[int]], world: int, node: int) -> Gathered:
        """What every rank of every lane gathers."""
        return wide_gathered(self.band, self.queries, self.keys, np.array(lanes, dtype=np.int64), world, node)


def _one(runs: Runs) -> Runs:
    return Runs(runs.start[None], runs.stop[None])
