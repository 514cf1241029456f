"""Which part of every weight of a model each rank holds, under a `DecodeSharding`.

    query and output projections    the query heads of the rank: all ranks divide them, in rank order
    key and value projections       the kv heads of the rank's TP rank: KVDP and CP ranks hold the same; where the
                                    cache has latents, what expands them for the query heads of the rank
    MLP, experts, vocabulary        over all ranks, as in Helix; every rank has a part of each expert
    norms, routers                  on every rank
    biases that are added to a sum  on rank 0; the others hold zeros

So every rank holds 1 / (tp x kvdp x cp) of nearly all weights, whatever the sharding of the KV cache is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnmesh.plan.decode import DecodeSharding

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """How a tensor is divided: in dimension `dim` (from the end if negative), by ranks or heads.

    `packed` tensors are concatenated in that dimension, and each is divided; `unit` neighbors stay together. `aligned`
    parts are multiples of 8 units (of 4 if there are few), as grouped matrix products need them. "first" gives all of
    it to rank 0.
    """

    dim: int
    by: Literal["ranks", "q_heads", "kv_heads", "first"]
    packed: int = 1
    unit: int = 1
    aligned: bool = False


FIRST_RANK = Split(0, "first")
"""A bias that is added to a sum over ranks."""


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention."""

    q: int
    kv: int


@dataclass(frozen=True)
class WeightPart:
    """A part of a tensor: `ranges` of dimension `dim`, concatenated. Without ranges the whole tensor, or zeros."""

    shape: Shape  # of the part
    dim: int = 0
    ranges: tuple[range, ...] = ()
    zeros: bool = False

    def indices(self) -> list[tuple[slice, ...]]:
        """One index into the whole tensor per range."""
        if not self.ranges:
            return [tuple(slice(None) for _ in self.shape)]
        before = (slice(None),) * self.dim
        after = (slice(None),) * (len(self.shape) - self.dim - 1)
        return [(*before, slice(each.start, each.stop), *after) for each in self.ranges]


def weight_part(
    name: str, shape: Sequence[int], split: Split | None, sharding: DecodeSharding, rank: int, heads: Heads
) -> WeightPart:
    """The part of a tensor that a rank holds; without a split all of it. `name` is for the message of a ValueError."""
    whole = tuple(shape)
    if split is None:
        return WeightPart(whole)
    if split.by == "first":
        return WeightPart(whole, zeros=rank > 0)
    dim = split.dim % len(whole)
    size, rest = divmod(whole[dim], split.packed)
    own = _own_indices(split, size, sharding, rank, heads)
    if rest or own is None or not own:
        what = {
            "ranks": f"{sharding.ranks} ranks",
            "q_heads": f"{heads.q} query heads",
            "kv_heads": f"{heads.kv} kv heads",
        }
        raise ValueError(
            f"{name} must be divisible in dimension {dim} over {what[split.by]}, got the shape {list(whole)} under "
            f"{sharding}"
        )
    ranges = tuple(range(at * size + own.start, at * size + own.stop) for at in range(split.packed))
    local = (*whole[:dim], split.packed * len(own), *whole[dim + 1 :])
    return WeightPart(local, dim, ranges)


def _own_indices(split: Split, size: int, sharding: DecodeSharding, rank: int, heads: Heads) -> range | None:
    """The indices of a rank in one of the packed tensors, or None if the sizes do not fit."""
    if split.by == "ranks":
        width = _width(split, size, sharding.ranks)
        units, rest = divmod(size, width)
        own = sharding.q_heads(rank, units)  # all ranks divide them, as they divide query heads
    else:
        count = heads.q if split.by == "q_heads" else heads.kv
        width, rest = divmod(size, count)
        own = sharding.q_heads(rank, count) if split.by == "q_heads" else sharding.kv_heads(rank, count)
    return None if rest else range(own.start * width, own.stop * width)


def _width(split: Split, size: int, ranks: int) -> int:
    """The indices that stay together."""
    if not split.aligned:
        return split.unit
    eight = 8 * split.unit
    return eight if size % eight == 0 and size // eight >= ranks else 4 * split.unit
