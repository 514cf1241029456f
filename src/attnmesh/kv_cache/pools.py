"""The device memory of a cache: pools of keys and values, the block table, and the write of new tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.storage import (
    BFP_GROUP,
    LATENT_GROUP,
    PLAIN,
    Quantized,
    Stored,
    bytes_per_token,
    dequantize,
    quantize,
    storage_of,
    unpack_index_keys,
    unpack_latent,
    values_of,
)
from attnmesh.utils.optional import require
from attnmesh.utils.validation import check_number, check_tensor, shown

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_FEW = 64  # tokens of a decode step: reading their slots costs less than calls that keep some of them
_ALIGNMENT = 64  # entries: the block table starts at a multiple of 256 bytes, as a separate tensor would


# Pools.


class LayerPools(NamedTuple):
    """Where a layer's keys and values are stored; values that are a part of the keys (fp8_ds_mla) are read there.

    `kind` is which of `BlockCache.block_tables` its blocks are in: 1 for layers with separate blocks, for a window.
    """

    kind: int
    keys: Stored
    values: Stored


@dataclass(frozen=True)
class Pools:
    """Keys (or values) of all layers, [layers, num_blocks, block_size, kv_heads, D], and a view of each layer."""

    tensors: tuple[Tensor, ...]  # everything that is stored per token: values, and scales unless the storage is fp8
    layers: tuple[Stored, ...]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy blocks to other blocks in every layer, on the device."""
        for x in self.tensors:
            x[:, target] = x[:, source]


def make_pools(shape: tuple[int, int, int, int, int], storage: str, scale: Tensor, device: torch.device) -> Pools:
    """Empty pools of shape [layers, num_blocks, block_size, kv_heads, D]; `scale` is used by fp8 only."""
    if storage in PLAIN:
        if torch.device(device).type == "cpu":  # the keys of a head are adjacent: torch's CPU kernel reads them faster
            layers, blocks, block_size, heads, dim = shape
            by_head = torch.zeros((layers, heads, blocks, block_size, dim), dtype=PLAIN[storage], device=device)
            plain = by_head.permute(0, 2, 3, 1, 4)
        else:
            plain = torch.zeros(shape, dtype=PLAIN[storage], device=device)
        return Pools((plain,), tuple(plain))
    if storage == "fp8_ds_mla":
        *front, dim = shape
        raw = torch.zeros((*front, int(bytes_per_token(storage, dim))), dtype=torch.uint8, device=device)
        return Pools((raw,), tuple(unpack_latent(x, dim % LATENT_GROUP) for x in raw))
    if storage == "fp8":
        raw = torch.zeros(shape, dtype=torch.uint8, device=device)  # as bytes: torch cannot index fp8 on the CPU
        return Pools((raw,), tuple(Quantized(x.view(torch.float8_e4m3fn), scale) for x in raw))
    values = torch.zeros(shape, dtype=torch.int8, device=device)
    *front, block_size, heads, dim = shape
    # The scales of one head's tokens are contiguous: a kernel reads one head of a block at a time.
    if storage == "int8":
        scales = torch.zeros((*front, heads, block_size), dtype=torch.float32, device=device).transpose(2, 3)
    else:
        groups = (*front, heads, block_size, dim // BFP_GROUP)
        scales = torch.zeros(groups, dtype=torch.int8, device=device).transpose(2, 3)
    return Pools((values, scales), tuple(Quantized(*both) for both in zip(values, scales, strict=True)))


def make_index_pools(shape: tuple[int, int, int], dim: int, storage: str, device: torch.device) -> Pools:
    """Empty pools of an indexer's keys for [layers, num_blocks, block_size], with one head of `dim` features."""
    if storage in PLAIN:
        return make_pools((*shape, 1, dim), storage, torch.empty(0, dtype=torch.float32, device=device), device)
    layers, num_blocks, block_size = shape
    raw = torch.zeros((layers, num_blocks, block_size * (dim + 4)), dtype=torch.uint8, device=device)
    return Pools((raw,), tuple(unpack_index_keys(x, block_size) for x in raw))


def fp8_scale(
    name: str, scale: float | Tensor | None, storage: str, kv_heads: int | None, device: torch.device
) -> Tensor:
    """An fp8 scale as a float32 tensor [] or [kv_heads] on the device; 1 by default.

    `kv_heads` is None if layers differ in it: there is one scale for all heads.
    """
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device)
    if storage != "fp8":
        raise ValueError(f"{name} must be None except for storage 'fp8', got {shown(scale)} for {storage!r}")
    if isinstance(scale, Tensor):
        if scale.shape not in ((), (kv_heads,)) or not scale.dtype.is_floating_point:
            of_heads = "" if kv_heads is None else f" or [{kv_heads}]"
            raise ValueError(
                f"{name} must be a number or floating point []{of_heads}, got {scale.dtype} {list(scale.shape)}"
            )
        if scale.is_meta:
            raise ValueError(f"{name} must have values, got {shown(scale)}")
        numbers = check_tensor(name, scale).detach().float().cpu().flatten().tolist()  # synchronizes once
        scale = scale.detach()
    elif isinstance(scale, int | float):
        numbers = [check_number(name, scale)]
    else:
        raise ValueError(f"{name} must be a number or a tensor, got {type(scale).__name__} {shown(scale)}")
    if not all(_SMALLEST <= number <= _LARGEST for number in numbers):
        raise ValueError(f"{name} must be positive and finite in float32, got {numbers}")
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


