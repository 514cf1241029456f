"""The stages of rings of thousands of ranks. They are those of plan/ring.py, offset by offset for all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attnmesh.plan.program import Ints
from attnmesh.plan.rounds.stages import Stages
from attnmesh.plan.wide.band import FAR, Band, Runs, pairs, seen_rows
from attnmesh.planner.hardware import Floats


@dataclass(frozen=True)
class WideRings:
    """Rings of the same size side by side, [ring, place]: queries and keys of each place, and who stands there."""

    band: Band
    queries: Runs
    keys: Runs
    ranks: Ints
    grad_weight: float  # rows of keys that a row of gradients weighs; 0: none travel
    alike: bool = False  # whether all rings turn the same way
    computes: bool = True  # an outer ring only moves keys
    home: bool = True  # whether places begin with the keys of their own queries

    @property
    def stages(self) -> int:
        """How many stages there are, the first one at home."""
        return len(self._seen)

    def rounds(self) -> Iterator[Stages]:
        """The stages, in order."""
        return map(self._stage, range(self.stages))

    def seen(self, stage: int) -> tuple[Ints, Ints, Ints]:
        """At every place: whose keys are there, and the rows of them that are seen."""
        offset = self._offsets[stage]
        block = (np.arange(self._size) - offset[:, None]) % self._size
        if stage == 0:
            return block, np.zeros_like(block), self.keys.size
        kept = np.take_along_axis(self._way.carried[stage], block, 1) > 0
        start, stop = (self._by_direction(side, stage) for side in (0, 1))
        return block, np.where(kept, start, 0), np.where(kept, stop, 0)

    @property
    def _size(self) -> int:
        return int(self.ranks.shape[1])

    @cached_property
    def _needed(self) -> dict[int, tuple[Ints, Ints]]:
        """The offsets at which some rank sees something, upwards, and what."""
        seen = {offset: self._seen_at(offset) for offset in range(1, self._size)}
        return {offset: (start, stop) for offset, (start, stop) in seen.items() if (start < stop).any()}

    def _seen_at(self, offset: int) -> tuple[Ints, Ints]:
        """By place: the rows that it sees of the keys `offset` places before it."""
        block = (np.arange(self._size) - offset) % self._size
        return seen_rows(self.band, self.queries, self.keys.at((slice(None), block)))

    @cached_property
    def _seen(self) -> list[tuple[Ints, Ints]]:
        """For offset 0 and every needed one, upwards."""
        size = self.keys.size
        return [(np.zeros_like(size), size), *self._needed.values()]

    @cached_property
    def _up(self) -> _Way:
        return self._travelled([0, *range(1, len(self._seen))])

    @cached_property
    def _down(self) -> _Way:
        return self._travelled([0, *reversed(range(1, len(self._seen)))])

    @cached_property
    def _downwards(self) -> NDArray[np.bool_]:
        """By ring: whether it turns downwards, because that moves less."""
        up, down = (way.moved(self.grad_weight) for way in (self._up, self._down))
        if self.alike:
            up, down = np.full_like(up, up.sum()), np.full_like(down, down.sum())
        return down < up

    @cached_property
    def _way(self) -> _Way:
        down = self._downwards
        if not down.any():
            return self._up
        if down.all():
            return self._down
        choose = down[None, :, None]
        grads = None
        if self._up.grads is not None and self._down.grads is not None:
            grads = np.where(choose, self._down.grads, self._up.grads)
        return _Way(np.where(choose, self._down.carried, self._up.carried), grads)

    @cached_property
    def _offsets(self) -> Ints:
        """[stage, ring]"""
        needed = np.array(list(self._needed), dtype=np.int64)
        chosen = np.where(self._downwards[None, :], needed[::-1, None], needed[:, None])
        return np.concatenate([np.zeros((1, len(self.ranks)), dtype=np.int64), chosen])

    def _by_direction(self, side: int, stage: int) -> Ints:
        up, down = self._seen[stage][side], self._seen[len(self._seen) - stage][side]
        return np.where(self._downwards[:, None], down, up)

    def _travelled(self, order: list[int]) -> _Way:
        """What is carried of every block, [stage, ring, block], if offsets come in this order."""
        size = self.keys.size
        carried = np.zeros((len(order), *size.shape), dtype=np.int64)
        carried[0] = size
        start, stop = np.full_like(size, FAR), np.full_like(size, -FAR)
        for stage in reversed(range(1, len(order))):
            first, last = self._of_blocks(order[stage])
            start, stop = np.minimum(start, first), np.maximum(stop, last)
            carried[stage] = np.maximum(stop - start, 0)
        if not self.grad_weight:
            return _Way(carried, None)
        grads = np.zeros_like(carried)
        start, stop = np.full_like(size, FAR), np.full_like(size, -FAR)
        for stage in range(1, len(order)):
            first, last = self._of_blocks(order[stage])
            start, stop = np.minimum(start, first), np.maximum(stop, last)
            grads[stage] = np.where(carried[stage] > 0, np.maximum(stop - start, 0), 0)
        return _Way(carried, grads)

    def _of_blocks(self, at: int) -> tuple[Ints, Ints]:
        """By block: the rows that are seen of it where it is after the at-th offset."""
        offset = self._up_offsets[at]
        start, stop = (np.concatenate((side[:, offset:], side[:, :offset]), 1) for side in self._seen[at])
        return start, stop

    @cached_property
    def _up_offsets(self) -> list[int]:
        return [0, *self._needed]

    def _stage(self, at: int) -> Stages:
        block, start, stop = self.seen(at)
        found = np.zeros_like(block)
        if self.computes:
            lanes = np.arange(len(self.ranks))[:, None]
            found = pairs(self.band, self.queries, self.keys.at((lanes, block)))
        way, places = self._way, self._size
        goes_on = np.zeros(block.shape, dtype=bool)
        rows, after = np.zeros_like(block), block
        if at + 1 < self.stages:
            rows = np.take_along_axis(way.carried[at + 1], block, 1)
            goes_on = rows > 0
            after = np.where(goes_on, (block + self._offsets[at + 1][:, None]) % places, block)
        grads = np.zeros_like(block) if way.grads is None else np.take_along_axis(way.grads[at], block, 1)
        next_rank = np.take_along_axis(self.ranks, after, 1)
        calls = (found > 0).astype(np.int64)
        at_home = at == 0 and self.home and self.band == (-FAR, 1)  # a rank's own keys make one causal square
        columns = (
            self.ranks, found, calls, np.maximum(stop - start, 0), next_rank, rows, grads, found * at_home,
            calls * at_home,
        )  # fmt: skip
        return Stages(*(column.reshape(-1) for column in columns))


@dataclass(frozen=True)
class _Way:
    """One direction: rows of keys that arrive at each stage, [stage, ring, block], and of gradients that leave it."""

    carried: Ints
    grads: Ints | None

    def moved(self, grad_weight: float) -> Floats:
        """By ring: everything that travels, in rows of keys."""
        keys: Floats = self.carried[1:].sum((0, 2)).astype(np.float64)
        return keys if self.grads is None else keys + grad_weight * self.grads.sum((0, 2))
