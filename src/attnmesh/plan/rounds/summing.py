"""Rounds of an all-reduce: everybody's slices are summed by the ranks that own them, and the sums go to everybody.

Either every rank sends to all others at once, twice; or ranks meet in pairs, first neighbours and then ever farther
apart, and hand over half of what they still have to sum, and the same way back. Both send the same bytes. Many ranks
take pairs, since messages are started one after another; few take the direct way, which waits only twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnmesh.plan.program import Ints, Messages, Round
from attnmesh.planner.hardware import Link


def summed(name: str, nbytes: int, ranks: int, link: Link) -> Iterator[Round]:
    """The rounds of a sum of `nbytes` over all ranks; `link` is what the way is chosen by."""
    if ranks == 1:
        return
    ends = nbytes * np.arange(ranks + 1, dtype=np.int64) // ranks  # of the slices, by owner
    halvings = (ranks - 1).bit_length()
    in_pairs = halvings * (link.message + link.latency) < (ranks - 1) * link.message + link.latency
    if in_pairs and ranks == 1 << halvings:
        steps = list(_in_pairs(ends, halvings))
    else:
        steps = list(_at_once(np.diff(ends)))
    for half, order in (("scatter", steps), ("gather", steps[::-1])):
        for i, (source, target, moved) in enumerate(order):
            if half == "gather":  # what a rank gave its peer to sum is what comes back as sums
                source, target = target, source
            there = moved > 0
            exchange = f"{name}, {half} {i + 1} of {len(order)}" if len(order) > 1 else f"{name}, {half}"
            messages = Messages(source[there], target[there], moved[there])
            yield Round(exchange, {exchange: messages}, (), (exchange,))


def _at_once(slices: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Every slice to its owner: sources, targets, bytes."""
    ranks = np.arange(len(slices), dtype=np.int64)
    source, target = np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks))
    source, target = source[source != target], target[source != target]
    yield source, target, slices[target]


def _in_pairs(ends: Ints, halvings: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """The half that a peer's side owns, to the peer: its number differs in one bit, in the lowest one first."""
    ranks = np.arange(1 << halvings, dtype=np.int64)
    place = np.zeros_like(ranks)  # which slice a rank owns
    for bit in range(halvings):
        place |= (ranks >> bit & 1) << (halvings - 1 - bit)
    for bit in range(halvings):
        peer = ranks ^ (1 << bit)
        width = 1 << (halvings - 1 - bit)  # slices that a side owns
        first = place[peer] // width * width
        yield ranks, peer, ends[first + width] - ends[first]
