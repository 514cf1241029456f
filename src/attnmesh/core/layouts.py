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

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attnmesh.core.masks import Mask
from attnmesh.core.ranges import Ranges, as_tensor, narrow


class Layout(ABC):
    """Which positions each rank holds. Immutable and hashable."""

    @abstractmethod
    def _spans(self, length: int, world: int, rank: int) -> tuple[range, ...]: ...

    def ranges(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        """The rank's positions as ascending, non-empty arithmetic runs."""
        _check_place(length, world, rank)
        return tuple(span for span in self._spans(length, world, rank) if span)

    def positions(self, length: int, world: int, rank: int) -> Tensor:
        """The global positions the rank holds, in its local order (ascending)."""
        return as_tensor(self.ranges(length, world, rank))

    def local_length(self, length: int, world: int, rank: int) -> int:
        """How many positions the rank holds."""
        return sum(len(span) for span in self.ranges(length, world, rank))

    def shard(self, x: Tensor, dim: int, world: int, rank: int) -> Tensor:
        """The rank's part of a whole tensor along `dim`. A view where the rank holds one run, else one copy."""
        dim = dimension(x, dim)
        ranges = self.ranges(x.shape[dim], world, rank)
        runs = [_run(x, dim, span) for span in ranges]
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
            for span in self.ranges(length, world, rank):
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

    def chunks(self, length: int, world: int, rank: int) -> tuple[range, ...]:
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
        for piece in self.chunks(length, world, rank):
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


# A rank's work may be this much off the mean where that keeps keys with their queries.
_SLACK = 0.01
# All of the slack is worth spending to keep so many keys, as a part of the window, from being seen across its ends.
_KEYS_FOR_SLACK = 0.25


@dataclass(frozen=True)
class Balanced(Layout):
    """Equal work for every rank under `mask`, and equally many positions, give or take one.

    Work is within about 1% of the mean, unless the sequence is so short that single positions weigh more than that. It
    is even for `mask` only: attention under another one is as exact, but may leave ranks waiting.
    """

    mask: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise ValueError(f"Balanced.mask must be an attnmesh mask (Causal(), Documents(...)), got {self.mask!r}")

    def _spans(self, length: int, world: int, rank: int) -> Ranges:
        return _shares(self.mask, length, world)[rank]


@lru_cache(maxsize=256)
def _shares(mask: Mask, length: int, world: int) -> tuple[Ranges, ...]:
    """What every rank holds."""
    mask.check(length)
    seen = torch.stack(mask.key_ranges(torch.arange(length, device="cpu"))).clamp(0, length)
    whole = _Strand((range(length),) if length else (), seen[1] - seen[0], seen)
    shares = _shared(whole, world, int(whole.work.sum()) / world)
    # In this order keys travel least far around a ring: shares that end near one another see the same documents.
    return tuple(sorted(shares, key=lambda ranges: ranges[-1][-1] if ranges else length))


@dataclass(frozen=True)
class _Strand:
    """Positions that some ranks are to share, strung together as if nothing had lain between them."""

    ranges: Ranges
    work: Tensor  # how many keys each position sees, in the whole sequence
    seen: Tensor  # which positions of the strand it sees, by index: seen[0] <= index < seen[1]

    def inside(self, window: range) -> _Strand:
        """The positions in the window."""
        rows = slice(window.start, window.stop)
        seen = (self.seen[:, rows] - window.start).clamp(0, len(window))
        return _Strand(narrow(self.ranges, window), self.work[rows], seen)

    def outside(self, window: range) -> _Strand:
        """The positions before and after the window."""
        ranges = narrow(self.ranges, range(window.start)) + narrow(self.ranges, range(window.stop, len(self.work)))
        work, seen = (torch.cat([x[..., : window.start], x[..., window.stop :]], -1) for x in (self.work, self.seen))
        return _Strand(ranges, work, seen - (seen - window.start).clamp(0, len(window)))


def _shared(strand: _Strand, ranks: int, mean: float) -> list[Ranges]:
    """The shares of so many ranks; `mean` is the work due to each of all ranks."""
    if ranks == 1 or not strand.ranges:
        return [strand.ranges] * ranks
    # There is an even window for one rank of any number, and for half of them; for another part there may be none.
    taking = 1 if ranks % 2 else ranks // 2
    window = _window(strand, taking, ranks, mean)
    return [*_shared(strand.inside(window), taking, mean), *_shared(strand.outside(window), ranks - taking, mean)]


def _window(strand: _Strand, taking: int, ranks: int, mean: float) -> range:
    """The best window of the strand for `taking` of the ranks that share it."""
    size = len(strand.work) * taking // ranks
    before = torch.cat([strand.work.new_zeros(1), strand.work.cumsum(0)])
    work = before[size:] - before[: len(before) - size]  # of each window, by where it starts
    total, others = int(before[-1]), ranks - taking

    # If both sides stay near the mean of all ranks, then so can every share cut from them: slack does not add up.
    least, most = (1 - _SLACK) * mean, (1 + _SLACK) * mean
    fewest = math.ceil(max(least * taking, total - most * others))
    fits = (work >= fewest) & (work <= math.floor(min(most * taking, total - least * others)))
    if fits[0] or fits[-1]:  # one cut instead of two
        fits[1:-1] = False
    starts = fits.nonzero().flatten()
    even = total * taking // ranks
    if not starts.numel():  # single positions weigh too much
        start = int((work - even).abs().argmin())
        return range(start, start + size)

    parted = torch.zeros_like(before)  # at each border: how many keys are seen across it
    parted[1:-1] = strand.seen[1, :-1] - strand.seen[0, 1:]
    uneven = (work[starts] - even).abs().double() / (taking * mean)
    price = parted[starts] + parted[starts + size] + uneven * (size * _KEYS_FOR_SLACK / _SLACK)
    start = int(starts[price.argmin()])
    return range(start, start + size)


@dataclass(frozen=True, init=False, repr=False)
class Joint(Layout):
    """Sequences one after another, given as pairs of (length, layout). The length of the whole is their sum."""

    parts: tuple[tuple[int, Layout], ...]

    def __init__(self, *parts: tuple[int, Layout]) -> None:
        for part in parts:
            if not _is_part(part):
                raise ValueError(f"Joint's parts must be (length, layout) with an integer length >= 0, got {part!r}")
        object.__setattr__(self, "parts", tuple(map(tuple, parts)))

    def __repr__(self) -> str:
        return f"Joint({', '.join(map(repr, self.parts))})"

    def _spans(self, length: int, world: int, rank: int) -> Ranges:
        lengths = [n for n, _ in self.parts]
        if sum(lengths) != length:
            raise ValueError(
                f"the lengths of Joint's parts must add up to the sequence length {length}, but {lengths} add up to "
                f"{sum(lengths)}"
            )
        runs: list[range] = []
        begin = 0
        for n, layout in self.parts:
            for span in layout.ranges(n, world, rank):
                run = range(begin + span.start, begin + span.stop, span.step)
                # One run where the shards touch: fewer blocks to compute.
                if runs and runs[-1].step == run.step == 1 and runs[-1].stop == run.start:
                    run = range(runs.pop().start, run.stop)
                runs.append(run)
            begin += n
        return tuple(runs)


def _is_part(part: object) -> bool:
    match part:
        case (int(length), Layout()):
            return length >= 0 and not isinstance(length, bool)
    return False


LAYOUTS: dict[str, Layout] = {"zigzag": Zigzag(), "striped": Striped(), "contiguous": Contiguous()}