# Tables.


class DeviceTables:
    """`block_tables` int32 [kinds, rows, slots] and `cur_pos` int32 [rows], -1 where empty, at fixed addresses.

    Both are views of one tensor, so one copy to the device and one scatter apply all changes of an operation. The host
    keeps a mirror and never reads the device. On the meta device nothing is stored.
    """

    def __init__(self, kinds: int, rows: int, slots: int, device: torch.device | str | None) -> None:
        self._table_begin = rows + -rows % _ALIGNMENT
        self._rows, self._slots = rows, slots
        size = self._table_begin + kinds * rows * slots
        self._device_copy = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.cur_pos = self._device_copy[:rows]
        self.block_tables = self._device_copy[self._table_begin :].view(kinds, rows, slots)
        self.is_meta = self._device_copy.is_meta
        self._mirror = array("i", [-1]) * (0 if self.is_meta else size)
        self._changed: dict[int, int] = {}
        self._empty = torch.empty(0, dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Empty all rows, on the host and on the device."""
        self._mirror = array("i", [-1]) * len(self._mirror)
        self._changed = {}
        self._device_copy.fill_(-1)

    def set_length(self, row: int, length: int) -> None:
        """Set the number of a row's tokens that this rank stores: `cur_pos` is length - 1."""
        self._set(row, length - 1)

    def set_blocks(self, row: int, first: int, blocks: Iterable[int], kind: int = 0) -> None:
        """Set entries of a row of a block table from index `first` on."""
        begin = self._table_begin + (kind * self._rows + row) * self._slots + first
        for at, block in enumerate(blocks, begin):
            self._set(at, block)

    def _set(self, at: int, value: int) -> None:
        if not self.is_meta and self._mirror[at] != value:
            self._mirror[at] = self._changed[at] = value

    def upload(self, numbers: Iterable[int] = ()) -> Tensor:
        """Copy all changes and `numbers` to the device in one transfer; returns the numbers, int64 on the device."""
        count = len(self._changed)
        packed = [*self._changed, *self._changed.values(), *numbers]
        if not packed or self.is_meta:
            return self._empty
        # Pinned: from pageable memory the host would wait for the device.
        sent = torch.tensor(packed, dtype=torch.int64, device="cpu", pin_memory=self.cur_pos.is_cuda)
        sent = sent.to(self.cur_pos.device, non_blocking=True)
        if count:
            self._device_copy[sent[:count]] = sent[count : 2 * count].to(torch.int32)
            self._changed = {}
        return sent[2 * count :]


# Writing.


def write_tokens(keys: Stored, values: Stored, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n, Hkv, T, D] and v [n, Hkv, T, Dv] to `slots` [n, T] of the pools, as `quantize` would store them.

    A slot is block * block_size + offset; slots below 0 are skipped. On a GPU this is one kernel launch.
    """
    if slots.is_cuda:
        _triton().write_tokens(keys, values, slots, k, v)
        return
    _write(keys, slots, k)
    _write(values, slots, v)


def write_rows(pool: Stored, slots: Tensor, x: Tensor) -> None:
    """Write x [n, 1, T, D] to `slots` [n, T] of one pool with one head: latents, or an indexer's keys."""
    if slots.is_cuda:
        _triton().write_rows(pool, slots, x)
    else:
        _write(pool, slots, x)


def as_stored(pool: Stored, x: Tensor) -> Tensor:
    """Keys or values x [n, Hkv, T, D] as they are read from `pool` once they are written there, in the dtype of x."""
    if isinstance(pool, Tensor):
        return x.to(pool.dtype).to(x.dtype)
    scale = pool.scales if pool.storage == "fp8" else None
    return dequantize(quantize(x, pool.storage, scale=scale), x.dtype)


def _write(pool: Stored, slots: Tensor, x: Tensor) -> None:
    if slots.numel() == 1 and isinstance(pool, Tensor):  # a decode step: no index tensors
        block, offset = divmod(int(slots), pool.shape[1])
        if block >= 0:
            pool[block][offset].copy_(x.view(x.shape[1], x.shape[3]))
        return
    if isinstance(pool, Tensor) and 0 < slots.numel() <= _FEW and pool.stride(0) == pool.shape[1] * pool.stride(1):
        at = slots.reshape(-1)
        if min(at.tolist()) >= 0:
            tokens = x.to(pool.dtype).transpose(0, 1).flatten(1, 2)
            pool.permute(2, 0, 1, 3).flatten(1, 2).index_copy_(1, at.long(), tokens)  # one call, in a view
            return
    kept = slots >= 0
    at = slots[kept]
    block_size = values_of(pool).shape[1]
    index = (at // block_size, at % block_size)
    tokens = x.transpose(1, 2)[kept]  # [tokens, Hkv, D]
    if isinstance(pool, Tensor):
        pool[index] = tokens.to(pool.dtype)
        return
    scale = pool.scales if pool.storage == "fp8" else None
    new = quantize(tokens, storage_of(pool), scale=scale)
    assert isinstance(new, Quantized)
    as_bytes = torch.int8  # torch cannot index fp8 on the CPU
    pool.values.view(as_bytes)[index] = new.values.view(as_bytes)
    if scale is None:
        pool.scales[index] = new.scales
    if pool.rope is not None and new.rope is not None:
        pool.rope[index] = new.rope


def _triton() -> Any:
    return require("attnmesh.kv_cache.triton_write", extra="triton")
