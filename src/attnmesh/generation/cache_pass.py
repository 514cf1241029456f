"""A forward pass that keeps what it reads: what Transformers takes for a cache, and where new tokens go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.write import write_tokens


@dataclass(frozen=True)
class CachePass:
    """Keys and values of new tokens go to `slots` [B, T] of this rank's cache; -1 where another rank keeps them."""

    cache: BlockCache
    slots: Tensor

    is_compileable: ClassVar[bool] = False  # as Transformers asks

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep keys and values [B, Hkv, T, D]. Attention gets those of this pass, and knows where the others are."""
        write_tokens(self.cache.keys(layer), self.cache.values(layer), self.slots, key, value)
        return key, value

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        """Of a mask that nobody makes."""
        return query_length, 0

    def get_query_offset(self, layer: int = 0) -> int:
        """Of the same mask."""
        return 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Nothing that Transformers need count on: positions come with every pass."""
        return 0
