"""The sparse family's tensors and how a grid of ranks shares them: heads over tp, the sequence over cp."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Layout
from attnmesh.core.masks import Causal, Full
from attnmesh.plan.program import Ints
from attnmesh.plan.shards import Shards
from attnmesh.plan.wide.band import band_of, pairs, runs_of
from attnmesh.planner.hardware import Floats

Bringing = Literal["gathered", "sharded"]


@dataclass(frozen=True)
class SparseShape:
    """The tensors of the whole sequence. Which keys a query names is not known: all that it sees are as likely."""

    rows: int  # queries
    keys: int
    heads: int
    width: int  # of a query and a key
    value_width: int
    topk: int
    index_heads: int = 0
    index_width: int = 0
    itemsize: int = 2  # bytes an element
    sum_itemsize: int = 4  # bytes an element of a sum, of an lse and of a score
    own_values: bool = False  # whether values are a tensor of their own, and not the first features of keys
    causal: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in _MAY_BE_NONE else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")

    @property
    def key_rows(self) -> list[int]:
        """Elements of a position of every tensor that keys bring along."""
        return [self.width, self.value_width] if self.own_values else [self.width]


_MAY_BE_NONE = ("rows", "keys", "index_heads", "index_width", "own_values", "causal")


@dataclass(frozen=True)
class SparseGrid:
    """`tp` x `cp` ranks; rank cp_place * tp + tp_place. As `SparseParallel` has them."""

    tp: int = 1
    cp: int = 1
    layout: Layout = Contiguous()  # noqa: RUF009  (immutable)
    keys: Bringing = "gathered"
    node: int | None = None  # ranks a node; all of them unless said

    def __post_init__(self) -> None:
        for name in ("tp", "cp", *(() if self.node is None else ("node",))):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.keys not in get_args(Bringing):
            raise ValueError(f'keys must be "gathered" or "sharded", got {self.keys!r}')

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tp * self.cp

    @property
    def sharded(self) -> bool:
        """Whether blocks of keys visit in a ring."""
        return self.keys == "sharded" and self.cp > 1


@dataclass(frozen=True)
class SparseShares:
    """Who has what; entry r is rank r's."""

    shape: SparseShape
    grid: SparseGrid

    @property
    def ranks(self) -> Ints:
        """[cp place, tp place]"""
        return np.arange(self.grid.world, dtype=np.int64).reshape(self.grid.cp, self.grid.tp)

    @cached_property
    def cp_place(self) -> Ints:
        """The place of every rank among those that share the sequence."""
        return np.arange(self.grid.world, dtype=np.int64) // self.grid.tp

    @cached_property
    def heads(self) -> Ints:
        """Heads of every rank; they differ by one where they do not divide."""
        return self._dealt(np.full(self.grid.world, self.shape.heads, np.int64))

    @cached_property
    def rows(self) -> Ints:
        """Queries of every rank."""
        return np.array([ranges.size(held) for held in self._queries], dtype=np.int64)[self.cp_place]

    @cached_property
    def share(self) -> Ints:
        """Of them, those that fall to the rank when rows are dealt out over tp."""
        return self._dealt(self.rows)

    @cached_property
    def held(self) -> Ints:
        """Keys, by cp place."""
        return np.array([ranges.size(held) for held in self._keys], dtype=np.int64)

    @cached_property
    def seen(self) -> Floats:
        """[cp place, owner]: pairs of queries here and the keys that they see there."""
        shards = Shards(Causal() if self.shape.causal else Full(), self._queries, self._keys)
        band, queries, keys = band_of(shards.mask), runs_of(self._queries), runs_of(self._keys)
        places = range(self.grid.cp)
        if band is None or queries is None or keys is None:
            found = [[shards.patch(place, owner).pairs for owner in places] for place in places]
            return np.array(found, dtype=np.float64)
        return np.array([pairs(band, queries, keys.at(slice(owner, owner + 1))) for owner in places], np.float64).T

    @cached_property
    def named(self) -> Floats:
        """[cp place, owner]: slots of queries here that name a key there."""
        most = min(self.shape.topk, self.shape.keys)
        slots = [_clamped(held, most) if self.shape.causal else most * ranges.size(held) for held in self._queries]
        every = self.seen.sum(1, keepdims=True)
        named: Floats = np.array(slots)[:, None] * self.seen / np.maximum(every, 1)
        return named

    @cached_property
    def _queries(self) -> tuple[ranges.Ranges, ...]:
        return tuple(self.grid.layout.ranges(self.shape.rows, self.grid.cp, place) for place in range(self.grid.cp))

    @cached_property
    def _keys(self) -> tuple[ranges.Ranges, ...]:
        return tuple(self.grid.layout.ranges(self.shape.keys, self.grid.cp, place) for place in range(self.grid.cp))

    def _dealt(self, whole: Ints) -> Ints:
        """What falls to each tp place, dealt out in turn."""
        place = np.arange(self.grid.world, dtype=np.int64) % self.grid.tp
        return whole // self.grid.tp + (place < whole % self.grid.tp)


def _clamped(held: ranges.Ranges, most: int) -> int:
    """The sum of min(position + 1, most)."""
    total = 0
    for run in held:
        below = run[: len(range(run.start, min(run.stop, most), run.step))]
        total += len(below) * (below[0] + below[-1] + 2) // 2 if below else 0
        total += (len(run) - len(below)) * most
    return total
