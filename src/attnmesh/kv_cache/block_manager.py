"""`BlockManager`: the sequences of a cache: their blocks, prefixes and windows. `BlockLayout`: positions to blocks.

Where several ranks shard the positions of a sequence, each rank stores its positions densely in blocks:

    ranks = 2, block_size = 2      block      0       1       2
    interleave = 1                rank 0    0 2     4 6     8 10
                                  rank 1    1 3     5 7     9 11
    interleave = 4                rank 0    0 1     2 3     8 9
                                  rank 1    4 5     6 7    12 13

All ranks give a sequence the same blocks: the number that rank 0 needs, which never stores fewer tokens than another
rank. The positions in a block differ from rank to rank; its reference count and prefix hash do not. So all ranks make
the same decisions without communication.

Layers with a sliding window have a separate pool of blocks (`LayerKind`). A sequence has the same indices of blocks in
both pools, but in the second pool only the blocks that a window still reaches, and `WINDOW_MARGIN` tokens before it.
What it passes is freed, and stays cached under its prefix hash as any other block. A prompt reuses a prefix where both
pools have what its next token attends to.

Of recurrent layers, a pool has states (`num_states`) under the prefix hash of the last block before them. A prompt
reuses a prefix that ends with such a state. States are kept at the last block boundary of a prompt, where the blocks
end that a prompt finds in the cache (so that the next prompt with this beginning has a state there), and at the latest
block boundary of an answer.

`BlockPool`: free blocks, reference counts, prefix hashes and eviction. Pure Python, no tensors.

Every block is in one of three states:

- *free*: not referenced, and its content is not reusable;
- *used*: referenced by one or more sequences;
- *cached*: not referenced, but registered under its prefix hash, so that a prompt with the same prefix can reuse it.

Cached blocks are evicted in least recently used order once no block is free. Sequences that compute the same prompt at
the same time have blocks with the same content, all registered under one hash. Of these only used ones, or else one
cached block, are kept: content is found for as long as any sequence references it.
"""

from __future__ import annotations

import heapq
import logging
from array import array
from collections import Counter, OrderedDict, abc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256, shake_256
from math import gcd
from typing import NamedTuple

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.pools import DeviceTables
from attnmesh.kv_cache.sequence import Sequence
from attnmesh.utils.text import see
from attnmesh.utils.validation import check_count, shown

# `BlockPool`: free blocks, reference counts, prefix hashes and eviction. Pure Python, no tensors.


_MAX_CONTENT = 1 << 24  # tokens of one image: more than any has

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks (`total`, `free`, `used`, `cached`, `evictions`) and of prompt tokens (`lookups`, `hits`)."""

    total: int
    free: int
    used: int
    cached: int
    lookups: int
    hits: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that were reused; 0 before the first prompt."""
        return self.hits / self.lookups if self.lookups else 0.0


class CacheFull(RuntimeError):  # noqa: N818 - a state one waits out, not a mistake
    """The cache has no room, and nothing has changed: free a sequence, or wait until one is freed.

    `resource` is "blocks" or "sequences". `free` and `cached` are the numbers that could have been taken, `total` is
    how many the cache has; `limit` is the argument that decides, where that is not `num_blocks` or `max_sequences`.

    Examples:
        >>> spec = am.CacheSpec(layers=1, kv_heads=1, head_dim=16)
        >>> cache = am.BlockCache(spec, num_blocks=2, block_size=4, max_sequences=2, max_length=16, device="cpu")
        >>> sequence = cache.allocate(8)
        >>> try:
        ...     cache.allocate(1)
        ... except am.decode.CacheFull as error:
        ...     print(error.resource, error.needed, error.free)
        blocks 1 0
        >>> cache.free(sequence)
        >>> cache.allocate(1).length  # nothing is written yet
        0
    """

    def __init__(self, resource: str, *, needed: int, free: int, cached: int, total: int, limit: str = "") -> None:
        limit = limit or f"{'num_blocks' if resource == 'blocks' else 'max_sequences'}={total}"
        if resource == "blocks":
            room = f"{free} are free and {cached} can be evicted of {limit}"
        else:
            room = f"{free} of {limit} are free" if free else f"all of {limit} are in use"
        super().__init__(f"the cache is full: {needed} more {resource} needed, {room}{see('decode.md#a-full-cache')}")
        self.resource, self.needed, self.free, self.cached, self.total = resource, needed, free, cached, total


