"""Keys and values of a sequence as the plain numbers that the CPU kernel takes, a range of positions at a time."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import BFP_GROUP, Quantized, Stored, values_of

_CHUNK_BYTES = 16 << 20  # keys and values, widened, that are still in the cores' caches when they are read again
_LEAST_CHUNK = 256


class KeysAndValues:
    """What a call's sequences read. One width for keys and values: the kernel takes no other."""

    def __init__(self, call: DecodeCall) -> None:
        self.dtype = accumulation_dtype(call.q.dtype)
        self._width = max(call.q.shape[3], call.value_dim)
        self._k, self._v = (_Reader(call, stored, self.dtype, self._width) for stored in (call.k, call.v))
        self._heads = call.kv_heads
        self._block_len = call.block_size
        self.in_place = self._k.in_place and self._v.in_place  # nothing is gathered, widened or padded
        self.padded = self._width > call.value_dim

    @property
    def chunk(self) -> int:
        """Keys that are gathered and widened at a time, whole blocks. It depends on no sequence and no batch."""
        key = self._heads * 2 * self._width * self.dtype.itemsize
        return -(-max(_LEAST_CHUNK, _CHUNK_BYTES // key) // self._block_len) * self._block_len

    def read(self, owners: range, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hkv, end - first, width] of the owners' caches; valid until the next read."""
        return self._k.read(owners, first, end), self._v.read(owners, first, end)

    def query(self, q: Tensor, scale: float) -> Tensor:
        """q [B, Hq, T, D] as it meets what `read` gives: scaled, in its width, times the scale of the keys' heads."""
        q = q.to(self.dtype) * scale
        if self._k.head_scale is not None:
            q = (q.unflatten(1, (self._heads, -1)) * self._k.head_scale.unsqueeze(-1)).flatten(1, 2)
        return q if q.shape[3] == self._width else F.pad(q, (0, self._width - q.shape[3]))

    def scaled_out(self, out: Tensor) -> Tensor:
        """Out [n, Hkv, R, Dv] over what `read` gives, times the scale of the values' heads."""
        return out if self._v.head_scale is None else out * self._v.head_scale


class _Reader:
    """One of the two. Its buffers live as long as the call: a fresh one for each chunk would fault its pages in again.

    fp8's scales are not multiplied in: they are the same for all keys of a head (`head_scale`, [] or [Hkv, 1, 1]).
    """

    def __init__(self, call: DecodeCall, stored: Stored, dtype: torch.dtype, width: int) -> None:
        self._stored, self._table, self._block_len = stored, call.table, call.block_size
        self._dtype, self._width = dtype, width
        self._buffers: dict[str, Tensor] = {}
        values = values_of(stored)
        self.in_place = (
            call.table is None
            and values.dtype == dtype
            and values.shape[3] == width
            and (values.stride(3) == 1 or width == 1)
        )
        self.head_scale: Tensor | None = None
        if isinstance(stored, Quantized) and stored.storage == "fp8":
            scales = stored.scales.to(dtype)
            self.head_scale = scales.view(-1, 1, 1) if scales.ndim else scales

    def read(self, owners: range, first: int, end: int) -> Tensor:
        """[n, Hkv, end - first, width]."""
        values = values_of(self._stored)
        if self.in_place:
            return values[owners.start : owners.stop, :, first:end]
        raw = self._raw("values", values, owners, first, end)
        if raw.dtype == self._dtype and raw.shape[3] == self._width and raw.stride(3) == 1:
            return raw
        if self._table is None:
            wide = self._room("wide", (*raw.shape[:3], self._width), self._dtype)
        else:  # by token, as the pool is
            wide = self._room("wide", (raw.shape[2], raw.shape[1], self._width), self._dtype).transpose(0, 1)[None]
        numbers = wide[..., : raw.shape[3]]
        numbers.copy_(raw)
        wide[..., raw.shape[3] :] = 0.0
        if isinstance(self._stored, Quantized) and self._stored.storage != "fp8":
            scales = self._raw("scales", self._stored.scales, owners, first, end)
            if self._stored.storage == "int8":
                numbers.mul_(scales.to(self._dtype).unsqueeze(-1))
            else:
                steps = torch.ldexp(torch.ones_like(scales, dtype=self._dtype), scales.int())
                numbers.unflatten(-1, (-1, BFP_GROUP)).mul_(steps.unsqueeze(-1))
        return wide

    def _raw(self, name: str, held: Tensor, owners: range, first: int, end: int) -> Tensor:
        """What is stored for these positions, [n, Hkv, end - first, ...]: a view of a cache, or gathered blocks."""
        if self._table is None:
            return held[owners.start : owners.stop, :, first:end]
        assert len(owners) == 1, "a table's rows are gathered one by one"
        slot = first // self._block_len
        blocks = self._table[owners.start, slot : -(-end // self._block_len)]
        begin = first - slot * self._block_len
        gathered = self._room(name, (len(blocks), *held.shape[1:]), held.dtype)
        if held.dtype.itemsize == 1:  # torch selects no float8
            torch.index_select(held.view(torch.int8), 0, blocks, out=gathered.view(torch.int8))
        else:
            torch.index_select(held, 0, blocks, out=gathered)
        # By token, as they lie in the pool: the kernel loses less by that than an order by head would cost.
        return gathered.flatten(0, 1)[begin : begin + end - first].transpose(0, 1).unsqueeze(0)

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype)
        return self._buffers[name][:size].view(shape)
