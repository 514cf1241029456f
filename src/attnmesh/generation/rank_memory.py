"""The memory of a rank before anything is loaded: its KV cache in blocks and bytes, and `ShardedMemory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.generation.models import cache_storage, kv_bytes_per_token
from attnmesh.generation.prefill_shards import rank_capacity
from attnmesh.generation.windows import MARGIN, layer_windows, max_window_blocks
from attnmesh.integrations.sharded_model import WeightSizes
from attnmesh.integrations.weight_splits import heads_of
from attnmesh.plan.decode import DecodeSharding

BLOCK_SIZE = 32


def num_blocks(tokens: int) -> int:
    """The blocks of so many tokens of one sequence."""
    return -(-tokens // BLOCK_SIZE)


def cache_blocks(capacity: int, max_sequences: int) -> int:
    """The blocks of a rank's cache for `capacity` tokens: sequences do not fill their last blocks."""
    return num_blocks(capacity) + 4 * max_sequences


def layer_blocks(config: Any, capacity: int, max_sequences: int) -> int:
    """The blocks of a rank's cache in all layers together; those with a window have what they need."""
    blocks, windows = cache_blocks(capacity, max_sequences), layer_windows(config)
    kept = min(blocks, window_blocks(windows, max_sequences))
    return sum(blocks if window is None else kept for window in windows)


def window_blocks(windows: Sequence[int | None], max_sequences: int) -> int:
    """The most blocks of a rank in a layer with a window."""
    widest = max((window for window in windows if window is not None), default=0)
    return max_sequences * max_window_blocks(widest, MARGIN, BLOCK_SIZE)


def kv_cache_bytes(config: Any, storage: str, tokens: int, sequences: int) -> int:
    """Bytes of `tokens` tokens of at most so many sequences on a rank; layers with a window keep what they need."""
    windows = layer_windows(config)
    kept = min(tokens, window_blocks(windows, sequences) * BLOCK_SIZE)
    stored = sum(tokens if window is None else kept for window in windows)
    return stored * kv_bytes_per_token(config, storage) // len(windows)


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

    `storage`, `cache_tokens`, `max_sequences`, `layout` and `prefill_chunk` are the settings of the `Generator`.
    Activations are not counted.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        *,
        storage: str | None = None,
        cache_tokens: int,
        max_sequences: int = 1,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        prefill_chunk: int | None = None,
    ) -> None:
        self._weights, self._heads, self._dtype = WeightSizes(config), heads_of(config), dtype
        self._config = config
        stored_as = cache_storage(config, dtype, storage)
        self._bytes_per_head = kv_bytes_per_token(config, stored_as) // self._heads.kv // int(config.num_hidden_layers)
        self._cache_tokens, self._max_sequences = cache_tokens, max_sequences
        self._layout, self._prefill_chunk = layout, prefill_chunk or cache_tokens

    def of(self, sharding: DecodeSharding) -> RankMemory:
        """The memory under a sharding. Raises ValueError if the model cannot be divided this way."""
        sharding.check_heads(self._heads.q, self._heads.kv)
        capacity = rank_capacity(self._layout, sharding.cp, self._cache_tokens, self._prefill_chunk)
        blocks = layer_blocks(self._config, capacity, -(-self._max_sequences // sharding.kvdp))
        heads = max(len(sharding.kv_heads(rank, self._heads.kv)) for rank in range(sharding.ranks))
        return RankMemory(
            weights=self._weights.largest_part(sharding) * self._dtype.itemsize,
            kv_cache=blocks * BLOCK_SIZE * heads * self._bytes_per_head,
        )
