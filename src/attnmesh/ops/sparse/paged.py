"""Keys of the sparse functions in the blocks of a paged cache: where an index is stored, reading it, and calls over it.

An index is a position of its sequence, which the block table maps to a slot of the pool (block * block_size + offset),
or it is a slot already. Negative indices are padding. An index that is in no block is a fault: it is never read, and is
reported as `device_errors` describes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.core.ranges import InterleavedShard
from attnmesh.ops.storage import PLAIN, Quantized, Stored, dequantize, storage_of, values_of, width_of
from attnmesh.utils.validation import check_tensor, check_type, shown

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class PagedKeys:
    """A pool [num_blocks, block_size, 1, D] and a block table int32 [B, blocks] (None: indices are slots).

    With a `shard`, indices are positions of the whole sequence, and the table has the blocks of those on one rank; the
    others are treated as padding.
    """

    pool: Stored
    table: Tensor | None
    shard: InterleavedShard | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return values_of(self.pool).shape[0]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return values_of(self.pool).shape[1]

    @property
    def width(self) -> int:
        """Features per key."""
        return width_of(self.pool)

    @property
    def storage(self) -> str:
        """The storage type of the pool."""
        return storage_of(self.pool)

    def slots(self, indices: Tensor, used: Tensor) -> Tensor:
        """The slots of the used indices [B, T, n], int64, -1 for the others. Raises ValueError for a fault.

        Reads tensors on the host: for the CPU and the reference.
        """
        used = used & (indices >= 0)
        at = indices.long()
        if self.shard is not None:
            used = used & (self.shard.owner(at) == self.shard.rank)
            at = self.shard.index(at)
        if self.table is None:
            self._raise_first(used & (at >= self.num_blocks * self.block_size), indices)
            return at.masked_fill(~used, -1)
        entry = at // self.block_size
        self._raise_first(used & (entry >= self.table.shape[1]), indices)
        if not self.table.numel():
            return at.masked_fill(~used, -1)
        batch, n = entry.shape[0], entry.flatten(1)
        block = self.table.long().gather(1, n.clamp(0, self.table.shape[1] - 1)).view(entry.shape)
        for sequence, token, slot in (used & ((block < 0) | (block >= self.num_blocks))).nonzero():
            where = int(sequence), int(token), int(slot)
            raise ValueError(
                f"block_table[{where[0]}, {int(entry[where])}] is {int(block[where])}, but the pool has blocks 0 to "
                f"{self.num_blocks - 1}"
            )
        assert batch == self.table.shape[0]
        return (block * self.block_size + at % self.block_size).masked_fill(~used, -1)

    def _raise_first(self, wrong: Tensor, indices: Tensor) -> None:
        for sequence, token, slot in wrong.nonzero():
            where = int(sequence), int(token), int(slot)
            held = (
                f"the pool has slots 0 to {self.num_blocks * self.block_size - 1}"
                if self.table is None
                else f"the block table has space for {self.table.shape[1] * self.block_size} positions"
            )
            raise ValueError(
                f"indices[{where[0]}, {where[1]}, {where[2]}] is {int(indices[where])}, but {held} (-1 is padding)"
            )

    def gather(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The keys in slots [...], dequantized to `dtype`: [..., D]; arbitrary where a slot is -1."""
        blocks, offsets = (x.clamp(min=0) for x in (slots // self.block_size, slots % self.block_size))
        if isinstance(self.pool, Tensor):
            return self.pool[blocks, offsets, 0].to(dtype)
        as_bytes = self.pool.values.view(torch.int8)  # torch cannot index fp8 on the CPU
        values = as_bytes[blocks, offsets].view(torch.float8_e4m3fn)
        rope = None if self.pool.rope is None else self.pool.rope[blocks, offsets]
        return dequantize(Quantized(values, self.pool.scales[blocks, offsets], rope), dtype, head_axis=-2)[..., 0, :]


@dataclass(frozen=True)
class SparseDecodeCall:
    """Validated arguments: q [B, T, H, D], indices int32 [B, T, topk], counts [B, T] (None: all)."""

    q: Tensor
    keys: PagedKeys
    indices: Tensor
    counts: Tensor | None
    scale: float
    d_v: int
    sinks: Tensor | None
    split_size: int | None
    out_dtype: torch.dtype

    @property
    def used(self) -> Tensor:
        """Which entries of `indices` are among the counted, bool [B, T, topk]."""
        slot = torch.arange(self.indices.shape[2], device=self.indices.device)
        if self.counts is None:
            return torch.ones_like(self.indices, dtype=torch.bool)
        return slot < self.counts[..., None]

    def without_sinks(self, q: Tensor) -> SparseDecodeCall:
        """The call for other queries of the same tokens, without sinks."""
        return replace(self, q=q, sinks=None)


def check_pool(name: str, pool: object, q: Tensor, quantized: str) -> Stored:
    """`pool` as a pool with one head that fits queries [..., D]: of their dtype, or in the storage type `quantized`."""
    check_type(name, pool, (Tensor, Quantized))
    assert isinstance(pool, Tensor | Quantized)
    values = check_tensor(name, values_of(pool))
    if values.ndim != 4 or values.shape[2] != 1 or not values.shape[1]:
        raise ValueError(f"{name} must be [num_blocks, block_size, 1, {q.shape[-1]}], got {list(values.shape)}")
    if isinstance(pool, Tensor):
        if pool.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} like q, or {quantized}, got {pool.dtype}")
    elif pool.storage != quantized:
        raise ValueError(f"{name} must be one of {', '.join((*PLAIN, quantized))}, got {pool.storage}")
    if width_of(pool) != q.shape[-1]:
        raise ValueError(f"{name} must have {q.shape[-1]} features per key, as q has, got {width_of(pool)}")
    if values.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {values.device}")
    parts = (pool,) if isinstance(pool, Tensor) else (pool.scales, pool.rope)
    for x in parts:
        if isinstance(x, Tensor):
            refuse_gradient(name, x)
    if values.stride(-1) != 1 and values.shape[-1] > 1:
        raise ValueError(f"{name} must have a contiguous last dimension, got strides {values.stride()}")
    if isinstance(pool, Quantized) and pool.rope is not None and pool.rope.stride(-1) != 1:
        raise ValueError(f"the rope part of {name} must have a contiguous last dimension, got {pool.rope.stride()}")
    return pool


def check_table(table: object, q: Tensor) -> Tensor:
    """`block_table` as int32 [B, blocks] on the device of q [B, ...]."""
    if not isinstance(table, Tensor) or table.ndim != 2 or table.dtype != torch.int32:
        raise ValueError(f"block_table must be int32 [batch, blocks], got {shown(table)}")
    check_tensor("block_table", table)
    if table.shape[0] != q.shape[0]:
        raise ValueError(f"block_table must have one row per sequence, {q.shape[0]}, got {table.shape[0]}")
    if table.device != q.device:
        raise ValueError(f"block_table must be on the device of q, {q.device}, got {table.device}")
    return table


def check_shard(shard: object, table: Tensor | None) -> InterleavedShard | None:
    """`shard` as an InterleavedShard or None, which slots exclude."""
    if shard is None:
        return None
    check_type("shard", shard, InterleavedShard)
    assert isinstance(shard, InterleavedShard)
    if table is None:
        raise ValueError(f"shard must be None where indices are slots (block_table=None), got {shard}")
    return shard


def check_per_row(name: str, x: object, q: Tensor) -> Tensor:
    """`x` as integers [B, T] on the device of q [B, T, ...]."""
    shape = list(q.shape[:2])
    if not isinstance(x, Tensor) or x.dtype not in _INTEGERS or list(x.shape) != shape:
        raise ValueError(f"{name} must be int32 or int64 {shape}, one number per token, got {shown(x)}")
    check_tensor(name, x)
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    return x


def refuse_gradient(name: str, x: Tensor) -> None:
    """Raises ValueError if a gradient would be expected of a function that has none."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} must not require a gradient (decode has no backward): use no_grad(), got {shown(x)}")
