"""The memory of a rank before anything is loaded: its KV cache in blocks and bytes, and `ShardedMemory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmesh.core.ranges import InterleavedShard
from attnmesh.generation.models import cache_storage, kv_bytes_per_token, latent_widths, layer_windows
from attnmesh.kv_cache.block_manager import BlockLayout, max_window_blocks
from attnmesh.models.sharded import WeightSizes, heads_of
from attnmesh.plan.decode import DecodeSharding

BLOCK_SIZE = 32


@dataclass(frozen=True)
class CacheBlocks:
    """The blocks of a rank's cache: for `cache_tokens` tokens of at most `max_sequences` sequences over its CP ranks.

    Sequences do not fill their last blocks, and beams copy one. Layers with a window have the blocks that they need, if
    that is less; a pass computes at most `prefill_chunk` tokens of a sequence.
    """

    windows: tuple[int | None, ...]
    shard: InterleavedShard
    cache_tokens: int
    max_sequences: int
    prefill_chunk: int

    @property
    def full(self) -> int:
        """Of layers that attend to all tokens."""
        return BlockLayout(self.shard, BLOCK_SIZE).num_blocks(self.cache_tokens) + 2 * self.max_sequences

    @property
    def windowed(self) -> int:
        """Of layers with a window; 0 if these use the blocks of other layers."""
        widest = max((window for window in self.windows if window is not None), default=None)
        if widest is None:
            return 0
        layout = BlockLayout(self.shard, BLOCK_SIZE)
        needed = self.max_sequences * max_window_blocks(layout, widest, self.prefill_chunk)
        return needed if needed < self.full else 0

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The windows of layers that have blocks of their own."""
        return self.windows if self.windowed else (None,) * len(self.windows)

    @property
    def total(self) -> int:
        """Of all layers."""
        return sum(self.full if window is None else self.windowed for window in self.layer_windows)


def kv_cache_bytes(config: Any, storage: str, tokens: int, sequences: int) -> int:
    """Bytes of `tokens` tokens of at most so many sequences on a rank; layers with a window keep only its tokens."""
    blocks = CacheBlocks(layer_windows(config), InterleavedShard(), tokens, sequences, tokens)
    kept = min(tokens, blocks.windowed * BLOCK_SIZE)
    stored = sum(tokens if window is None else kept for window in blocks.layer_windows)
    return stored * kv_bytes_per_token(config, storage) // len(blocks.windows)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most."""

    weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.kv_cache


class ShardedMemory:
    """The memory per rank of a `Generator` with sharded weights, under any sharding.

    `storage`, `cache_tokens`, `max_sequences` and `prefill_chunk` are the settings of the `Generator`. Activations are
    not counted.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        *,
        storage: str | None = None,
        cache_tokens: int,
        max_sequences: int = 1,
        prefill_chunk: int | None = None,
    ) -> None:
        self._weights, self._heads, self._dtype = WeightSizes(config), heads_of(config), dtype
        self._config = config
        stored_as = cache_storage(latent_widths(config), dtype, storage)
        self._bytes_per_head = kv_bytes_per_token(config, stored_as) // self._heads.kv // len(layer_windows(config))
        self._cache_tokens, self._max_sequences = cache_tokens, max_sequences
        self._prefill_chunk = prefill_chunk or cache_tokens

    def of(self, sharding: DecodeSharding) -> RankMemory:
        """The memory under a sharding. Raises ValueError if the model cannot be divided this way."""
        sharding.check_heads(self._heads.q, self._heads.kv)
        blocks = CacheBlocks(
            layer_windows(self._config), sharding.position_shard(0), self._cache_tokens,
            -(-self._max_sequences // sharding.kvdp), self._prefill_chunk,
        )  # fmt: skip
        heads = max(len(sharding.kv_heads(rank, self._heads.kv)) for rank in range(sharding.ranks))
        return RankMemory(
            weights=self._weights.largest_part(sharding) * self._dtype.itemsize,
            kv_cache=blocks.total * BLOCK_SIZE * heads * self._bytes_per_head,
        )
