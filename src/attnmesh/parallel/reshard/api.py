"""`reshard`: move a KV cache from one sharding to another, on the same ranks or on others, or into a cache there.

Every rank knows which tokens every rank holds before and after (`CacheContents`, `plan_moves`), so no rank has to ask:
ranks send what others lack, in messages of bounded size, and copy what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.comm.base import text_digest
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.reshard.contents import CacheTokens, PrefillKV, Reader, check_movable
from attnmesh.parallel.reshard.goal import (
    MESSAGE_BYTES,
    Goal,
    Holders,
    Room,
    Target,
    cache_holders,
    device_of,
    prefill_holders,
    room_of,
    target_ranks,
)
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Move, Part, Piece, plan_moves
from attnmesh.utils.text import alternatives, format_ranks
from attnmesh.utils.validation import check_index, check_list, check_type, shown

_INT63 = (1 << 63) - 1


Group = Comm | ProcessGroup | DeviceMesh


@overload
def reshard(
    cache: ShardedCache | PrefillKV | None, to: DecodeSharding, comm: Group | None = ..., *,
    ranks: Sequence[int] | None = ..., rows: Sequence[int] | None = ..., into: None = ...,
    num_blocks: int | None = ..., block_size: int | None = ..., max_length: int | None = ...,
    device: torch.device | str | None = ..., message_bytes: int = ...,
) -> ShardedCache | None: ...  # fmt: skip
@overload
def reshard(
    cache: ShardedCache | PrefillKV | None, to: DecodeSharding, comm: Group | None = ..., *,
    ranks: Sequence[int] | None = ..., rows: Sequence[int] | None = ..., into: ShardedCache, num_blocks: None = ...,
    block_size: None = ..., max_length: None = ..., device: torch.device | str | None = ..., message_bytes: int = ...,
) -> dict[int, CacheSequence]: ...  # fmt: skip
def reshard(
    cache: ShardedCache | PrefillKV | None,
    to: DecodeSharding,
    comm: Group | None = None,
    *,
    ranks: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    into: ShardedCache | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> ShardedCache | dict[int, CacheSequence] | None:
    """A cache with the same sequences in the same rows, sharded as `to`; None on ranks that are not among `ranks`.

    All ranks of `comm` must call it, also those without a part of the cache, which pass None. Rank i of `to` is rank
    `ranks[i]` of `comm`, by default i. Prefixes and forks keep sharing blocks within a KVDP rank, and full blocks with
    known token ids serve later prompts. Cached blocks that no sequence refers to are left behind. Where the ranks of a
    `ShardedCache` pass `rows`, only the sequences in these rows are moved.

    Keys and values keep their storage type and every bit. A rank receives only what it lacks. `cache` does not change,
    and both caches exist until the caller drops it. Besides them a rank needs `2 * message_bytes`, and indices.
    `block_size` and `max_length` are by default the cache's, and `num_blocks`, per rank, is by default enough for the
    same number of tokens in total. `device` is the cache's, or torch's default device on a rank without one.

    With `into`, a cache with the sharding `to` that its ranks pass, the sequences join those that are there, in free
    rows. Returned are the new sequences by their rows in `cache`, and None on ranks that pass no `into`. Raises
    CacheFull on every rank if rows or blocks are missing. After any error `into` has the sequences that it had.

    Examples:
        >>> spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16)
        >>> sizes = dict(batch=1, num_blocks=4, block_size=4, max_length=16, device="cpu")
        >>> def rank(comm):
        ...     cache = am.ShardedCache(am.DecodeSharding(tp=2), comm.rank, spec, **sizes)  # a kv head per rank
        ...     cache.mark_written(cache.append([cache.allocate(6)], 6))
        ...     moved = am.decode.reshard(cache, am.DecodeSharding(cp=2), comm)  # half of the positions per rank
        ...     return [list(x.keys(0).shape) for x in (cache, moved)]  # [blocks, block_size, kv heads, head_dim]
        >>> am.run_virtual(2, rank)[0]
        [[4, 4, 1, 16], [2, 4, 2, 16]]
    """
    comm = comm_named("comm", comm)

    def check_arguments() -> tuple[tuple[Target, Source | None, torch.device], SharedValues]:
        check_type("cache", cache, (ShardedCache, PrefillKV, type(None)), "a ShardedCache, a PrefillKV or None")
        target = Target(to, target_ranks(ranks, to, comm.world), num_blocks, block_size, max_length, message_bytes)
        if into is not None:
            _check_into(into, cache, target, comm.rank)
        if rows is not None and not isinstance(cache, ShardedCache):
            raise ValueError(f"rows must be None without a ShardedCache that they are of, got {shown(rows)}")
        source = None if cache is None else source_of(cache, rows)
        devices = [source.tokens.device] if source is not None else []
        devices += [into.block_table.device] if into is not None else []
        if len(set(devices)) > 1:
            raise ValueError(f"into must be on the device of the cache, {devices[0]}, got {devices[1]}")
        on = device_of(devices[0] if devices else None, device)
        return (target, source, on), {**target.values(), "device": on.type}

    target, source, on = check_on_all_ranks(comm, "reshard", check_arguments, force=True)
    holders, source_ranks = share_holders(comm, source, on)
    room = _share_room(comm, into, target.ranks, on)
    # The same on all ranks: all of them raise, or none.
    goal = target.goal(holders) if room is None else room.goal(holders.contents)
    goal.check_message(holders.parts(), message_bytes)

    def move(made: ShardedCache | None) -> None:
        moves = plan_moves(
            _on_ranks(comm.world, source_ranks, holders.parts()),
            _on_ranks(comm.world, target.ranks, goal.needs()),
            comm.rank,
        )
        reader, writer = None if source is None else source.tokens, None if made is None else CacheTokens(made)
        _Transfer(comm, reader, writer, lambda move: goal.chunk_tokens(move, message_bytes)).run(moves)

    with propagate_failure(comm):
        if into is not None:
            with _joining(into, goal) as joined:
                move(into)
            return joined
        is_new = room is None and comm.rank in target.ranks
        made = goal.make_cache(target.ranks.index(comm.rank), on) if is_new else None
        move(made)
    return made


# The cache that sequences are moved into.


def _check_into(into: object, cache: ShardedCache | PrefillKV | None, target: Target, rank: int) -> None:
    """Raise ValueError unless sequences can be moved into a cache with these arguments."""
    check_type("into", into, ShardedCache, "a ShardedCache or None")
    assert isinstance(into, ShardedCache)
    check_movable("into", into)
    if into is cache:
        raise ValueError("into must be another cache than the one that is moved, got the same")
    place = target.ranks.index(rank) if rank in target.ranks else None
    if into.sharding != target.sharding or into.rank != place:
        raise ValueError(
            f"into must be the part of rank {place} of {target.sharding!r} on this rank, got that of rank {into.rank} "
            f"of {into.sharding!r}"
        )
    for name in ("num_blocks", "block_size", "max_length"):
        if getattr(target, name) is not None:
            raise ValueError(f"{name} must be None with into, whose own it is, got {getattr(target, name)}")


def _share_room(comm: Comm, into: ShardedCache | None, ranks: tuple[int, ...], device: torch.device) -> Room | None:
    """What is free in the cache that sequences are moved into, on every rank; None if there is no such cache."""
    room = None if into is None else room_of(into)
    own = None if into is None else (0, (text_digest(repr(room)) ^ into.log.digest) & _INT63, 0)
    having = list(_share_headers(comm, "into", "all its ranks", own, device))
    if not having:
        return None
    if having != sorted(ranks):
        raise ValueError(
            f"into must be given on all ranks of the sharding, {format_ranks(sorted(ranks))}, got it on "
            f"{format_ranks(having)}"
        )
    text = broadcast_text(comm, None if room is None else room.to_text, having, device)
    return Room.from_text(text) if room is None else room


@contextmanager
def _joining(into: ShardedCache, goal: Goal) -> Iterator[dict[int, CacheSequence]]:
    """New sequences, whose keys and values are written within it; without them after an error."""
    joined = goal.restore(into)
    try:
        yield joined
    except BaseException:
        for sequence in joined.values():
            into.free(sequence)
        raise
    for sequence in joined.values():
        into.mark_restored(sequence)


# What is moved.


@dataclass(frozen=True)
class Source:
    """This rank's part of what is moved; `digest` is equal on all ranks that hold a part of the same."""

    rank: int
    digest: int
    holders: Holders
    tokens: Reader


