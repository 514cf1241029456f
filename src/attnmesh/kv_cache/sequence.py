"""What the cache hands out: a handle for a sequence, and the places of its new tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False, repr=False)
class Sequence:
    """A sequence in a cache. `row` is its row in the cache's tables, `length` its tokens, `cached` how many of them
    were there when it began. The rest is the cache's own; all of it changes through the cache only.
    """

    row: int
    length: int
    cached: int
    owner: object | None  # its cache; None once freed
    blocks: list[int]  # may reach past the length: what a prompt has reserved
    ids: array[int]  # known tokens: past the length while a prompt is outstanding, short of it after an anonymous token
    root: bytes
    digests: list[bytes]  # of the full blocks that were registered or found
    pending: dict[NewTokens, int]  # tokens not yet written in every layer, and where they begin, in their order

    @property
    def written(self) -> int:
        """How many tokens, from the first on, are in the cache with all their layers."""
        return next(iter(self.pending.values()), self.length)

    def __repr__(self) -> str:
        state = "" if self.owner is not None else ", freed"
        return f"Sequence(row={self.row}, length={self.length}, cached={self.cached}{state})"


@dataclass(eq=False, repr=False)
class ShardedSequence:
    """A sequence in a cache that is spread over ranks. `row` is its row in the batch; the rest is as of `Sequence`."""

    row: int
    bank: int  # which KVDP rank's sequences it is among
    held: Sequence  # as its bank knows it
    owner: object  # its cache

    @property
    def length(self) -> int:
        """Its tokens, whoever holds them."""
        return self.held.length

    @property
    def cached(self) -> int:
        """How many of them were there when it began."""
        return self.held.cached

    @property
    def freed(self) -> bool:
        """Whether it has ended."""
        return self.held.owner is None

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"ShardedSequence(row={self.row}, length={self.length}, cached={self.cached}{state})"


@dataclass(eq=False, repr=False)
class NewTokens:
    """Slots for T new tokens of n sequences: `slots` int64 [n, T] on the device, block * block_size + offset.

    The slot of a token that another rank of the share holds is -1, which `write` skips. So is that of a token truncated
    or freed before it was written.
    """

    slots: Tensor
    sequences: tuple[Sequence, ...]
    missing: set[int]  # layers not yet written
    owner: object  # their cache

    def skip(self, sequence: Sequence, begin: int) -> None:
        """Give up a sequence's tokens from the `begin`th on: by now their slots may be someone else's."""
        if not self.slots.is_meta:
            self.slots[self.sequences.index(sequence), begin:] = -1

    def __repr__(self) -> str:
        return f"NewTokens({list(self.slots.shape)} slots, missing layers {sorted(self.missing)})"
