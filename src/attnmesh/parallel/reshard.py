"""`reshard`: move a KV cache from one sharding to another, on the same ranks or on others.

Every rank knows which tokens every rank holds before and after (`CacheContents`, `plan_moves`), so no rank has to ask:
ranks send what others lack, in messages of bounded size, and copy what stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.core.call_log import alternatives, format_ranks, text_digest
from attnmesh.core.validation import check_count, check_device, check_list, check_type, shown
from attnmesh.kv_cache.contents import CacheContents, contents_of
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.ops.storage import bytes_per_token
from attnmesh.parallel.cache_tokens import CacheTokens, Reader
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.prefill_kv import PrefillKV
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Move, Part, Piece, plan_moves

MESSAGE_BYTES = 1 << 24
_MAX_BLOCK_SIZE = 256


def reshard(
    cache: ShardedCache | PrefillKV | None,
    to: DecodeSharding,
    comm: Comm | ProcessGroup | DeviceMesh | None = None,
    *,
    ranks: Sequence[int] | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> ShardedCache | None:
    """A cache with the same sequences in the same rows, sharded as `to`; None on ranks that are not among `ranks`.

    All ranks of `comm` must call it, also those without a part of the cache, which pass None. Rank i of `to` is rank
    `ranks[i]` of `comm`, by default i. Prefixes and forks keep sharing blocks within a KVDP rank, and full blocks with
    known token ids serve later prompts. Cached blocks that no sequence refers to are left behind.

    Keys and values keep their storage type and every bit. A rank receives only what it lacks. `cache` does not change,
    and both caches exist until the caller drops it. Besides them a rank needs `2 * message_bytes`, and indices.
    `block_size` and `max_length` are by default those of the cache, and `num_blocks`, per rank, as many as hold as many
    tokens in total. `device` is that of the cache, or torch's default device on a rank without one.
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[tuple[Target, _Source | None, torch.device], SharedValues]:
        check_type("cache", cache, (ShardedCache, PrefillKV, type(None)), "a ShardedCache, a PrefillKV or None")
        target = Target(to, _target_ranks(ranks, to, comm.world), num_blocks, block_size, max_length, message_bytes)
        source = None if cache is None else _source(cache)
        on = _device(None if source is None else source.tokens.device, device)
        return (target, source, on), {**target.values(), "device": on.type}

    target, source, on = check_on_all_ranks(comm, "reshard", check_arguments, force=True)
    with propagate_failure(comm):
        holders, source_ranks = _share(comm, source, on)
    # The same on all ranks, so that all of them raise.
    goal = target.goal(holders)
    goal.check_message(holders.parts(), message_bytes)
    with propagate_failure(comm):
        made = goal.make_cache(target.ranks.index(comm.rank), on) if comm.rank in target.ranks else None
        moves = plan_moves(
            _on_ranks(comm.world, source_ranks, holders.parts()),
            _on_ranks(comm.world, target.ranks, goal.needs()),
            comm.rank,
        )
        reader, writer = None if source is None else source.tokens, None if made is None else CacheTokens(made)
        _Transfer(comm, reader, writer, lambda move: goal.chunk_tokens(move, message_bytes)).run(moves)
    return made


# What is moved.


@dataclass(frozen=True)
class Holders:
    """A cache and the ranks that hold it: those of a `sharding`, or of a prefill with `positions` of every sequence.

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


@dataclass(frozen=True)
class _Source:
    """This rank's part of what is moved; `digest` is equal on all ranks that hold a part of the same."""

    rank: int
    digest: int
    holders: Holders
    tokens: Reader


def _source(cache: ShardedCache | PrefillKV) -> _Source:
    if isinstance(cache, PrefillKV):
        contents = cache.contents()
        positions = tuple(tuple((run.start, run.stop, run.step) for run in own) for own in cache.positions())
        holders = Holders(contents, 16, cache.batch * cache.length, positions=positions)
        return _Source(cache.rank, text_digest(repr(holders)), holders, cache)
    holders = cache_holders(cache)
    sizes = replace(holders.contents, sequences=())
    digest = text_digest(f"{sizes} {holders.sharding} {cache.block_size} {cache.num_blocks}") ^ cache.log.digest
    return _Source(cache.rank, digest, holders, CacheTokens(cache))


def cache_holders(cache: ShardedCache) -> Holders:
    """The contents of a cache and the ranks of its sharding."""
    sharding = cache.sharding
    capacity = cache.num_blocks * cache.block_size * sharding.kvdp * sharding.cp
    numbers = (sharding.tp, sharding.kvdp, sharding.cp, sharding.interleave)
    return Holders(contents_of(cache), cache.block_size, capacity, numbers)


def _share(comm: Comm, source: _Source | None, device: torch.device) -> tuple[Holders, list[int]]:
    """What is moved, and the rank of `comm` that has each part, on every rank; ValueError on all if parts do not fit."""
    lacking = -1, 0, 0
    own = lacking if source is None else (source.rank, source.digest >> 1, source.holders.ranks)
    header = torch.tensor(own, dtype=torch.int64, device=device)
    headers = [part.tolist() for part in comm.all_gather(header, [(3,)] * comm.world)]
    having = [rank for rank in range(comm.world) if headers[rank][0] >= 0]
    if not having:
        raise ValueError(f"cache must be given on the ranks that hold it, got None on all {comm.world} ranks")
    if len({tuple(headers[rank][1:]) for rank in having}) > 1:
        texts = {rank: f"one of digest {headers[rank][1]:016x}" for rank in having}
        raise ValueError(
            "cache must be the same, after the same operations, on all ranks that hold it, got "
            f"{alternatives(texts, comm.global_ranks)}"
        )
    parts = {headers[rank][0]: rank for rank in having}
    expected = headers[having[0]][2]
    if len(parts) < len(having) or len(parts) < expected:
        missing = sorted(set(range(expected)) - set(parts))
        raise ValueError(
            f"cache must be given for each of its {expected} ranks once, got ranks {sorted(headers[r][0] for r in having)}"
            + (f" without {format_ranks(missing)}" if missing else "")
        )
    holders = None if source is None else source.holders
    if len(having) < comm.world:
        holders = _broadcast(comm, holders, having[0], [rank for rank in range(comm.world) if rank not in having], device)
    assert holders is not None
    return holders, [parts[part] for part in range(expected)]


