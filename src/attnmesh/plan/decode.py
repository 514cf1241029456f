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
from attnmesh.utils.text import explained_in
from attnmesh.utils.validation import (
    MAX_RANKS,
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
        >>> sharding.kv_heads(0, 8), sharding.kv_heads(7, 8)  # the kv heads of the first and of the last rank
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