def root_hash(cache_key: str) -> bytes:
    """The parent hash of the first block of every sequence under `cache_key`. Keys do not share blocks."""
    return sha256(b"root:" + cache_key.encode()).digest()


def content_ids(content: bytes | str, count: int) -> list[int]:
    """Ids for the `count` tokens of a prompt that stand for an image or other content, in place of a placeholder's id.

    A cache only compares ids. Placeholders have the same ids whatever they stand for; these are derived from all of
    `content` (bytes, or text such as a digest, which is its UTF-8): prompts then reuse blocks up to the first
    difference in text or content. They are negative, so that no token has one of them.

    Examples:
        >>> prompt = [5, 6, *am.decode.content_ids(b"the bytes of an image", 3), 7]
        >>> len(prompt), prompt[2] < 0, prompt[2:5] == am.decode.content_ids(b"another image", 3)
        (6, True, False)
    """
    if not isinstance(content, bytes | str):
        raise ValueError(f"content must be bytes or a string, got {shown(content)}")
    check_count("count", count, most=_MAX_CONTENT)
    data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    digest = shake_256(b"content:" + data).digest(8 * count)
    return [-1 - (int.from_bytes(digest[at : at + 8], "little") >> 1) for at in range(0, 8 * count, 8)]


def block_hash(parent: bytes, ids: array[int]) -> bytes:
    """The prefix hash of a full block: its token ids and, through `parent`, all token ids before them."""
    return sha256(b"link:" + parent + ids.tobytes()).digest()


