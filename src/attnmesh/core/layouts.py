"""Layouts: which rank has which positions of the sequence, as pure functions. Any length, any world size.

    S = 16, world = 2      rank 0                        rank 1
    Contiguous             0 1 2 3 4 5 6 7               8 9 10 11 12 13 14 15
    Zigzag                 0 1 2 3 12 13 14 15           4 5 6 7 8 9 10 11
    Striped                0 2 4 6 8 10 12 14            1 3 5 7 9 11 13 15

Under a causal mask, late positions attend to more keys. Zigzag pairs an early chunk with a late one, and striped
assigns positions round-robin; both balance the work, contiguous does not. Every rank has its positions in ascending
order, as a few arithmetic ranges: plans and kernels rely on it.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from attnmesh.core.mask import Mask, check_mask, sequence_intervals
from attnmesh.core.ranges import Ranges, as_tensor, common, narrow, rows_between, size
from attnmesh.utils.text import counted, format_ranks, see
from attnmesh.utils.validation import MAX_COUNT, MAX_RANKS, check_count, check_index, check_tensor, check_type, shown

_MAX_PAIRS = 2**16  # chunks are listed one by one
_OWN_LAYOUT = "layouts.md#a-layout-of-your-own"
_GAP_WINDOW = 2**24  # positions that are searched at a time


class Layout(ABC):
    """The assignment of positions to ranks. Immutable and hashable.

    Every position of a sequence belongs to one rank, at any length and for any number of ranks: a rank may hold more
    than another, or nothing. A shard is in ascending order of positions.

    A layout of one's own is a subclass: a frozen dataclass that defines `assign`. Its fields must be hashable (numbers,
    strings, tuples) and in its `repr`, which ranks compare. For each length and number of ranks, what `assign` returns
    is checked once: positions that belong to no rank, or to several, raise ValueError.

    Examples:
        >>> layout = am.Striped()
        >>> layout.positions(10, world=4, rank=1)
        tensor([1, 5, 9])
        >>> x = torch.arange(10)
        >>> shards = [layout.shard(x, 0, 4, rank) for rank in range(4)]
        >>> torch.equal(layout.unshard(shards, 0), x)
        True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        parameters = vars(cls).get("__dataclass_params__")
        printed = cls.__repr__ is not object.__repr__
        if parameters is None or not (parameters.frozen and parameters.eq and printed):
            raise ValueError(
                f"{cls.__name__}, a layout, must be a frozen dataclass with a repr: decorate it with "
                f"@dataclass(frozen=True){see(_OWN_LAYOUT)}"
            )
        return super().__new__(cls)

    @abstractmethod
    def assign(self, length: int, world: int, rank: int) -> Sequence[range]:
        """The positions of `rank` among 0, ..., length - 1 as ascending ranges: what a subclass defines.

        A pure function: all ranks compute the positions of all ranks. Ranges may be empty, and have a step above 0. The
        fewer they are, the fewer blocks are computed.
        """

    def ranges(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        """The positions of a rank as ascending, non-empty arithmetic ranges."""
        _check_rank(length, world, rank)
        if type(self) in _KNOWN:
            return tuple(run for run in self.assign(length, world, rank) if run)
        return _checked_partition(self, length, world)[rank]

    def positions(self, length: int, world: int, rank: int) -> Tensor:
        """The global positions of a rank, in its local (ascending) order."""
        return as_tensor(self.ranges(length, world, rank))

    def local_length(self, length: int, world: int, rank: int) -> int:
        """The number of positions of a rank."""
        return sum(len(run) for run in self.ranges(length, world, rank))

    def shard(self, x: Tensor, dim: int, world: int, rank: int) -> Tensor:
        """The shard of a rank, from the whole tensor, along `dim`. A view if the shard is one range, else a copy."""
        dim = dimension(x, dim)
        ranges = self.ranges(x.shape[dim], world, rank)
        parts = [_select_range(x, dim, run) for run in ranges]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from the shards of all ranks, in rank order."""
        check_type("shards", shards, (list, tuple), "a list of tensors, one per rank")
        world = len(shards)
        if not world:
            raise ValueError("shards must contain the shard of every rank, got none")
        for rank, shard in enumerate(shards):
            check_tensor(f"shards[{rank}]", shard)
        dim = dimension(shards[0], dim)
        kinds = {(shard.dtype, shard.device, (*shard.shape[:dim], *shard.shape[dim + 1 :])) for shard in shards}
        if len(kinds) > 1:
            raise ValueError(
                f"shards must have the same dtype, device, and shape except in dim {dim}, got {shown(list(shards))}"
            )
        length = sum(shard.shape[dim] for shard in shards)
        sizes = [shard.shape[dim] for shard in shards]
        expected = [self.local_length(length, world, rank) for rank in range(world)]
        if sizes != expected:
            raise ValueError(
                f"shards must have sizes {expected} along dim {dim} for {self} and length {length}, got {sizes}"
            )
        whole = shards[0].new_empty([*shards[0].shape[:dim], length, *shards[0].shape[dim + 1 :]])
        for rank, shard in enumerate(shards):
            begin = 0
            for run in self.ranges(length, world, rank):
                _select_range(whole, dim, run).copy_(shard.narrow(dim, begin, len(run)))
                begin += len(run)
        return whole


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r has the r-th chunk; chunk lengths differ by at most one position, longer chunks first.

    Examples:
        >>> [am.Contiguous().ranges(10, 4, rank) for rank in range(4)]
        [(range(0, 3),), (range(3, 6),), (range(6, 8),), (range(8, 10),)]
    """

    def assign(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        base, extra = divmod(length, world)
        begin = rank * base + min(rank, extra)
        return (range(begin, begin + base + (rank < extra)),)


@dataclass(frozen=True)
class Zigzag(Layout):
    """The sequence in 2P chunks, where pair p is chunks p and 2P - 1 - p. Balances causal work at any length.

    `pairs` is the number of pairs per rank: one number for all ranks (with one pair each, rank r has pair r), or one
    number for each rank. A rank with two pairs gets twice the causal work of a rank with one; a rank with none gets no
    work. P is the sum over all ranks. Pairs are assigned round-robin, rank 0 first, until each rank has its number.

    Chunk lengths differ by at most one position. If the length is not divisible, the balance depends on which chunks
    are longer: the first chunks if there are at most P longer ones, else all but the first chunks. This is optimal (a
    test tries all alternatives).

    Examples:
        >>> [am.Zigzag().ranges(16, 3, rank) for rank in range(3)]
        [(range(0, 2), range(13, 16)), (range(2, 4), range(10, 13)), (range(4, 10),)]
        >>> am.Zigzag((1, 0)).ranges(16, 2, 0)  # rank 0 has all the work
        (range(0, 16),)
    """

    pairs: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        counts, least = (self.pairs, 0) if isinstance(self.pairs, tuple) else ((self.pairs,), 1)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and least <= n <= _MAX_PAIRS for n in counts)
        if not whole or not any(counts):
            raise ValueError(
                "Zigzag.pairs must be an integer >= 1, or a tuple of integers >= 0 of which at least one is > 0, at "
                f"most {_MAX_PAIRS} each, got {shown(self.pairs)}"
            )

    def __repr__(self) -> str:
        return "Zigzag()" if self.pairs == 1 else f"Zigzag({self.pairs!r})"

    def chunks(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        """The chunks of a rank in ascending order, two per pair; some are empty if the sequence is short."""
        _check_rank(length, world, rank)
        mine, total = self._assigned_pairs(world, rank)
        base, extra = divmod(length, 2 * total)

        def begin(chunk: int) -> int:
            longer_before = min(chunk, extra) if extra <= total else max(0, chunk - (2 * total - extra))
            return chunk * base + longer_before

        numbers = [*mine, *(2 * total - 1 - pair for pair in reversed(mine))]
        return tuple(range(begin(chunk), begin(chunk + 1)) for chunk in numbers)

    def _assigned_pairs(self, world: int, rank: int) -> tuple[Sequence[int], int]:
        """The pairs of a rank, ascending, and the total number of pairs."""
        if isinstance(self.pairs, int):
            return range(rank, self.pairs * world, world), self.pairs * world
        if len(self.pairs) != world:
            raise ValueError(
                f"Zigzag.pairs must have one entry for each of {counted(world, 'rank')}, got {self.pairs!r}"
            )
        owners = [owner for turn in range(max(self.pairs)) for owner, n in enumerate(self.pairs) if turn < n]
        return [pair for pair, owner in enumerate(owners) if owner == rank], len(owners)

    def assign(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        runs: list[range] = []
        for chunk in self.chunks(length, world, rank):
            if runs and runs[-1].stop == chunk.start:
                chunk = range(runs.pop().start, chunk.stop)
            runs.append(chunk)
        return tuple(runs)


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r has positions r, r + world, r + 2 * world, ...

    Examples:
        >>> [am.Striped().positions(10, 4, rank).tolist() for rank in range(4)]
        [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    """

    def assign(self, length: int, world: int, rank: int) -> tuple[range, ...]:
        return (range(rank, max(rank, length), world),)


def dimension(x: Tensor, dim: int, name: str = "dim") -> int:
    """`dim` as a non-negative index; raises ValueError if it is out of range, or `x` is not a tensor."""
    check_tensor("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name} must be in {-x.ndim}..{x.ndim - 1} for a tensor x of shape {tuple(x.shape)}, got {shown(dim)}"
        )
    return dim % x.ndim


def check_layout(name: str, layout: object) -> None:
    """Raise ValueError unless `layout` is a layout."""
    check_type(name, layout, Layout, "a layout (Contiguous(), Zigzag(), ...)")


def _check_rank(length: int, world: int, rank: int) -> None:
    check_count("length", length)
    check_count("world", world, least=1, most=MAX_RANKS)
    check_index("rank", rank, world)


def _select_range(x: Tensor, dim: int, run: range) -> Tensor:
    """The indices of an arithmetic range along `dim`, as a view."""
    index = [slice(None)] * x.ndim
    index[dim] = slice(run.start, run.stop, run.step)
    return x[tuple(index)]


# The work of a rank may deviate this much from the mean if that keeps keys with their queries.
_SLACK = 0.01
# The fraction of a window's keys, read across its ends, that costs as much as all of the slack.
_KEYS_FOR_SLACK = 0.25


@dataclass(frozen=True)
class Balanced(Layout):
    """Equal work for every rank under `mask`, and equally many positions up to one.

    Work is within about 1% of the mean, unless the sequence is so short that single positions weigh more than that. It
    is balanced for `mask` only: attention under another mask is as exact, but its work may be imbalanced.

    Examples:
        >>> layout = am.Balanced(am.Causal())
        >>> [layout.positions(8, 2, rank).tolist() for rank in range(2)]  # 18 visible pairs each
        [[2, 3, 4, 5], [0, 1, 6, 7]]
    """

    mask: Mask

    def __post_init__(self) -> None:
        check_mask("Balanced.mask", self.mask)

    def assign(self, length: int, world: int, rank: int) -> Ranges:
        return _balanced_shards(self.mask, length, world)[rank]


@lru_cache(maxsize=256)
def _balanced_shards(mask: Mask, length: int, world: int) -> tuple[Ranges, ...]:
    """The positions of every rank."""
    mask.check(length)
    work, visible = _work(mask, length)
    whole = _Positions((range(length),) if length else (), work, visible)
    shards = _divide(whole, world, int(whole.work.sum()) / world)
    # In this order keys travel least far around a ring: shards that end near one another have the same documents.
    return tuple(sorted(shards, key=lambda ranges: ranges[-1][-1] if ranges else length))


def _work(mask: Mask, length: int) -> tuple[Tensor, Tensor]:
    """The number of keys visible to each position in all sequences, and the first and the end of all of them."""
    positions = torch.arange(length, device="cpu")
    work = torch.zeros(length, dtype=torch.int64, device="cpu")
    low, high = torch.full_like(work, length), torch.zeros_like(work)
    for sequences, intervals in sequence_intervals(mask, length):
        for part in intervals:
            first, end = (bound.clamp(0, length) for bound in part.key_ranges(positions))
            some = first < end
            work += (end - first).clamp(min=0) * (1 if sequences is None else len(sequences))
            low, high = (
                torch.where(some, torch.minimum(low, first), low), torch.where(some, torch.maximum(high, end), high)
            )  # fmt: skip
    return work, torch.stack([torch.minimum(low, high), high])


@dataclass(frozen=True)
class _Positions:
    """Positions to divide among some ranks, concatenated without the gaps between them."""

    ranges: Ranges
    work: Tensor  # number of keys visible to each position, in the whole sequence
    visible: Tensor  # the indices among these positions that are visible to it: visible[0] <= index < visible[1]

    def inside(self, window: range) -> _Positions:
        """The positions in the window."""
        rows = slice(window.start, window.stop)
        visible = (self.visible[:, rows] - window.start).clamp(0, len(window))
        return _Positions(narrow(self.ranges, window), self.work[rows], visible)

    def outside(self, window: range) -> _Positions:
        """The positions before and after the window."""
        ranges = narrow(self.ranges, range(window.start)) + narrow(self.ranges, range(window.stop, len(self.work)))
        work, visible = (
            torch.cat([x[..., : window.start], x[..., window.stop :]], -1) for x in (self.work, self.visible)
        )
        return _Positions(ranges, work, visible - (visible - window.start).clamp(0, len(window)))


def _divide(positions: _Positions, ranks: int, mean: float) -> list[Ranges]:
    """The shards of `ranks` ranks; `mean` is the mean work per rank over all ranks."""
    if ranks == 1 or not positions.ranges:
        return [positions.ranges] * ranks
    # A balanced window exists for one rank of any number, and for half of them; for other fractions there may be none.
    taking = 1 if ranks % 2 else ranks // 2
    window = _window(positions, taking, ranks, mean)
    return [*_divide(positions.inside(window), taking, mean), *_divide(positions.outside(window), ranks - taking, mean)]


def _window(positions: _Positions, taking: int, ranks: int, mean: float) -> range:
    """The best window for `taking` of the ranks that the positions are divided among."""
    size = len(positions.work) * taking // ranks
    before = torch.cat([positions.work.new_zeros(1), positions.work.cumsum(0)])
    work = before[size:] - before[: len(before) - size]  # of each window, by its start
    total, others = int(before[-1]), ranks - taking

    # If both sides stay near the mean of all ranks, every shard cut from them can too: slack does not accumulate.
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

    across = torch.zeros_like(before)  # the number of keys that are read across each boundary
    across[1:-1] = positions.visible[1, :-1] - positions.visible[0, 1:]
    uneven = (work[starts] - even).abs().double() / (taking * mean)
    cost = across[starts] + across[starts + size] + uneven * (size * _KEYS_FOR_SLACK / _SLACK)
    start = int(starts[cost.argmin()])
    return range(start, start + size)


@dataclass(frozen=True, init=False, repr=False)
class Joint(Layout):
    """Concatenated sequences, given as pairs of (length, layout). The total length is their sum.

    Examples:
        >>> layout = am.Joint((4, am.Zigzag()), (3, am.Contiguous()))  # an image and a text, say
        >>> [layout.positions(7, 2, rank).tolist() for rank in range(2)]
        [[0, 3, 4, 5], [1, 2, 6]]
    """

    parts: tuple[tuple[int, Layout], ...]

    def __init__(self, *parts: tuple[int, Layout]) -> None:
        for part in parts:
            if not _is_part(part):
                raise ValueError(f"Joint.parts must be (length, layout) with an integer length >= 0, got {shown(part)}")
        object.__setattr__(self, "parts", tuple(map(tuple, parts)))

    def __repr__(self) -> str:
        return f"Joint({', '.join(map(repr, self.parts))})"

    def assign(self, length: int, world: int, rank: int) -> Ranges:
        lengths = [n for n, _ in self.parts]
        if sum(lengths) != length:
            raise ValueError(
                f"the lengths of Joint.parts must add up to the sequence length {length}, but {lengths} add up to "
                f"{sum(lengths)}"
            )
        runs: list[range] = []
        begin = 0
        for n, layout in self.parts:
            for part in layout.ranges(n, world, rank):
                run = range(begin + part.start, begin + part.stop, part.step)
                # One range if adjacent shards touch: fewer blocks to compute.
                if runs and runs[-1].step == run.step == 1 and runs[-1].stop == run.start:
                    run = range(runs.pop().start, run.stop)
                runs.append(run)
            begin += n
        return tuple(runs)


def _is_part(part: object) -> bool:
    match part:
        case (int(length), Layout()):
            return 0 <= length <= MAX_COUNT and not isinstance(length, bool)
    return False


_KNOWN = frozenset({Contiguous, Zigzag, Striped, Balanced, Joint})
"""Layouts that are known to be partitions (a `Joint` of others asks each of them): the exact types."""


def positions_checksum(layout: Layout, length: int, world: int) -> int | None:
    """A checksum of the positions of all ranks, under a layout that may depend on more than its text; None for ours."""
    if isinstance(layout, Joint):
        parts = [positions_checksum(part, n, world) for n, part in layout.parts]
        return hash(tuple(parts)) if any(part is not None for part in parts) else None
    return None if type(layout) in _KNOWN else zlib.crc32(repr(_checked_partition(layout, length, world)).encode())


def _checked_partition(layout: Layout, length: int, world: int) -> tuple[Ranges, ...]:
    try:
        hash(layout)
    except TypeError:
        raise ValueError(
            f"the fields of {shown(layout)}, a layout, must be hashable: numbers, strings or tuples{see(_OWN_LAYOUT)}"
        ) from None
    return _partition(layout, length, world)


@lru_cache(maxsize=256)
def _partition(layout: Layout, length: int, world: int) -> tuple[Ranges, ...]:
    """The positions of every rank by a layout of a user; ValueError unless each position belongs to one rank."""

    def refuse(what: str, problem: str) -> NoReturn:
        raise ValueError(
            f"assign of {shown(layout)} must give {what}, got for length={length} and world={world}: "
            f"{problem}{see(_OWN_LAYOUT)}"
        )

    shards: list[Ranges] = []
    for rank in range(world):
        given = layout.assign(length, world, rank)
        if not isinstance(given, list | tuple) or not all(isinstance(run, range) for run in given):
            refuse("a list or tuple of ranges", f"{shown(given)} of rank {rank}")
        runs = tuple(run for run in given if run)
        ascending = all(run.step > 0 for run in runs) and all(a[-1] < b[0] for a, b in pairwise(runs))
        if not ascending or (runs and not 0 <= runs[0][0] <= runs[-1][-1] < length):
            refuse(f"ascending ranges of positions in 0..{length - 1}", f"{shown(given)} of rank {rank}")
        shards.append(runs)

    every_position = "every position to one rank"
    by_start = sorted(((run, rank) for rank, runs in enumerate(shards) for run in runs), key=lambda held: held[0][0])
    reaching: list[tuple[range, int]] = []  # ranges that do not end before `run` begins
    for run, rank in by_start:
        reaching = [held for held in reaching if held[0][-1] >= run[0]]
        for other, owner in reaching:
            if shared := common((other,), (run,)):
                refuse(every_position, f"position {shared[0][0]} belongs to {format_ranks(sorted((owner, rank)))}")
        reaching.append((run, rank))
    if sum(map(size, shards)) < length:
        refuse(every_position, f"position {_first_gap(by_start, length)} belongs to no rank")
    return tuple(shards)


def _first_gap(by_start: Sequence[tuple[range, int]], length: int) -> int:
    """The first position that is in no range."""
    for begin in range(0, length, _GAP_WINDOW):
        held = torch.zeros(min(_GAP_WINDOW, length - begin), dtype=torch.bool, device="cpu")
        for run, _ in by_start:
            inside = rows_between(run, begin, begin + len(held))
            if inside:
                part = run[inside.start : inside.stop]
                held[part[0] - begin : part[-1] - begin + 1 : part.step] = True
        if not held.all():
            return begin + int((~held).nonzero()[0])
    raise AssertionError("no position is missing")


LAYOUTS: dict[str, Layout] = {"zigzag": Zigzag(), "striped": Striped(), "contiguous": Contiguous()}
