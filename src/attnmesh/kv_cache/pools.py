"""The memory of all layers: keys or values in blocks, as plain numbers or quantized."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.optional import require
from attnmesh.ops.storage import BFP_GROUP, PLAIN, Quantized, Stored, quantize, storage_of, values_of


@dataclass(frozen=True)
class Pools:
    """Keys (or values) of all layers, `whole` [layers, num_blocks, block_size, kv_heads, D], and each `layer` of it."""

    whole: tuple[Tensor, ...]  # what is written a token: values, and scales unless they are fp8's
    layers: tuple[Stored, ...]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy blocks to other blocks in every layer, on the device."""
        for x in self.whole:
            x[:, target] = x[:, source]


def make_pools(shape: tuple[int, int, int, int, int], storage: str, scale: Tensor, device: torch.device) -> Pools:
    """Empty pools of a shape [layers, num_blocks, block_size, kv_heads, D]; `scale` is fp8's."""
    if storage in PLAIN:
        plain = torch.zeros(shape, dtype=PLAIN[storage], device=device)
        return Pools((plain,), tuple(plain))
    if storage == "fp8":
        raw = torch.zeros(shape, dtype=torch.uint8, device=device)  # copied as bytes: torch indexes no fp8 on the CPU
        return Pools((raw,), tuple(Quantized(x.view(torch.float8_e4m3fn), scale) for x in raw))
    values = torch.zeros(shape, dtype=torch.int8, device=device)
    *front, block_size, heads, dim = shape
    # The scales of one head's tokens lie next to one another: a kernel reads one head of a block at a time.
    if storage == "int8":
        scales = torch.zeros((*front, heads, block_size), dtype=torch.float32, device=device).transpose(2, 3)
    else:
        groups = (*front, heads, block_size, dim // BFP_GROUP)
        scales = torch.zeros(groups, dtype=torch.int8, device=device).transpose(2, 3)
    return Pools((values, scales), tuple(Quantized(*both) for both in zip(values, scales, strict=True)))


def fp8_scale(name: str, scale: float | Tensor | None, storage: str, kv_heads: int, device: torch.device) -> Tensor:
    """An fp8 scale as a float32 tensor [] or [kv_heads] on the device; 1 by default."""
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device)
    if storage != "fp8":
        raise ValueError(f"{name} is for storage 'fp8' only: {storage!r} finds its scales itself")
    if isinstance(scale, Tensor):
        if scale.shape not in ((), (kv_heads,)) or not scale.dtype.is_floating_point:
            raise ValueError(
                f"{name} must be a number or floating point [] or [{kv_heads}], got {scale.dtype} {list(scale.shape)}"
            )
        numbers = scale.detach().float().cpu().flatten().tolist()  # once, when the cache is made
        scale = scale.detach()
    elif isinstance(scale, (int, float)):
        numbers = [float(scale)]
    else:
        raise ValueError(f"{name} must be a number or a tensor, got {type(scale).__name__}")
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"{name} must be positive and finite, got {numbers}")
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


_ALIGNED = 64  # entries: the table starts at a multiple of 256 bytes, as a tensor of its own would


class Tables:
    """`block_table` int32 [rows, slots] and `cur_pos` int32 [rows], -1 where there is nothing.

    Both are views of one tensor, so that one upload and one scatter bring all changes of an operation. The host keeps
    a mirror, and so knows what changed without ever reading the device. On the meta device there is nothing to keep.
    """

    def __init__(self, rows: int, slots: int, device: torch.device | str | None) -> None:
        self._begin = rows + -rows % _ALIGNED
        self._slots = slots
        size = self._begin + rows * slots
        self._device_copy = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.cur_pos = self._device_copy[:rows]
        self.block_table = self._device_copy[self._begin :].view(rows, slots)
        self.is_meta = self._device_copy.is_meta
        self._mirror = array("i", [-1]) * (0 if self.is_meta else size)
        self._changed: dict[int, int] = {}
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)

    def set_length(self, row: int, length: int) -> None:
        """The last of a row's `length` tokens that are held here is at length - 1; a row without tokens has -1."""
        self._set(row, length - 1)

    def set_blocks(self, row: int, first: int, blocks: Iterable[int]) -> None:
        """Put blocks into a row from slot `first` on."""
        begin = self._begin + row * self._slots + first
        for at, block in enumerate(blocks, begin):
            self._set(at, block)

    def _set(self, at: int, value: int) -> None:
        if not self.is_meta and self._mirror[at] != value:
            self._mirror[at] = self._changed[at] = value

    def upload(self, more: Iterable[int] = ()) -> Tensor:
        """Bring all changes to the device, and in the same upload `more`, which comes back as int64 there."""
        count = len(self._changed)
        numbers = [*self._changed, *self._changed.values(), *more]
        if not numbers or self.is_meta:
            return self._nothing
        # Pinned: from pageable memory the host would wait for the device.
        packed = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.cur_pos.is_cuda)
        packed = packed.to(self.cur_pos.device, non_blocking=True)
        if count:
            self._device_copy[packed[:count]] = packed[count : 2 * count].to(torch.int32)
            self._changed = {}
        return packed[2 * count :]


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def write_tokens(keys: Stored, values: Stored, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n, Hkv, T, D] and v [n, Hkv, T, Dv] to `slots` [n, T] of the pools, as `quantize` would store them.

    A slot is block * block_size + offset; those below 0 are skipped. Nothing else is touched, and on a GPU it is one
    kernel.
    """
    if slots.is_cuda:
        _triton().write_tokens(keys, values, slots, k, v)
    else:
        _write(keys, slots, k)
        _write(values, slots, v)


def _write(pool: Stored, slots: Tensor, x: Tensor) -> None:
    kept = slots >= 0
    at = slots[kept]
    block_size = values_of(pool).shape[1]
    where = (at // block_size, at % block_size)
    tokens = x.transpose(1, 2)[kept]  # [tokens, Hkv, D]
    if isinstance(pool, Tensor):
        pool[where] = tokens.to(pool.dtype)
        return
    scale = pool.scales if pool.storage == "fp8" else None
    new = quantize(tokens, storage_of(pool), scale=scale)
    assert isinstance(new, Quantized)
    as_bytes = torch.int8  # torch indexes no fp8 on the CPU
    pool.values.view(as_bytes)[where] = new.values.view(as_bytes)
    if scale is None:
        pool.scales[where] = new.scales


def _triton() -> Any:
    return require("attnmesh.kv_cache.triton_write", extra="triton")
