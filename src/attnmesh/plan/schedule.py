"""What describes a schedule: its name, what it refuses, its communication rounds, its peak memory, its tiles.

There is one `ScheduleSpec` per schedule, in the file of its concept; `schedules.SCHEDULES` lists them by name. The
estimates of `explain`, the cost model, the memory estimate, the simulator and the report all read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from attnmesh.plan.program import Floats, Ints, Messages, Program, Round
from attnmesh.plan.shards import Shards
from attnmesh.plan.workload import GroupedWorkload, Workload


class Tile(NamedTuple):
    """A rank computes the queries of some shards against the keys of some shards, for some query heads."""

    rank: int
    heads: range  # query heads
    queries: range  # the ranks whose queries these are
    keys: range  # the ranks whose keys these are
    pairs: int  # visible (query, key) pairs per head


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


class NamedTiles(NamedTuple):
    """The tiles of one step."""

    name: str
    tiles: list[Tile]


class ScheduleSpec(ABC):
    """The description of one schedule. Everything but `refusal` requires that the schedule can serve the workload."""

    name: str

    def refusal(self, shards: Shards, ranks_per_node: int) -> str | None:
        """Why the schedule cannot serve these shards; None if it can."""
        return None

    @abstractmethod
    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """What all ranks compute and send, round by round."""

    @abstractmethod
    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """Peak bytes by rank, see `peak_bytes`."""

    @abstractmethod
    def tiles(self, workload: Workload) -> list[NamedTiles]:
        """The tiles of a forward: one entry for every round for which `is_step` is true."""

    def program(self, workload: Workload, *, backward: bool) -> Program:
        """The rounds as a program."""
        return Program(self.name, workload.world, lambda: self.rounds(workload, backward=backward))

    def peak_bytes(self, workload: Workload, *, backward: bool) -> Ints:
        """The memory that the schedule allocates besides its inputs, in bytes by rank.

        Forward: until the results are returned, including them and what is saved for the backward. Backward: besides
        q, k, v, out, lse and the gradient of out; gradients and what the forward saved included. Workspaces of kernels
        are not counted.
        """
        return np.ceil(self.memory(workload, backward=backward)).astype(np.int64)

    def steps(self, workload: Workload) -> list[Step]:
        """The forward, step by step: what every rank computes, and the messages that travel at the same time."""
        rounds = [round_ for round_ in self.rounds(workload, backward=False) if is_step(round_)]
        tiles = self.tiles(workload)
        return [Step(t.name, t.tiles, _messages(round_)) for round_, t in zip(rounds, tiles, strict=True)]


def is_step(round_: Round) -> bool:
    """Whether a round of a forward computes attention or starts an exchange, not only copies and merges."""
    return bool(round_.starts) or any(kernels.kind == "attention" for kernels in round_.work)


class GroupTile(NamedTuple):
    """A tile of a rank group: places in the group instead of ranks, and key heads of the group instead of all."""

    rank: int
    group: int  # index of its group within the groups of its shape
    kv_heads: range
    query: int  # the place in the group whose queries these are
    keys: range  # the places whose keys these are
    pairs: int


class GroupStep(NamedTuple):
    """The tiles of one step of rank groups."""

    name: str
    tiles: list[GroupTile]


class GroupSpec(ScheduleSpec):
    """A schedule that several rank groups can run at once, each over the same shards: a ring, an all-gather."""

    @abstractmethod
    def group_rounds(self, grouped: GroupedWorkload, *, backward: bool) -> Iterator[Round]:
        """The rounds of all groups."""

    @abstractmethod
    def group_memory(self, grouped: GroupedWorkload, *, backward: bool) -> Floats:
        """Peak bytes by rank."""

    @abstractmethod
    def group_tiles(self, grouped: GroupedWorkload) -> list[GroupStep]:
        """The tiles of a forward of all groups."""

    def rounds(self, workload: Workload, *, backward: bool) -> Iterator[Round]:
        """The rounds of one group of all ranks."""
        return self.group_rounds(GroupedWorkload.of(workload), backward=backward)

    def memory(self, workload: Workload, *, backward: bool) -> Floats:
        """Peak bytes of one group of all ranks."""
        return self.group_memory(GroupedWorkload.of(workload), backward=backward)

    def tiles(self, workload: Workload) -> list[NamedTiles]:
        """The tiles of one group of all ranks."""
        readers = workload.shape.q_heads // workload.shape.kv_heads

        def placed(tile: GroupTile) -> Tile:
            heads = range(tile.kv_heads.start * readers, tile.kv_heads.stop * readers)
            return Tile(tile.rank, heads, single(tile.query), tile.keys, tile.pairs)

        return [
            NamedTiles(name, [placed(tile) for tile in tiles if tile.pairs])
            for name, tiles in self.group_tiles(GroupedWorkload.of(workload))
        ]


def single(rank: int) -> range:
    """A range of one rank."""
    return range(rank, rank + 1)


def concurrent_steps(groups: list[list[GroupStep]]) -> list[GroupStep]:
    """The steps of several rank groups at once; those with fewer steps finish earlier."""
    merged = []
    for steps in zip_longest(*groups):
        present = [step for step in steps if step is not None]
        merged.append(GroupStep(present[0].name, [tile for step in present for tile in step.tiles]))
    return merged


def two_level_refusal(name: str, shards: Shards, ranks_per_node: int) -> str | None:
    """Why a schedule that treats nodes differently cannot serve; None if it can."""
    if 1 < ranks_per_node < shards.world:
        return None
    return (
        f"{name} requires a two-dimensional mesh, or ranks_per_node above 1 and below the world size, got "
        f"{ranks_per_node} of {shards.world} ranks per node"
    )


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
