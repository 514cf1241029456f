"""`LayerCaches`: the KV cache of one rank, where layers with a sliding window store less than others.

Layers that attend to all tokens share one `BlockCache`, and layers with a window another one, with fewer blocks. A
sequence has the same length and the same indices in both. In the second one it has only the blocks that `KeptPositions`
name, which are at most so many for each of `max_sequences` sequences: that cache cannot run out of blocks, and only the
blocks of the first one are counted where room is planned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnmesh.core.masks import Mask, SlidingWindow
from attnmesh.kv_cache.block_pool import CacheStats
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.sequence import NewTokens
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.ops.storage import Stored


@dataclass(frozen=True, eq=False)
class StoredSequence:
    """A sequence in the caches of a rank."""

    parts: tuple[CacheSequence, ...]  # one in each cache

    @property
    def length(self) -> int:
        """The number of tokens that belong to this rank."""
        return self.parts[0].length


@dataclass(frozen=True)
class Appended:
    """New tokens of some sequences: those of each cache, and their `slots` [n, T]."""

    new: tuple[NewTokens, ...]

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """The slots in each cache."""
        return tuple(each.slots for each in self.new)


class LayerCaches:
    """The caches of all layers. `windows` are those of the layers, or None where a layer attends to all tokens.

    Layers with a window have a cache of their own if `window_blocks`, what their sequences need at most, is less than
    `num_blocks`. The other arguments are those of `BlockCache`.
    """

    def __init__(
        self, windows: Sequence[int | None], *, num_blocks: int, window_blocks: int, kv_heads: int, head_dim: int,
        value_dim: int, latent: bool, storage: str, **sizes: Any,
    ) -> None:  # fmt: skip
        self.value_dim, self._storage = value_dim, storage
        widths = [window for window in windows if window is not None]
        self.window = max(widths) if widths and window_blocks < num_blocks else None
        """What layers with a cache of their own keep; None if there are none."""
        self._which = [0 if self.window is None or window is None else 1 for window in windows]
        self._index = [self._which[:layer].count(which) for layer, which in enumerate(self._which)]
        of_heads: dict[str, Any] = {
            "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, "latent": latent, "storage": storage,
        }  # fmt: skip
        full, windowed = self._which.count(0), self._which.count(1)
        # If all layers have a window, the first cache stores next to nothing: it counts blocks.
        first: dict[str, Any] = of_heads if full else {"kv_heads": 1, "head_dim": 1, "storage": "fp16"}
        self.caches = [BlockCache(num_blocks=num_blocks, layers=full or 1, **first, **sizes)]
        if windowed:
            self.caches.append(BlockCache(num_blocks=window_blocks, layers=windowed, **of_heads, **sizes))

    @property
    def num_windowed(self) -> int:
        """The number of layers that keep a window only."""
        return self._which.count(1)

    @property
    def stored_bytes(self) -> int:
        """The memory of keys and values, with their scales."""
        return sum(x.nbytes for cache in self.caches for x in cache.stored_tensors)

    def which(self, layer: int) -> int:
        """The number of a layer's cache."""
        return self._which[layer]

    def keys(self, layer: int) -> Stored:
        """The pool of a layer's keys."""
        return self.caches[self._which[layer]].keys(self._index[layer])

    def values(self, layer: int) -> Stored:
        """The pool of a layer's values; that of its keys where these are latents in fp8_ds_mla."""
        if self._storage == "fp8_ds_mla":
            return self.keys(layer)
        return self.caches[self._which[layer]].values(self._index[layer])

    def check_mask(self, layer: int, mask: Mask) -> None:
        """Raise ValueError if a layer that keeps a window only attends to more."""
        if self._which[layer] and not (isinstance(mask, SlidingWindow) and mask.left < (self.window or 0)):
            raise ValueError(
                f"mask of layer {layer} must be a sliding window of at most {self.window} tokens, as the model's "
                f"configuration has it, got {mask!r}"
            )

    def stats(self) -> CacheStats:
        """The blocks of the cache that decides whether there is room."""
        return self.caches[0].stats()

    def allocate(self) -> StoredSequence:
        """A sequence without tokens."""
        return StoredSequence(tuple(cache.allocate(0) for cache in self.caches))

    def fork(self, sequence: StoredSequence) -> StoredSequence:
        """A second sequence with the same blocks."""
        return StoredSequence(tuple(cache.fork(part) for cache, part in self._parts(sequence)))

    def append(self, sequences: Sequence[StoredSequence], count: int, kept: Collection[int] | None = None) -> Appended:
        """Slots for more tokens of each sequence. Layers with a window store them in the blocks `kept` only."""
        return Appended(
            tuple(
                cache.append([sequence.parts[i] for sequence in sequences], count, kept if i else None)
                for i, cache in enumerate(self.caches)
            )
        )

    def mark_written(self, appended: Appended) -> None:
        """Record that all layers of new tokens were written."""
        for cache, new in zip(self.caches, appended.new, strict=True):
            cache.mark_written(new)

    def keep(self, sequence: StoredSequence, kept: Collection[int]) -> None:
        """Free the other blocks of layers with a window."""
        for cache, part in self._parts(sequence)[1:]:
            cache.keep(part, kept)

    def truncate(self, sequence: StoredSequence, length: int) -> None:
        """Keep the first `length` tokens of this rank."""
        for cache, part in self._parts(sequence):
            cache.truncate(part, length)

    def free(self, sequence: StoredSequence) -> None:
        """End a sequence."""
        for cache, part in self._parts(sequence):
            cache.free(part)

    def clear(self) -> None:
        """End all sequences."""
        for cache in self.caches:
            cache.clear()

    def _parts(self, sequence: StoredSequence) -> list[tuple[BlockCache, CacheSequence]]:
        return list(zip(self.caches, sequence.parts, strict=True))
