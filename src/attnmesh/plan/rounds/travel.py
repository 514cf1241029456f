"""Rows that travel between many ranks at once: message by message, or, where there are millions, only their sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Bundle, Ints, Messages

MOST_MESSAGES = 1 << 18
"""More than these in one exchange are kept as sums."""


@dataclass(frozen=True)
class Travel:
    """Rows (or bytes) that go from rank `source[i]` to rank `target[i]`."""

    source: Ints
    target: Ints
    rows: Ints

    def weighing(self, row: Ints) -> Messages:
        """As messages: a row weighs `row[r]` on the rank r that sends it."""
        return _sent(self.source, self.target, self.rows * row[self.source])

    def back_weighing(self, row: Ints) -> Messages:
        """The same rows on the way back; the rank that sends them is the one that they came to."""
        return _sent(self.target, self.source, self.rows * row[self.target])

    def sent(self, world: int) -> Ints:
        """Rows that leave every rank."""
        return np.bincount(self.source, self.rows, world).astype(np.int64)


@dataclass(frozen=True)
class TravelSums:
    """The same as sums by rank; `near` are rows to ranks of the same node."""

    group: Ints
    near_out: Ints
    near_in: Ints
    far_out: Ints
    far_in: Ints
    sends: Ints

    def weighing(self, row: Ints) -> Bundle:
        """As a bundle. All ranks of a group must weigh a row alike."""
        near_out, near_in = self.near_out * row, self.near_in * row
        return Bundle(self.group, near_out, near_in, self.far_out * row, self.far_in * row, self.sends)

    def back_weighing(self, row: Ints) -> Bundle:
        """The same rows on the way back."""
        near_out, near_in = self.near_in * row, self.near_out * row
        return Bundle(self.group, near_out, near_in, self.far_in * row, self.far_out * row, self.sends)

    def sent(self, world: int) -> Ints:
        """Rows that leave every rank."""
        return self.near_out + self.far_out


def _sent(source: Ints, target: Ints, nbytes: Ints) -> Messages:
    there = nbytes > 0
    return Messages(source[there], target[there], nbytes[there])
