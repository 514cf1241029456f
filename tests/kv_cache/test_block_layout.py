"""`BlockLayout` against counting positions one by one."""

from itertools import product

import pytest

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.block_manager import BlockLayout

SHARES = [(*share, (1, 3, 4)[at % 3]) for at, share in enumerate(product((1, 2, 3, 4), (1, 2, 3, 4, 8)))]
MOST = 110


def by_hand(ranks, run, block_size):
    """The (rank, index) of every position, dealt out a run at a time."""
    dealt, counts = [], [0] * ranks
    for position in range(MOST):
        rank = position // run % ranks
        dealt.append((rank, counts[rank]))
        counts[rank] += 1
    return [(rank, index // block_size, index % block_size) for rank, index in dealt]


def full_on_every_rank(places, ranks, block_size):
    """How many blocks, from the first on, these places fill on every rank."""
    count = {}
    for rank, block, _ in places:
        count[rank, block] = count.get((rank, block), 0) + 1
    full = 0
    while all(count.get((rank, full)) == block_size for rank in range(ranks)):
        full += 1
    return full


@pytest.mark.parametrize(("ranks", "run", "block_size"), SHARES)
def test_blocks_by_counting(ranks, run, block_size):
    places, layout = by_hand(ranks, run, block_size), BlockLayout(InterleavedShard(ranks, 0, run), block_size)
    full = [full_on_every_rank(places[:n], ranks, block_size) for n in range(MOST + 1)]
    for length in range(MOST + 1):
        assert layout.num_blocks(length) == len({block for _, block, _ in places[:length]})
        assert layout.num_full_blocks(length) == full[length]
    for blocks in range(full[MOST] + 1):
        assert full[layout.num_tokens(blocks)] >= blocks
        assert blocks == 0 or full[layout.num_tokens(blocks) - 1] < blocks


@pytest.mark.parametrize(("ranks", "run", "block_size"), SHARES)
def test_resumable_blocks_have_no_later_position(ranks, run, block_size):
    places, layout = by_hand(ranks, run, block_size), BlockLayout(InterleavedShard(ranks, 0, run), block_size)
    level = 0
    for blocks in range(layout.num_full_blocks(MOST - 2 * ranks * run) + 1):
        filled = layout.num_tokens(blocks)
        before = {block for _, block, _ in places[:filled]}
        after = {block for _, block, _ in places[filled:]}
        if not before & after:
            level = blocks
            assert before == set(range(blocks))
            assert filled == ranks * blocks * block_size == layout.shard.position(blocks * block_size, 0)
        assert layout.num_resumable(blocks) == level
    assert layout.num_resumable(0) == 0


@pytest.mark.parametrize(("ranks", "run", "block_size"), SHARES)
def test_touched_and_slots_position_by_position(ranks, run, block_size):
    places = by_hand(ranks, run, block_size)
    names = [7 * block % 113 for block in range(MOST)]  # blocks of a sequence are anywhere in the pool
    layouts = [BlockLayout(InterleavedShard(ranks, rank, run), block_size) for rank in range(ranks)]
    for begin in range(0, 60, 7):
        for count in (1, 2, 3, 5, 8, 13, 24, 31, 32, 33, 50):
            new = places[begin : begin + count]
            assert list(layouts[0].touched(begin, begin + count)) == sorted({block for _, block, _ in new})
            for rank, layout in enumerate(layouts):
                wanted = [names[block] * block_size + at if owner == rank else -1 for owner, block, at in new]
                assert layout.slots(names, begin, begin + count) == wanted


def test_a_pool_of_one_rank_is_dealt_in_one_run():
    assert BlockLayout(InterleavedShard(interleave=3), 4).slots([5, 2], 2, 7) == [22, 23, 8, 9, 10]
    assert [BlockLayout(InterleavedShard(interleave=3), 4).num_resumable(blocks) for blocks in range(4)] == [0, 1, 2, 3]