class BlockPool:
    """The state of every block. `check_invariants` verifies that each block is in exactly one state.

    `limit` is the argument that `total` was given as.
    """

    def __init__(self, total: int, limit: str = "num_blocks") -> None:
        self.total, self.limit = total, f"{limit}={total}"
        self.evictions = 0
        self.ref_counts = [0] * total
        """The number of sequences that reference each block."""
        self.free_blocks = list(range(total - 1, -1, -1))  # a stack: block 0 is allocated first
        self.cached_blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._blocks_of_hash: dict[bytes, dict[int, None]] = {}  # oldest first
        self.hash_of_block: dict[int, bytes] = {}

    def lookup(self, prefix_hash: bytes) -> int | None:
        """A block registered under a prefix hash, or None."""
        return next(iter(self._blocks_of_hash.get(prefix_hash, ())), None)

    def check_available(self, needed: int, keep: Iterable[int] = ()) -> None:
        """Raise CacheFull unless `needed` blocks can be allocated without evicting any block of `keep`."""
        free, cached = len(self.free_blocks), len(self.cached_blocks) - sum(x in self.cached_blocks for x in keep)
        if needed > free + cached:
            raise CacheFull("blocks", needed=needed, free=free, cached=cached, total=self.total, limit=self.limit)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with a reference count of 1: free blocks first, then the least recently used cached blocks."""
        self.check_available(count)
        return [self._allocate() for _ in range(count)]

    def _allocate(self) -> int:
        if self.free_blocks:
            block = self.free_blocks.pop()
        else:
            block, _ = self.cached_blocks.popitem(last=False)
            self.remove_hash(block)
            self.evictions += 1
            _LOG.debug("evicted the cached block %d", block)
        self.ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        self.cached_blocks.pop(block, None)
        self.ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in sequence order.

        The last block is freed first, so that the end of a prefix is evicted before its beginning: more prompts share
        the beginning, and no later block can be looked up without it.
        """
        for block in reversed(list(blocks)):
            if not self.ref_counts[block]:
                raise RuntimeError(f"block {block} has a reference count of 0 and cannot be freed")
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                if self._has_copy(block):
                    self.remove_hash(block)
                if block in self.hash_of_block:
                    self.cached_blocks[block] = None
                else:
                    self.free_blocks.append(block)

    def add_hash(self, block: int, prefix_hash: bytes) -> None:
        """Register a used block under its prefix hash. A cached block with the same content becomes free."""
        copy = self.lookup(prefix_hash)
        if copy is not None and copy in self.cached_blocks:
            self._forget(copy)
        self._blocks_of_hash.setdefault(prefix_hash, {})[block] = None
        self.hash_of_block[block] = prefix_hash

    def remove_hash(self, block: int) -> None:
        """Remove a block from the lookup table, because its content is about to change."""
        prefix_hash = self.hash_of_block.pop(block, None)
        if prefix_hash is not None:
            blocks = self._blocks_of_hash[prefix_hash]
            del blocks[block]
            if not blocks:
                del self._blocks_of_hash[prefix_hash]

    def forget(self, prefix_hash: bytes) -> None:
        """Remove all blocks under a prefix hash from the lookup table, and free the cached block."""
        for block in list(self._blocks_of_hash.get(prefix_hash, ())):
            self._forget(block)

    def forget_cached(self) -> None:
        """Free all cached blocks."""
        for block in list(self.cached_blocks):
            self._forget(block)

    def _forget(self, block: int) -> None:
        self.remove_hash(block)
        if block in self.cached_blocks:
            del self.cached_blocks[block]
            self.free_blocks.append(block)

    def _has_copy(self, block: int) -> bool:
        """Whether another block is registered under the hash of a block."""
        prefix_hash = self.hash_of_block.get(block)
        return prefix_hash is not None and len(self._blocks_of_hash[prefix_hash]) > 1

    def check_invariants(self, block_lists: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the state agrees with the blocks of all sequences."""
        used = Counter(block for blocks in block_lists for block in blocks)
        if dict(used) != {block: n for block, n in enumerate(self.ref_counts) if n}:
            raise AssertionError(f"sequences reference {dict(used)}, reference counts are {self.ref_counts}")
        free, cached = self.free_blocks, list(self.cached_blocks)
        if sorted([*free, *cached, *used]) != list(range(self.total)):
            raise AssertionError(f"free {free}, cached {cached}, used {sorted(used)}: not every block exactly once")
        registered = {block: prefix_hash for prefix_hash, blocks in self._blocks_of_hash.items() for block in blocks}
        if registered != self.hash_of_block or not all(self._blocks_of_hash.values()):
            raise AssertionError("the two hash tables disagree")
        hashed = set(self.hash_of_block)
        if not set(cached) <= hashed or hashed & set(free):
            raise AssertionError(f"blocks with a hash {hashed}, cached {cached}, free {free}")
        if any(self._has_copy(block) for block in cached):
            raise AssertionError(f"of the cached blocks {cached} some have a copy")


WINDOW_MARGIN = 512
"""Tokens before a window that layers with a window keep, too: the end of a later prompt may differ by this many."""


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of `block_size` tokens that positions lie in. Only `slots` depends on the rank of the shard."""

    shard: InterleavedShard
    block_size: int

    def num_blocks(self, length: int) -> int:
        """The number of blocks that a sequence of `length` tokens has."""
        return -(-self.shard.length(length, 0) // self.block_size)

    @cached_property
    def _last(self) -> InterleavedShard:
        """The positions of the last rank, which fills its blocks last."""
        return replace(self.shard, rank=self.shard.ranks - 1)

    def num_full_blocks(self, length: int) -> int:
        """The number of blocks that are full on every rank."""
        return self._last.length(length) // self.block_size

    def num_tokens(self, blocks: int) -> int:
        """The shortest length with `blocks` full blocks on every rank."""
        return self._last.position(blocks * self.block_size - 1) + 1 if blocks else 0

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
        """The slots of positions `begin` to `end` in a sequence's `blocks` on this rank.

        They are below 0 for tokens of other ranks, and in blocks that the sequence does not have.
        """
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


def max_window_blocks(layout: BlockLayout, window: int, tokens: int) -> int:
    """The most blocks that a sequence has in layers with a window, in a pass of at most `tokens` tokens.

    Two runs of them: what the window before the pass reaches, and what the window after it does. Rank 0 is up to
    `interleave` tokens ahead of the last rank, which may be several blocks.
    """
    shard, size = layout.shard, layout.block_size
    ahead = (shard.interleave - 1) // size if shard.ranks > 1 else 0
    run = -(-shard.length(window + WINDOW_MARGIN, 0) // size) + 2 + ahead
    return run + min(run, -(-shard.length(tokens, 0) // size) + 1)


@dataclass(frozen=True)
class LayerKind:
    """Layers whose keys and values lie in the same blocks of a pool: layers with full attention, or with a window."""

    number: int  # 0, or 1 for layers with a window
    pool: BlockPool
    window: int | None = None

    def blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence; -1 for blocks that it does not have."""
        return sequence.blocks if self.window is None else sequence.window_blocks

    def first_needed(self, layout: BlockLayout, length: int) -> int:
        """The first block that the token after `length` tokens attends to."""
        return 0 if self.window is None else layout.num_full_blocks(max(0, length + 1 - self.window))

    def first_kept(self, layout: BlockLayout, length: int) -> int:
        """The first block that a sequence of `length` tokens keeps."""
        return 0 if self.window is None else layout.num_full_blocks(max(0, length + 1 - self.window - WINDOW_MARGIN))


class BlockCopies(NamedTuple):
    """Copy-on-write: blocks to copy before new tokens are written."""

    sources: list[int]
    targets: list[int]


class _TouchedBlock(NamedTuple):
    """A block for new tokens of a sequence: a new block, a copy of a shared block, or an unshared block."""

    kind: LayerKind
    sequence: Sequence
    at: int  # index in the sequence's blocks
    is_new: bool
    is_copy: bool


class BlockManager:
    """The sequences of one cache. Changes are collected in `tables` until the tables are uploaded.

    Arguments are validated by `BlockCache`, which also moves the keys and values. An operation that raises has changed
    nothing. Except for the lengths in `tables`, nothing depends on the rank. `rows` are the rows of its sequences in a
    batch, and `kvdp_rank` stores them. `states` are the kept states of recurrent layers, None without such layers:
    prompts then reuse any blocks.
    """

    def __init__(
        self, kinds: abc.Sequence[LayerKind], tables: DeviceTables, layout: BlockLayout, rows: range, kvdp_rank: int,
        states: BlockPool | None = None,
    ) -> None:  # fmt: skip
        self.owner = object()  # of sequences and new tokens
        self.sequences: dict[int, Sequence] = {}  # by row
        self._kinds, self._tables, self._layout = kinds, tables, layout
        self._pool, self._rows, self._kvdp_rank, self._states = kinds[0].pool, rows, kvdp_rank, states
        self.free_rows = list(rows)  # a heap, lowest first: rows in use stay together

    def find_prefix(self, root: bytes, ids: array[int]) -> int:
        """The number of tokens of a prompt that are cached."""
        return self._layout.num_tokens(len(self._find_prefix(root, ids)[0]))

    def reusable(self, tokens: int, of: Sequence | None = None) -> int:
        """The most tokens that a prompt can reuse of another prompt, or a sequence, with so many tokens in common."""
        if of is not None and self._states is not None:
            return max((end for end in self._state_ends(of) if end <= tokens), default=0)
        blocks = self._layout.num_full_blocks(tokens)
        return self._layout.num_tokens(self._layout.num_resumable(blocks))

    def _state_ends(self, sequence: Sequence) -> list[int]:
        """Where states are kept in the prompt of a sequence, ascending."""
        return sorted({sequence.shared, self.reusable(max(0, len(sequence.ids) - 1))})

    def chunk_end(self, sequence: Sequence) -> int:
        """Where the next pass over a prompt must end, for a state to be kept there."""
        ends = [] if self._states is None else self._state_ends(sequence)
        return next((end for end in ends if end > sequence.length), len(sequence.ids))

    def keep_state(self, sequence: Sequence, in_answer: bool) -> int | None:
        """The number of the state that takes the present state of a sequence; None if that is not to be kept."""
        states, length = self._states, sequence.length
        if states is None or not length or self.reusable(length) != length:
            return None
        if not in_answer and length not in self._state_ends(sequence):
            return None
        blocks = self._layout.num_full_blocks(length)
        if len(sequence.hashes) < blocks:  # after tokens with unknown ids
            return None
        prefix_hash = sequence.hashes[blocks - 1]
        if (found := states.lookup(prefix_hash)) is not None:
            self._use(states, found)
            return None
        if in_answer:
            states.forget(sequence.answer_state)
            sequence.answer_state = prefix_hash
        for each in [*states.cached_blocks]:
            if self._pool.lookup(states.hash_of_block[each]) is None:  # evicted: no prompt can reach this state
                states.forget(states.hash_of_block[each])
        (kept,) = states.allocate(1)
        states.add_hash(kept, prefix_hash)
        states.free([kept])
        return kept

    @staticmethod
    def _use(states: BlockPool, state: int) -> None:
        """Let a kept state be the most recently used one."""
        states.acquire(state)
        states.free([state])

    def check_allocate(self, count: int, ids: array[int], root: bytes, spare: int = 0) -> tuple[list[bytes], int]:
        """What `_find_prefix` returns for a prompt; raises CacheFull if there is no room for it.

        There is room for `count` tokens, and `spare` blocks besides.
        """
        hashes, shared = self._find_prefix(root, ids)
        if not self.free_rows:
            raise CacheFull("sequences", needed=1, free=0, cached=0, total=len(self._rows))
        needed = self._layout.num_blocks(count) - len(hashes) + spare
        self._pool.check_available(needed, keep=self._cached(self._kinds[0], hashes))
        return hashes, shared

    def allocate(self, count: int, ids: array[int], root: bytes) -> Sequence:
        """A sequence with blocks for `count` tokens that starts with the longest cached prefix of `ids`."""
        hashes, shared = self.check_allocate(count, ids, root)
        length = self._layout.num_tokens(len(hashes))
        cached = [self._cached(kind, hashes) for kind in self._kinds]
        for kind, blocks in zip(self._kinds, cached, strict=True):
            first = kind.first_needed(self._layout, length)
            blocks[:first] = [-1] * first
            for block in _stored(blocks):
                kind.pool.acquire(block)
        cached[0] += self._pool.allocate(self._layout.num_blocks(count) - len(hashes))
        sequence = self._place(heapq.heappop(self.free_rows), length, cached, ids, root, hashes)
        sequence.shared = self._layout.num_tokens(shared)
        if hashes and self._states is not None and (state := self._states.lookup(hashes[-1])) is not None:
            self._use(self._states, state)
            sequence.state = state
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence over the same non-empty blocks; reserved blocks stay with the first sequence."""
        if not self.free_rows:
            raise CacheFull("sequences", needed=1, free=0, cached=0, total=len(self._rows))
        count = self._layout.num_blocks(sequence.length)
        shared = [kind.blocks(sequence)[:count] for kind in self._kinds]
        for kind, blocks in zip(self._kinds, shared, strict=True):
            for block in _stored(blocks):
                kind.pool.acquire(block)
        row, ids = heapq.heappop(self.free_rows), sequence.ids[: sequence.length]
        fork = self._place(row, sequence.length, shared, ids, sequence.root, list(sequence.hashes))
        fork.window_begin = sequence.window_begin
        return fork

    def restore(
        self, row: int, length: int, reserved: int, ids: array[int], root: bytes, shared: list[int]
    ) -> Sequence:
        """A sequence of `length` tokens in a given free row, with blocks for `reserved` tokens.

        It starts with the blocks `shared` of another sequence. Its content comes from another cache, which the
        caller copies, and then lets prompts reuse it (`cache_full_blocks`).
        """
        blocks = [*shared, *self._pool.allocate(self._layout.num_blocks(reserved) - len(shared))]
        for block in shared:
            self._pool.acquire(block)
        self.free_rows.remove(row)
        heapq.heapify(self.free_rows)
        return self._place(row, length, [blocks], ids, root, [])

    def check_room(self, sequences: abc.Sequence[Sequence], count: int) -> None:
        """Raise CacheFull if there are too few blocks for `count` more tokens per sequence."""
        if any(len(kind.pool.free_blocks) < len(sequences) * count for kind in self._kinds):  # else it fits anyway
            self.check_append(sequences, count)

    def check_append(self, sequences: abc.Sequence[Sequence], count: int) -> list[_TouchedBlock]:
        """The blocks that `count` more tokens per sequence go to; raises CacheFull if there are too few."""
        touched: list[_TouchedBlock] = []
        for kind in self._kinds:
            of_kind = list(self._touched_blocks(kind, sequences, count))
            needed = [each for each in of_kind if each.is_new or each.is_copy]
            if needed:
                kind.pool.check_available(len(needed))
            touched += of_kind
        return touched

    def append(
        self, sequences: tuple[Sequence, ...], count: int, given: abc.Sequence[abc.Sequence[int]] | None
    ) -> list[BlockCopies]:
        """Extend each sequence by `count` tokens. Returns the blocks to copy, of each kind of layer."""
        copies = [BlockCopies([], []) for _ in self._kinds]
        for block in self.check_append(sequences, count):
            self._make_writable(block, copies[block.kind.number])
        for i, sequence in enumerate(sequences):
            if given is not None and len(sequence.ids) >= sequence.length:
                sequence.ids.extend(given[i][len(sequence.ids) - sequence.length :])
            sequence.length += count
            self._set_length(sequence)
        return copies

    def new_slots(self, sequences: abc.Sequence[Sequence], count: int, kind: int) -> list[int]:
        """The slots of the last `count` tokens of sequences on this rank, in layers of a kind."""
        slots, blocks = self._layout.slots, self._kinds[kind].blocks
        return [slot for each in sequences for slot in slots(blocks(each), each.length - count, each.length)]

    def check_truncate(self, sequence: Sequence, length: int) -> None:
        """Raise ValueError if a window after `length` tokens has left blocks that it would need again."""
        for kind in self._kinds[1:]:
            needed = kind.blocks(sequence)[kind.first_needed(self._layout, length) : self._layout.num_blocks(length)]
            if -1 in needed:
                raise ValueError(
                    f"length must be 0, or at most {WINDOW_MARGIN} tokens less for layers with a window, got {length} "
                    f"for {sequence}"
                )

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Free all blocks past `length`, and drop tokens there that are not written yet."""
        kept = self._layout.num_blocks(length)
        for kind in self._kinds:
            blocks = kind.blocks(sequence)
            self._set_blocks(kind, sequence, kept, [-1] * (len(blocks) - kept))
            kind.pool.free(_stored(blocks[kept:]))
            del blocks[kept:]
        for new, begin in list(sequence.pending.items()):
            if begin + new.slots.shape[1] > length:
                new.drop(sequence, max(0, length - begin))
            if begin >= length:
                del sequence.pending[new]
        # A kept block may be full beyond the length and have a hash: it keeps that until tokens are appended to it.
        del sequence.ids[length:], sequence.hashes[self._layout.num_full_blocks(length) :]
        sequence.length, sequence.window_begin = length, min(sequence.window_begin, kept)
        self._set_length(sequence)

    def free(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Free all blocks of a sequence and its row. With `forget`, no prompt can reuse them."""
        if forget:
            for kind in self._kinds:
                for block in _stored(kind.blocks(sequence)):
                    kind.pool.remove_hash(block)
            for pool in [*(kind.pool for kind in self._kinds[1:]), *([] if self._states is None else [self._states])]:
                for prefix_hash in sequence.hashes:  # also of blocks that a window has passed
                    pool.forget(prefix_hash)
        self.truncate(sequence, 0)
        heapq.heappush(self.free_rows, sequence.row)
        del self.sequences[sequence.row]
        sequence.owner = None

    def forget_cached(self) -> None:
        """Free the blocks that are cached for later prompts only."""
        for kind in self._kinds:
            kind.pool.forget_cached()
        if self._states is not None:
            self._states.forget_cached()

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Register the blocks that are full on every rank, with known token ids, and written in every layer.

        What a window has passed is freed. The table on the device has it until the next upload, where nothing reads it.
        """
        written = sequence.written if sequence.pending else sequence.length
        full = self._layout.num_full_blocks(min(written, len(sequence.ids)))
        for i in range(len(sequence.hashes), full):
            prefix_hash = self._hash(sequence.hashes[-1] if sequence.hashes else sequence.root, sequence.ids, i)
            sequence.hashes.append(prefix_hash)
            for kind in self._kinds:
                for block in _stored(kind.blocks(sequence)[i : i + 1]):
                    kind.pool.add_hash(block, prefix_hash)
        for kind in self._kinds[1:]:
            end = kind.first_kept(self._layout, written)
            blocks = kind.blocks(sequence)
            for at in range(sequence.window_begin, end):
                kind.pool.free(_stored(blocks[at : at + 1]))
                blocks[at] = -1
                self._set_blocks(kind, sequence, at, [-1])
            sequence.window_begin = max(end, sequence.window_begin)

    def _hash(self, parent: bytes, ids: array[int], block: int) -> bytes:
        """The prefix hash of a block: over its tokens on all ranks, and all before them that its parent misses."""
        return block_hash(parent, ids[self._layout.num_tokens(block) : self._layout.num_tokens(block + 1)])

    def _find_prefix(self, root: bytes, ids: array[int]) -> tuple[list[bytes], int]:
        """The hashes of the longest resumable chain of blocks that a prompt starts with, without its last token.

        And the number of blocks of the longest chain, also without a kept state after it.
        """
        hashes: list[bytes] = []
        longest = shared = 0
        found = [0] * len(self._kinds)  # where the latest run of blocks that a kind of layers has begins
        while self._layout.num_tokens(len(hashes) + 1) < len(ids):
            hashes.append(self._hash(hashes[-1] if hashes else root, ids, len(hashes)))
            count = len(hashes)
            for kind in self._kinds:
                if kind.pool.lookup(hashes[-1]) is None:
                    found[kind.number] = count
            if found[0]:
                break
            length = self._layout.num_tokens(count)
            if self._layout.num_resumable(count) == count and all(
                found[kind.number] <= kind.first_needed(self._layout, length) for kind in self._kinds
            ):
                shared = count
                if self._states is None or self._states.lookup(hashes[-1]) is not None:
                    longest = count
        return hashes[:longest], shared

    def _cached(self, kind: LayerKind, hashes: list[bytes]) -> list[int]:
        """The blocks under these hashes; -1 for blocks that this kind of layers does not have."""
        found = (kind.pool.lookup(each) for each in hashes)
        return [-1 if block is None else block for block in found]

    def _place(
        self, row: int, length: int, blocks: list[list[int]], ids: array[int], root: bytes, hashes: list[bytes]
    ) -> Sequence:
        windowed = blocks[1] if len(blocks) > 1 else []
        sequence = Sequence(
            row, length, length, self.owner, blocks[0], ids, root, hashes, {}, windowed, self._kvdp_rank
        )
        self.sequences[row] = sequence
        for kind in self._kinds:
            self._set_blocks(kind, sequence, 0, kind.blocks(sequence))
        self._set_length(sequence)
        return sequence

    def _touched_blocks(
        self, kind: LayerKind, sequences: abc.Sequence[Sequence], count: int
    ) -> abc.Iterator[_TouchedBlock]:
        """Every touched block. Of the sequences that share a block, the last keeps it and the others copy it."""
        copied: Counter[int] = Counter()
        for sequence in sequences:
            blocks, kept = kind.blocks(sequence), kind.first_kept(self._layout, sequence.length + count)
            for at in self._layout.touched(sequence.length, sequence.length + count):
                is_new, is_copy = at >= len(blocks) or blocks[at] < 0, False
                if is_new and at < kept:
                    continue
                if not is_new and (references := kind.pool.ref_counts[blocks[at]]) > 1:
                    is_copy = references - copied[blocks[at]] > 1
                    copied[blocks[at]] += is_copy
                yield _TouchedBlock(kind, sequence, at, is_new, is_copy)

    def _make_writable(self, touched: _TouchedBlock, copies: BlockCopies) -> None:
        """Give the sequence a block that no other sequence references and that no prompt can reuse."""
        kind, sequence, at, is_new, is_copy = touched
        blocks = kind.blocks(sequence)
        if not is_new and not is_copy:
            if blocks[at] in kind.pool.hash_of_block:  # it was full before a truncation
                kind.pool.remove_hash(blocks[at])
            return
        (block,) = kind.pool.allocate(1)
        if is_copy:
            copies.sources.append(blocks[at])
            copies.targets.append(block)
            kind.pool.free([blocks[at]])
        blocks += [-1] * (at + 1 - len(blocks))
        blocks[at] = block
        self._set_blocks(kind, sequence, at, [block])

    def _set_blocks(self, kind: LayerKind, sequence: Sequence, first: int, blocks: abc.Iterable[int]) -> None:
        self._tables.set_blocks(sequence.row - self._rows.start, first, blocks, kind.number)

    def _set_length(self, sequence: Sequence) -> None:
        self._tables.set_length(sequence.row - self._rows.start, self._layout.shard.length(sequence.length))


def _stored(blocks: abc.Iterable[int]) -> list[int]:
    """The blocks that a sequence has."""
    return [block for block in blocks if block >= 0]
