"""Heads divided among ranks: every number of heads and ranks, by brute force."""

from collections import Counter
from itertools import pairwise

import pytest

from attnmesh.plan.ulysses import head_share, replicated

COUNTS = [(q, kv) for q in range(1, 17) for kv in range(1, q + 1) if q % kv == 0]
WORLDS = range(1, 20)
CASES = [(q, kv, world) for q, kv in COUNTS for world in WORLDS]


def test_every_query_head_goes_to_one_rank_in_order_and_stretches_differ_by_one():
    for q, kv, world in CASES:
        shares = [head_share(q, kv, world, rank).q for rank in range(world)]
        assert [head for share in shares for head in share] == list(range(q))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_rank_gets_just_the_kv_heads_that_its_query_heads_read():
    for q, kv, world in CASES:
        for rank in range(world):
            share = head_share(q, kv, world, rank)
            assert list(share.kv) == sorted({head // (q // kv) for head in share.q}), (q, kv, world, rank)


def test_segments_hold_every_head_of_a_share_once_and_read_in_equal_groups():
    for q, kv, world in CASES:
        for rank in range(world):
            share = head_share(q, kv, world, rank)
            assert [head for segment in share.segments for head in segment.q] == list(range(len(share.q)))
            assert [head for segment in share.segments for head in segment.kv] == list(range(len(share.kv)))
            for segment in share.segments:
                group, rest = divmod(len(segment.q), len(segment.kv))
                assert not rest
                for at, head in enumerate(segment.q):
                    bytes_read = share.kv[segment.kv[at // group]]  # as a kernel reads it
                    assert bytes_read == share.q[head] // (q // kv), (q, kv, world, rank)


def test_segments_are_as_few_as_can_be():
    """A group cut at the start, whole ones, a group cut at the end; neighbours with equal groups are one call."""
    for q, kv, world in CASES:
        for rank in range(world):
            segments = head_share(q, kv, world, rank).segments
            assert len(segments) <= 3
            groups = [len(segment.q) // len(segment.kv) for segment in segments]
            assert all(a != b for a, b in pairwise(groups)), (q, kv, world, rank)


def test_a_kv_head_is_replicated_where_several_ranks_read_it():
    for q, kv, world in CASES:
        held = Counter(head for rank in range(world) for head in head_share(q, kv, world, rank).kv)
        assert set(held) == set(range(kv))
        assert replicated(q, kv, world) == (max(held.values()) > 1), (q, kv, world)


@pytest.mark.parametrize(("q", "kv", "world"), [(8, 8, 4), (8, 4, 4), (32, 8, 8), (6, 6, 3), (5, 5, 1)])
def test_where_the_ranks_divide_the_kv_heads_nothing_is_replicated_and_one_call_serves(q, kv, world):
    for rank in range(world):
        share = head_share(q, kv, world, rank)
        assert (len(share.q), len(share.kv), len(share.segments)) == (q // world, kv // world, 1)
    assert not replicated(q, kv, world)


def test_more_ranks_than_query_heads_leave_some_with_nothing():
    assert [len(head_share(3, 1, 5, rank).q) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert head_share(3, 1, 5, 4) == (range(3, 3), range(0), ())
