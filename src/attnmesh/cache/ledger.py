"""Who holds what: the rows, blocks and digests of every sequence, and the tables that say so on the device.

Nothing here checks arguments or moves keys and values: `BlockCache` does both. What may fail, fails before it changes
anything.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from typing import NamedTuple

from attnmesh.cache.blocks import Blocks, link_digest
from attnmesh.cache.sequence import Sequence
from attnmesh.cache.stats import CacheFull
from attnmesh.cache.tables import Tables


class Places(NamedTuple):
    """Slots of new tokens, sequence after sequence, and the blocks to copy before anything is written there."""

    slots: list[int]
    sources: list[int]
    targets: list[int]


class _Growth(NamedTuple):
    """What a sequence needs for its next tokens: whether its block at `tail` is copied, and how many fresh blocks."""

    sequence: Sequence
    tail: int
    copies: bool
    fresh: int


class Ledger:
    """The sequences of one cache. Changes wait in `tables` until it is uploaded."""

    def __init__(self, owner: object, blocks: Blocks, tables: Tables, block_len: int, max_sequences: int) -> None:
        self._owner, self._blocks, self._tables = owner, blocks, tables
        self._block_len, self._max_sequences = block_len, max_sequences
        self._rows = list(range(max_sequences))  # a heap: the lowest first, so that those in use lie together

    def begin(self, count: int, ids: array[int], root: bytes) -> Sequence:
        """A sequence with room for `count` tokens, on top of the longest chain of blocks that has its first ids."""
        digests, found = self._find(root, ids)
        needed = self._blocks_for(count) - len(found)
        self._check_row()
        self._blocks.check_room(needed, keeping=found)
        for block in found:
            self._blocks.hold(block)
        return self._enter(len(found) * self._block_len, [*found, *self._blocks.take(needed)], ids, root, digests)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second holder of the blocks that a sequence has filled or begun; reserved ones stay with the first."""
        self._check_row()
        shared = sequence.blocks[: self._blocks_for(sequence.length)]
        for block in shared:
            self._blocks.hold(block)
        ids = sequence.ids[: sequence.length]
        return self._enter(sequence.length, shared, ids, sequence.root, list(sequence.digests))

    def grow(self, sequences: tuple[Sequence, ...], count: int, given: list[array[int]] | None) -> Places:
        """Places for `count` more tokens on each sequence."""
        growths = self._growths(sequences, count)
        self._blocks.check_room(sum(growth.fresh + growth.copies for growth in growths))
        places = Places([], [], [])
        for i, (sequence, tail, copies, fresh) in enumerate(growths):
            if copies:
                places.sources.append(sequence.blocks[tail])
                places.targets.append(self._replace_tail(sequence, tail))
            elif tail < len(sequence.blocks):
                self._blocks.forget(sequence.blocks[tail])  # it may have been full before it was truncated
            if fresh:  # mostly none: one token rarely begins a block
                blocks = self._blocks.take(fresh)
                self._tables.set_blocks(sequence.row, len(sequence.blocks), blocks)
                sequence.blocks += blocks
            if given is not None and len(sequence.ids) >= sequence.length:
                sequence.ids.extend(given[i][len(sequence.ids) - sequence.length :])
            self._add_slots(places.slots, sequence, count)
            sequence.length += count
            self._tables.set_length(sequence.row, sequence.length)
        return places

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Give back all blocks past `length`, and all claims on tokens there."""
        kept = self._blocks_for(length)
        self._tables.set_blocks(sequence.row, kept, [-1] * (len(sequence.blocks) - kept))
        self._tables.set_length(sequence.row, length)
        self._blocks.release(sequence.blocks[kept:])
        for new, begin in list(sequence.pending.items()):
            if begin + new.slots.shape[1] > length:
                new.skip(sequence, max(0, length - begin))
            if begin >= length:
                del sequence.pending[new]
        # A last block that stays may be full and findable: it remains so, until somebody appends.
        del sequence.blocks[kept:], sequence.ids[length:], sequence.digests[length // self._block_len :]
        sequence.length = length

    def end(self, sequence: Sequence) -> None:
        """Give back everything."""
        self.truncate(sequence, 0)
        heapq.heappush(self._rows, sequence.row)
        sequence.owner = None

    def register(self, sequence: Sequence) -> None:
        """Make the full blocks findable whose tokens are known and written in every layer."""
        size = self._block_len
        for i in range(len(sequence.digests), min(sequence.written, len(sequence.ids)) // size):
            parent = sequence.digests[-1] if sequence.digests else sequence.root
            digest = link_digest(parent, sequence.ids[i * size : (i + 1) * size])
            self._blocks.register(sequence.blocks[i], digest)
            sequence.digests.append(digest)

    def _find(self, root: bytes, ids: array[int]) -> tuple[list[bytes], list[int]]:
        """The longest chain of blocks that a prompt begins with, never the one with its last token."""
        digests: list[bytes] = []
        found: list[int] = []
        size = self._block_len
        for begin in range(0, len(ids) - size, size):
            digest = link_digest(digests[-1] if digests else root, ids[begin : begin + size])
            block = self._blocks.find(digest)
            if block is None:
                break
            digests.append(digest)
            found.append(block)
        return digests, found

    def _enter(self, length: int, blocks: list[int], ids: array[int], root: bytes, digests: list[bytes]) -> Sequence:
        """A new sequence whose first `length` tokens are there."""
        row = heapq.heappop(self._rows)
        self._tables.set_blocks(row, 0, blocks)
        self._tables.set_length(row, length)
        return Sequence(row, length, length, self._owner, blocks, ids, root, digests, {})

    def _growths(self, sequences: tuple[Sequence, ...], count: int) -> list[_Growth]:
        """What each sequence needs. Of those that share a last block, the last to leave may keep it."""
        leaving: Counter[int] = Counter()
        growths = []
        for sequence in sequences:
            tail, filled = divmod(sequence.length, self._block_len)
            copies = False
            if filled:
                block = sequence.blocks[tail]
                copies = self._blocks.holders(block) - leaving[block] > 1
                leaving[block] += copies
            fresh = max(0, self._blocks_for(sequence.length + count) - len(sequence.blocks))
            growths.append(_Growth(sequence, tail, copies, fresh))
        return growths

    def _replace_tail(self, sequence: Sequence, tail: int) -> int:
        """Give a sequence a last block of its own for the one it shares."""
        (target,) = self._blocks.take(1)
        self._blocks.release([sequence.blocks[tail]])
        sequence.blocks[tail] = target
        self._tables.set_blocks(sequence.row, tail, [target])
        return target

    def _add_slots(self, slots: list[int], sequence: Sequence, count: int) -> None:
        """Where a sequence's next tokens go, a run for each block."""
        size, at, stop = self._block_len, sequence.length, sequence.length + count
        while at < stop:
            index, offset = divmod(at, size)
            run = min(size - offset, stop - at)
            begin = sequence.blocks[index] * size + offset
            slots += range(begin, begin + run)
            at += run

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_len)

    def _check_row(self) -> None:
        if not self._rows:
            raise CacheFull("sequences", needed=1, free=0, cached=0, total=self._max_sequences)
