"""`CacheTokens`: reads and writes the stored tokens of a rank's cache by sequence and position, bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.plan.reshard import Piece

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Slots = tuple[Tensor, Tensor]
"""The blocks of tokens, and their offsets in these blocks."""


class Reader(Protocol):
    """What tokens are read from: a cache, or a prefill."""

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, in their order: [layers, tokens, heads, ...] of each stored tensor, contiguous."""


class CacheTokens:
    """The tokens of one rank's `ShardedCache`: what is stored per token, as integers, so that no bit can change."""

    def __init__(self, cache: ShardedCache) -> None:
        assert isinstance(cache.kv_heads, int)  # as check_movable has seen
        self.heads = cache.sharding.kv_heads(cache.rank, cache.kv_heads)
        self.tensors = [as_integers(x) for x in cache.local.stored_tensors]
        """[layers, num_blocks, block_size, own kv heads, ...]: keys and values, each followed by its scales."""
        self._shard, self._block_size = cache.local.layout.shard, cache.local.layout.block_size
        self._sequences = cache.sequences

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return self.tensors[0].device

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, from the rows of their content."""
        return self.read_slots(
            self.slots((piece.content, ranges.as_tensor(piece.positions)) for piece in pieces), heads
        )

    def write(self, pieces: Sequence[Piece], heads: range, tokens: Sequence[Tensor]) -> None:
        """Store tokens as `read` returned them, in the blocks of the pieces' own rows."""
        slots = self.slots((piece.row, ranges.as_tensor(piece.positions)) for piece in pieces)
        self.write_slots(slots, heads, tokens)

    def slots(self, positions: Iterable[tuple[int, Tensor]]) -> Slots:
        """The slots of positions of rows; all of them are stored on this rank."""
        blocks, offsets = [], []
        for row, of_row in positions:
            index = self._shard.index(of_row)
            of_sequence = torch.tensor(self._sequences[row].blocks, dtype=torch.int64, device="cpu")
            blocks.append(of_sequence[index // self._block_size])
            offsets.append(index % self._block_size)
        return torch.cat(blocks).to(self.device), torch.cat(offsets).to(self.device)

    def read_slots(self, slots: Slots, heads: range) -> list[Tensor]:
        """The tokens in slots, [layers, tokens, heads, ...] of each stored tensor, contiguous."""
        return [self._of(x, heads)[:, slots[0], slots[1]].contiguous() for x in self.tensors]

    def write_slots(self, slots: Slots, heads: range, tokens: Sequence[Tensor]) -> None:
        """Store tokens [layers, tokens, heads, ...] in slots."""
        for x, new in zip(self.tensors, tokens, strict=True):
            self._of(x, heads)[:, slots[0], slots[1]] = new

    def buffers(self, comm: Comm, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """Buffers to receive tokens in, shaped as `read` returns them."""
        tokens = sum(ranges.size(piece.positions) for piece in pieces)
        return [
            comm.buffer((x.shape[0], tokens, len(heads), *x.shape[4:]), dtype=x.dtype, device=x.device)
            for x in self.tensors
        ]

    def _of(self, x: Tensor, heads: range) -> Tensor:
        first = heads.start - self.heads.start
        return x[:, :, :, first : first + len(heads)]


def as_integers(x: Tensor) -> Tensor:
    """A view of a tensor as integers of the same width."""
    return x.view(_INTEGERS[x.element_size()])
