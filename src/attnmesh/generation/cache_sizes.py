"""The blocks and bytes of a rank's KV cache, before it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnmesh.generation.models import kv_bytes_per_token
from attnmesh.generation.windows import MARGIN, layer_windows, max_window_blocks

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
