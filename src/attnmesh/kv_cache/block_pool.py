"""`BlockPool`: free blocks, reference counts, prefix hashes and eviction. Pure Python, no tensors.

Every block is in one of three states:

- *free*: not referenced, and its content is not reusable;
- *used*: referenced by one or more sequences;
- *cached*: not referenced, but registered under its prefix hash, so that a prompt with the same prefix can reuse it.

Cached blocks are evicted in least recently used order once no block is free. Sequences that compute the same prompt at
the same time have blocks with the same content, all registered under one hash. Of these only used ones, or else one
cached block, are kept: content is found for as long as any sequence references it.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256, shake_256

from attnmesh.utils.text import see
from attnmesh.utils.validation import check_count, shown

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
