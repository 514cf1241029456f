"""Who holds which queries and keys in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.core.layouts import Layout
from attnmesh.ops.sparse.arguments import Rows, SparseMask
from attnmesh.parallel.sparse.groups import Ranks

_MOST_REMEMBERED = 128


class KeyTable(NamedTuple):
    """For every key its owner and its row there; one more entry, for no key, is owned by nobody (`world`)."""

    owner: Tensor
    row: Tensor


@dataclass(frozen=True)
class Spread:
    """`length` queries and `key_length` keys, spread over the cp ranks by a layout. Nothing here is exchanged."""

    ranks: Ranks
    layout: Layout
    sharded: bool
    length: int
    key_length: int
    device: torch.device

    @property
    def key_lengths(self) -> list[int]:
        """How many keys each cp rank holds."""
        world = self.ranks.cp.world
        return [self.layout.local_length(self.key_length, world, rank) for rank in range(world)]

    def check(self, what: str, rows: int, length: int) -> None:
        """Raise ValueError unless this rank has its share."""
        cp = self.ranks.cp
        due = self.layout.local_length(length, cp.world, cp.rank)
        if rows != due:
            raise ValueError(
                f"under {self.layout} cp rank {cp.rank} of {cp.world} holds {due} of {length} {what}, got {rows} rows"
            )

    def local_mask(self, mask: SparseMask) -> SparseMask:
        """The mask of the whole sequence as one of this rank's rows; or ValueError."""
        if mask.k_offset:
            raise ValueError(f"mask.k_offset must be 0, all keys count here wherever they are, got {mask.k_offset}")
        if not mask.causal or mask.q_positions is not None:
            return mask
        cp = self.ranks.cp
        here = _positions(self.layout, self.length, cp.world, cp.rank, self.device) + mask.q_start
        return replace(mask, q_start=0, q_positions=here)

    def key_table(self) -> KeyTable:
        """Where every key is."""
        return _key_table(self.layout, self.key_length, self.ranks.cp.world, self.device)

    def rows_at(self, owner: int, rows: Rows) -> Rows:
        """The same ranges of keys, counted in the rows of `owner`: it holds its keys in ascending order."""
        held = _positions(self.layout, self.key_length, self.ranks.cp.world, owner, self.device)
        lo, hi = (torch.searchsorted(held, bound, out_int32=True) for bound in (rows.lo, rows.hi))
        return Rows(lo, hi, rows.slots, 0)

    def keys_of(self, owner: int, rows: Tensor) -> Tensor:
        """The keys that lie in these rows of `owner`, -1 where there is none."""
        held = _positions(self.layout, self.key_length, self.ranks.cp.world, owner, self.device)
        if not held.shape[0]:
            return rows
        return torch.where(rows < 0, -1, held[rows.clamp(min=0).long()])


@lru_cache(maxsize=_MOST_REMEMBERED)
def _positions(layout: Layout, length: int, world: int, rank: int, device: torch.device) -> Tensor:
    """Made once: a GPU would have to wait for the copy in every call."""
    return layout.positions(length, world, rank).to(device, torch.int32)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _key_table(layout: Layout, length: int, world: int, device: torch.device) -> KeyTable:
    owner = torch.full((length + 1,), world, dtype=torch.int16, device="cpu")
    row = torch.full((length + 1,), -1, dtype=torch.int32, device="cpu")
    for rank in range(world):
        held = layout.positions(length, world, rank).cpu()
        owner[held] = rank
        row[held] = torch.arange(held.shape[0], dtype=torch.int32, device="cpu")
    return KeyTable(owner.to(device), row.to(device))


@dataclass(frozen=True)
class Here:
    """Slots whose keys are at hand: `indices` [s_q, width] are rows of the block; `rows` says how many count."""

    indices: Tensor
    rows: Rows
    slot: Tensor | None
    """Which slot of the call each one is, and `topk` where there is none. None: they are the call's own."""

    def put(self, total: Tensor, found: Tensor) -> None:
        """Bring what was found [..., s_q, width] to its slots in `total` [..., s_q, topk + 1], the last for none."""
        assert self.slot is not None
        total.scatter_(-1, self.slot.expand_as(found), found)

    def take(self, given: Tensor) -> Tensor:
        """From what is given for each slot of the call [s_q, topk], that of these; anything where there is none."""
        return given if self.slot is None else given.gather(1, self.slot.clamp(max=given.shape[1] - 1))


class ByOwner:
    """The valid slots of every row, sorted by owner once; each block then gets its stretch of them."""

    def __init__(self, indices: Tensor, rows: Rows, spread: Spread) -> None:
        world = spread.ranks.cp.world
        table = spread.key_table()
        at = torch.where(rows.valid(indices), indices, spread.key_length).long()
        owner = table.owner[at]
        self._order = owner.argsort(dim=1, stable=True)
        self._local = table.row[at].gather(1, self._order)
        ones = torch.ones_like(at)
        self._count = at.new_zeros(at.shape[0], world + 1).scatter_add_(1, owner.long(), ones)
        self._first = self._count.cumsum(1) - self._count
        self._held = spread.key_lengths

    def at(self, owner: int) -> Here:
        """The slots whose keys `owner` holds, first in every row."""
        count = self._count[:, owner, None]
        n, topk = self._local.shape
        # Reading a number back is free on a CPU. Elsewhere it is not, and kernels stop where slots do.
        width = max(1, int(count.max()) if n else 1) if count.device.type == "cpu" else topk
        j = torch.arange(width, device=count.device)
        source = (self._first[:, owner, None] + j).clamp(max=topk - 1)
        none = j >= count
        lo = count.new_zeros(n, dtype=torch.int32)
        rows = Rows(lo, torch.full_like(lo, self._held[owner]), count[:, 0].int().contiguous(), 0)
        indices = self._local.gather(1, source).masked_fill(none, -1)
        return Here(indices, rows, self._order.gather(1, source).masked_fill(none, topk))


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
