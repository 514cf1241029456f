"""The cache in numbers: what it holds, and why it can hold no more."""

from __future__ import annotations

from dataclasses import dataclass


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
