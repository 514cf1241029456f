"""What is moved and what it becomes: `Holders` describe a cache and its ranks, `Target` and `Goal` the new one.

`Room` is a cache that sequences are moved into, without its keys and values. Pure functions of their arguments: all
ranks compute the same, and raise the same errors.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace

import torch

from attnmesh.comm import SharedValues
from attnmesh.kv_cache.block_manager import CacheFull
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.ops.storage import bytes_per_token
from attnmesh.parallel.reshard.contents import CacheContents, Placement, PrefillKV, contents_of, layout_of, sizes_of
from attnmesh.plan.decode import DecodeSharding, Place
from attnmesh.plan.reshard import Move, Part, Piece
from attnmesh.utils.validation import check_count, check_device, check_list, check_type, shown

MESSAGE_BYTES = 1 << 24
_MAX_BLOCK_SIZE = 256
_BLOCK_SIZE = 16  # of a cache for a prefill, unless it is given


@dataclass(frozen=True)
class Holders:
    """A cache and the ranks that hold it: ranks of a `sharding`, or of a prefill with `positions` of every sequence.

    `capacity` is the number of tokens that it can hold, over all sequences.
    """

    contents: CacheContents
    block_size: int
    capacity: int
    sharding: tuple[int, ...] = ()  # tp, kvdp, cp, interleave
    positions: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # by rank: start, stop and step of each range

    @property
    def ranks(self) -> int:
        """The number of ranks that hold a part."""
        return DecodeSharding(*self.sharding).ranks if self.sharding else len(self.positions)

    def parts(self) -> list[Part]:
        """What each rank holds."""
        if self.sharding:
            return self.contents.parts(DecodeSharding(*self.sharding))
        rows = range(len(self.contents.sequences))
        by_rank = [tuple(range(*run) for run in runs) for runs in self.positions]
        heads = range(self.contents.kv_heads)
        return [Part(heads, tuple(Piece(row, row, own) for row in rows) if own else ()) for own in by_rank]

    def to_text(self) -> bytes:
        """The holders as JSON."""
        return json.dumps({**vars(self), "contents": self.contents.to_json()}).encode()

    @classmethod
    def from_text(cls, text: bytes) -> Holders:
        """The holders from JSON."""
        given = json.loads(text)
        positions = tuple(tuple(tuple(run) for run in runs) for runs in given["positions"])
        contents = CacheContents.from_json(given["contents"])
        return cls(contents, given["block_size"], given["capacity"], tuple(given["sharding"]), positions)


def cache_holders(cache: ShardedCache, rows: Collection[int] | None = None) -> Holders:
    """The contents of a cache, or of some of its rows, and the ranks of its sharding."""
    sharding = cache.sharding
    capacity = cache.num_blocks * cache.block_size * sharding.kvdp * sharding.cp
    return Holders(contents_of(cache, rows), cache.block_size, capacity, astuple(sharding))


def prefill_holders(prefill: PrefillKV) -> Holders:
    """The sequences of a prefill and the ranks of its layout."""
    positions = tuple(tuple((run.start, run.stop, run.step) for run in own) for own in prefill.positions())
    return Holders(prefill.contents(), _BLOCK_SIZE, prefill.batch * prefill.length, positions=positions)


def target_ranks(ranks: object, to: DecodeSharding, world: int) -> tuple[int, ...]:
    """The rank of a comm for each rank of a sharding, from the argument `ranks`."""
    check_type("to", to, DecodeSharding)
    if ranks is None:
        if to.ranks > world:
            raise ValueError(f"to must have at most the {world} ranks of comm, got {to!r} with {to.ranks} ranks")
        return tuple(range(to.ranks))
    given = check_list("ranks", ranks, "ranks")
    known = all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < world for rank in given)
    if not known or len(set(given)) < len(given) or len(given) != to.ranks:
        raise ValueError(
            f"ranks must be {to.ranks} different ranks from 0 to {world - 1}, one for each of {to}, got {shown(ranks)}"
        )
    return tuple(given)


def device_of(of_cache: torch.device | None, given: torch.device | str | None) -> torch.device:
    """The device of a new cache: that of the cache that is moved, the given one, or torch's default."""
    if given is None:
        return torch.get_default_device() if of_cache is None else of_cache
    device = check_device("device", given)
    if of_cache is not None and torch.empty(0, dtype=torch.uint8, device=device).device != of_cache:
        raise ValueError(f"device must be that of the cache, {of_cache}, got {given}")
    return device


