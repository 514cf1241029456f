"""Which blocks the positions of a sequence lie in, when ranks share the positions: pure index arithmetic.

    ranks = 2, block_size = 2      block      0       1       2
    run = 1                       rank 0    0 2     4 6     8 10
                                  rank 1    1 3     5 7     9 11
    run = 4                       rank 0    0 1     2 3     8 9
                                  rank 1    4 5     6 7    12 13

Every rank gives a sequence the same blocks, as many as rank 0 needs, which never holds fewer tokens than another. What
lies in a block differs from rank to rank; who holds it, shares it and finds it again does not.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from math import gcd

from attnmesh.core.ranges import Share


@dataclass(frozen=True)
class Paging:
    """Blocks of `block_size` tokens under a share. Only `slots` depends on the share's own rank."""

    share: Share
    block_size: int

    def blocks(self, length: int) -> int:
        """How many blocks a sequence of `length` tokens has."""
        return -(-self.share.length(length, 0) // self.block_size)

    def full_blocks(self, length: int) -> int:
        """How many of them are full on every rank."""
        return self.share.length(length, self.share.ranks - 1) // self.block_size

    def filled(self, blocks: int) -> int:
        """How many tokens it takes to fill so many blocks on every rank: the last rank fills its own last."""
        return self.share.position(blocks * self.block_size - 1, self.share.ranks - 1) + 1 if blocks else 0

    def level(self, blocks: int) -> int:
        """The most blocks, up to so many, that are full on every rank before any rank begins the next one.

        Only there can a sequence go on from blocks that others hold, too. Elsewhere some rank has room in them still
        when another is past them, and the next tokens would be written into what is not its own.
        """
        run = self.share.run if self.share.ranks > 1 else 1
        return blocks - blocks % (run // gcd(run, self.block_size))

    def touched(self, begin: int, end: int) -> abc.Sequence[int]:
        """The blocks that positions `begin` to `end` lie in, on one rank or another, in ascending order."""
        share = self.share
        if end - begin == 1:  # mostly: a step of decode, for every sequence of a batch
            return (share.index(begin) // self.block_size,)
        if end - begin >= share.ranks * share.run:  # without a gap, from what the last rank lacks on
            return range(self.full_blocks(begin), self.blocks(end))
        return sorted({share.index(position) // self.block_size for position in range(begin, end)})

    def slots(self, blocks: list[int], begin: int, end: int) -> list[int]:
        """Where this rank holds positions `begin` to `end` of a sequence that has `blocks`; -1 where it does not."""
        share, size = self.share, self.block_size
        if end - begin == 1:
            index = share.index(begin)
            return [blocks[index // size] * size + index % size if share.owner(begin) == share.rank else -1]
        slots = [-1] * (end - begin)
        at, stop = share.length(begin), share.length(end)
        while at < stop:  # a stretch of one run in one block at a time
            index, offset = divmod(at, size)
            run = share.run - at % share.run if share.ranks > 1 else size
            count = min(size - offset, run, stop - at)
            first, slot = share.position(at) - begin, blocks[index] * size + offset
            slots[first : first + count] = range(slot, slot + count)
            at += count
        return slots