def _broadcast(comm: Comm, holders: Holders | None, root: int, others: list[int], device: torch.device) -> Holders:
    """The holders of rank `root` on the ranks `others`."""
    text = holders.to_text() if holders is not None and comm.rank == root else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    length = int(comm.all_gather(size, [(1,)] * comm.world)[root])
    if comm.rank == root:
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        comm.exchange([(sent, rank) for rank in others], []).wait()
    if holders is not None:
        return holders
    received = comm.buffer((length,), dtype=torch.uint8, device=device)
    comm.exchange([], [(received, root)]).wait()
    return Holders.from_text(received.cpu().numpy().tobytes())


# Where it goes.


def _target_ranks(ranks: object, to: DecodeSharding, world: int) -> tuple[int, ...]:
    check_type("to", to, DecodeSharding)
    if ranks is None:
        if to.ranks > world:
            raise ValueError(f"to must have at most the {world} ranks of comm, got {to!r} with {to.ranks} ranks")
        return tuple(range(to.ranks))
    given = check_list("ranks", ranks, "ranks")
    for rank in given:
        check_count("each of ranks", rank, most=world - 1)
    if len(set(given)) < len(given) or len(given) != to.ranks:
        raise ValueError(f"ranks must be {to.ranks} different ranks, one for each of {to}, got {shown(ranks)}")
    return tuple(given)


def _device(of_cache: torch.device | None, given: torch.device | str | None) -> torch.device:
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
        needed = contents.num_blocks(sharding, block_size)
        if self.num_blocks is not None and self.num_blocks < needed:
            raise ValueError(
                f"num_blocks must be at least {needed}, what the sequences of the cache and one of max_length="
                f"{contents.max_length} need on a rank under {sharding} with block_size={block_size}, got "
                f"{self.num_blocks}"
            )
        equal = -(-holders.capacity // (block_size * sharding.kvdp * sharding.cp))
        return Goal(contents, sharding, self.num_blocks or max(needed, equal), block_size)


@dataclass(frozen=True)
class Goal:
    """The cache that is made."""

    contents: CacheContents
    sharding: DecodeSharding
    num_blocks: int
    block_size: int

    def needs(self) -> list[Part]:
        """What each rank of the sharding is to hold."""
        return self.contents.needs(self.sharding, self.block_size)

    def make_cache(self, rank: int, device: torch.device) -> ShardedCache:
        """A rank's cache, without keys and values."""
        return self.contents.make_cache(
            self.sharding, rank, num_blocks=self.num_blocks, block_size=self.block_size, device=device
        )

    def token_bytes(self, heads: int) -> int:
        """The bytes of a token with so many heads in all layers."""
        both = (bytes_per_token(self.contents.storage, dim) for dim in (self.contents.head_dim, self.contents.value_dim))
        return int(self.contents.layers * heads * sum(both))

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


def _on_ranks(world: int, ranks: Sequence[int], parts: list[Part]) -> list[Part | None]:
    """The parts by rank of a comm."""
    by_rank: list[Part | None] = [None] * world
    for rank, part in zip(ranks, parts, strict=True):
        by_rank[rank] = part
    return by_rank


# Messages.


class _Transfer:
    """Follows a plan: in step s, rank r sends to rank r + s and receives from rank r - s.

    Both ends of a message are in the same step with the same number, so no rank waits for one that waits for it. A rank
    has one message in each direction at a time.
    """

    def __init__(
        self, comm: Comm, reader: Reader | None, writer: CacheTokens | None, chunk_tokens: Callable[[Move], int]
    ) -> None:
        self._comm, self._reader, self._writer, self._chunk_tokens = comm, reader, writer, chunk_tokens

    def run(self, moves: Sequence[Move]) -> None:
        """Make all moves of this rank."""
        comm = self._comm
        by_pair = {(move.source, move.target): move for move in moves}
        for step in range(comm.world):
            sent = by_pair.get((comm.rank, (comm.rank + step) % comm.world))
            received = by_pair.get(((comm.rank - step) % comm.world, comm.rank))
            both = (() if move is None else move.chunks(self._chunk_tokens(move)) for move in (sent, received))
            for out, into in zip_longest(*both):
                if step == 0:
                    self._copy(out, sent)
                else:
                    self._exchange(sent if out else None, out, received if into else None, into)

    def _copy(self, chunk: Sequence[Piece], move: Move | None) -> None:
        assert move is not None and self._reader is not None and self._writer is not None
        self._writer.write(chunk, move.heads, self._reader.read(chunk, move.heads))

    def _exchange(
        self, sent: Move | None, out: Sequence[Piece], received: Move | None, into: Sequence[Piece]
    ) -> None:
        sends, recvs, buffers = [], [], []
        if sent is not None:
            assert self._reader is not None
            sends = [(_bytes(x), sent.target) for x in self._reader.read(out, sent.heads)]
        if received is not None:
            assert self._writer is not None
            buffers = self._writer.buffers(self._comm, into, received.heads)
            recvs = [(_bytes(x), received.source) for x in buffers]
        self._comm.exchange(sends, recvs).wait()
        if received is not None and self._writer is not None:
            self._writer.write(into, received.heads, buffers)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
