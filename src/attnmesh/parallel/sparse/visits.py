"""Keys of all cp ranks brought to the queries of this one: gathered at once, or visiting in a ring.

Either way a call is a loop over visits. In a ring every block makes its way around: at step t this rank meets the keys
of rank - t, which it passes on to its right neighbour while it computes. In the backward the gradient of a block
follows it from rank to rank, one step behind, and comes home at last: sums are in the order of the ring, the same in
every run. Two buffers beside the own keys are all that a ring takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.ops.sparse.mask import Rows
from attnmesh.parallel.sparse.slots import ByOwner, Here
from attnmesh.parallel.sparse.spread import Spread


class Visit(NamedTuple):
    """The keys of `owner` (of all ranks, where there is only one visit), one tensor for each that was brought."""

    step: int
    owner: int
    keys: list[Tensor]


class GradReturn(Protocol):
    """Sums of gradients on the way to the owners of their keys."""

    def leave(self, visit: Visit, grads: list[Tensor]) -> None:
        """Send off what this rank found for the keys of a visit; it may be reused."""

    def home(self) -> list[Tensor]:
        """What all ranks found for this rank's own keys; after the last visit."""


class Keys(Protocol):
    """Keys to be met. `visits` may be gone through more than once."""

    alone: bool
    """Whether one visit brings all keys."""

    def visits(self) -> Iterator[Visit]:
        """One after the other, as they come."""

    def slots(self, indices: Tensor, rows: Rows) -> Callable[[Visit], Here]:
        """The slots that name keys of a visit."""

    def rows_at(self, visit: Visit, rows: Rows) -> Rows:
        """The ranges of keys, counted in those of a visit."""

    def keys_of(self, visit: Visit, chosen: Tensor) -> Tensor:
        """What rows of a visit are called in the whole sequence."""

    def homing(self) -> GradReturn:
        """A way home for gradients."""


def bring(own: Sequence[Tensor], spread: Spread) -> Keys:
    """The keys of all ranks, of which these are this rank's own."""
    return _Ring(own, spread) if spread.sharded and spread.ranks.cp.world > 1 else _Gathered(own, spread)


class _Gathered:
    """All keys at once, in the order of the sequence: indices name them as they are."""

    alone = True

    def __init__(self, own: Sequence[Tensor], spread: Spread) -> None:
        self._spread = spread
        cp, lengths = spread.ranks.cp, spread.key_lengths
        self._whole = [
            x
            if cp.world == 1
            else spread.layout.unshard(cp.all_gather(x.contiguous(), [(n, *x.shape[1:]) for n in lengths]), 0)
            for x in own
        ]

    def visits(self) -> Iterator[Visit]:
        yield Visit(0, self._spread.ranks.cp.rank, self._whole)

    def slots(self, indices: Tensor, rows: Rows) -> Callable[[Visit], Here]:
        here = Here(indices, rows, None)
        return lambda visit: here

    def rows_at(self, visit: Visit, rows: Rows) -> Rows:
        return rows

    def keys_of(self, visit: Visit, chosen: Tensor) -> Tensor:
        return chosen

    def homing(self) -> GradReturn:
        return _ScatterHome(self._spread)


class _ScatterHome:
    """Gradients of all keys, each rank's part summed up where it belongs."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._found: list[Tensor] = []

    def leave(self, visit: Visit, grads: list[Tensor]) -> None:
        self._found = grads

    def home(self) -> list[Tensor]:
        cp, layout = self._spread.ranks.cp, self._spread.layout
        if cp.world == 1:
            return self._found
        return [
            cp.reduce_scatter([layout.shard(grad, 0, cp.world, rank).contiguous() for rank in range(cp.world)])
            for grad in self._found
        ]


class _Ring:
    """Blocks that visit."""

    alone = False

    def __init__(self, own: Sequence[Tensor], spread: Spread) -> None:
        self._own, self._spread = [x.contiguous() for x in own], spread

    def visits(self) -> Iterator[Visit]:
        cp, lengths = self._spread.ranks.cp, self._spread.key_lengths
        most = max(lengths)
        buffers = [
            [cp.buffer((most, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in self._own]
            for _ in range(min(2, cp.world - 1))
        ]
        here = self._own
        for step in range(cp.world):
            owner, after = (cp.rank - step) % cp.world, (cp.rank - step - 1) % cp.world
            travelling: Pending | None = None
            coming: list[Tensor] = []
            if step + 1 < cp.world:  # posted first: the next keys travel while these are computed on
                coming = [buffer[: lengths[after]] for buffer in buffers[step % len(buffers)]]
                travelling = _shift(cp, here, coming)
            yield Visit(step, owner, here)
            if travelling is not None:
                travelling.wait()
            here = coming

    def slots(self, indices: Tensor, rows: Rows) -> Callable[[Visit], Here]:
        by_owner = ByOwner(indices, rows, self._spread)
        return lambda visit: by_owner.at(visit.owner)

    def rows_at(self, visit: Visit, rows: Rows) -> Rows:
        return self._spread.rows_at(visit.owner, rows)

    def keys_of(self, visit: Visit, chosen: Tensor) -> Tensor:
        return self._spread.keys_of(visit.owner, chosen)

    def homing(self) -> GradReturn:
        return _FollowHome(self._spread)


class _FollowHome:
    """Gradients that follow their block; those of the own keys wait here for what comes home."""

    def __init__(self, spread: Spread) -> None:
        self._cp, self._lengths = spread.ranks.cp, spread.key_lengths
        self._own: list[Tensor] = []
        self._arriving: list[Tensor] = []
        self._leaving: list[Tensor] = []
        self._travelling: Pending | None = None

    def leave(self, visit: Visit, grads: list[Tensor]) -> None:
        if visit.step == 0:
            self._own = grads
            return
        self._wait()
        if self._arriving:  # what the ranks before found for the same keys
            grads = [before.add_(grad) for before, grad in zip(self._arriving, grads, strict=True)]
        # The right neighbour meets these keys next, or owns them. From the left come those of the next visit, or ours.
        n = self._lengths[(visit.owner - 1) % self._cp.world]
        self._leaving = [grad.contiguous() for grad in grads]
        self._arriving = [self._cp.buffer((n, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in grads]
        self._travelling = _shift(self._cp, self._leaving, self._arriving)

    def home(self) -> list[Tensor]:
        self._wait()
        return [own + came for own, came in zip(self._own, self._arriving, strict=True)]

    def _wait(self) -> None:
        if self._travelling is not None:
            self._travelling.wait()
            self._travelling = None


def _shift(cp: Comm, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> Pending:
    """To the right neighbour, from the left one."""
    right, left = (cp.rank + 1) % cp.world, (cp.rank - 1) % cp.world
    return cp.exchange([(x, right) for x in sends], [(x, left) for x in recvs])


def at_slots(keys: Keys, indices: Tensor, rows: Rows, fill: float, found: Callable[[Visit, Here], Tensor]) -> Tensor:
    """What is found for each slot [..., s_q, topk], from the visit that brings its key; `fill` where none does."""
    slots = keys.slots(indices, rows)
    total: Tensor | None = None
    for visit in keys.visits():
        here = slots(visit)
        part = found(visit, here)
        if keys.alone:
            return part
        if total is None:
            total = torch.full((*part.shape[:-1], indices.shape[1] + 1), fill, dtype=part.dtype, device=part.device)
        here.put(total, part)
    assert total is not None
    return total[..., :-1].contiguous()