def source_of(cache: ShardedCache | PrefillKV, rows: Sequence[int] | None = None) -> Source:
    """This rank's part, or some rows of it; raises ValueError if a sequence has unwritten tokens."""
    if isinstance(cache, PrefillKV):
        holders, state = prefill_holders(cache), hash(tuple(one.ids for one in cache.contents().sequences))
    else:
        chosen = None
        if rows is not None:
            chosen = sorted({check_index("rows", row, cache.batch) for row in check_list("rows", rows, "rows")})
            if not set(chosen) <= set(cache.sequences):
                raise ValueError(f"rows must be among {sorted(cache.sequences)}, got {shown(rows)}")
        holders, state = cache_holders(cache, chosen), cache.log.digest ^ text_digest(f"rows {chosen}")
    sizes = replace(holders, contents=replace(holders.contents, sequences=()))
    digest = (text_digest(repr(sizes)) ^ state) & _INT63
    return Source(cache.rank, digest, holders, cache if isinstance(cache, PrefillKV) else CacheTokens(cache))


def share_holders(comm: Comm, source: Source | None, device: torch.device) -> tuple[Holders, list[int]]:
    """What is moved, and the rank of `comm` that has each part, on every rank; all raise if parts do not fit."""
    own = None if source is None else (source.rank, source.digest, source.holders.ranks)
    headers = _share_headers(comm, "cache", "all ranks that hold it", own, device)
    having = list(headers)
    if not having:
        raise ValueError(f"cache must be given on the ranks that hold it, got None on all {comm.world} ranks")
    parts = {headers[rank][0]: rank for rank in having}
    expected = headers[having[0]][2]
    if len(parts) < len(having) or len(parts) < expected:
        missing = sorted(set(range(expected)) - set(parts))
        given = sorted(headers[rank][0] for rank in having)
        raise ValueError(
            f"cache must be given for each of its {expected} ranks once, got those of {format_ranks(given)}"
            + (f" without {format_ranks(missing)}" if missing else "")
        )
    text = broadcast_text(comm, None if source is None else source.holders.to_text, having, device)
    holders = Holders.from_text(text) if source is None else source.holders
    return holders, [parts[part] for part in range(expected)]


