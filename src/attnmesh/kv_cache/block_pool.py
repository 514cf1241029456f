"""The cache in numbers: what it holds, and why it can hold no more."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class CacheStats:
    """Blocks: `free`, `used` and `cached` (held by nobody, but findable). Tokens of prompts: `lookups`, `hits`."""

    total: int
    free: int
    used: int
    cached: int
    lookups: int
    hits: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Found tokens among those looked up; 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0


class CacheFull(RuntimeError):  # noqa: N818 - a state one waits out, not a mistake
    """There is no room, and nothing has changed: end a sequence, or wait until one ends.

    `resource` is "blocks" or "sequences"; `cached` are blocks that could be evicted, and are too few.
    """

    def __init__(self, resource: str, *, needed: int, free: int, cached: int, total: int) -> None:
        if resource == "blocks":
            limit = f"{free} are free and {cached} can be evicted of num_blocks={total}"
        else:
            limit = f"all of max_sequences={total} are in use"
        super().__init__(f"the cache is full: {needed} more {resource} needed, {limit}")
        self.resource, self.needed, self.free, self.cached, self.total = resource, needed, free, cached, total


def root_digest(cache_key: str) -> bytes:
    """Where the chains of a cache key begin: two keys never find one another's blocks."""
    return sha256(b"root:" + cache_key.encode()).digest()


def link_digest(parent: bytes, ids: array[int]) -> bytes:
    """The name of a full block: its own tokens and, through its parent, all tokens before them."""
    return sha256(b"link:" + parent + ids.tobytes()).digest()


class Blocks:
    """The state of every block. Every method leaves each block in exactly one state; `audit` proves it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.evictions = 0
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))  # a stack: 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many blocks are nobody's and hold nothing findable."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """How many blocks are held by nobody, but findable."""
        return len(self._cached)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def find(self, digest: bytes) -> int | None:
        """The block registered under a digest."""
        return self._by_digest.get(digest)

    def check_room(self, needed: int, keeping: Iterable[int] = ()) -> None:
        """Raise CacheFull unless so many can be taken, without evicting any of `keeping`."""
        cached = self.cached - sum(block in self._cached for block in keeping)
        if needed > self.free + cached:
            raise CacheFull("blocks", needed=needed, free=self.free, cached=cached, total=self.total)

    def take(self, count: int) -> list[int]:
        """So many blocks for one holder: free ones first, then the least recently used of the cached."""
        self.check_room(count)
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
            self.evictions += 1
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder, of a block that is held or cached."""
        self._cached.pop(block, None)
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less, for each of a sequence's blocks in their order.

        The last goes back first: what is evicted first is then the end of a prefix, and its beginning, which more
        prompts share and without which no later block is found, lives longest.
        """
        for block in reversed(list(blocks)):
            if not self._holders[block]:
                raise RuntimeError(f"block {block} is held by nobody and cannot be released")
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._digests:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Make a held block findable. If another one has the same content, that one stays, and this one is not."""
        if digest not in self._by_digest:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def forget(self, block: int) -> None:
        """Let a block be found no more, because its content is about to change."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._by_digest[digest]

    def audit(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the books agree with what every sequence says it holds."""
        said = Counter(block for blocks in held for block in blocks)
        if dict(said) != {block: n for block, n in enumerate(self._holders) if n}:
            raise AssertionError(f"sequences hold {dict(said)}, the books say {self._holders}")
        everywhere = sorted([*self._free, *self._cached, *said])
        if everywhere != list(range(self.total)):
            raise AssertionError(f"free {self._free}, cached {list(self._cached)}, held {sorted(said)}: not each once")
        if {digest: block for block, digest in self._digests.items()} != self._by_digest:
            raise AssertionError("blocks and digests do not name one another")
        findable = set(self._digests)
        if not set(self._cached) <= findable or findable & set(self._free):
            raise AssertionError(f"findable are {findable}, cached {list(self._cached)}, free {self._free}")
