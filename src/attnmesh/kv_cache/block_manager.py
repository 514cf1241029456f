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

import heapq
from array import array
from collections import Counter, abc
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.block_pool import Blocks, CacheFull, link_digest
from attnmesh.kv_cache.pools import Tables
from attnmesh.kv_cache.sequence import Sequence


@dataclass(frozen=True)
class Paging:
    """Blocks of `block_size` tokens under a share. Only `slots` depends on the share's own rank."""

    share: InterleavedShard
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
        run = self.share.interleave if self.share.ranks > 1 else 1
        return blocks - blocks % (run // gcd(run, self.block_size))

    def touched(self, begin: int, end: int) -> abc.Sequence[int]:
        """The blocks that positions `begin` to `end` lie in, on one rank or another, in ascending order."""
        share = self.share
        if end - begin == 1:  # mostly: a step of decode, for every sequence of a batch
            return (share.index(begin) // self.block_size,)
        if end - begin >= share.ranks * share.interleave:  # without a gap, from what the last rank lacks on
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
            run = share.interleave - at % share.interleave if share.ranks > 1 else size
            count = min(size - offset, run, stop - at)
            first, slot = share.position(at) - begin, blocks[index] * size + offset
            slots[first : first + count] = range(slot, slot + count)
            at += count
        return slots


class Copies(NamedTuple):
    """The blocks to copy before anything is written to new tokens' slots."""

    sources: list[int]
    targets: list[int]


class _Growth(NamedTuple):
    """A block that a sequence's next tokens lie in: fresh, copied because others hold it, or the sequence's own."""

    sequence: Sequence
    at: int  # among the sequence's blocks
    fresh: bool
    copies: bool


class Ledger:
    """The sequences of one cache. Changes wait in `tables` until it is uploaded."""

    def __init__(self, owner: object, blocks: Blocks, tables: Tables, paging: Paging, max_sequences: int) -> None:
        self._owner, self._blocks, self._tables, self._paging = owner, blocks, tables, paging
        self._max_sequences = max_sequences
        self._rows = list(range(max_sequences))  # a heap: the lowest first, so that those in use lie together

    @property
    def free_rows(self) -> int:
        """How many more sequences there can be."""
        return len(self._rows)

    def find(self, root: bytes, ids: array[int]) -> int:
        """How many tokens of a prompt are there."""
        return self._paging.filled(len(self._find(root, ids)[1]))

    def begin(self, count: int, ids: array[int], root: bytes) -> Sequence:
        """A sequence with room for `count` tokens, on top of the longest chain of blocks that has its first ids."""
        digests, found = self._find(root, ids)
        needed = self._paging.blocks(count) - len(found)
        self._check_row()
        self._blocks.check_room(needed, keeping=found)
        for block in found:
            self._blocks.hold(block)
        length = self._paging.filled(len(found))
        return self._enter(length, [*found, *self._blocks.take(needed)], ids, root, digests)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second holder of the blocks that a sequence has filled or begun; reserved ones stay with the first."""
        self._check_row()
        shared = sequence.blocks[: self._paging.blocks(sequence.length)]
        for block in shared:
            self._blocks.hold(block)
        ids = sequence.ids[: sequence.length]
        return self._enter(sequence.length, shared, ids, sequence.root, list(sequence.digests))

    def check_growth(self, sequences: tuple[Sequence, ...], count: int) -> list[_Growth]:
        """What `count` more tokens on each sequence need, or CacheFull."""
        growths = self._growths(sequences, count)
        self._blocks.check_room(sum(growth.fresh or growth.copies for growth in growths))
        return growths

    def grow(self, sequences: tuple[Sequence, ...], count: int, given: list[array[int]] | None) -> Copies:
        """Room for `count` more tokens on each sequence."""
        copies = Copies([], [])
        for growth in self.check_growth(sequences, count):
            self._grow_block(growth, copies)
        for i, sequence in enumerate(sequences):
            if given is not None and len(sequence.ids) >= sequence.length:
                sequence.ids.extend(given[i][len(sequence.ids) - sequence.length :])
            sequence.length += count
            self._set_length(sequence.row, sequence.length)
        return copies

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Give back all blocks past `length`, and all claims on tokens there."""
        kept = self._paging.blocks(length)
        self._tables.set_blocks(sequence.row, kept, [-1] * (len(sequence.blocks) - kept))
        self._set_length(sequence.row, length)
        self._blocks.release(sequence.blocks[kept:])
        for new, begin in list(sequence.pending.items()):
            if begin + new.slots.shape[1] > length:
                new.skip(sequence, max(0, length - begin))
            if begin >= length:
                del sequence.pending[new]
        # Blocks that stay may be full and findable beyond the length: they remain so, until somebody appends to them.
        del sequence.blocks[kept:], sequence.ids[length:], sequence.digests[self._paging.full_blocks(length) :]
        sequence.length = length

    def end(self, sequence: Sequence) -> None:
        """Give back everything."""
        self.truncate(sequence, 0)
        heapq.heappush(self._rows, sequence.row)
        sequence.owner = None

    def register(self, sequence: Sequence) -> None:
        """Make the blocks findable that are full on every rank, whose tokens are known and written in every layer."""
        full = self._paging.full_blocks(min(sequence.written, len(sequence.ids)))
        for i in range(len(sequence.digests), full):
            parent = sequence.digests[-1] if sequence.digests else sequence.root
            digest = self._digest(parent, sequence.ids, i)
            self._blocks.register(sequence.blocks[i], digest)
            sequence.digests.append(digest)

    def _digest(self, parent: bytes, ids: array[int], block: int) -> bytes:
        """The name of a block: its tokens on all ranks, and all before them, that its parent has not named."""
        return link_digest(parent, ids[self._paging.filled(block) : self._paging.filled(block + 1)])

    def _find(self, root: bytes, ids: array[int]) -> tuple[list[bytes], list[int]]:
        """The longest chain of blocks that a prompt begins with and can go on from, never with its last token."""
        digests: list[bytes] = []
        found: list[int] = []
        while self._paging.filled(len(found) + 1) < len(ids):
            digest = self._digest(digests[-1] if digests else root, ids, len(found))
            block = self._blocks.find(digest)
            if block is None:
                break
            digests.append(digest)
            found.append(block)
        level = self._paging.level(len(found))
        return digests[:level], found[:level]

    def _enter(self, length: int, blocks: list[int], ids: array[int], root: bytes, digests: list[bytes]) -> Sequence:
        """A new sequence whose first `length` tokens are there."""
        row = heapq.heappop(self._rows)
        self._tables.set_blocks(row, 0, blocks)
        self._set_length(row, length)
        return Sequence(row, length, length, self._owner, blocks, ids, root, digests, {})

    def _growths(self, sequences: tuple[Sequence, ...], count: int) -> list[_Growth]:
        """Every block that is touched. Of those that share one, the last to leave may keep it."""
        leaving: Counter[int] = Counter()
        growths = []
        for sequence in sequences:
            for at in self._paging.touched(sequence.length, sequence.length + count):
                fresh, copies = at >= len(sequence.blocks), False
                if not fresh and (holders := self._blocks.holders(sequence.blocks[at])) > 1:
                    copies = holders - leaving[sequence.blocks[at]] > 1
                    leaving[sequence.blocks[at]] += copies
                growths.append(_Growth(sequence, at, fresh, copies))
        return growths

    def _grow_block(self, growth: _Growth, copies: Copies) -> None:
        """Make a block one that only its sequence holds and nobody finds: its content is about to change."""
        sequence, at, fresh, copied = growth
        if not fresh and not copied:
            self._blocks.forget(sequence.blocks[at])  # it may have been full before it was truncated
            return
        (block,) = self._blocks.take(1)
        if copied:
            copies.sources.append(sequence.blocks[at])
            copies.targets.append(block)
            self._blocks.release([sequence.blocks[at]])
        sequence.blocks[at : at + 1] = [block]
        self._tables.set_blocks(sequence.row, at, [block])

    def _set_length(self, row: int, length: int) -> None:
        self._tables.set_length(row, self._paging.share.length(length))

    def _check_row(self) -> None:
        if not self._rows:
            raise CacheFull("sequences", needed=1, free=0, cached=0, total=self._max_sequences)