@dataclass(frozen=True)
class Target:
    """The sharding that a cache gets, its ranks, and the sizes that were given for it."""

    sharding: DecodeSharding
    ranks: tuple[int, ...]
    num_blocks: int | None
    block_size: int | None
    max_length: int | None
    message_bytes: int = MESSAGE_BYTES

    def __post_init__(self) -> None:
        for name, most in (("num_blocks", None), ("block_size", _MAX_BLOCK_SIZE), ("max_length", None)):
            given = getattr(self, name)
            if given is not None:
                check_count(name, given, least=1, **({} if most is None else {"most": most}))
        check_count("message_bytes", self.message_bytes, least=1)

    def values(self) -> SharedValues:
        """What must be equal on all ranks."""
        return {**vars(self), "sharding": repr(self.sharding)}

    def goal(self, holders: Holders) -> Goal:
        """What a cache becomes; raises ValueError if it does not fit."""
        contents, sharding = holders.contents, self.sharding
        sharding.check_heads(contents.kv_heads * sharding.ranks, contents.kv_heads)
        block_size = holders.block_size if self.block_size is None else self.block_size
        longest = max((sequence.reserved for sequence in contents.sequences), default=1)
        if self.max_length is not None:
            if self.max_length < longest:
                raise ValueError(f"max_length must be at least {longest}, the longest sequence, got {self.max_length}")
            contents = replace(contents, max_length=self.max_length)
        placed = contents.placements(sharding, block_size)
        used = [sum(each.new_blocks for each in placed if each.kvdp_rank == peer) for peer in range(sharding.kvdp)]
        needed = max(layout_of(sharding, block_size).num_blocks(contents.max_length), *used)
        if self.num_blocks is not None and self.num_blocks < needed:
            raise ValueError(
                f"num_blocks must be at least {needed}, what the sequences of the cache and one of max_length="
                f"{contents.max_length} need on a rank under {sharding} with block_size={block_size}, got "
                f"{self.num_blocks}"
            )
        equal = -(-holders.capacity // (block_size * sharding.kvdp * sharding.cp))
        return Goal(contents, sharding, self.num_blocks or max(needed, equal), block_size, placed)


@dataclass(frozen=True)
class Goal:
    """The cache that is made, or that sequences are moved into; `placed` are their places there."""

    contents: CacheContents
    sharding: DecodeSharding
    num_blocks: int
    block_size: int
    placed: Sequence[Placement]

    def needs(self) -> list[Part]:
        """What each rank of the sharding is to hold in blocks of its own: all but the blocks that sequences share."""
        sharding, contents, parts = self.sharding, self.contents, []
        for rank in range(sharding.ranks):
            shard, kvdp_rank = sharding.position_shard(rank), sharding.place(rank).kvdp
            pieces = [
                piece
                for one in self.placed if one.kvdp_rank == kvdp_rank
                for piece in contents.pieces(one, shard, shard.position(one.shared * self.block_size))
            ]  # fmt: skip
            parts.append(Part(sharding.kv_heads(rank, contents.kv_heads), tuple(pieces)))
        return parts

    def make_cache(self, rank: int, device: torch.device) -> ShardedCache:
        """A rank's cache with all sequences. Their keys and values are still to be copied."""
        cache = ShardedCache(
            self.sharding, rank, self.contents.spec, batch=self.contents.batch, num_blocks=self.num_blocks,
            block_size=self.block_size, max_length=self.contents.max_length, device=device,
        )  # fmt: skip
        for made in self.restore(cache).values():
            cache.mark_restored(made)
        return cache

    def restore(self, cache: ShardedCache) -> dict[int, CacheSequence]:
        """New sequences of a cache, by the row of each before, without keys and values. The cache must have room."""
        made: dict[int, CacheSequence] = {}
        for placed in self.placed:
            one = placed.sequence
            shared = made[placed.base].blocks[: placed.shared] if placed.shared else []
            ids, root = array("q", one.ids), bytes.fromhex(one.root)
            made[one.row] = cache.restore(placed.row, one.length, one.reserved, ids, root, shared)
            made[one.row].cached = one.cached
        return made

    def token_bytes(self, heads: int) -> int:
        """The bytes of a token with so many heads in all layers."""
        widths = self.contents.widths
        return int(self.contents.layers * heads * sum(bytes_per_token(self.contents.storage, each) for each in widths))

    def chunk_tokens(self, move: Move, message_bytes: int) -> int:
        """The tokens of a move that fit into one message."""
        return message_bytes // self.token_bytes(len(move.heads))

    def check_message(self, sources: list[Part], message_bytes: int) -> None:
        """Raise ValueError if one token does not fit into a message."""
        heads = min(max(len(part.heads) for part in parts) for parts in (sources, self.needs()))
        if message_bytes < self.token_bytes(heads):
            raise ValueError(
                f"message_bytes must be at least {self.token_bytes(heads)}, one token with {heads} kv heads in "
                f"{self.contents.layers} layers, got {message_bytes}"
            )


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
