"""The masks that models use, as pure functions of position.

Combine them with `&` (both allow it) and `|` (either allows it):

    Causal() & Documents([3, 5])                           packed documents
    Causal() & (Global(4) | SlidingWindow(1023))           a window, and four tokens that every query attends to
    PerSequence([Causal(), Causal() & Documents([3, 5])])  a mask for every sequence of the batch

Which tokens of a batch belong together: documents that are packed into a row, and padding, as a mask.

The mask is derived from `[batch, tokens]` tensors on the host. No `[tokens, tokens]` tensor is ever made. Host tensors
are read by numpy: torch would divide these short operations among threads, and wait for them on a busy machine.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attnmesh.core.mask import (
    FAR,
    And,
    Coverage,
    IntervalMask,
    Line,
    Mask,
    Or,
    Trapezoid,
    check_mask,
    trapezoids,
    union,
)
from attnmesh.utils.validation import MAX_COUNT, check_bool, check_choice, check_count, check_list, shown

__all__ = [
    "SLICE_KINDS",
    "And",
    "BlockCausal",
    "Causal",
    "Chunked",
    "Coverage",
    "Documents",
    "Full",
    "Global",
    "Mask",
    "Or",
    "Padding",
    "PerSequence",
    "Prefix",
    "Slice",
    "Slices",
    "SlidingWindow",
    "check_mask",
]  # fmt: skip


@dataclass(frozen=True)
class Full(IntervalMask):
    """Every query attends to every key.

    Examples:
        >>> print(am.Full().draw(3))
        # # #
        # # #
        # # #
    """

    allows_everything = True

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.ones(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool, device=q.device)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _filled(q, -FAR), _filled(q, FAR)

    def key_range(self, q: int) -> tuple[int, int]:
        return -FAR, FAR


@dataclass(frozen=True)
class Causal(IntervalMask):
    """A query attends to itself and earlier positions: keys `k <= q`.

    Examples:
        >>> print(am.Causal().draw(3))
        # . .
        # # .
        # # #
    """

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _filled(q, -FAR), q + 1

    def key_range(self, q: int) -> tuple[int, int]:
        return -FAR, q + 1


@dataclass(frozen=True)
class SlidingWindow(IntervalMask):
    """A query attends to `left` keys before itself, itself, and `right` keys after: `q - left <= k <= q + right`.

    Examples:
        >>> print(am.SlidingWindow(1, right=1).draw(4))
        # # . .
        # # # .
        . # # #
        . . # #
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, width in (("left", self.left), ("right", self.right)):
            check_count(f"SlidingWindow.{name}", width)

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - self.left <= k) & (k <= q + self.right)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q - self.left, q + (self.right + 1)

    def key_range(self, q: int) -> tuple[int, int]:
        return q - self.left, q + self.right + 1


@dataclass(frozen=True)
class Prefix(IntervalMask):
    """The first `n` positions attend to one another in both directions, later positions causally: `k < n` or `k <= q`.

    Prefix language models, and images before text. For a prefix per document, see `Documents`.

    Examples:
        >>> print(am.Prefix(2).draw(4))
        # # . .
        # # . .
        # # # .
        # # # #
    """

    n: int

    def __post_init__(self) -> None:
        check_count("Prefix.n", self.n)

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return (k < self.n) | (k <= q)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _filled(q, -FAR), (q + 1).clamp(min=self.n)

    def key_range(self, q: int) -> tuple[int, int]:
        return -FAR, max(self.n, q + 1)

    def boundaries(self, q: range) -> list[int]:
        return [self.n] if q and q[0] < self.n <= q[-1] else []


@dataclass(frozen=True)
class Chunked(IntervalMask):
    """Chunks of `size` positions: a query attends to itself and earlier positions of its own chunk (Llama 4).

    Examples:
        >>> print(am.Chunked(2).draw(4))
        # . . .
        # # . .
        . . # .
        . . # #
    """

    size: int

    def __post_init__(self) -> None:
        check_count("Chunked.size", self.size, least=1)

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (_floor(q, self.size) == _floor(k, self.size))

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _floor(q, self.size) * self.size, q + 1

    def key_range(self, q: int) -> tuple[int, int]:
        return q // self.size * self.size, q + 1

    def boundaries(self, q: range) -> list[int]:
        return _multiples(self.size, q)


