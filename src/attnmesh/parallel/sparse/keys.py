"""Which rank holds which queries and keys, and how keys reach the queries of other cp ranks: all-gather or ring.

In both cases a call is a loop over KV shards: one that holds all keys, or one per rank. In a ring, at step t a rank
computes with the keys of rank - t, while it sends them to its right neighbor and receives the next from its left. In
the backward pass the gradient of a shard follows it from rank to rank, one step behind, and ends at its owner: sums are
in the order of the ring, the same in every run. A ring needs two buffers besides the keys of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.core.layouts import Layout
from attnmesh.ops.sparse.arguments import RowBounds, SparseMask
from attnmesh.parallel.sparse.groups import SparseGroups

_CACHE_SIZE = 128


# Which rank holds what.


class KeyOwners(NamedTuple):
    """The cp rank and local row of every key. The last entry is for an invalid slot, and its owner is `world`."""

    owner: Tensor
    row: Tensor


@dataclass(frozen=True)
class SequenceSharding:
    """`length` queries and `key_length` keys, sharded over the cp ranks by a layout."""

    groups: SparseGroups
    layout: Layout
    ring: bool
    length: int
    key_length: int
    device: torch.device

    @property
    def key_lengths(self) -> list[int]:
        """The number of keys of each cp rank."""
        world = self.groups.cp.world
        return [self.layout.local_length(self.key_length, world, rank) for rank in range(world)]

    def check_rows(self, name: str, rows: int, length: int) -> None:
        """Raises ValueError unless `rows` is the number of rows that this rank holds of `length`."""
        cp = self.groups.cp
        expected = self.layout.local_length(length, cp.world, cp.rank)
        if rows != expected:
            raise ValueError(
                f"{name} must have {expected} rows on cp rank {cp.rank} of {cp.world} for {length} under "
                f"{self.layout}, got {rows}"
            )

    def local_mask(self, mask: SparseMask) -> SparseMask:
        """The mask of the whole sequence as a mask of the rows of this rank."""
        if mask.k_offset:
            raise ValueError(f"mask.k_offset must be 0 where keys are sharded by a layout, got {mask.k_offset}")
        if not mask.causal or mask.q_positions is not None:
            return mask
        cp = self.groups.cp
        positions = _positions(self.layout, self.length, cp.world, cp.rank, self.device) + mask.q_start
        return replace(mask, q_start=0, q_positions=positions)

    def key_owners(self) -> KeyOwners:
        """The owner of every key."""
        return _key_owners(self.layout, self.key_length, self.groups.cp.world, self.device)

    def local_bounds(self, owner: int, bounds: RowBounds) -> RowBounds:
        """The bounds in rows of `owner`, which holds its keys in ascending order."""
        keys = _positions(self.layout, self.key_length, self.groups.cp.world, owner, self.device)
        lo, hi = (torch.searchsorted(keys, bound, out_int32=True) for bound in (bounds.lo, bounds.hi))
        return RowBounds(lo, hi, bounds.slots, 0)

    def global_indices(self, owner: int, rows: Tensor) -> Tensor:
        """The indices of the keys in these rows of `owner`; -1 where the row is -1."""
        keys = _positions(self.layout, self.key_length, self.groups.cp.world, owner, self.device)
        if not keys.shape[0]:
            return rows
        return torch.where(rows < 0, -1, keys[rows.clamp(min=0).long()])


@lru_cache(maxsize=_CACHE_SIZE)
def _positions(layout: Layout, length: int, world: int, rank: int, device: torch.device) -> Tensor:
    """Cached, because the copy to a GPU would synchronize in every call."""
    return layout.positions(length, world, rank).to(device, torch.int32)


@lru_cache(maxsize=_CACHE_SIZE)
def _key_owners(layout: Layout, length: int, world: int, device: torch.device) -> KeyOwners:
    owner = torch.full((length + 1,), world, dtype=torch.int16, device="cpu")
    row = torch.full((length + 1,), -1, dtype=torch.int32, device="cpu")
    for rank in range(world):
        keys = layout.positions(length, world, rank).cpu()
        owner[keys] = rank
        row[keys] = torch.arange(keys.shape[0], dtype=torch.int32, device="cpu")
    return KeyOwners(owner.to(device), row.to(device))


# Slots by owner of their keys: a KV shard is read only by the slots of its keys.


@dataclass(frozen=True)
class LocalSlots:
    """The slots whose keys are in a KV shard: `indices` [s_q, width] are rows of the shard."""

    indices: Tensor
    bounds: RowBounds
    slot: Tensor | None
    """The slot of the call [s_q, width], `topk` where there is none. None: the slots of the call itself."""

    def scatter(self, total: Tensor, values: Tensor) -> None:
        """Write values [..., s_q, width] to their slots in `total` [..., s_q, topk + 1]; the last takes the unused."""
        assert self.slot is not None
        total.scatter_(-1, self.slot.expand_as(values), values)

    def gather(self, values: Tensor) -> Tensor:
        """The values [s_q, topk] of these slots, [s_q, width]; arbitrary where there is no slot."""
        return values if self.slot is None else values.gather(1, self.slot.clamp(max=values.shape[1] - 1))


class SlotsByOwner:
    """The valid slots of every row, sorted once by the owner of their keys."""

    def __init__(self, indices: Tensor, bounds: RowBounds, sharding: SequenceSharding) -> None:
        world = sharding.groups.cp.world
        owners = sharding.key_owners()
        at = torch.where(bounds.valid(indices), indices, sharding.key_length).long()
        owner = owners.owner[at]
        self._order = owner.argsort(dim=1, stable=True)
        self._local = owners.row[at].gather(1, self._order)
        ones = torch.ones_like(at)
        self._count = at.new_zeros(at.shape[0], world + 1).scatter_add_(1, owner.long(), ones)
        self._first = self._count.cumsum(1) - self._count
        self._key_lengths = sharding.key_lengths

    def of(self, owner: int) -> LocalSlots:
        """The slots of the keys of `owner`, in the leading columns of every row."""
        count = self._count[:, owner, None]
        n, topk = self._local.shape
        # Reading the maximum is free on a CPU. On a GPU it would synchronize, and kernels stop at the last slot anyway.
        width = max(1, int(count.max()) if n else 1) if count.device.type == "cpu" else topk
        j = torch.arange(width, device=count.device)
        source = (self._first[:, owner, None] + j).clamp(max=topk - 1)
        unused = j >= count
        lo = count.new_zeros(n, dtype=torch.int32)
        bounds = RowBounds(lo, torch.full_like(lo, self._key_lengths[owner]), count[:, 0].int().contiguous(), 0)
        indices = self._local.gather(1, source).masked_fill(unused, -1)
        return LocalSlots(indices, bounds, self._order.gather(1, source).masked_fill(unused, topk))


# How keys reach the queries of other ranks.


class KVShard(NamedTuple):
    """The keys of `owner`, or of all ranks after an all-gather: one tensor for each that is exchanged."""

    step: int
    owner: int
    tensors: list[Tensor]


def exchange_keys(own: Sequence[Tensor], sharding: SequenceSharding) -> KeyExchange:
    """The keys of all ranks; `own` are the keys of this rank."""
    if sharding.ring and sharding.groups.cp.world > 1:
        return _RingExchange(own, sharding)
    return _AllGather(own, sharding)


class _AllGather:
    """All keys at once, in the order of the sequence, so that indices need no conversion.

    `slots` are those whose keys are in a shard, `local_bounds` the bounds in rows of a shard, and `global_indices` the
    indices of keys, given their rows in a shard. A grad return sends gradients of shards back to the ranks that own
    the keys (they may be overwritten), and collects this rank's keys' gradients, summed over all ranks, at the end.
    """

    single = True  # one shard holds all keys

    def __init__(self, own: Sequence[Tensor], sharding: SequenceSharding) -> None:
        self._sharding = sharding
        cp, lengths = sharding.groups.cp, sharding.key_lengths
        self._gathered = [
            x
            if cp.world == 1
            else sharding.layout.unshard(cp.all_gather(x.contiguous(), [(n, *x.shape[1:]) for n in lengths]), 0)
            for x in own
        ]

    def shards(self) -> Iterator[KVShard]:
        yield KVShard(0, self._sharding.groups.cp.rank, self._gathered)

    def slots(self, indices: Tensor, bounds: RowBounds) -> Callable[[KVShard], LocalSlots]:
        slots = LocalSlots(indices, bounds, None)
        return lambda shard: slots

    def local_bounds(self, shard: KVShard, bounds: RowBounds) -> RowBounds:
        return bounds

    def global_indices(self, shard: KVShard, rows: Tensor) -> Tensor:
        return rows

    def grad_return(self) -> _GradReduceScatter:
        return _GradReduceScatter(self._sharding)


class _GradReduceScatter:
    """Reduce-scatters the gradients of all keys."""

    def __init__(self, sharding: SequenceSharding) -> None:
        self._sharding = sharding
        self._grads: list[Tensor] = []

    def send(self, shard: KVShard, grads: list[Tensor]) -> None:
        self._grads = grads

    def collect(self) -> list[Tensor]:
        cp, layout = self._sharding.groups.cp, self._sharding.layout
        if cp.world == 1:
            return self._grads
        return [
            cp.reduce_scatter([layout.shard(grad, 0, cp.world, rank).contiguous() for rank in range(cp.world)])
            for grad in self._grads
        ]


class _RingExchange:
    """As `_AllGather`, with one shard per rank, passed around a ring. `shards` may be iterated more than once."""

    single = False

    def __init__(self, own: Sequence[Tensor], sharding: SequenceSharding) -> None:
        self._own, self._sharding = [x.contiguous() for x in own], sharding

    def shards(self) -> Iterator[KVShard]:
        cp, lengths = self._sharding.groups.cp, self._sharding.key_lengths
        longest = max(lengths)
        buffers = [
            [cp.buffer((longest, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in self._own]
            for _ in range(min(2, cp.world - 1))
        ]
        current = self._own
        for step in range(cp.world):
            owner, next_owner = (cp.rank - step) % cp.world, (cp.rank - step - 1) % cp.world
            pending: Pending | None = None
            received: list[Tensor] = []
            if step + 1 < cp.world:  # before the computation, which hides it
                received = [buffer[: lengths[next_owner]] for buffer in buffers[step % len(buffers)]]
                pending = _shift_right(cp, current, received)
            yield KVShard(step, owner, current)
            if pending is not None:
                pending.wait()
            current = received

    def slots(self, indices: Tensor, bounds: RowBounds) -> Callable[[KVShard], LocalSlots]:
        by_owner = SlotsByOwner(indices, bounds, self._sharding)
        return lambda shard: by_owner.of(shard.owner)

    def local_bounds(self, shard: KVShard, bounds: RowBounds) -> RowBounds:
        return self._sharding.local_bounds(shard.owner, bounds)

    def global_indices(self, shard: KVShard, rows: Tensor) -> Tensor:
        return self._sharding.global_indices(shard.owner, rows)

    def grad_return(self) -> _RingGradReturn:
        return _RingGradReturn(self._sharding)


class _RingGradReturn:
    """Gradients that follow their shard around the ring; the gradients of the rank's own keys are added at the end."""

    def __init__(self, sharding: SequenceSharding) -> None:
        self._cp, self._lengths = sharding.groups.cp, sharding.key_lengths
        self._own: list[Tensor] = []
        self._received: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._pending: Pending | None = None

    def send(self, shard: KVShard, grads: list[Tensor]) -> None:
        if shard.step == 0:
            self._own = grads
            return
        self._wait()
        if self._received:  # the sum of the ranks before, for the same keys
            grads = [before.add_(grad) for before, grad in zip(self._received, grads, strict=True)]
        # The right neighbor has these keys next, or owns them. The left sends the next shard's, or this rank's.
        n = self._lengths[(shard.owner - 1) % self._cp.world]
        self._sent = [grad.contiguous() for grad in grads]
        self._received = [self._cp.buffer((n, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in grads]
        self._pending = _shift_right(self._cp, self._sent, self._received)

    def collect(self) -> list[Tensor]:
        self._wait()
        return [own + received for own, received in zip(self._own, self._received, strict=True)]

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


KeyExchange: TypeAlias = _AllGather | _RingExchange


def _shift_right(cp: Comm, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> Pending:
    """Send to the right neighbor, receive from the left."""
    right, left = (cp.rank + 1) % cp.world, (cp.rank - 1) % cp.world
    return cp.exchange([(x, right) for x in sends], [(x, left) for x in recvs])


def map_slots(
    keys: KeyExchange, indices: Tensor, bounds: RowBounds, fill: float, compute: Callable[[KVShard, LocalSlots], Tensor]
) -> Tensor:
    """The values [..., s_q, topk] that `compute` returns for the slots of each shard; `fill` for invalid slots."""
    slots = keys.slots(indices, bounds)
    total: Tensor | None = None
    for shard in keys.shards():
        local = slots(shard)
        values = compute(shard, local)
        if keys.single:
            return values
        if total is None:
            shape = (*values.shape[:-1], indices.shape[1] + 1)
            total = torch.full(shape, fill, dtype=values.dtype, device=values.device)
        local.scatter(total, values)
    assert total is not None
    return total[..., :-1].contiguous()
