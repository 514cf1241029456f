"""Layouts: which rank holds which positions of the sequence, as pure functions. Any length, any world.

    S = 16, world = 2      rank 0                        rank 1
    Contiguous             0 1 2 3 4 5 6 7               8 9 10 11 12 13 14 15
    Zigzag                 0 1 2 3 12 13 14 15           4 5 6 7 8 9 10 11
    Striped                0 2 4 6 8 10 12 14            1 3 5 7 9 11 13 15

Under a causal mask, late positions see more keys. Zigzag pairs an early piece with a late one, striped deals positions
out in turn; both give every rank the same work, contiguous does not. Every layout holds its positions in
ascending order, as a few arithmetic runs (`spans`): plans and kernels rely on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.spans import as_tensor


class Layout(ABC):
    """Which positions each rank holds. Immutable and hashable."""

    @abstractmethod
    def _spans(self, length: int, world: int, rank: int) -> tuple[range, ...]: ...

    def spans(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        """The rank's positions as ascending, non-empty arithmetic runs."""
        _check_place(length, world, rank)
        return tuple(span for span in self._spans(length, world, rank) if span)

    def positions(self, length: int, world: int, rank: int) -> Tensor:
        """The global positions the rank holds, in its local order (ascending)."""
        return as_tensor(self.spans(length, world, rank))

    def local_length(self, length: int, world: int, rank: int) -> int:
        """How many positions the rank holds."""
        return sum(len(span) for span in self.spans(length, world, rank))

    def shard(self, x: Tensor, dim: int, world: int, rank: int) -> Tensor:
        """The rank's part of a whole tensor along `dim`. A view where the rank holds one run, else one copy."""
        dim = dimension(x, dim)
        spans = self.spans(x.shape[dim], world, rank)
        runs = [_run(x, dim, span) for span in spans]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs, dim) if runs else x.narrow(dim, 0, 0)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from the shards of all ranks, in rank order."""
        world = len(shards)
        if not world:
            raise ValueError("unshard needs the shard of every rank, got none")
        dim = dimension(shards[0], dim)
        kinds = {(shard.dtype, (*shard.shape[:dim], *shard.shape[dim + 1 :])) for shard in shards}
        if len(kinds) > 1:
            raise ValueError(f"shards must have one dtype, and one shape but for dimension {dim}, got {kinds}")
        length = sum(shard.shape[dim] for shard in shards)
        sizes = [shard.shape[dim] for shard in shards]
        due = [self.local_length(length, world, rank) for rank in range(world)]
        if sizes != due:
            raise ValueError(
                f"{self} gives the ranks {due} of {length} positions, but the shards hold {sizes} along dimension {dim}"
            )
        whole = shards[0].new_empty([*shards[0].shape[:dim], length, *shards[0].shape[dim + 1 :]])
        for rank, shard in enumerate(shards):
            begin = 0
            for span in self.spans(length, world, rank):
                _run(whole, dim, span).copy_(shard.narrow(dim, begin, len(span)))
                begin += len(span)
        return whole


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th stretch; stretches differ by at most one position, longer ones first."""

    def _spans(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        base, extra = divmod(length, world)
        begin = rank * base + min(rank, extra)
        return (range(begin, begin + base + (rank < extra)),)


@dataclass(frozen=True)
class Zigzag(Layout):
    """The sequence in 2P pieces, folded: pair p is pieces p and 2P - 1 - p. Even causal work at any length.

    `pairs` is how many pairs a rank holds: one number for all ranks (of one pair each, rank r holds pair r), or a
    number for each rank. A rank with two pairs gets twice the causal work of a rank with one; a rank with none sits
    out. P is the sum over all ranks. They take pairs in turn, rank 0 first, until each has its number.

    Pieces differ by at most one position. Where the length does not divide, which pieces get the odd position
    decides the balance: giving them to the first pieces while there are at most P, and denying them to the first
    pieces otherwise, is the best choice there is (a test tries all others).
    """

    pairs: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        counts, least = (self.pairs, 0) if isinstance(self.pairs, tuple) else ((self.pairs,), 1)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in counts)
        if not whole or not any(counts):
            raise ValueError(
                "Zigzag.pairs must be an integer >= 1, or a tuple of integers >= 0 of which at least one is > 0, got "
                f"{self.pairs!r}"
            )

    def __repr__(self) -> str:
        return "Zigzag()" if self.pairs == 1 else f"Zigzag({self.pairs!r})"

    def pieces(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        """The rank's pieces, ascending, two for each of its pairs; some are empty where the sequence is short."""
        _check_place(length, world, rank)
        mine, total = self._dealt(world, rank)
        base, extra = divmod(length, 2 * total)

        def begin(piece: int) -> int:
            longer_before = min(piece, extra) if extra <= total else max(0, piece - (2 * total - extra))
            return piece * base + longer_before

        numbers = [*mine, *(2 * total - 1 - pair for pair in reversed(mine))]
        return tuple(range(begin(piece), begin(piece + 1)) for piece in numbers)

    def _dealt(self, world: int, rank: int) -> tuple[Sequence[int], int]:
        """The pairs that fall to the rank, ascending, and how many there are in all."""
        if isinstance(self.pairs, int):
            return range(rank, self.pairs * world, world), self.pairs * world
        if len(self.pairs) != world:
            raise ValueError(f"Zigzag.pairs must have one entry for each of {world} ranks, got {self.pairs!r}")
        owners = [owner for turn in range(max(self.pairs)) for owner, n in enumerate(self.pairs) if turn < n]
        return [pair for pair, owner in enumerate(owners) if owner == rank], len(owners)

    def _spans(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        runs: list[range] = []
        for piece in self.pieces(length, world, rank):
            if runs and runs[-1].stop == piece.start:
                piece = range(runs.pop().start, piece.stop)
            runs.append(piece)
        return tuple(runs)


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r holds positions r, r + world, r + 2 x world, ..."""

    def _spans(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        return (range(rank, max(rank, length), world),)


def dimension(x: Tensor, dim: int) -> int:
    """`dim` counted from the front; ValueError where there is none."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be in {-x.ndim}..{x.ndim - 1} for a tensor of shape {tuple(x.shape)}, got {dim}")
    return dim % x.ndim


def _check_place(length: int, world: int, rank: int) -> None:
    if length < 0:
        raise ValueError(f"length must be >= 0, got {length}")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1} (world >= 1), got rank {rank} of world {world}")


def _run(x: Tensor, dim: int, span: range) -> Tensor:
    """The positions of an arithmetic run along `dim`, as a view."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(span.start, span.stop, span.step)
    return x[tuple(index)]
