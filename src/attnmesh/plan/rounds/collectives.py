"""Collectives as exchanges: what ranks of the same group send one another, counted as comm's traffic is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Bundle, Ints, Messages, Round
from attnmesh.plan.rounds.sizes import copying
from attnmesh.plan.rounds.travel import MOST_MESSAGES

ONE_ROUND = 1 << 16
"""Bytes at a rank below which a sum takes one round instead of two: as comm has it."""

Exchange = Messages | Bundle


@dataclass(frozen=True)
class Groups:
    """Ranks that exchange with one another: `ranks[g, i]` is the i-th of group g. Every rank is in one group."""

    ranks: Ints
    node: int  # ranks a node

    @property
    def world(self) -> int:
        """All ranks."""
        return self.ranks.size

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return int(self.ranks.shape[1])

    def gathered(self, own: Ints) -> Exchange:
        """Every rank r sends its `own[r]` bytes to each other one."""
        return self._everywhere(own, np.zeros_like(own))

    def scattered(self, due: Ints) -> Exchange:
        """Every rank r gets `due[r]` bytes from each other one."""
        return self._everywhere(np.zeros_like(due), due)

    def summed(self, nbytes: Ints) -> list[Exchange]:
        """Tensors of `nbytes[r]` bytes, equal in a group, are summed: slices go to who sums them, sums to everybody.

        A rank sends twice all but its share, rounded as comm counts it. What is small goes to everybody at once.
        """
        if self.size == 1 or not nbytes.any():
            return []
        sent = np.rint(2 * (self.size - 1) / self.size * nbytes).astype(np.int64)
        second = np.where(nbytes * self.size <= ONE_ROUND, 0, sent // 2)
        return [self._evenly(half) for half in (sent - second, second) if half.any()]

    def shifted(self, nbytes: Ints) -> Messages:
        """Every rank r sends `nbytes[r]` bytes to its right neighbour."""
        source, target = self.ranks.reshape(-1), np.roll(self.ranks, -1, axis=1).reshape(-1)
        sent = (nbytes[source] > 0) & (source != target)
        return Messages(source[sent], target[sent], nbytes[source[sent]])

    def _evenly(self, sent: Ints) -> Exchange:
        """`sent[r]` bytes of rank r go to the others; what does not divide goes to the right neighbour."""
        each, rest = np.divmod(sent, self.size - 1)
        return self._everywhere(each, np.zeros_like(each), rest)

    def _everywhere(self, by_source: Ints, by_target: Ints, to_right: Ints | None = None) -> Exchange:
        """From everybody to everybody: what the sender says, what the receiver says, and more for a neighbour."""
        to_right = np.zeros_like(by_source) if to_right is None else to_right
        if self.world * (self.size - 1) > MOST_MESSAGES:
            return self._sums(by_source, by_target, to_right)
        source = np.repeat(self.ranks.reshape(-1), self.size)
        target = np.repeat(self.ranks, self.size, axis=0).reshape(-1)
        nbytes = by_source[source] + by_target[target] + to_right[source] * (self._beside(-1)[source] == target)
        sent = (source != target) & (nbytes > 0)
        return Messages(source[sent], target[sent], nbytes[sent])

    def _sums(self, by_source: Ints, by_target: Ints, to_right: Ints) -> Bundle:
        rank, group = np.arange(self.world), np.zeros(self.world, dtype=np.int64)
        group[self.ranks] = np.arange(len(self.ranks))[:, None]
        node = rank // self.node
        _, both = np.unique(group * self.world + node, return_inverse=True)  # ranks of one group and one node

        def of_others(values: Ints, by: Ints) -> Ints:
            sums: Ints = np.bincount(by, values)[by].astype(np.int64) - values
            return sums

        others, near = np.full(self.world, self.size - 1), np.bincount(both)[both] - 1
        right, left = self._beside(-1), self._beside(1)
        near_out = near * by_source + of_others(by_target, both) + to_right * (node[right] == node)
        near_in = near * by_target + of_others(by_source, both) + to_right[left] * (node[left] == node)
        out = others * by_source + of_others(by_target, group) + to_right
        into = others * by_target + of_others(by_source, group) + to_right[left]
        return Bundle(group, near_out, near_in, out - near_out, into - near_in, others)

    def _beside(self, shift: int) -> Ints:
        """The neighbour of every rank in its group: the right one for -1, the left one for 1."""
        found = np.empty(self.world, dtype=np.int64)
        found[self.ranks] = np.roll(self.ranks, shift, axis=1)
        return found


def all_ranks(world: int, node: int | None = None) -> Groups:
    """One group of all ranks."""
    return Groups(np.arange(world, dtype=np.int64)[None], node or world)


def exchanged(name: str, *exchanges: Exchange) -> Iterator[Round]:
    """Exchanges that are waited for at once; no round where nothing is sent."""
    started = {f"{name} {at}" if at else name: moved for at, moved in enumerate(exchanges) if _any(moved)}
    if started:
        yield Round(name, started, (), tuple(started))


def summed(name: str, nbytes: Ints, groups: Groups) -> Iterator[Round]:
    """A tensor of `nbytes[r]` bytes on every rank r becomes the sum over its group."""
    steps = groups.summed(nbytes)
    for at, exchange in enumerate(steps):
        yield from exchanged(f"{name} {at}" if at else name, exchange)
        if at == 0:  # all of one slice, or of everything
            read = nbytes * (groups.size if len(steps) == 1 else 1)
            yield Round(f"{name}, added", work=(copying(read),))


def _any(moved: Exchange) -> bool:
    return bool(moved.sends.any()) if isinstance(moved, Bundle) else len(moved) > 0
