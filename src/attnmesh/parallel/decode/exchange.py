"""How the ranks of a block exchange, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.comm.base import split_buffer
from attnmesh.plan.decode import Combine, DecodeShape, DecodeSharding, KvdpExchange


@dataclass(frozen=True)
class Exchange:
    """KVDP's trades, CP's combining of states, and who projects the queries.

    `cp="auto"` goes by the size of the messages. With `replicate_q` CP ranks project the same queries, as in Helix: W_q
    is held `cp` times, and no queries are gathered.
    """

    kvdp: KvdpExchange = "all_to_all"
    cp: Literal["auto"] | Combine = "auto"
    replicate_q: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kvdp", self.kvdp, get_args(KvdpExchange)),
            ("cp", self.cp, ("auto", *get_args(Combine))),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    def combine(self, sharding: DecodeSharding, shape: DecodeShape, device: str) -> Combine:
        """How CP ranks combine their states of such a step: on every rank the same."""
        if self.cp != "auto":
            return self.cp
        from attnmesh.planner.auto import pick_combine
        from attnmesh.planner.catalog import default_cluster

        return pick_combine(sharding, shape, default_cluster(device).intra_node)


@dataclass(frozen=True)
class Kvdp:
    """The trade among the peers of `comm`: `rows[d]` sequences and `heads[d]` query heads of peer d."""

    comm: Comm
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    way: KvdpExchange = "all_to_all"

    @property
    def parts(self) -> int:
        """In how many parts a message lies: one for each peer, unless everybody gets all of it."""
        return len(self.rows) if self.way == "all_to_all" else 1

    def gather_heads(self, message: Tensor, tokens: int, dim: int) -> Tensor:
        """All heads of the own sequences, [H, B_own, S, D], from the own heads of all, in `parts` parts."""
        me = self.comm.rank
        if len(self.rows) == 1:
            return message.view(self.heads[me], self.rows[me], tokens, dim)
        if self.way == "all_to_all":
            sent = [(self.heads[me], rows, tokens, dim) for rows in self.rows]
            shapes = [(heads, self.rows[me], tokens, dim) for heads in self.heads]
            arrived = self._room(message, (sum(self.heads), self.rows[me], tokens, dim))
            self.comm.all_to_all(split_buffer(message, sent), shapes, into=arrived)
            return arrived
        shapes = [(heads, sum(self.rows), tokens, dim) for heads in self.heads]
        gathered = self._room(message, (sum(self.heads), sum(self.rows), tokens, dim))
        self.comm.all_gather(message.view(shapes[me]), shapes, into=gathered)
        return gathered[:, _slice(self.rows, me)]

    def scatter_heads(self, out: Tensor) -> Tensor:
        """The own heads of all sequences, [B, S, q, D], from all heads of the own, [B_own, H, S, D]."""
        me = self.comm.rank
        if len(self.rows) == 1:
            return out.transpose(1, 2)
        _, _, tokens, dim = out.shape
        if self.way == "all_to_all":
            shapes = [(rows, tokens, self.heads[me], dim) for rows in self.rows]
            arrived = self._room(out, (sum(self.rows), tokens, self.heads[me], dim))
            self.comm.all_to_all(self._by_peer(out), shapes, into=arrived)
            return arrived
        shapes = [(rows, sum(self.heads), tokens, dim) for rows in self.rows]
        gathered = self._room(out, (sum(self.rows), sum(self.heads), tokens, dim))
        self.comm.all_gather(out, shapes, into=gathered)
        return gathered[:, _slice(self.heads, me)].transpose(1, 2)

    def _by_peer(self, out: Tensor) -> list[Tensor]:
        """A message [B_own, S, q_d, D] for each peer, by one copy where they are alike."""
        by_token = out.transpose(1, 2)
        if len(set(self.heads)) > 1:
            return [part.contiguous() for part in by_token.split(self.heads, dim=2)]
        return list(by_token.unflatten(2, (len(self.heads), -1)).movedim(2, 0).contiguous())

    def _room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.comm.buffer(shape, dtype=like.dtype, device=like.device)


def _slice(counts: Sequence[int], part: int) -> slice:
    ends = list(accumulate(counts))
    return slice(ends[part] - counts[part], ends[part])
