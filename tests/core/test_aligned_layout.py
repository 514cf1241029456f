"""Layouts whose shards begin at multiples of a size."""

import math
from itertools import pairwise

import pytest

from attnmesh.core.layouts import Aligned, Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal

LAYOUTS = [Contiguous(), Zigzag(), Zigzag(2), Striped(), Balanced(Causal()), Joint((9, Zigzag()), (14, Contiguous()))]
SIZES = (1, 2, 5, 16, 100)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_shards_are_a_partition_into_whole_blocks(layout: Layout, size: int):
    for length in (23,) if isinstance(layout, Joint) else (0, 1, 16, 23, 80):
        for world in range(1, 6):
            shards = [Aligned(layout, size).ranges(length, world, rank) for rank in range(world)]
            assert sorted(p for shard in shards for run in shard for p in run) == list(range(length))
            for run in (run for shard in shards for run in shard):
                assert run.start % size == 0
                assert run.stop % size == 0 or run.stop == length
            assert all(a.stop < b.start for shard in shards for a, b in pairwise(shard))


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_every_rank_has_a_block_if_there_are_as_many(layout: Layout):
    for world in range(1, 6):
        length = 4 * (world if layout != Zigzag(2) else 2 * world) - 1
        assert all(Aligned(layout, 4).ranges(length, world, rank) for rank in range(world))
        assert math.ceil(length / 4) >= world


def test_what_cannot_be_aligned_is_refused():
    with pytest.raises(ValueError, match=r"Aligned\.size must be"):
        Aligned(Zigzag(), 0)
    with pytest.raises(ValueError, match=r"Aligned\.layout must be a layout"):
        Aligned("zigzag", 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Aligned\.layout must have shards of consecutive positions"):
        Aligned(Joint((8, Striped()), (8, Zigzag())), 4).ranges(16, 2, 0)
