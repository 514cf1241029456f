"""Rows that arrive from other ranks and go to their places in one buffer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.comm.base import Message
from attnmesh.plan.shards import Piece


class Arrivals:
    """What is expected into `buffer`, rows first. Pieces arrive in place where their rows are neighbours there."""

    def __init__(self, buffer: Tensor, comm: Comm) -> None:
        self.messages: list[Message] = []
        self.buffer, self._comm = buffer, comm
        self._moves: list[tuple[Tensor, Tensor]] = []

    def expect(self, piece: Piece, peer: int) -> None:
        """Make room for a piece that `peer` sends."""
        place = place_of(piece, self.buffer)
        if piece.in_place:
            self.messages.append((place, peer))
            return
        landing = self._comm.buffer(place.shape, dtype=place.dtype, device=place.device)
        self.messages.append((landing, peer))
        self._moves.append((place, landing))

    def settle(self) -> None:
        """Move what could not arrive in place. Call it when the messages are there."""
        for place, landing in self._moves:
            place.copy_(landing)


@dataclass(frozen=True)
class Arriving:
    """A buffer that is being filled."""

    pending: Pending
    arrivals: Arrivals

    def wait(self) -> Tensor:
        """The buffer, every row in its place."""
        self.pending.wait()
        self.arrivals.settle()
        return self.arrivals.buffer


def place_of(piece: Piece, buffer: Tensor) -> Tensor:
    """The rows of the target that a piece becomes, as a view."""
    return buffer[piece.to.start : piece.to.stop : piece.to.step]


def rows_in(piece: Piece, shard: Tensor) -> Tensor:
    """The rows of a shard that a piece holds, as a view."""
    return shard[piece.rows.start : piece.rows.stop]


def other_ranks(comm: Comm) -> list[int]:
    """The others, each rank starting with its right neighbour: nobody is everybody's first target."""
    return [(comm.rank + step) % comm.world for step in range(1, comm.world)]
