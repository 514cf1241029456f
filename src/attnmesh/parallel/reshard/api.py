"""`reshard`: move a KV cache from one sharding to another, on the same ranks or on others.

Every rank knows which tokens every rank holds before and after (`CacheContents`, `plan_moves`), so no rank has to ask:
ranks send what others lack, in messages of bounded size, and copy what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.core.call_log import alternatives, format_ranks, text_digest
from attnmesh.core.validation import check_type
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.parallel.node_groups import comm_named
from attnmesh.parallel.reshard.goal import (
    MESSAGE_BYTES,
    Holders,
    Target,
    cache_holders,
    device_of,
    prefill_holders,
    target_ranks,
)
from attnmesh.parallel.reshard.prefill import PrefillKV
from attnmesh.parallel.reshard.tokens import CacheTokens, Reader
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Move, Part, Piece, plan_moves

_INT63 = (1 << 63) - 1


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

    def check_arguments() -> tuple[tuple[Target, Source | None, torch.device], SharedValues]:
        check_type("cache", cache, (ShardedCache, PrefillKV, type(None)), "a ShardedCache, a PrefillKV or None")
        target = Target(to, target_ranks(ranks, to, comm.world), num_blocks, block_size, max_length, message_bytes)
        source = None if cache is None else source_of(cache)
        on = device_of(None if source is None else source.tokens.device, device)
        return (target, source, on), {**target.values(), "device": on.type}

    target, source, on = check_on_all_ranks(comm, "reshard", check_arguments, force=True)
    holders, source_ranks = share_holders(comm, source, on)
    goal = target.goal(holders)  # the same on all ranks: all of them raise, or none
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
class Source:
    """This rank's part of what is moved; `digest` is equal on all ranks that hold a part of the same."""

    rank: int
    digest: int
    holders: Holders
    tokens: Reader


def source_of(cache: ShardedCache | PrefillKV) -> Source:
    """This rank's part; raises ValueError if a sequence has unwritten tokens."""
    if isinstance(cache, PrefillKV):
        holders, state = prefill_holders(cache), hash(tuple(one.ids for one in cache.contents().sequences))
    else:
        holders, state = cache_holders(cache), cache.log.digest
    sizes = replace(holders, contents=replace(holders.contents, sequences=()))
    digest = (text_digest(repr(sizes)) ^ state) & _INT63
    return Source(cache.rank, digest, holders, cache if isinstance(cache, PrefillKV) else CacheTokens(cache))


def share_holders(comm: Comm, source: Source | None, device: torch.device) -> tuple[Holders, list[int]]:
    """What is moved, and the rank of `comm` that has each part, on every rank; all raise if parts do not fit."""
    lacking = -1, 0, 0
    own = lacking if source is None else (source.rank, source.digest, source.holders.ranks)
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
        given = sorted(headers[rank][0] for rank in having)
        raise ValueError(
            f"cache must be given for each of its {expected} ranks once, got those of {format_ranks(given)}"
            + (f" without {format_ranks(missing)}" if missing else "")
        )
    holders = None if source is None else source.holders
    if len(having) < comm.world:
        others = [rank for rank in range(comm.world) if rank not in having]
        holders = _broadcast(comm, holders, having[0], others, device)
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
