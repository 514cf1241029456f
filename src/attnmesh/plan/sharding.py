"""`DecodeSharding`: which rank holds which heads, sequences and positions of a KV cache that is spread over ranks.

    K/V cache  [batch, kv heads, positions, head_dim]
                KVDP   TP        CP

Tensor parallelism (TP) divides heads, KV data parallelism (KVDP) sequences, context parallelism (CP) positions. The
weights are not divided this way: all `tp x kvdp x cp` ranks project a part of the query heads each, in the order of
ranks, exactly as plain tensor parallelism over all ranks would. The `kvdp x cp` ranks of one TP rank share its kv
heads; they trade queries before attention and results after it.

    rank = (tp_rank x cp + cp_rank) x kvdp + kvdp_rank

In this order the ranks that trade hold query heads side by side: what arrives lies in order of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attnmesh.core.ranges import PositionShard
from attnmesh.core.validation import check_positive


class Place(NamedTuple):
    """A rank's three coordinates."""

    tp: int
    cp: int
    kvdp: int


@dataclass(frozen=True)
class DecodeSharding:
    """`tp` x `kvdp` x `cp` ranks; positions are dealt to the CP ranks `interleave` at a time.

    `tp` divides the kv heads, or the kv heads divide it: then each is held by several TP ranks (plain tensor
    parallelism beyond the number of kv heads). Batches and query heads that do not divide leave some ranks one more.
    """

    tp: int = 1
    kvdp: int = 1
    cp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        check_positive(tp=self.tp, kvdp=self.kvdp, cp=self.cp, interleave=self.interleave)

    def __str__(self) -> str:
        parts = [f"{name.upper()}{n}" for name in ("tp", "kvdp", "cp") if (n := getattr(self, name)) > 1]
        return "-".join(parts) or "TP1"

    # Ranks.

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tp * self.kvdp * self.cp

    def place(self, rank: int) -> Place:
        """The coordinates of a rank."""
        self._check_rank(rank)
        rest, kvdp = divmod(rank, self.kvdp)
        return Place(*divmod(rest, self.cp), kvdp)

    def rank(self, place: Place) -> int:
        """The rank at these coordinates."""
        for name, n, ranks in zip(place._fields, place, (self.tp, self.cp, self.kvdp), strict=True):
            if not 0 <= n < ranks:
                raise ValueError(f"{name} of a place must be 0 to {ranks - 1} under {self}, got {n}")
        return (place.tp * self.cp + place.cp) * self.kvdp + place.kvdp

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be 0 to {self.ranks - 1} under {self}, got {rank}")

    def kvdp_peers(self, rank: int) -> list[int]:
        """Those with this rank's kv heads and positions, in the order of their sequences."""
        place = self.place(rank)
        return [self.rank(place._replace(kvdp=kvdp)) for kvdp in range(self.kvdp)]

    def cp_peers(self, rank: int) -> list[int]:
        """Those with this rank's kv heads and sequences, in the order of their first positions."""
        place = self.place(rank)
        return [self.rank(place._replace(cp=cp)) for cp in range(self.cp)]

    # Heads.

    def check_heads(self, q_heads: int, kv_heads: int) -> None:
        """Raise ValueError unless these heads can be divided this way."""
        if kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"q_heads must be a multiple of kv_heads, got q_heads={q_heads} and kv_heads={kv_heads}")
        if kv_heads % self.tp and self.tp % kv_heads:
            raise ValueError(
                f"tp must divide the kv heads or be a multiple of them, got tp={self.tp}, kv_heads={kv_heads}"
            )
        if self.ranks > q_heads:
            raise ValueError(
                f"every rank needs a query head, got q_heads={q_heads} for {self.tp} x {self.kvdp} x {self.cp} = "
                f"{self.ranks} ranks"
            )

    def kv_heads(self, rank: int, kv_heads: int) -> range:
        """The kv heads whose keys and values a rank holds (as do all that share its TP rank)."""
        return _part(kv_heads, self.tp, self.place(rank).tp, least=1)

    def group_heads(self, rank: int, q_heads: int) -> range:
        """The query heads of a rank's TP rank: those it attends with, after it has traded."""
        return _part(q_heads, self.tp, self.place(rank).tp)

    def q_heads(self, rank: int, q_heads: int) -> range:
        """The query heads that a rank projects, and whose part of the output projection it has."""
        self._check_rank(rank)
        return _part(q_heads, self.ranks, rank)

    def replicated_q_heads(self, rank: int, q_heads: int) -> range:
        """The query heads that a rank projects where CP ranks project the same ones, and need not gather them."""
        group = self.group_heads(rank, q_heads)
        part = _part(len(group), self.kvdp, self.place(rank).kvdp)
        return group[part.start : part.stop]

    def cp_heads(self, rank: int, q_heads: int) -> range:
        """The query heads of all KVDP peers of a rank: what CP ranks gather, and what they share out again."""
        place = self.place(rank)
        return _part(q_heads, self.tp * self.cp, place.tp * self.cp + place.cp)

    # Sequences.

    def sequences(self, rank: int, batch: int) -> range:
        """The rows of a batch whose keys and values a rank holds."""
        return _part(batch, self.kvdp, self.place(rank).kvdp)

    # Positions.

    def position_shard(self, rank: int) -> PositionShard:
        """The positions of every sequence that a rank holds."""
        return PositionShard(self.cp, self.place(rank).cp, self.interleave)

    def owner(self, position: int) -> int:
        """The CP rank that holds a position."""
        return PositionShard(self.cp, 0, self.interleave).owner(position)

    def local_index(self, position: int) -> int:
        """Where in its owner's cache a position lies."""
        return PositionShard(self.cp, 0, self.interleave).index(position)

    def local_length(self, length: int, cp_rank: int) -> int:
        """How many of a sequence's first `length` positions a CP rank holds."""
        return PositionShard(self.cp, cp_rank, self.interleave).length(length)

    def slot(self, position: int, blocks: list[int], block_size: int) -> int:
        """A position's slot in its owner's pool of blocks, where the sequence has `blocks`."""
        index = self.local_index(position)
        return blocks[index // block_size] * block_size + index % block_size


def _part(count: int, parts: int, part: int, least: int = 0) -> range:
    """The part-th of `parts` nearly equal runs of `count` things; with `least`, several parts may hold the same one."""
    start, stop = count * part // parts, count * (part + 1) // parts
    return range(start, max(stop, start + least))