def _share_headers(
    comm: Comm, name: str, holders: str, own: tuple[int, int, int] | None, device: torch.device
) -> dict[int, list[int]]:
    """The part, digest and number of parts of what ranks hold, by rank; all raise if the last two differ."""
    header = torch.tensor((-1, 0, 0) if own is None else own, dtype=torch.int64, device=device)
    gathered = [part.tolist() for part in comm.all_gather(header, [(3,)] * comm.world)]
    headers = {rank: numbers for rank, numbers in enumerate(gathered) if numbers[0] >= 0}
    if len({tuple(numbers[1:]) for numbers in headers.values()}) > 1:
        texts = {rank: f"one of digest {numbers[1]:016x}" for rank, numbers in headers.items()}
        raise ValueError(
            f"{name} must be the same, after the same operations, on {holders}, got "
            f"{alternatives(texts, comm.global_ranks)}"
        )
    return headers


def broadcast_text(comm: Comm, encode: Callable[[], bytes] | None, having: list[int], device: torch.device) -> bytes:
    """The text of the first of the ranks `having`, on all others; `encode` is None there."""
    root, others = having[0], [rank for rank in range(comm.world) if rank not in having]
    if not others:
        return b""
    text = encode() if encode is not None and comm.rank == root else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    length = int(comm.all_gather(size, [(1,)] * comm.world)[root])
    if comm.rank == root:
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        comm.exchange([(sent, rank) for rank in others], []).wait()
    if encode is not None:
        return b""
    received = comm.buffer((length,), dtype=torch.uint8, device=device)
    comm.exchange([], [(received, root)]).wait()
    return received.cpu().numpy().tobytes()


# Messages.


def _on_ranks(world: int, ranks: Sequence[int], parts: list[Part]) -> list[Part | None]:
    """The parts by rank of a comm."""
    by_rank: list[Part | None] = [None] * world
    for rank, part in zip(ranks, parts, strict=True):
        by_rank[rank] = part
    return by_rank


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
        assert move is not None
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(chunk, move.heads, self._reader.read(chunk, move.heads))

    def _exchange(self, sent: Move | None, out: Sequence[Piece], received: Move | None, into: Sequence[Piece]) -> None:
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
