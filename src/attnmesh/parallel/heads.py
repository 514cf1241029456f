"""The all-to-all between sequence and heads: every rank's rows of all heads become all rows of some heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.ranges import Ranges, size
from attnmesh.parallel.arrivals import Arrivals, Arriving, other_ranks, place_of, rows_in
from attnmesh.parallel.message import heads_first, rows_first
from attnmesh.plan.shards import pieces


@dataclass(frozen=True)
class HeadExchange:
    """Ranks that hold the positions `held`, by rank; together they are `whole`, in ascending order."""

    held: tuple[Ranges, ...]
    whole: Ranges
    comm: Comm

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[range]) -> Arriving:
        """Start to bring all rows of this rank's heads here, from shards [B,H,n,D] of equal shape. `heads` is by rank.

        What arrives is a message: `heads_first` has its tensors, [B,h,rows,D].
        """
        me, others = self.comm.rank, other_ranks(self.comm)
        arrived = self._message(size(self.whole), len(heads[me]), tensors)
        arrivals = Arrivals(arrived, self.comm)
        for source in others:
            for piece in pieces(self.held[source], self.whole):
                arrivals.expect(piece, source)
        mine = pieces(self.held[me], self.whole)
        sends = []
        for target in others:
            packed = rows_first([x[:, heads[target].start : heads[target].stop] for x in tensors])
            sends += [(rows_in(piece, packed), target) for piece in mine]
        travelling = self.comm.exchange(sends, arrivals.messages)
        for piece in mine:
            for place, x in zip(heads_first(place_of(piece, arrived)), tensors, strict=True):
                place.copy_(x[:, heads[me].start : heads[me].stop, piece.rows.start : piece.rows.stop])
        return Arriving(travelling, arrivals)

    def to_rows(self, tensors: Sequence[Tensor], heads: Sequence[range], all_heads: int) -> list[Tensor]:
        """This rank's rows of all heads, [B,H,n,D], from all rows of this rank's heads [B,h,rows,D].

        Heads that several ranks have are summed, in rank order; others are copied.
        """
        me, others = self.comm.rank, other_ranks(self.comm)
        whole = rows_first(tensors)
        mine = pieces(self.held[me], self.whole)
        sends = [
            (place_of(piece, whole).contiguous(), target)
            for target in others
            for piece in pieces(self.held[target], self.whole)
        ]
        shards = [self._message(size(self.held[me]), len(of), tensors) for of in heads]
        recvs = [(rows_in(piece, shards[source]), source) for source in others for piece in mine]
        travelling = self.comm.exchange(sends, recvs)
        for piece in mine:
            rows_in(piece, shards[me]).copy_(place_of(piece, whole))
        travelling.wait()
        batch, _, _, head_dim = tensors[0].shape
        found = [
            torch.empty(batch, all_heads, size(self.held[me]), head_dim, dtype=x.dtype, device=x.device)
            for x in tensors
        ]
        done = 0  # heads below have a value already
        for of, shard in zip(heads, shards, strict=True):
            again = max(0, min(of.stop, done) - of.start)
            for whole_heads, part in zip(found, heads_first(shard), strict=True):
                whole_heads[:, of.start : of.start + again] += part[:, :again]
                whole_heads[:, of.start + again : of.stop] = part[:, again:]
            done = max(done, of.stop)
        return found

    def _message(self, rows: int, heads: int, like: Sequence[Tensor]) -> Tensor:
        batch, _, _, head_dim = like[0].shape
        shape = (rows, len(like), batch, heads, head_dim)
        return self.comm.buffer(shape, dtype=like[0].dtype, device=like[0].device)
