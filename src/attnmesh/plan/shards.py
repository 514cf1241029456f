"""Queries and keys sharded over ranks under a mask, and the rows that move between shards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout, check_layout
from attnmesh.core.masks import Mask, check_mask
from attnmesh.core.ranges import Ranges, rows_between
from attnmesh.core.visibility import Patch
from attnmesh.utils.text import see
from attnmesh.utils.validation import MAX_RANKS, check_bool, check_count, check_device, check_type


@dataclass(frozen=True)
class Shards:
    """The positions of the queries and of the keys that each rank holds, and the mask."""

    mask: Mask
    queries: tuple[Ranges, ...]  # by rank
    keys: tuple[Ranges, ...]  # by rank
    _patches: dict[object, Patch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.queries)

    def patch(self, rank: int, block: int, rows: Ranges | None = None) -> Patch:
        """The queries of `rank` against the keys of the rank `block`, or against those `rows` of them."""
        at = rank, block, rows
        if at not in self._patches:
            keys = self.keys[block]
            kept = keys if rows is None else ranges.select(keys, rows)
            self._patches[at] = Patch(self.mask, self.queries[rank], kept)
        return self._patches[at]


def shards(
    mask: Mask, layout: Layout, length: int, world: int, key_layout: Layout | None = None, key_length: int | None = None
) -> Shards:
    """The shards that layouts describe; keys have the layout and length of the queries unless given.

    `queries[rank]` and `keys[rank]` are ascending ranges of positions, none for a rank that holds nothing.

    Examples:
        >>> shards(am.Causal(), am.Zigzag(), 16, 4).queries[0]  # the positions of rank 0
        (range(0, 2), range(14, 16))
    """
    check_mask("mask", mask)
    check_layout("layout", layout)
    check_count("length", length)
    check_count("world", world, least=1, most=MAX_RANKS)
    if key_layout is not None:
        check_layout("key_layout", key_layout)
    if key_length is not None:
        check_count("key_length", key_length)
    return _shards(mask, layout, length, world, key_layout, key_length)


@lru_cache(maxsize=256)
def _shards(
    mask: Mask, layout: Layout, length: int, world: int, key_layout: Layout | None, key_length: int | None
) -> Shards:
    def positions(layout: Layout, length: int) -> tuple[Ranges, ...]:
        return tuple(layout.ranges(length, world, rank) for rank in range(world))

    keys = key_layout or layout, length if key_length is None else key_length
    return Shards(mask, positions(layout, length), positions(*keys))


@lru_cache(maxsize=64)
def node_shards(shards: Shards, ranks_per_node: int) -> Shards | None:
    """The shards of whole nodes of `ranks_per_node` consecutive ranks; None where the shards of a node interleave."""

    def joined(shards: tuple[Ranges, ...]) -> list[Ranges | None]:
        return [ranges.union(shards[first : first + ranks_per_node]) for first in range(0, len(shards), ranks_per_node)]

    queries, keys = joined(shards.queries), joined(shards.keys)
    known_queries, known_keys = ([shard for shard in side if shard is not None] for side in (queries, keys))
    if len(known_queries) < len(queries) or len(known_keys) < len(keys):
        return None
    return Shards(shards.mask, tuple(known_queries), tuple(known_keys))


class Piece(NamedTuple):
    """Contiguous rows of a shard and the rows of the target that they become (with a step for striped shards)."""

    rows: range
    to: range

    @property
    def in_place(self) -> bool:
        """Whether the target rows are contiguous too: a message can then be received in place."""
        return self.to.step == 1


@lru_cache(maxsize=4096)
def pieces(held: Ranges, needed: Ranges) -> tuple[Piece, ...]:
    """The rows of a shard of the positions `held` that are `needed`. Runs of `needed` have no gaps."""
    found = []
    row = 0
    for run in held:
        at = 0
        for run_needed in needed:
            rows = rows_between(run, run_needed.start, run_needed.stop)
            if rows:
                first = at + run[rows.start] - run_needed.start
                step = run.step if len(rows) > 1 else 1
                to = range(first, first + (len(rows) - 1) * step + 1, step)
                found.append(Piece(range(row + rows.start, row + rows.stop), to))
            at += len(run_needed)
        row += len(run)
    return tuple(found)


# The schedules of `ContextParallel` by name, and which shards each can serve.

ScheduleName = Literal["auto", "ring", "allgather", "ulysses", "ulysses+ring", "ulysses+allgather", "ring+ring"]
SCHEDULES = ("ring", "allgather", "ulysses", "ulysses+ring", "ulysses+allgather", "ring+ring")
"""From the simplest to the most complex: of schedules that tie, the first is chosen."""
REPRODUCIBLE = ("allgather", "ulysses", "ulysses+allgather")
"""The schedules of reproducible=True: a rank has all keys of its queries, and visits them in ascending order."""


def why_not(schedule: str, shards: Shards, ranks_per_node: int, *, reproducible: bool = False) -> str | None:
    """Why the schedule cannot serve; None if it can."""
    if reproducible and schedule not in REPRODUCIBLE:
        return (
            f"with reproducible=True a rank visits keys in ascending order, but a ring brings them in another; the "
            f"schedules with reproducible=True are {', '.join(REPRODUCIBLE)}"
        )
    if "+" not in schedule:
        return None
    if not 1 < ranks_per_node < shards.world:
        return (
            f"{schedule} requires a two-dimensional mesh, or ranks_per_node above 1 and below the world size, got "
            f"{ranks_per_node} of {shards.world} ranks per node"
        )
    if schedule.startswith("ulysses") and node_shards(shards, ranks_per_node) is None:
        return f"{schedule} joins the shards of a node, and in this layout the shards of a node interleave"
    return None


def check_schedule(schedule: str, shards: Shards, ranks_per_node: int, *, reproducible: bool = False) -> None:
    """Raise ValueError if the schedule cannot serve."""
    why = why_not(schedule, shards, ranks_per_node, reproducible=reproducible)
    if why is not None:
        raise ValueError(
            f"schedule={schedule!r} cannot serve this: {why}{see('context-parallelism.md#select-a-schedule')}"
        )


# An attention workload over ranks: shards, shapes, ranks per node.


@dataclass(frozen=True)
class Shape:
    """Everything about the tensors except their positions.

    Attributes:
        batch: sequences.
        q_heads: query heads.
        kv_heads: KV heads.
        head_dim: features of a query and of a key.
        itemsize: bytes per element.
        sum_itemsize: bytes per element of a sum: gradients that are sent before they are complete.
        value_dim: features of values and outputs, if they differ from head_dim.

    Examples:
        >>> shape = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)
        >>> shape.key_row  # bytes of K and V of one position
        4096
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    sum_itemsize: int
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for name, n in vars(self).items():
            if n is not None or name != "value_dim":
                check_count(name, n)
        if self.value_dim == self.head_dim:  # equal shapes compare equal
            object.__setattr__(self, "value_dim", None)

    @property
    def out_dim(self) -> int:
        """The head_dim of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_row(self) -> int:
        """Bytes of K and V of one position."""
        return self.batch * self.kv_heads * (self.head_dim + self.out_dim) * self.itemsize

    @property
    def key_grad_row(self) -> int:
        """Bytes of dK and dV of one position while they are summed."""
        return self.batch * self.kv_heads * (self.head_dim + self.out_dim) * self.sum_itemsize

    @property
    def query_row(self) -> int:
        """Bytes of Q (or its gradient) of one position."""
        return self.batch * self.q_heads * self.head_dim * self.itemsize

    @property
    def out_row(self) -> int:
        """Bytes of out (or its gradient) of one position."""
        return self.batch * self.q_heads * self.out_dim * self.itemsize

    @property
    def lse_row(self) -> int:
        """Bytes of the lse of one position."""
        return self.batch * self.q_heads * self.sum_itemsize

    def with_heads(self, q_heads: int, kv_heads: int) -> Shape:
        """The same shape with other heads."""
        return replace(self, q_heads=q_heads, kv_heads=kv_heads)


@dataclass(frozen=True)
class Workload:
    """Attention over shards of a sequence.

    Attributes:
        shards: what each rank holds, see `shards`.
        shape: heads and sizes.
        ranks_per_node: on a mesh of one dimension, the world size.
        lse: whether the lse is returned, with its gradient: Ulysses exchanges it too.
        device: the torch device type. GPU kernels need larger pieces.
        reproducible: whether the bits of the results are the same for any number of ranks, see `plan.leaves`.

    Examples:
        >>> Workload(shards(am.Causal(), am.Zigzag(), 131072, 16), shape, ranks_per_node=8).world
        16
    """

    shards: Shards
    shape: Shape
    ranks_per_node: int
    lse: bool = False
    device: str = "cuda"
    reproducible: bool = False

    def __post_init__(self) -> None:
        check_type("shards", self.shards, Shards)
        check_type("shape", self.shape, Shape)
        check_count("ranks_per_node", self.ranks_per_node, least=1, most=MAX_RANKS)
        check_bool(lse=self.lse, reproducible=self.reproducible)
        check_type("device", self.device, str, "the name of a device type")
        check_device("device", self.device)
        sequences = self.shards.mask.sequences
        if sequences not in (None, self.shape.batch):
            raise ValueError(f"batch must be {sequences}, the sequences of the mask, got {self.shape.batch}")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world
