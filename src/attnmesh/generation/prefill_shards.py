"""Which positions of a prompt each rank stores, chunk by chunk, and how many that are at most."""

from __future__ import annotations

from collections.abc import Sequence

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout
from attnmesh.core.ranges import Ranges
from attnmesh.parallel.decode.positions import balance, interleave

MIN_TOKENS_PER_RANK = 2  # with as many, any layout gives every rank some tokens of a chunk
_SPARE_TOKENS = 4


def min_prefill_chunk(world: int) -> int:
    """The fewest tokens that any layout can shard over `world` ranks."""
    return MIN_TOKENS_PER_RANK * world


def shard_chunk(layout: Layout, counts: Sequence[int], new: range) -> list[Ranges]:
    """The new positions that each rank stores, where the ranks store `counts` positions before them."""
    world = len(counts)
    if len(new) < min_prefill_chunk(world):
        return interleave(new, world)
    if new.start:  # every rank attends for all queries over its keys: balance the keys, whatever the layout
        return balance(new, counts)
    return [layout.ranges(len(new), world, rank) for rank in range(world)]


def prefilled(layout: Layout, counts: Sequence[int], new: range, chunk: int) -> Sequence[int]:
    """The tokens per rank, `counts` before, after the prefill of `new` positions in chunks."""
    for at in range(new.start, new.stop, chunk):
        parts = shard_chunk(layout, counts, range(at, min(new.stop, at + chunk)))
        counts = [count + ranges.size(part) for count, part in zip(counts, parts, strict=True)]
    return counts


def rank_capacity(layout: Layout, world: int, cache_tokens: int, prefill_chunk: int) -> int:
    """The most tokens that one of `world` ranks stores of sequences with `cache_tokens` tokens together."""
    # A shorter sequence may give a rank one or two tokens more than the longest does; decode adds at most one.
    return max(prefilled(layout, [0] * world, range(cache_tokens), prefill_chunk)) + _SPARE_TOKENS