@dataclass(frozen=True)
class BlockCausal(IntervalMask):
    """Blocks of `size` positions: a query attends to its own block and all blocks before it.

    Block diffusion, and video models that generate frame after frame.

    Examples:
        >>> print(am.BlockCausal(2).draw(4))
        # # . .
        # # . .
        # # # #
        # # # #
    """

    size: int

    def __post_init__(self) -> None:
        check_count("BlockCausal.size", self.size, least=1)

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return _floor(k, self.size) <= _floor(q, self.size)

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return _filled(q, -FAR), (_floor(q, self.size) + 1) * self.size

    def key_range(self, q: int) -> tuple[int, int]:
        return -FAR, (q // self.size + 1) * self.size

    def boundaries(self, q: range) -> list[int]:
        return _multiples(self.size, q)


@dataclass(frozen=True, init=False)
class Documents(IntervalMask):
    """Several documents packed into one sequence: a query attends to the keys of its own document.

    `lengths` are the lengths of the documents in order; they must add up to the length of the sequence. With
    `prefixes`, one length per document, a document attends causally except for its first positions: the positions
    of the prefix attend to one another in both directions.

    Examples:
        >>> print(am.Documents([2, 3], prefixes=[0, 2]).draw(5))
        # . . . .
        # # . . .
        . . # # .
        . . # # .
        . . # # #
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] | None

    def __init__(self, lengths: Iterable[int], prefixes: Iterable[int] | None = None) -> None:
        counts = _checked_counts("Documents.lengths", lengths)
        check_count("the sum of Documents.lengths", sum(counts))
        object.__setattr__(self, "lengths", counts)
        if prefixes is not None:
            given, prefixes = prefixes, _checked_counts("Documents.prefixes", prefixes)
            if len(prefixes) != len(counts) or any(n > m for n, m in zip(prefixes, counts, strict=True)):
                raise ValueError(
                    f"Documents.prefixes must be one length per document, none longer than the document, got "
                    f"{_brief(prefixes) if prefixes else shown(given)} for lengths "
                    f"{_brief(counts) if counts else shown(lengths)}"
                )
        object.__setattr__(self, "prefixes", prefixes)

    def __repr__(self) -> str:
        more = "" if self.prefixes is None else f", prefixes={self.prefixes}"
        return f"Documents(lengths={self.lengths}{more})"

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The boundaries of the documents: 0, the running sums, the total. Empty documents have none."""
        return tuple(dict.fromkeys(itertools.accumulate(self.lengths, initial=0)))

    @cached_property
    def _prefix_ends(self) -> tuple[int, ...]:
        """The end of the prefix of every document that is not empty."""
        assert self.prefixes is not None
        begins = itertools.accumulate(self.lengths, initial=0)
        return tuple(begin + prefix for begin, prefix, n in zip(begins, self.prefixes, self.lengths, strict=False) if n)

    @property
    def length(self) -> int:
        """The sum of the lengths."""
        return self.bounds[-1]

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        ends = _numbers(self.bounds[1:], q.device)
        q_document, k_document = (torch.bucketize(x.contiguous(), ends, right=True) for x in (q, k))
        inside = (q >= 0) & (q < self.bounds[-1]) & (k >= 0)
        allowed = (q_document == k_document) & inside
        if self.prefixes is None:
            return allowed
        none = _numbers([*self._prefix_ends, 0], q.device)  # of positions after all
        return allowed & ((k <= q) | (k < none[k_document]))

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        bounds = _numbers(self.bounds, q.device)
        after = torch.bucketize(q.contiguous(), bounds, right=True)  # index of the first boundary after the query
        # Positions outside all documents attend to nothing.
        last = bounds.numel() - 1
        first, end = bounds[(after - 1).clamp(0, last)], bounds[after.clamp(0, last)]
        if self.prefixes is None or not last:
            return first, end
        ends = _numbers(self._prefix_ends, q.device)
        causal = torch.maximum(q + 1, ends[(after - 1).clamp(0, last - 1)])
        return first, torch.where((after > 0) & (after <= last), torch.minimum(causal, end), end)

    def key_range(self, q: int) -> tuple[int, int]:
        after = bisect.bisect_right(self.bounds, q)
        last = len(self.bounds) - 1
        first, end = self.bounds[min(max(after - 1, 0), last)], self.bounds[min(after, last)]
        if self.prefixes is None or not 0 < after <= last:
            return first, end
        return first, max(q + 1, self._prefix_ends[after - 1])

    def check(self, length: int) -> None:
        check_count("length", length)
        if self.bounds[-1] != length:
            raise ValueError(
                f"Documents.lengths must add up to the sequence length {length}, but {_brief(self.lengths)} "
                f"add up to {self.bounds[-1]}"
            )

    def boundaries(self, q: range) -> list[int]:
        found = self.bounds if self.prefixes is None else sorted({*self.bounds, *self._prefix_ends})
        return [b for b in found if q and q[0] < b <= q[-1]]


@dataclass(frozen=True)
class Global(Mask):
    """Every query attends to the first `n` positions; with `both`, these also attend to every position (Longformer).

    It allows nothing else: combine it with another mask by `|`, such as `Causal() & (Global(4) | SlidingWindow(1023))`.

    Examples:
        >>> print((am.Causal() & (am.Global(1) | am.SlidingWindow(1))).draw(5))
        # . . . .
        # # . . .
        # # # . .
        # . # # .
        # . . # #
    """

    n: int
    both: bool = False

    def __post_init__(self) -> None:
        check_count("Global.n", self.n)
        check_bool(**{"Global.both": self.both})

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        return (k < self.n) | (q < self.n) if self.both else (k < self.n) & (q == q)

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """The first keys for every query; with `both`, the other keys for the first queries."""
        low, n, high = Line(-FAR, 0), Line(self.n, 0), Line(FAR, 0)
        everyone = trapezoids(positions.start, positions.stop, low, n)
        return everyone + (trapezoids(positions.start, min(self.n, positions.stop), n, high) if self.both else [])


Slice = tuple[range, range, str]
"""Queries, keys, and how they are connected: see `Slices`."""

SLICE_KINDS = ("full", "causal", "inverse_causal", "bidirectional_causal")


@dataclass(frozen=True, init=False)
class Slices(Mask):
    """Rectangles of queries and keys, each full or cut by diagonals: `(query range, key range, kind)`.

    Ranges are `range(start, stop)` or pairs `(start, stop)`. Kinds, of the i-th query and the j-th key of a rectangle
    with m queries and n keys:

        "full"                  all pairs
        "causal"                j - n <= i - m: the diagonal ends in the last query and the last key
        "inverse_causal"        j >= i: the diagonal begins in the first query and the first key
        "bidirectional_causal"  both

    A pair that several slices allow counts once. A query may have at most 64 intervals of keys, where intervals that
    touch are one; more raise ValueError when the mask is used. This is MagiAttention's description of masks.

    Examples:
        >>> print(am.Slices([((0, 3), (0, 3), "causal"), ((3, 5), (1, 3), "full")]).draw(5))
        # . . . .
        # # . . .
        # # # . .
        . # # . .
        . # # . .
    """

    slices: tuple[Slice, ...]

    def __init__(self, slices: Iterable[tuple[range | tuple[int, int], range | tuple[int, int], str]]) -> None:
        try:
            given = list(slices)
        except TypeError:
            raise ValueError(f"Slices.slices must be a list of slices, got {shown(slices)}") from None
        object.__setattr__(self, "slices", tuple(_checked_slice(i, item) for i, item in enumerate(given)))

    @property
    def length(self) -> int:
        """The end of the last query or key."""
        return max((stop for q, k, _ in self.slices for stop in (q.stop, k.stop)), default=0)

    def check(self, length: int) -> None:
        check_count("length", length)
        for i, (_, k, _) in enumerate(self.slices):
            if k.stop > length:
                raise ValueError(f"Slices.slices[{i}] must have keys in [0, {length}), got {k}")

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        allowed = torch.zeros(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool, device=q.device)
        for queries, keys, kind in self.slices:
            inside = (q >= queries.start) & (q < queries.stop) & (k >= keys.start) & (k < keys.stop)
            if kind in ("causal", "bidirectional_causal"):
                inside = inside & (k - keys.stop <= q - queries.stop)
            if kind in ("inverse_causal", "bidirectional_causal"):
                inside = inside & (k - keys.start >= q - queries.start)
            allowed = allowed | inside
        return allowed

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """All slices without what earlier ones contain."""
        return [
            each._replace(start=max(each.start, positions.start), stop=min(each.stop, positions.stop))
            for each in self._disjoint
            if each.start < positions.stop and each.stop > positions.start
        ]

    @cached_property
    def _disjoint(self) -> list[Trapezoid]:
        found = []
        for queries, keys, kind in self.slices:
            first, end = Line(keys.start, 0), Line(keys.stop, 0)
            if kind in ("causal", "bidirectional_causal"):
                end = Line(keys.stop - queries.stop + 1, 1)
            if kind in ("inverse_causal", "bidirectional_causal"):
                first = Line(keys.start - queries.start, 1)
            found.append(trapezoids(queries.start, queries.stop, first, end))
        return union(found)


@dataclass(frozen=True, init=False)
class PerSequence(Mask):
    """A mask for every sequence of the batch, in order. Another batch size raises ValueError.

    Examples:
        >>> mask = am.PerSequence([am.Causal(), am.Causal() & am.Documents([1, 3])])
        >>> mask.sequences, mask.length
        (2, 4)
        >>> print(mask.of_sequence(1).draw(4))
        # . . .
        . # . .
        . # # .
        . # # #
    """

    masks: tuple[Mask, ...]

    def __init__(self, masks: Iterable[Mask]) -> None:
        if isinstance(masks, Set):
            raise ValueError(f"PerSequence.masks must be a list of masks, got {shown(masks)}")
        given = tuple(check_list("PerSequence.masks", masks, "masks"))
        for i, mask in enumerate(given):
            check_mask(f"PerSequence.masks[{i}]", mask)
            if mask.sequences is not None:
                raise ValueError(f"PerSequence.masks[{i}] must be the mask of one sequence, got {shown(mask)}")
        object.__setattr__(self, "masks", given)

    @property
    def sequences(self) -> int:
        """The number of masks."""
        return len(self.masks)

    def of_sequence(self, index: int) -> Mask:
        """The mask of one sequence of the batch."""
        check_count("index", index, most=len(self.masks) - 1)
        return self.masks[index]

    @property
    def length(self) -> int | None:
        """The largest length of the masks."""
        return max((mask.length for mask in self.masks if mask.length is not None), default=None)

    def check(self, length: int) -> None:
        check_count("length", length)
        for mask in self.masks:
            mask.check(length)

    @property
    def is_interval(self) -> bool:
        return all(mask.is_interval for mask in self.masks)

    def trapezoids(self, positions: range) -> list[Trapezoid]:
        """Not defined: take `of_sequence(i)`."""
        raise ValueError(f"{shown(self)} has a mask for every sequence: take of_sequence(i)")

    def _visible(self, q: Tensor, k: Tensor) -> Tensor:
        raise ValueError(f"{shown(self)} has a mask for every sequence: take of_sequence(i)")


@dataclass(frozen=True, init=False)
class Padding(PerSequence):
    """A batch of padded sequences: sequence i has `lengths[i]` positions, the rest is padding.

    No query attends to padding, and padding attends to nothing. With `side="left"` the padding comes first, and
    `length`, the padded length, is required. Combine it by `&`: `Causal() & Padding([5, 8])`.

    Examples:
        >>> mask = am.Causal() & am.Padding([2, 3], side="left", length=4)
        >>> print(mask.of_sequence(0).draw(4))
        . . . .
        . . . .
        . . # .
        . . # #
    """

    lengths: tuple[int, ...]
    side: str
    padded_length: int | None

    def __init__(self, lengths: Iterable[int], side: str = "right", length: int | None = None) -> None:
        counts = _checked_counts("Padding.lengths", lengths)
        check_choice("Padding.side", side, ("left", "right"))
        if length is not None:
            check_count("Padding.length", length, least=max(counts, default=0))
        elif side == "left":
            raise ValueError('Padding with side="left" requires length, the padded length, got None')
        shifts = [length - n if side == "left" and length is not None else 0 for n in counts]
        spans = [range(shift, shift + n) for n, shift in zip(counts, shifts, strict=True)]
        super().__init__([Slices([(span, span, "full")] if span else []) for span in spans])
        for name, value in (("lengths", counts), ("side", side), ("padded_length", length)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        length = "" if self.padded_length is None else f", length={self.padded_length}"
        return f"Padding(lengths={self.lengths}, side={self.side!r}{length})"

    @property
    def length(self) -> int | None:
        """The padded length, or the longest sequence."""
        return self.padded_length if self.padded_length is not None else max(self.lengths, default=0)

    def check(self, length: int) -> None:
        check_count("length", length)
        if max(self.lengths, default=0) > length or self.padded_length not in (None, length):
            raise ValueError(f"{self} does not fit sequences of {length} positions")


def _checked_counts(name: str, counts: Iterable[int]) -> tuple[int, ...]:
    try:
        if isinstance(counts, str | Set | Mapping):
            raise TypeError("not a list")
        given = tuple(counts)
        numbers = tuple(operator.index(n) for n in given)
    except (TypeError, RuntimeError):  # of a tensor without data
        raise ValueError(f"{name} must all be integers >= 0, got {shown(counts)}") from None
    if any(n < 0 for n in numbers) or any(isinstance(n, bool) for n in given):
        raise ValueError(f"{name} must all be integers >= 0, got {_brief(given)}")
    return numbers


def _numbers(numbers: Iterable[int], device: torch.device) -> Tensor:
    """An int64 tensor on a device, copied there without waiting for it."""
    return torch.tensor(tuple(numbers), dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _checked_slice(index: int, item: object) -> Slice:
    name = f"Slices.slices[{index}]"
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 3:
        raise ValueError(f"{name} must be (query range, key range, kind), got {shown(item)}")
    check_choice(f"the kind of {name}", item[2], SLICE_KINDS)
    ends = []
    for given in item[:2]:
        pair = given
        if isinstance(given, range):
            pair = (given.start, given.stop) if given.step == 1 else None
        match pair:
            case (int(start), int(stop)) if 0 <= start < stop <= MAX_COUNT and not isinstance(start, bool):
                ends.append(range(start, stop))
            case _:
                raise ValueError(
                    f"{name} must have ranges (start, stop) with 0 <= start < stop <= {MAX_COUNT}, got {shown(given)}"
                )
    return ends[0], ends[1], str(item[2])


def _filled(q: Tensor, bound: int) -> Tensor:
    return torch.full_like(q, bound, dtype=torch.int64)  # positions may be narrower integers


def _floor(x: Tensor, size: int) -> Tensor:
    return torch.div(x, size, rounding_mode="floor")


def _multiples(size: int, q: range) -> list[int]:
    return list(range((q[0] // size + 1) * size, q[-1] + 1, size)) if q else []


def _brief(lengths: tuple[object, ...]) -> str:
    first = ", ".join(map(shown, lengths[:8]))
    return f"({first}, ... {len(lengths)} in all)" if len(lengths) > 8 else f"({first})"


# Which tokens of a batch belong together: documents that are packed into a row, and padding, as a mask.


@dataclass(frozen=True)
class Packing:
    """The documents and the padding of a batch: `mask` allows pairs of tokens of the same document.

    A token of padding attends to nothing, and nothing attends to it. `first[b]` is the first token of row b that is not
    padding. A batch without documents and padding has `mask=None`.
    """

    mask: Mask | None
    first: tuple[int, ...]
    length: int
    known_numbers: Tensor | None = field(default=None, repr=False, compare=False)

    def apply(self, layer: Mask) -> Mask:
        """The mask of a layer within the documents. Chunks of chunked attention begin after the padding."""
        if isinstance(layer, Chunked) and any(self.first):
            layer = Causal() & _per_row([_chunks(layer.size, begin, self.length) for begin in self.first])
        return layer if self.mask is None else layer & self.mask

    def numbers(self) -> Tensor | None:
        """The number of the document of each token, int32 [B, S] on the host, -1 for padding; None without a mask.

        A compiled graph takes it in place of the mask: see `packing_of_numbers`.
        """
        if self.mask is None or self.known_numbers is not None:
            return self.known_numbers
        at = torch.arange(self.length, dtype=torch.int64, device="cpu")
        follows, real = (self.mask.visible(at, keys).expand(len(self.first), -1) for keys in (at - 1, at))
        return (~follows).cumsum(-1).masked_fill(~real, -1).int()


def packing_of(starts: Tensor | None, real: Tensor | None, shape: tuple[int, int]) -> Packing:
    """The packing of a batch of this shape [B, S].

    Args:
        starts: bool [B, S] on the host, the tokens that begin a document; None if every row is one document.
        real: bool [B, S] on the host, the tokens that are not padding; None if there is no padding.
    """
    rows, length = shape
    every = [
        _row(None if starts is None else starts[i], None if real is None else real[i], length) for i in range(rows)
    ]
    masks = [mask for mask, _ in every]
    first = tuple(begin for _, begin in every)
    if all(isinstance(mask, Full) for mask in masks):
        return Packing(None, first, length)
    numbers = np.zeros(shape, dtype=np.int32)
    if starts is not None:
        known = starts.shape[1]
        numbers[:, :known] = starts.numpy().cumsum(-1, dtype=np.int32)
        numbers[:, known:] = numbers[:, known - 1 : known]
    if real is not None:
        numbers[~real.numpy()] = -1
    return Packing(_per_row(masks), first, length, torch.from_numpy(numbers))


_latest: deque[tuple[Tensor, Packing]] = deque(maxlen=8)


def packing_of_numbers(numbers: Tensor) -> Packing:
    """The packing that has these `numbers`; a packing of the latest calls if its numbers are equal."""
    for known, packing in tuple(_latest):
        if torch.equal(known, numbers):
            return packing
    real = numbers >= 0
    shape = numbers.shape[0], numbers.shape[1]
    packing = packing_of(number_starts(numbers), None if bool(real.all()) else real, shape)
    _latest.append((numbers.clone(), packing))
    return packing


def number_starts(numbers: Tensor) -> Tensor:
    """The tokens [B, S] whose document has another number than the previous token's."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts


def _row(starts: Tensor | None, real: Tensor | None, length: int) -> tuple[Mask, int]:
    """The mask of one row, and its first token that is not padding."""
    begin, end = 0, length
    if starts is None and real is None:
        return Full(), begin
    cuts = np.zeros(max(length, 1), dtype=bool)
    if real is not None:
        tokens = np.flatnonzero(real.numpy())
        if not tokens.size:
            return Slices([]), length
        begin, end = int(tokens[0]), int(tokens[-1]) + 1
        cuts[1:] |= np.diff(real.numpy())
    if starts is not None:
        cuts[: len(starts)] |= starts.numpy()
    inside = [at for at in np.flatnonzero(cuts).tolist() if begin < at < end]
    mask: Mask = Full()
    if inside:
        bounds = sorted({0, begin, *inside, end, length})
        mask = Documents([b - a for a, b in pairwise(bounds)])
    if begin > 0 or end < length:
        tokens_only = Slices([(range(begin, end), range(begin, end), "full")])
        mask = tokens_only & mask if inside else tokens_only
    return mask, begin


def _per_row(masks: Sequence[Mask]) -> Mask:
    """One mask if all rows have the same."""
    return masks[0] if all(mask == masks[0] for mask in masks) else PerSequence(masks)


def _chunks(size: int, begin: int, length: int) -> Mask:
    """Chunks of `size` tokens from token `begin` on."""
    bounds = [*([0] if begin else []), *range(begin, length, size), length]
    return Documents([b - a for a, b in pairwise(bounds)])
