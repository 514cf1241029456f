"""`BlockManager`: block tables and prefix hashes of the sequences in one cache. `BlockLayout`: positions to blocks.

Where several ranks shard the positions of a sequence, each rank stores its positions densely in blocks:

    ranks = 2, block_size = 2      block      0       1       2
    interleave = 1                rank 0    0 2     4 6     8 10
                                  rank 1    1 3     5 7     9 11
    interleave = 4                rank 0    0 1     2 3     8 9
                                  rank 1    4 5     6 7    12 13

All ranks give a sequence the same blocks: as many as rank 0 needs, which never stores fewer tokens than another rank.
The positions in a block differ from rank to rank; its reference count and prefix hash do not. So all ranks make the
same decisions without communication.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, abc
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.block_pool import BlockPool, CacheFull, block_hash
from attnmesh.kv_cache.pools import DeviceTables
from attnmesh.kv_cache.sequence import Sequence


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of `block_size` tokens that positions lie in. Only `slots` depends on the rank of the shard."""

    shard: InterleavedShard
    block_size: int

    def num_blocks(self, length: int) -> int:
        """The number of blocks that a sequence of `length` tokens has."""
        return -(-self.shard.length(length, 0) // self.block_size)

    def num_full_blocks(self, length: int) -> int:
        """The number of blocks that are full on every rank."""
        return self.shard.length(length, self.shard.ranks - 1) // self.block_size

    def num_tokens(self, blocks: int) -> int:
        """The shortest length with `blocks` full blocks on every rank. The last rank fills its block last."""
        return self.shard.position(blocks * self.block_size - 1, self.shard.ranks - 1) + 1 if blocks else 0

    def num_resumable(self, blocks: int) -> int:
        """The largest number of blocks, at most `blocks`, that are full on every rank before any rank starts another.

        A sequence can only continue from shared blocks there. Elsewhere a rank still has room in a shared block while
        another is past it, and the next tokens would be written into a block that other sequences reference.
        """
        interleave = self.shard.interleave if self.shard.ranks > 1 else 1
        return blocks - blocks % (interleave // gcd(interleave, self.block_size))

    def touched(self, begin: int, end: int) -> abc.Sequence[int]:
        """The indices of the blocks that positions `begin` to `end` lie in on any rank, ascending."""
        shard = self.shard
        if end - begin == 1:  # the common case: one decode step, for every sequence of a batch
            return (shard.index(begin) // self.block_size,)
        if end - begin >= shard.ranks * shard.interleave:  # contiguous, from the last rank's first incomplete block
            return range(self.num_full_blocks(begin), self.num_blocks(end))
        return sorted({shard.index(position) // self.block_size for position in range(begin, end)})

    def slots(self, blocks: list[int], begin: int, end: int) -> list[int]:
        """The slots of positions `begin` to `end` in a sequence's `blocks` on this rank; -1 for other ranks' tokens."""
        shard, size = self.shard, self.block_size
        if end - begin == 1:
            index = shard.index(begin)
            return [blocks[index // size] * size + index % size if shard.owner(begin) == shard.rank else -1]
        slots = [-1] * (end - begin)
        at, stop = shard.length(begin), shard.length(end)
        while at < stop:  # consecutive positions within one block at a time
            index, offset = divmod(at, size)
            run = shard.interleave - at % shard.interleave if shard.ranks > 1 else size
            count = min(size - offset, run, stop - at)
            first, slot = shard.position(at) - begin, blocks[index] * size + offset
            slots[first : first + count] = range(slot, slot + count)
            at += count
        return slots


class BlockCopies(NamedTuple):
    """Copy-on-write: blocks to copy before new tokens are written."""

    sources: list[int]
    targets: list[int]


class _TouchedBlock(NamedTuple):
    """A block that new tokens of a sequence go to: a new one, a copy of a shared one, one of its own, or none."""

    sequence: Sequence
    at: int  # index in the sequence's blocks
    is_new: bool
    is_copy: bool
    is_stored: bool = True  # False: the block is left out, and so are the tokens in it


class BlockManager:
    """The sequences of one cache. Changes are collected in `tables` until those are uploaded.

    Arguments are validated by `BlockCache`, which also moves the keys and values. An operation that raises has changed
    nothing. Except for the lengths in `tables`, nothing depends on the rank.
    """

    def __init__(
        self, owner: object, pool: BlockPool, tables: DeviceTables, layout: BlockLayout, max_sequences: int
    ) -> None:
        self._owner, self._pool, self._tables, self._layout = owner, pool, tables, layout
        self._max_sequences = max_sequences
        self._free_rows = list(range(max_sequences))  # a heap, lowest first: rows in use stay together

    @property
    def free_rows(self) -> int:
        """The number of sequences that can still be allocated."""
        return len(self._free_rows)

    def find_prefix(self, root: bytes, ids: array[int]) -> int:
        """The number of tokens of a prompt that are cached."""
        return self._layout.num_tokens(len(self._find_prefix(root, ids)[1]))

    def allocate(self, count: int, ids: array[int], root: bytes) -> Sequence:
        """A sequence with blocks for `count` tokens that starts with the longest cached prefix of `ids`."""
        hashes, cached = self._find_prefix(root, ids)
        needed = self._layout.num_blocks(count) - len(cached)
        self._check_row()
        self._pool.check_available(needed, keep=cached)
        for block in cached:
            self._pool.acquire(block)
        length = self._layout.num_tokens(len(cached))
        return self._new_sequence(length, [*cached, *self._pool.allocate(needed)], ids, root, hashes)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence over the same non-empty blocks; reserved blocks stay with the first sequence."""
        self._check_row()
        shared = sequence.blocks[: self._layout.num_blocks(sequence.length)]
        for block in _stored(shared):
            self._pool.acquire(block)
        ids = sequence.ids[: sequence.length]
        return self._new_sequence(sequence.length, shared, ids, sequence.root, list(sequence.hashes))

    def restore(
        self, row: int, length: int, reserved: int, ids: array[int], root: bytes, shared: list[int]
    ) -> Sequence:
        """A sequence of `length` tokens in a given free row, with blocks for `reserved` tokens.

        It starts with the blocks `shared` of another sequence. Its content is that of a cache elsewhere, which the
        caller copies, and then lets prompts reuse it (`cache_full_blocks`).
        """
        blocks = [*shared, *self._pool.allocate(self._layout.num_blocks(reserved) - len(shared))]
        for block in shared:
            self._pool.acquire(block)
        self._free_rows.remove(row)
        heapq.heapify(self._free_rows)
        return self._place(row, length, blocks, ids, root, [])

    def check_append(
        self, sequences: tuple[Sequence, ...], count: int, kept: abc.Set[int] | None = None
    ) -> list[_TouchedBlock]:
        """The blocks that `count` more tokens per sequence go to; raises CacheFull if there are too few."""
        touched = self._touched_blocks(sequences, count, kept)
        self._pool.check_available(sum(block.is_new or block.is_copy for block in touched))
        return touched

    def append(
        self, sequences: tuple[Sequence, ...], count: int, given: list[array[int]] | None,
        kept: abc.Set[int] | None = None,
    ) -> BlockCopies:  # fmt: skip
        """Extend each sequence by `count` tokens, which are stored in the blocks `kept` only, by default in all."""
        copies = BlockCopies([], [])
        for block in self.check_append(sequences, count, kept):
            self._make_writable(block, copies)
        for i, sequence in enumerate(sequences):
            if given is not None and len(sequence.ids) >= sequence.length:
                sequence.ids.extend(given[i][len(sequence.ids) - sequence.length :])
            sequence.length += count
            self._set_length(sequence.row, sequence.length)
        return copies

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Free all blocks past `length`, and drop tokens there that are not written yet."""
        kept = self._layout.num_blocks(length)
        self._tables.set_blocks(sequence.row, kept, [-1] * (len(sequence.blocks) - kept))
        self._set_length(sequence.row, length)
        self._pool.free(_stored(sequence.blocks[kept:]))
        for new, begin in list(sequence.pending.items()):
            if begin + new.slots.shape[1] > length:
                new.drop(sequence, max(0, length - begin))
            if begin >= length:
                del sequence.pending[new]
        # A kept block may be full beyond the length and have a hash: it keeps that until tokens are appended to it.
        del sequence.blocks[kept:], sequence.ids[length:], sequence.hashes[self._layout.num_full_blocks(length) :]
        sequence.length = length

    def keep(self, sequence: Sequence, kept: abc.Set[int]) -> None:
        """Free all blocks of a sequence but those with the indices `kept`; its length stays."""
        for at, block in enumerate(sequence.blocks):
            if block >= 0 and at not in kept:
                self._leave_out(sequence, at)

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence and its row."""
        self.truncate(sequence, 0)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.owner = None

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Register the blocks that are full on every rank, with known token ids, and written in every layer."""
        full = self._layout.num_full_blocks(min(sequence.written, len(sequence.ids)))
        for i in range(len(sequence.hashes), full):
            if sequence.blocks[i] < 0:
                break
            prefix_hash = self._hash(sequence.hashes[-1] if sequence.hashes else sequence.root, sequence.ids, i)
            self._pool.add_hash(sequence.blocks[i], prefix_hash)
            sequence.hashes.append(prefix_hash)

    def _hash(self, parent: bytes, ids: array[int], block: int) -> bytes:
        """The prefix hash of a block: over its tokens on all ranks, and all before them that its parent misses."""
        return block_hash(parent, ids[self._layout.num_tokens(block) : self._layout.num_tokens(block + 1)])

    def _find_prefix(self, root: bytes, ids: array[int]) -> tuple[list[bytes], list[int]]:
        """The longest resumable chain of cached blocks that a prompt starts with, never including its last token."""
        hashes: list[bytes] = []
        blocks: list[int] = []
        while self._layout.num_tokens(len(blocks) + 1) < len(ids):
            prefix_hash = self._hash(hashes[-1] if hashes else root, ids, len(blocks))
            block = self._pool.lookup(prefix_hash)
            if block is None:
                break
            hashes.append(prefix_hash)
            blocks.append(block)
        resumable = self._layout.num_resumable(len(blocks))
        return hashes[:resumable], blocks[:resumable]

    def _new_sequence(
        self, length: int, blocks: list[int], ids: array[int], root: bytes, hashes: list[bytes]
    ) -> Sequence:
        """A new sequence whose first `length` tokens are cached."""
        return self._place(heapq.heappop(self._free_rows), length, blocks, ids, root, hashes)

    def _place(
        self, row: int, length: int, blocks: list[int], ids: array[int], root: bytes, hashes: list[bytes]
    ) -> Sequence:
        self._tables.set_blocks(row, 0, blocks)
        self._set_length(row, length)
        return Sequence(row, length, length, self._owner, blocks, ids, root, hashes, {})

    def _touched_blocks(
        self, sequences: tuple[Sequence, ...], count: int, kept: abc.Set[int] | None
    ) -> list[_TouchedBlock]:
        """Every touched block. Of the sequences that share one, the last keeps it and the others copy it."""
        copied: Counter[int] = Counter()
        touched = []
        for sequence in sequences:
            for at in self._layout.touched(sequence.length, sequence.length + count):
                if kept is not None and at not in kept:
                    touched.append(_TouchedBlock(sequence, at, is_new=False, is_copy=False, is_stored=False))
                    continue
                is_new, is_copy = at >= len(sequence.blocks) or sequence.blocks[at] < 0, False
                if not is_new and (references := self._pool.ref_count(sequence.blocks[at])) > 1:
                    is_copy = references - copied[sequence.blocks[at]] > 1
                    copied[sequence.blocks[at]] += is_copy
                touched.append(_TouchedBlock(sequence, at, is_new, is_copy))
        return touched

    def _make_writable(self, touched: _TouchedBlock, copies: BlockCopies) -> None:
        """Give the sequence a block that no other sequence references and that no prompt can reuse."""
        sequence, at, is_new, is_copy, is_stored = touched
        if not is_stored:
            self._leave_out(sequence, at)
            return
        if not is_new and not is_copy:
            self._pool.remove_hash(sequence.blocks[at])  # it may have been full before a truncation
            return
        (block,) = self._pool.allocate(1)
        if is_copy:
            copies.sources.append(sequence.blocks[at])
            copies.targets.append(block)
            self._pool.free([sequence.blocks[at]])
        sequence.blocks[at : at + 1] = [block]
        self._tables.set_blocks(sequence.row, at, [block])

    def _leave_out(self, sequence: Sequence, at: int) -> None:
        """Leave a sequence without the block at an index: -1, as in the tables, where slots are negative."""
        self._pool.free(_stored(sequence.blocks[at : at + 1]))
        sequence.blocks[at : at + 1] = [-1]
        self._tables.set_blocks(sequence.row, at, [-1])

    def _set_length(self, row: int, length: int) -> None:
        self._tables.set_length(row, self._layout.shard.length(length))

    def _check_row(self) -> None:
        if not self._free_rows:
            raise CacheFull("sequences", needed=1, free=0, cached=0, total=self._max_sequences)


def _stored(blocks: list[int]) -> list[int]:
    """Those that are not left out."""
    return [block for block in blocks if block >= 0]
