"""`Room`: a cache that sequences are moved into, without its keys and values, and where it has room for them.

Pure functions of their arguments: all ranks compute the same, and raise the same errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from attnmesh.kv_cache.block_pool import CacheFull
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.parallel.reshard.contents import CacheContents, Placement, layout_of, sizes_of
from attnmesh.parallel.reshard.goal import Goal
from attnmesh.plan.decode import DecodeSharding, Place

_SAME = ("layers", "kv_heads", "head_dim", "value_dim", "storage", "latent")


@dataclass(frozen=True)
class Room:
    """The sizes of a cache, and what is free on each KVDP rank: rows, blocks, and blocks that can be evicted."""

    sizes: CacheContents  # without sequences
    sharding: tuple[int, ...]  # tp, kvdp, cp, interleave
    num_blocks: int
    block_size: int
    free_rows: tuple[tuple[int, ...], ...]
    free_blocks: tuple[int, ...]
    cached_blocks: tuple[int, ...]

    def to_text(self) -> bytes:
        """The room as JSON."""
        return json.dumps({**vars(self), "sizes": self.sizes.to_json()}).encode()

    @classmethod
    def from_text(cls, text: bytes) -> Room:
        """The room from JSON."""
        given = json.loads(text)
        lists = {name: tuple(given[name]) for name in ("sharding", "free_blocks", "cached_blocks")}
        rows = tuple(map(tuple, given["free_rows"]))
        return cls(**{**given, **lists, "free_rows": rows, "sizes": CacheContents.from_json(given["sizes"])})

    def goal(self, contents: CacheContents) -> Goal:
        """Where the sequences of another cache go. Raises ValueError if it does not fit, CacheFull if it does not now.

        Each goes to the KVDP rank where it shares the most blocks with those before it, then to the one with the most
        room. They do not share blocks with the sequences that are there.
        """
        self._check_sizes(contents)
        sharding = DecodeSharding(*self.sharding)
        layout = layout_of(sharding, self.block_size)
        rows = [list(free) for free in self.free_rows]
        blocks = [sum(both) for both in zip(self.free_blocks, self.cached_blocks, strict=True)]
        if len(contents.sequences) > sum(map(len, rows)):
            raise CacheFull(
                "sequences", needed=len(contents.sequences), free=sum(map(len, rows)), cached=0, total=self.sizes.batch,
                limit=f"batch={self.sizes.batch}",
            )  # fmt: skip
        placed: list[Placement] = []
        for sequence in contents.sequences:
            choices = [
                contents.place(sequence, rows[peer][0], peer, placed, layout)
                for peer in range(sharding.kvdp) if rows[peer]
            ]  # fmt: skip
            fitting = [each for each in choices if each.new_blocks <= blocks[each.kvdp_rank]]
            if not fitting:
                needed = min(choices, key=lambda each: each.new_blocks - blocks[each.kvdp_rank])
                free = blocks[needed.kvdp_rank]
                cached = min(free, self.cached_blocks[needed.kvdp_rank])
                raise CacheFull(
                    "blocks", needed=needed.new_blocks, free=free - cached, cached=cached, total=self.num_blocks
                )
            best = max(fitting, key=lambda each: (each.shared, blocks[each.kvdp_rank], -each.kvdp_rank))
            rows[best.kvdp_rank].pop(0)
            blocks[best.kvdp_rank] -= best.new_blocks
            placed.append(best)
        return Goal(contents, sharding, self.num_blocks, self.block_size, placed)

    def num_fitting(self, lengths: Sequence[int]) -> int:
        """How many sequences of these lengths, the first ones, there is room for, with a block more for each.

        They are placed as `goal` places sequences that share nothing.
        """
        sharding = DecodeSharding(*self.sharding)
        layout = layout_of(sharding, self.block_size)
        rows = list(map(len, self.free_rows))
        blocks = [sum(both) for both in zip(self.free_blocks, self.cached_blocks, strict=True)]
        for fitting, length in enumerate(lengths):
            needed = min(layout.num_blocks(length) + 1, self.num_blocks)  # an empty cache takes any
            peer = max(range(sharding.kvdp), key=lambda each: (rows[each] > 0, blocks[each]))
            if not rows[peer] or blocks[peer] < needed:
                return fitting
            rows[peer], blocks[peer] = rows[peer] - 1, blocks[peer] - needed
        return len(lengths)

    def _check_sizes(self, contents: CacheContents) -> None:
        for name in _SAME:
            if getattr(self.sizes, name) != getattr(contents, name):
                raise ValueError(
                    f"into must be a cache for the same model and storage, with {name}={getattr(contents, name)!r}, "
                    f"got {getattr(self.sizes, name)!r}"
                )
        for name in ("k_scale", "v_scale"):
            here, there = (_per_head(getattr(each, name), contents.kv_heads) for each in (self.sizes, contents))
            if here != there:
                raise ValueError(f"into must have the {name} of the cache, {there}, got {here}")
        longest = max((sequence.reserved for sequence in contents.sequences), default=0)
        if longest > self.sizes.max_length:
            raise ValueError(
                f"into must have a max_length of at least {longest}, the longest sequence, got {self.sizes.max_length}"
            )


def room_of(cache: ShardedCache) -> Room:
    """The room in a cache, the same on all its ranks."""
    sharding, used = cache.sharding, cache.sequences
    rows = [sharding.sequences(sharding.rank(Place(0, 0, peer)), cache.batch) for peer in range(sharding.kvdp)]
    stats = cache.stats()
    return Room(
        sizes_of(cache), astuple(sharding), cache.num_blocks,
        cache.block_size, tuple(tuple(row for row in own if row not in used) for own in rows),
        tuple(each.free for each in stats), tuple(each.cached for each in stats),
    )  # fmt: skip


def _per_head(scale: float | tuple[float, ...] | None, kv_heads: int) -> tuple[float, ...]:
    return scale if isinstance(scale, tuple) else (1.0 if scale is None else scale,) * kv_heads
