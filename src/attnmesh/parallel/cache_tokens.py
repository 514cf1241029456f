"""`CacheTokens`: reads and writes the stored tokens of a rank's cache by sequence and position, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.plan.reshard import Piece

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Reader(Protocol):
    """What tokens can be read from: a cache, a prefill, files."""

    device: torch.device

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, in their order: [layers, tokens, heads, ...] of each stored tensor, contiguous."""


class CacheTokens:
    """The tokens of one rank's `ShardedCache`: what is stored per token, as integers, so that no bit can change."""

    def __init__(self, cache: ShardedCache) -> None:
        local = cache.local
        self._tensors = [as_integers(x) for x in local.stored_tensors]
        self._heads = cache.sharding.kv_heads(cache.rank, cache.kv_heads)
        self._shard, self._block_size = local.layout.shard, local.layout.block_size
        self._sequences = cache.sequences
        self.device = cache.block_table.device

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, from the rows of their content."""
        blocks, offsets = self._slots([(piece.content, piece) for piece in pieces])
        return [self._of(x, heads)[:, blocks, offsets].contiguous() for x in self._tensors]

    def write(self, pieces: Sequence[Piece], heads: range, tokens: Sequence[Tensor]) -> None:
        """Store tokens as `read` returned them, in the blocks of the pieces' own rows."""
        blocks, offsets = self._slots([(piece.row, piece) for piece in pieces])
        for x, new in zip(self._tensors, tokens, strict=True):
            self._of(x, heads)[:, blocks, offsets] = new

    def buffers(self, comm: Comm, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """Buffers to receive tokens in, shaped as `read` returns them."""
        tokens = sum(ranges.size(piece.positions) for piece in pieces)
        return [
            comm.buffer((x.shape[0], tokens, len(heads), *x.shape[4:]), dtype=x.dtype, device=x.device)
            for x in self._tensors
        ]

    def _of(self, x: Tensor, heads: range) -> Tensor:
        first = heads.start - self._heads.start
        return x[:, :, :, first : first + len(heads)]

    def _slots(self, pieces: list[tuple[int, Piece]]) -> tuple[Tensor, Tensor]:
        """The block and the offset in it of every position."""
        blocks, offsets = [], []
        for row, piece in pieces:
            index = self._shard.index(ranges.as_tensor(piece.positions))
            of_sequence = torch.tensor(self._sequences[row].sequence.blocks, dtype=torch.int64, device="cpu")
            blocks.append(of_sequence[index // self._block_size])
            offsets.append(index % self._block_size)
        return torch.cat(blocks).to(self.device), torch.cat(offsets).to(self.device)


def as_integers(x: Tensor) -> Tensor:
    """A view of a tensor as integers of the same width."""
    return x.view(_INTEGERS[x.element_size()])
