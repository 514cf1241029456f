"""KV data parallelism: query heads of all sequences traded for all query heads of some sequences, and back.

The KVDP peers hold the same kv heads, each for its own sequences. Each has projected q query heads of all B sequences.
Shapes at every arrow, with S tokens a sequence, B_d sequences and q_d heads of peer d, and H heads in all:

    in,  all_to_all            [d][q, B_d, S, D]  --->  [H, B_own, S, D]
    in,  all_gather + slice    [q, B, S, D]       --->  [H, B, S, D]  ->  [H, B_own, S, D]
    out, all_to_all            [d][B_own, S, q_d, D]  --->  [B, S, q, D]
    out, all_gather + slice    [B_own, H, S, D]       --->  [B, H, S, D]  ->  [B, S, q, D]

Heads lead on the way in and sequences on the way out, so that what arrives from the peers, one after the other, is in
order. With one head each there is nothing to transpose: [1, B, S, D] is [B, S, D]. The all_gather moves all that
the all_to_all moves, and kvdp - 1 times as much again that is sliced off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.comm.base import parts_of
from attnmesh.plan.decode import Trade


@dataclass(frozen=True)
class Kvdp:
    """The trade among the peers of `comm`: `rows[d]` sequences and `heads[d]` query heads of peer d."""

    comm: Comm
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    way: Trade = "all_to_all"

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
            self.comm.all_to_all(parts_of(message, sent), shapes, into=arrived)
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
