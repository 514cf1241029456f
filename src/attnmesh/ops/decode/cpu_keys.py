"""The keys that a sequence reads on the CPU: which of them are visible, and their values in the kernel's dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import BFP_GROUP, LATENT_GROUP, Quantized, Stored, values_of

_CHUNK_BYTES = 16 << 20  # widened keys and values that are still in the cores' caches when they are read again
_MIN_CHUNK = 256


class KeyPart(NamedTuple):
    """Keys [first, end) in `parts` equal parts. `unmasked`: every row attends to all of them."""

    first: int
    end: int
    parts: int
    unmasked: bool


def split_keys(keys: range, unmasked: range, size: int, origin: int, max_count: int) -> Iterator[KeyPart]:
    """Cuts `keys` every `size` keys from `origin` on and at the ends of `unmasked`, joining up to `max_count` parts."""
    at = keys.start
    while at < keys.stop:
        whole = (unmasked.stop - at) // size if at in unmasked and (at - origin) % size == 0 else 0
        if whole:
            count = min(whole, max_count)
            yield KeyPart(at, at := at + count * size, count, True)
            continue
        ends = (at + size - (at - origin) % size, keys.stop, unmasked.start, unmasked.stop)
        inside = at in unmasked
        yield KeyPart(at, at := min(end for end in ends if end > at), 1, inside)


class VisibleKeys:
    """The keys visible to sequences with the same last position and `key_range`, and one cache if it is shared."""

    def __init__(self, call: DecodeCall, sequences: range, last: int) -> None:
        tokens = call.q.shape[2]
        self._call, self._sequences = call, sequences
        self._first_position = last - tokens + 1  # of the first token; below 0 it attends to nothing
        if call.key_range is None:
            window = call.window or last + 1
            self._firsts = [max(0, own - window + 1) for own in range(self._first_position, last + 1)]
            self._ends = list(range(self._first_position + 1, last + 2))
        else:
            firsts, ends = (x[sequences.start].tolist() for x in call.key_range)
            self._firsts, self._ends = [max(0, first) for first in firsts], [min(end, last + 1) for end in ends]
        self.keys = range(self._firsts[0], self._ends[-1] if call.mask is None else min(last + 1, call.mask.shape[3]))
        # The last row begins last. The first row ends first: before the new tokens, if a tree decides about them.
        first, stop = self._firsts[-1], self._ends[0] - (call.tree is not None)
        self.unmasked = range(first, stop) if stop > first and call.mask is None else range(0)
        self.owners = range(1) if call.shared else sequences
        self._rows_of_all = call.shared and len(sequences) > 1  # the rows of several sequences read one cache
        self.parts: list[KeyPart] | None = None  # the same for all layers of a step
        self._biases: dict[tuple[int, int], Tensor] | None = None if call.memo is None else {}

    @property
    def may_have_gaps(self) -> bool:
        """Whether some keys in the range may be visible to no row."""
        gap = any(first > end for end, first in zip(self._ends, self._firsts[1:], strict=False))  # of a `key_range`
        return gap or self._call.mask is not None or self._call.tree is not None

    def as_rows(self, x: Tensor) -> Tensor:
        """x [n, heads, T, X] as the rows of the owners' kv heads: [owners, Hkv, rows, X]. A single head stays one."""
        heads = self._call.kv_heads if x.shape[1] == self._call.q.shape[1] else 1
        if self._rows_of_all:
            x = x.unflatten(1, (heads, -1)).transpose(0, 1)  # [Hkv, n, group, T, X]
        return x.reshape(len(self.owners), heads, -1, x.shape[-1])

    def from_rows(self, x: Tensor) -> Tensor:
        """The inverse of `as_rows` for all heads: [n, Hq, T, X]."""
        n, (heads, tokens) = len(self._sequences), self._call.q.shape[1:3]
        if self._rows_of_all:
            x = x[0].unflatten(1, (n, -1)).transpose(0, 1)  # [n, Hkv, group * T, X]
        return x.reshape(n, heads, tokens, x.shape[-1])

    def bias(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """The additive mask of keys [first, end): [owners, Hkv or 1, rows, N], -inf where a key is not visible."""
        if self._biases is None:
            return self._bias(first, end, dtype)
        if (first, end) not in self._biases:
            self._biases[first, end] = self._bias(first, end, dtype)
        return self._biases[first, end]

    def _bias(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        call, tokens, n = self._call, self._call.q.shape[2], len(self._sequences)
        keys = torch.arange(first, end, device="cpu")
        visible = keys >= torch.tensor(self._firsts, device="cpu")[:, None]
        bias = torch.zeros((), dtype=dtype, device="cpu")
        if call.mask is not None:
            mask = self._of_sequences(call.mask)[..., first:end]
            if mask.dtype == torch.bool:
                visible = visible & mask
            else:
                bias = mask.to(dtype)
        elif call.tree is not None:
            column = keys - self._first_position  # the index of a key among the new tokens
            in_tree = self._of_sequences(call.tree)[:, :, column.clamp(0)]
            visible = (visible & ((column < 0) | in_tree))[:, None]
        else:
            visible = visible & (keys < torch.tensor(self._ends, device="cpu")[:, None])
        bias = bias.masked_fill(~visible, -torch.inf)
        bias = bias[(None,) * (4 - bias.ndim)]
        heads = call.group if bias.shape[1] == 1 else bias.shape[1]
        return self.as_rows(bias.expand(n, heads, tokens, -1))

    def _of_sequences(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 else x[self._sequences.start : self._sequences.stop]


def adjacent_blocks(table: Tensor, row: int, slots: range) -> int | None:
    """The first block of some slots of the table, if their blocks are adjacent in the pool, in order; else None."""
    blocks = table[row, slots.start : slots.stop].tolist()
    return blocks[0] if blocks == list(range(blocks[0], blocks[0] + len(blocks))) else None


class CacheReader:
    """Reads the keys and values of a call. Both have one width, the larger of the two, which the kernel requires."""

    def __init__(self, call: DecodeCall) -> None:
        self.dtype = accumulation_dtype(call.q.dtype)
        self._width = max(call.q.shape[3], call.value_dim)
        self._k, self._v = (_TensorReader(call, stored, self.dtype, self._width) for stored in (call.k, call.v))
        self._heads = call.kv_heads
        self._block_size, self.paged = call.block_size, call.paged
        self.in_place = self._k.in_place and self._v.in_place  # nothing is gathered, widened or padded
        self.padded = self._width > call.value_dim

    @property
    def chunk(self) -> int:
        """Keys that are gathered and widened at a time, a multiple of the block size. Independent of the batch."""
        key = self._heads * 2 * self._width * self.dtype.itemsize
        return -(-max(_MIN_CHUNK, _CHUNK_BYTES // key) // self._block_size) * self._block_size

    def read(self, owners: range, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hkv, end - first, width] of the owners' caches; valid until the next read."""
        keys = self._k.read(owners, first, end)
        return keys, keys if self._k.is_latent else self._v.read(owners, first, end)

    def query(self, q: Tensor, scale: float) -> Tensor:
        """q [B, Hq, T, D] for the product with `read` keys: scaled, padded, times the scale of the keys' heads.

        Contiguous: the kernel reads the last dimension of any strides as if its stride were 1.
        """
        q = (q.to(self.dtype) * scale).contiguous()
        if self._k.head_scale is not None:
            q = (q.unflatten(1, (self._heads, -1)) * self._k.head_scale.unsqueeze(-1)).flatten(1, 2)
        return q if q.shape[3] == self._width else F.pad(q, (0, self._width - q.shape[3]))

    def scaled_out(self, out: Tensor) -> Tensor:
        """Out [n, Hkv, R, Dv] over the keys and values that `read` returns, times the scale of the values' heads."""
        return out if self._v.head_scale is None else out * self._v.head_scale


class _TensorReader:
    """Reads the keys or the values. Buffers live as long as the call: allocating per chunk would fault pages in again.

    The scales of fp8 are not multiplied in: they are the same for all keys of a head (`head_scale`, [] or [Hkv, 1, 1]).
    Latents (fp8_ds_mla) are keys whose first features are the values.
    """

    def __init__(self, call: DecodeCall, stored: Stored, dtype: torch.dtype, width: int) -> None:
        self._stored, self._table, self._block_size = stored, call.table, call.block_size
        self._dtype, self._width = dtype, width
        self._buffers: dict[str, Tensor] = {}
        self._memo = {} if call.memo is None else call.memo
        values = values_of(stored)
        self.in_place = (
            call.table is None
            and values.dtype == dtype
            and values.shape[3] == width
            and (values.stride(3) == 1 or width == 1)
        )
        self.is_latent = isinstance(stored, Quantized) and stored.rope is not None
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
            wide = self._buffer("wide", (*raw.shape[:3], self._width), self._dtype)
        else:  # token-major, as in the pool
            wide = self._buffer("wide", (raw.shape[2], raw.shape[1], self._width), self._dtype).transpose(0, 1)[None]
        numbers = wide[..., : raw.shape[3]]
        numbers.copy_(raw)
        wide[..., raw.shape[3] :] = 0.0
        if isinstance(self._stored, Quantized) and self._stored.storage != "fp8":
            scales = self._raw("scales", self._stored.scales, owners, first, end)
            if self._stored.storage == "int8":
                numbers.mul_(scales.to(self._dtype).unsqueeze(-1))
            elif self._stored.rope is not None:
                numbers.unflatten(-1, (-1, LATENT_GROUP)).mul_(scales.to(self._dtype).unsqueeze(-1))
                rope = self._raw("rope", self._stored.rope, owners, first, end)
                wide[..., raw.shape[3] : raw.shape[3] + rope.shape[3]] = rope
            else:
                steps = torch.ldexp(torch.ones_like(scales, dtype=self._dtype), scales.int())
                numbers.unflatten(-1, (-1, BFP_GROUP)).mul_(steps.unsqueeze(-1))
        return wide

    def _raw(self, name: str, stored: Tensor, owners: range, first: int, end: int) -> Tensor:
        """The keys or values at these positions, [n, Hkv, end - first, ...]: a view of a cache, or gathered blocks."""
        if self._table is None:
            return stored[owners.start : owners.stop, :, first:end]
        assert len(owners) == 1, "rows of a block table are gathered one at a time"
        slot, stop = first // self._block_size, -(-end // self._block_size)
        begin = first - slot * self._block_size
        block = self._first_of_run(owners.start, slot, stop)
        if block is not None:
            run = stored[block : block + stop - slot].flatten(0, 1)
            return run[begin : begin + end - first].transpose(0, 1).unsqueeze(0)
        blocks = self._table[owners.start, slot:stop]
        gathered = self._buffer(name, (len(blocks), *stored.shape[1:]), stored.dtype)
        if stored.dtype.itemsize == 1:  # index_select does not take float8
            torch.index_select(stored.view(torch.int8), 0, blocks, out=gathered.view(torch.int8))
        else:
            torch.index_select(stored, 0, blocks, out=gathered)
        # Token-major, as in the pool: the kernel loses less by that than a transposed copy would cost.
        return gathered.flatten(0, 1)[begin : begin + end - first].transpose(0, 1).unsqueeze(0)

    def _first_of_run(self, row: int, slot: int, stop: int) -> int | None:
        """The first block of some slots, if they can be read without a copy."""
        assert self._table is not None
        key = "run", row, slot, stop
        if key not in self._memo:
            self._memo[key] = adjacent_blocks(self._table, row, range(slot, stop))
        found: int | None = self._memo[key]
        return found

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype, device="cpu")
        return self._buffers[name][:size].view(shape)
