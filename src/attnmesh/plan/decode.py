"""`DecodeSharding`: the heads, sequences and positions of a sharded KV cache that each rank holds, and the bytes sent.

    K/V cache  [batch, kv heads, positions, head_dim]
                KVDP   TP        CP

Tensor parallelism (TP) divides heads, KV data parallelism (KVDP) sequences, context parallelism (CP) positions. The
weights are not divided this way: all `tp x kvdp x cp` ranks project a part of the query heads each, in rank order,
exactly as plain tensor parallelism over all ranks would. The `kvdp x cp` ranks of one TP rank share its kv heads; they
exchange queries before attention and results after it.

    rank = (tp_rank x cp + cp_rank) x kvdp + kvdp_rank

In this order the ranks that exchange queries hold consecutive query heads: what they receive is in head order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from attnmesh.core.ranges import InterleavedShard
from attnmesh.utils.error_links import explained_in
from attnmesh.utils.validation import (
    MAX_RANKS,
    check_choice,
    check_count,
    check_index,
    check_positive,
    check_type,
)


class Place(NamedTuple):
    """The coordinates of a rank."""

    tp: int
    cp: int
    kvdp: int


@dataclass(frozen=True)
class DecodeSharding:
    """`tp` x `kvdp` x `cp` ranks; positions are assigned to CP ranks round-robin, `interleave` at a time.

    `tp` divides the kv heads, or the kv heads divide it: then each is replicated on several TP ranks (plain tensor
    parallelism beyond the number of kv heads). Where batches or query heads do not divide, some ranks have one more.

    Examples:
        >>> sharding = am.DecodeSharding(tp=2, kvdp=2, cp=2)
        >>> sharding.ranks
        8
        >>> sharding.kv_heads(0, 8), sharding.kv_heads(7, 8)  # of 8 kv heads, those of the first and the last rank
        (range(0, 4), range(4, 8))
    """

    tp: int = 1
    kvdp: int = 1
    cp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        check_positive(tp=self.tp, kvdp=self.kvdp, cp=self.cp, interleave=self.interleave)
        check_count("tp x kvdp x cp", self.ranks, most=MAX_RANKS)

    def __str__(self) -> str:
        parts = [f"{name.upper()}{n}" for name in ("tp", "kvdp", "cp") if (n := getattr(self, name)) > 1]
        return "-".join(parts) or "TP1"

    # Ranks.

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tp * self.kvdp * self.cp

    def place(self, rank: int) -> Place:
        """The coordinates of a rank."""
        self._check_rank(rank)
        rest, kvdp = divmod(rank, self.kvdp)
        return Place(*divmod(rest, self.cp), kvdp)

    def rank(self, place: Place) -> int:
        """The rank at these coordinates."""
        check_type("place", place, Place, "a Place (tp, cp, kvdp)")
        for name, n, ranks in zip(place._fields, place, (self.tp, self.cp, self.kvdp), strict=True):
            check_index(f"{name} of a place", n, ranks, self)
        return (place.tp * self.cp + place.cp) * self.kvdp + place.kvdp

    def _check_rank(self, rank: int) -> None:
        check_index("rank", rank, self.ranks, self)

    def kvdp_peers(self, rank: int) -> list[int]:
        """The ranks with the same kv heads and positions, in the order of their sequences."""
        place = self.place(rank)
        return [self.rank(place._replace(kvdp=kvdp)) for kvdp in range(self.kvdp)]

    def cp_peers(self, rank: int) -> list[int]:
        """The ranks with the same kv heads and sequences, in the order of their first positions."""
        place = self.place(rank)
        return [self.rank(place._replace(cp=cp)) for cp in range(self.cp)]

    # Heads.

    @explained_in("sharded-generation.md#errors")
    def check_heads(self, q_heads: int, kv_heads: int) -> None:
        """Raise ValueError unless these heads can be sharded this way."""
        check_count("q_heads", q_heads)
        check_count("kv_heads", kv_heads)
        if kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"q_heads must be a multiple of kv_heads, got q_heads={q_heads} and kv_heads={kv_heads}")
        if kv_heads % self.tp and self.tp % kv_heads:
            raise ValueError(
                f"tp must divide the kv heads or be a multiple of them, got tp={self.tp}, kv_heads={kv_heads}"
            )
        if self.ranks > q_heads:
            raise ValueError(
                f"q_heads must be at least the number of ranks, got q_heads={q_heads} for "
                f"{self.tp} x {self.kvdp} x {self.cp} = {self.ranks} ranks"
            )

    def kv_heads(self, rank: int, kv_heads: int) -> range:
        """The kv heads that a rank holds (as do all ranks with the same TP rank)."""
        return _part(check_count("kv_heads", kv_heads), self.tp, self.place(rank).tp, least=1)

    def group_heads(self, rank: int, q_heads: int) -> range:
        """The query heads of a rank's TP rank: those it computes attention for, after the exchange."""
        return _part(check_count("q_heads", q_heads), self.tp, self.place(rank).tp)

    def q_heads(self, rank: int, q_heads: int) -> range:
        """The query heads that a rank projects, and whose part of the output projection it holds."""
        self._check_rank(rank)
        return _part(check_count("q_heads", q_heads), self.ranks, rank)

    def replicated_q_heads(self, rank: int, q_heads: int) -> range:
        """The query heads that a rank projects where CP ranks all project the same ones instead of gathering them."""
        group = self.group_heads(rank, q_heads)
        part = _part(len(group), self.kvdp, self.place(rank).kvdp)
        return group[part.start : part.stop]

    def cp_heads(self, rank: int, q_heads: int) -> range:
        """The query heads of all KVDP peers of a rank: what CP ranks gather before, and scatter after attention."""
        place = self.place(rank)
        return _part(check_count("q_heads", q_heads), self.tp * self.cp, place.tp * self.cp + place.cp)

    # Sequences.

    def sequences(self, rank: int, batch: int) -> range:
        """The sequences of a batch that a rank holds."""
        return _part(check_count("batch", batch), self.kvdp, self.place(rank).kvdp)

    # Positions.

    def position_shard(self, rank: int) -> InterleavedShard:
        """The positions of every sequence that a rank holds."""
        return InterleavedShard(self.cp, self.place(rank).cp, self.interleave)

    def owner(self, position: int) -> int:
        """The CP rank that holds a position."""
        return InterleavedShard(self.cp, 0, self.interleave).owner(check_count("position", position))

    def local_index(self, position: int) -> int:
        """The index of a position in its owner's cache."""
        return InterleavedShard(self.cp, 0, self.interleave).index(check_count("position", position))

    def local_length(self, length: int, cp_rank: int) -> int:
        """The number of a sequence's first `length` positions that a CP rank holds."""
        check_index("cp_rank", cp_rank, self.cp, self)
        return InterleavedShard(self.cp, cp_rank, self.interleave).length(check_count("length", length))

    def slot(self, position: int, blocks: list[int], block_size: int) -> int:
        """A position's slot in its owner's block pool, where the sequence has `blocks`."""
        check_positive(block_size=block_size)
        check_type("blocks", blocks, (list, tuple), "a list of blocks")
        for i, block in enumerate(blocks):
            check_count(f"blocks[{i}]", block)
        index = self.local_index(position)
        if index // block_size >= len(blocks):
            raise ValueError(f"position must be in one of {len(blocks)} blocks of {block_size}, got {position}")
        return blocks[index // block_size] * block_size + index % block_size


def _part(count: int, parts: int, part: int, least: int = 0) -> range:
    """The part-th of `parts` nearly equal parts of `range(count)`; with `least`, parts may overlap."""
    start, stop = count * part // parts, count * (part + 1) // parts
    return range(start, max(stop, start + least))


KvdpExchange = Literal["all_to_all", "all_gather"]
"""How KVDP ranks exchange query heads for sequences and back: each its part, or all-gather and slice."""

Combine = Literal["all_to_all", "reduce_scatter", "all_reduce"]
"""How CP ranks merge results: `(out, lse)` in one message, or the lse first and then a sum."""

KvRows = Literal["auto", "all", "own"]
"""Whether a KVDP rank projects K and V of all sequences, fused with Q, or of its own sequences only."""

KVDP_EXCHANGES: tuple[KvdpExchange, ...] = get_args(KvdpExchange)
COMBINES: tuple[Combine, ...] = get_args(Combine)

_STATE_ITEMSIZE = 4  # (out, lse) are sent in float32 until they are merged


@dataclass(frozen=True)
class DecodeShape:
    """The attention of one layer in a decode step of `tokens` new tokens for each of `batch` sequences."""

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # hidden size of the model
    itemsize: int = 2  # bytes per element of the activations

    def __post_init__(self) -> None:
        check_positive(**vars(self))


class Copies(NamedTuple):
    """On how many ranks every part of a weight is replicated."""

    w_q: int
    w_kv: int
    w_out: int


def bytes_sent(
    sharding: DecodeSharding,
    shape: DecodeShape,
    rank: int,
    *,
    kvdp: KvdpExchange = "all_to_all",
    combine: Combine = "all_to_all",
    replicate_q: bool = False,
) -> dict[str, int]:
    """Bytes that a rank sends in each collective of a decode step, per layer.

    With `replicate_q` a rank projects the queries of all its CP peers instead of gathering them.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_choice("kvdp", kvdp, KVDP_EXCHANGES)
    check_choice("combine", combine, COMBINES)
    sent_in, sent_out = _kvdp_bytes(sharding, shape, rank, kvdp, replicate_q)
    lse, out = _cp_bytes(sharding, shape, rank, combine)
    gathered = 0 if replicate_q else (sharding.cp - 1) * _cp_heads(sharding, shape, rank) * _row(sharding, shape, rank)
    projected = shape.batch * shape.tokens * shape.hidden * shape.itemsize
    return {
        "kvdp in": sent_in,
        "cp in": gathered,
        "cp lse": lse,
        "cp out": out,
        "kvdp out": sent_out,
        "projection": _all_reduced(projected, sharding.ranks),
    }


def messages_sent(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, *, combine: Literal["all_to_all", "reduce_scatter"]
) -> dict[str, dict[int, int]]:
    """Bytes of each message between peers, by collective and target, with an all-to-all between KVDP ranks.

    They add up to `bytes_sent`, without the all-reduce of the projection.
    """
    kvdp, cp = ([peer for peer in peers(rank) if peer != rank] for peers in (sharding.kvdp_peers, sharding.cp_peers))
    mine, lse_row = _row(sharding, shape, rank), _lse_row(sharding, shape, rank)
    projected, gathered = len(sharding.q_heads(rank, shape.q_heads)), _cp_heads(sharding, shape, rank)
    result_row = lse_row * (shape.head_dim + 1) if combine == "all_to_all" else lse_row * shape.head_dim
    lse = 0 if combine == "all_to_all" else len(sharding.group_heads(rank, shape.q_heads)) * lse_row
    return {
        "kvdp in": {peer: projected * _row(sharding, shape, peer) for peer in kvdp},
        "cp in": dict.fromkeys(cp, gathered * mine),
        "cp lse": dict.fromkeys(cp, lse),
        "cp out": {peer: _cp_heads(sharding, shape, peer) * result_row for peer in cp},
        "kvdp out": {peer: len(sharding.q_heads(peer, shape.q_heads)) * mine for peer in kvdp},
    }


def cache_bytes(sharding: DecodeSharding, shape: DecodeShape, rank: int, context: int, kv_bytes: int) -> int:
    """KV cache bytes of a rank, with `context` positions per sequence.

    `kv_bytes` is the bytes of K and V per token and kv head: of one layer, or of all layers.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_positive(context=context, kv_bytes=kv_bytes)
    heads, sequences = sharding.kv_heads(rank, shape.kv_heads), sharding.sequences(rank, shape.batch)
    return len(heads) * len(sequences) * sharding.position_shard(rank).length(context) * kv_bytes


def weight_copies(sharding: DecodeSharding, kv_heads: int, *, replicate_q: bool = False) -> Copies:
    """W_q and W_out are sharded over all ranks; W_kv is replicated on all ranks that share its kv heads."""
    shared = sharding.kvdp * sharding.cp * max(1, sharding.tp // kv_heads)
    return Copies(w_q=sharding.cp if replicate_q else 1, w_kv=shared, w_out=1)


def _kvdp_bytes(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, kvdp: KvdpExchange, replicate_q: bool
) -> tuple[int, int]:
    """Bytes between KVDP peers: query heads of all sequences before, results of all query heads after attention."""
    peers, others = sharding.kvdp_peers(rank), sharding.kvdp - 1
    projected = sharding.replicated_q_heads if replicate_q else sharding.q_heads
    heads = len(projected(rank, shape.q_heads))
    if kvdp == "all_gather":
        all_rows = shape.batch * shape.tokens * shape.head_dim * shape.itemsize
        return others * heads * all_rows, others * _cp_heads(sharding, shape, rank) * _row(sharding, shape, rank)
    there = sum(heads * _row(sharding, shape, peer) for peer in peers if peer != rank)
    back = sum(len(sharding.q_heads(peer, shape.q_heads)) for peer in peers if peer != rank)
    return there, back * _row(sharding, shape, rank)


def _cp_bytes(sharding: DecodeSharding, shape: DecodeShape, rank: int, combine: Combine) -> tuple[int, int]:
    """Bytes between CP peers: the lse alone, and out (with the lse, where one message holds both)."""
    lse_row = _lse_row(sharding, shape, rank)
    out_row = lse_row * shape.head_dim
    heads = len(sharding.group_heads(rank, shape.q_heads))
    theirs = heads - _cp_heads(sharding, shape, rank)
    if combine == "all_to_all":
        return 0, theirs * (out_row + lse_row)
    lse = (sharding.cp - 1) * heads * lse_row
    return lse, theirs * out_row if combine == "reduce_scatter" else _all_reduced(heads * out_row, sharding.cp)


def _row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * shape.head_dim * shape.itemsize


def _lse_row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of the lse of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * _STATE_ITEMSIZE


def _cp_heads(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    return len(sharding.cp_heads(rank, shape.q_heads))


def _all_reduced(nbytes: int, ranks: int) -> int:
    """Bytes per rank of an all-reduce: reduce-scatter and all-gather, everything but the own part."""
    return round(2 * (ranks - 1) / ranks * nbytes)
