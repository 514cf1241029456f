"""`Balanced`: every rank has the same work and equally many positions, under any mask.

The work of a position is the number of keys it sees. Packed documents make it as uneven as they are themselves: a few
long ones hold most of it. Sharing it out fairly is the necklace problem. Slide a window that holds half of the
positions along the sequence: where it has more than half of the work, the rest has less, so somewhere in between both
have half. Take that window out, close the gap, and go on with both sides:

    causal, four ranks    0 1 2 3 4 5 6 7 8 9 a b c d e f
    in two                - - - - + + + + + + + + - - - -
    in four               3 3 2 2 1 1 0 0 0 0 1 1 2 2 3 3

A window has two ends, so `world` ranks hold fewer than 2 x world runs in all, and few documents are cut. A causal mask
gives a zigzag, a full one contiguous stretches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attnmesh.layout import Layout
from attnmesh.mask import Mask
from attnmesh.spans import Spans, narrowed

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

    def _spans(self, length: int, world: int, rank: int) -> Spans:
        return _shares(self.mask, length, world)[rank]


@lru_cache(maxsize=256)
def _shares(mask: Mask, length: int, world: int) -> tuple[Spans, ...]:
    """What every rank holds."""
    mask.check(length)
    seen = torch.stack(mask.visible(torch.arange(length, device="cpu"))).clamp(0, length)
    whole = _Strand((range(length),) if length else (), seen[1] - seen[0], seen)
    shares = _shared(whole, world, int(whole.work.sum()) / world)
    # In this order keys travel least far around a ring: shares that end near one another see the same documents.
    return tuple(sorted(shares, key=lambda spans: spans[-1][-1] if spans else length))


@dataclass(frozen=True)
class _Strand:
    """Positions that some ranks are to share, strung together as if nothing had lain between them."""

    spans: Spans
    work: Tensor  # how many keys each position sees, in the whole sequence
    seen: Tensor  # which positions of the strand it sees, by index: seen[0] <= index < seen[1]

    def inside(self, window: range) -> _Strand:
        """The positions in the window."""
        rows = slice(window.start, window.stop)
        seen = (self.seen[:, rows] - window.start).clamp(0, len(window))
        return _Strand(narrowed(self.spans, window), self.work[rows], seen)

    def outside(self, window: range) -> _Strand:
        """The positions before and after the window."""
        spans = narrowed(self.spans, range(window.start)) + narrowed(self.spans, range(window.stop, len(self.work)))
        work, seen = (torch.cat([x[..., : window.start], x[..., window.stop :]], -1) for x in (self.work, self.seen))
        return _Strand(spans, work, seen - (seen - window.start).clamp(0, len(window)))


def _shared(strand: _Strand, ranks: int, mean: float) -> list[Spans]:
    """The shares of so many ranks; `mean` is the work due to each of all ranks."""
    if ranks == 1 or not strand.spans:
        return [strand.spans] * ranks
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
