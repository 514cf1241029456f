"""The device memory of a cache: pools of keys and values, the block table, and the write of new tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.storage import (
    BFP_GROUP,
    LATENT_GROUP,
    PLAIN,
    STORAGES,
    Quantized,
    Stored,
    bytes_per_token,
    check_storage,
    dequantize,
    quantize,
    storage_of,
    unpack_index_keys,
    unpack_latent,
    values_of,
)
from attnmesh.utils.optional import require
from attnmesh.utils.validation import (
    check_bool,
    check_choice,
    check_count,
    check_number,
    check_positive,
    check_tensor,
    shown,
)

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


# `CacheSpec`: what a KV cache stores per token.


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheSpec:
    """What a KV cache stores per token: the layers of a model, the widths of their kv heads, and the storage type.

    `storage` is bf16, fp16, fp32, fp8, int8 or bfp8. `k_scale` and `v_scale` (a number, [] or [kv_heads], default 1)
    are for fp8: values are saturated at 448 times the scale. `value_dim` is `head_dim` by default. `kv_heads`,
    `head_dim` and `value_dim` are of every layer, or lists with a number for each layer.

    With `latent` (multi-head latent attention) one vector per token is stored: there is one kv head, and the values are
    the first `value_dim` features of the keys. `storage` is then bf16, fp16, fp32 or fp8_ds_mla, the 656 bytes per
    token of DeepSeek-V3.2 for head_dim=576. `index_dim` adds an indexer's keys of that width in the same blocks: in
    `storage`, or for fp8_ds_mla in fp8_token.

    `windows` has the sliding window of each layer, the token itself included, or None where a layer attends to all
    tokens. Layers with a window have blocks of their own.

    Examples:
        >>> am.CacheSpec(layers=32, kv_heads=8, head_dim=128, storage="int8").value_dim
        128
        >>> am.CacheSpec(layers=61, kv_heads=1, head_dim=576, latent=True, storage="fp8_ds_mla").value_dim
        512
    """

    layers: int
    kv_heads: int | Sequence[int]
    head_dim: int | Sequence[int]
    value_dim: int | Sequence[int] | None = None
    storage: str = "bf16"
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    latent: bool = False
    index_dim: int | None = None
    windows: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        check_positive(layers=self.layers)
        check_bool(latent=self.latent)
        check_choice("storage", self.storage, (*PLAIN, "fp8_ds_mla") if self.latent else STORAGES)
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self._latent_dim(self.head_dim) or self.head_dim)
        for name in ("kv_heads", "head_dim", "value_dim"):
            numbers = _by_layer(name, getattr(self, name), self.layers)
            object.__setattr__(self, name, numbers[0] if len(set(numbers)) == 1 else numbers)
        for shape in dict.fromkeys(self.shapes):
            self._check_storage(*shape)
        self._check_index()
        cpu, heads = torch.device("cpu"), self.kv_heads if isinstance(self.kv_heads, int) else None
        for name in ("k_scale", "v_scale"):
            fp8_scale(name, getattr(self, name), self.storage, heads, cpu)  # raises
        self._check_windows()

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """The kv heads, and the widths of keys and values, of each layer."""
        given = (self.kv_heads, self.head_dim, self.value_dim)
        by_layer = [[each] * self.layers if isinstance(each, int) else list(each or ()) for each in given]
        return list(zip(*by_layer, strict=True))

    def _latent_dim(self, head_dim: object) -> int | None:
        """The width of the values in a latent of `head_dim` features, where the storage type determines it."""
        is_known = self.storage == "fp8_ds_mla" and isinstance(head_dim, int)
        return head_dim // LATENT_GROUP * LATENT_GROUP if is_known else None  # type: ignore[operator]

    def _check_storage(self, kv_heads: int, head_dim: int, value_dim: int) -> None:
        """Raise ValueError unless keys and values of these widths can be stored."""
        storage, latent_dim = self.storage, self._latent_dim(head_dim)
        check_storage(storage, head_dim)
        if not self.latent:
            check_storage(storage, value_dim)
        elif kv_heads != 1 or value_dim > head_dim:
            raise ValueError(
                f"a latent cache has one kv head, whose values are among its {head_dim} features, got "
                f"kv_heads={kv_heads} and value_dim={value_dim}"
            )
        elif value_dim != (latent_dim or value_dim):
            raise ValueError(
                f"value_dim must be {latent_dim} for storage {storage!r} and head_dim={head_dim}, got {value_dim}"
            )

    def _check_index(self) -> None:
        storage, index_dim = self.storage, self.index_dim
        if index_dim is not None:
            check_positive(index_dim=index_dim)
            if not self.latent:
                raise ValueError(f"index_dim must be None unless latent=True, got {index_dim}")
            if storage not in PLAIN and index_dim % 4:
                raise ValueError(f"index_dim must be a multiple of 4 for storage {storage!r}, got {index_dim}")

    def _check_windows(self) -> None:
        windows = self.windows
        if not isinstance(windows, list | tuple) or len(windows) not in (0, self.layers):
            raise ValueError(
                f"windows must have a window or None for each of {self.layers} layers, got {shown(windows)}"
            )
        for i, each in enumerate(windows):
            if each is not None:
                check_count(f"windows[{i}]", each, least=1)
        if self.index_dim is not None and self.window is not None:
            raise ValueError(f"windows must be None in every layer of a cache with index_dim, got {shown(windows)}")

    @property
    def window(self) -> int | None:
        """The widest window; None if no layer has one."""
        return max((each for each in self.windows if each is not None), default=None)

    def of_heads(self, heads: Sequence[range]) -> CacheSpec:
        """What a rank stores that has some of the kv heads of each layer. A single scale applies to all heads."""
        first = heads[0]
        k_scale, v_scale = (
            scale[first.start : first.stop] if isinstance(scale, Tensor) and scale.dim() else scale
            for scale in (self.k_scale, self.v_scale)
        )
        return replace(self, kv_heads=[*map(len, heads)], k_scale=k_scale, v_scale=v_scale)


def _by_layer(name: str, given: object, layers: int) -> tuple[int, ...]:
    """A positive number for each layer, from one for all of them or a list with one for each."""
    if not isinstance(given, list | tuple):
        check_positive(**{name: given})
        return (given,) * layers  # type: ignore[return-value]
    if len(given) != layers:
        raise ValueError(f"{name} must be a number, or have one for each of {layers} layers, got {shown(given)}")
    return tuple(check_count(f"{name}[{i}]", each, least=1) for i, each in enumerate(given))
