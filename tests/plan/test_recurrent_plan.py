"""Plans of recurrent layers: every segment once and in order, every head once, halos complete, bytes bounded."""

import math

import pytest

from attnmesh.core.layouts import Balanced, Contiguous, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal
from attnmesh.core.ranges import size
from attnmesh.plan.recurrent import (
    LATENCY_BYTES,
    SegmentSizes,
    divided_plan,
    gathered_plan,
    halo_plan,
    planned_segments,
    runs,
    scan_plan,
)

SIZES = SegmentSizes(4 * 128 * 128, 4 * 128 * 128)  # a dense transition of a head of 128, in float32
LAYOUTS = [Contiguous(), Zigzag(), Balanced(Causal())]
MIB = 2**20


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("length", "world", "heads"), [(101, 5, 7), (3, 8, 2), (1, 1, 1), (64, 4, 4)])
def test_segments_and_heads_are_partitions(layout, length, world, heads):
    plan = divided_plan(planned_segments(layout, length, world), world, heads, SIZES, 1, True)
    positions = [p for segment in plan.segments for p in segment.positions]
    assert positions == list(range(length))
    assert [h for part in plan.heads for h in part] == list(range(heads))
    for rank in range(world):
        shard = [p for number in plan.held(rank) for p in plan.segments[number].positions]
        assert shard == layout.positions(length, world, rank).tolist()


def test_adjacent_ranges_of_a_rank_are_one_segment():
    assert [segment.rank for segment in scan_plan(Zigzag(), 24, 3, 4, SIZES, 128, False).segments] == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("final", [False, True])
def test_halos_are_complete(layout, final):
    """Every rank gets each position before its ranges that exists, from the rank that holds it, and no other."""
    length, world, before = 23, 8, 3  # most ranges are shorter than a halo
    plan = halo_plan(layout, length, world, before, final)
    for rank in range(world):
        begins = [run.start for run in plan.held[rank]] + [length] * final
        expected = {p for begin in begins for p in range(max(0, begin - before), begin)}
        assert sorted(expected) == [p for run in plan.needed[rank] for p in run]
        assert sum(plan.rows_sent(source, rank) for source in range(world)) == len(expected)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
def test_bytes_per_rank_and_range_are_bounded(layout: Layout):
    """32 heads of 128: for each range at most (A, B) times ceil(log2 N), which is 4 MiB for dense transitions.

    For one number per head it is 2 MiB and these numbers.
    """
    heads, dim, length = 32, 128, 2**18
    for world in (2, 3, 4, 6, 8, 16, 64, 1024):
        for form, per_step in ((dim * dim, 4 * MIB), (1, 2 * MIB + 4 * heads)):
            plan = scan_plan(layout, length, world, heads, SegmentSizes(4 * form, 4 * dim * dim), dim, False)
            for rank in {*range(0, world, 1 + world // 64), world - 1}:
                count = len(plan.held(rank))
                for backward in (False, True):
                    sent = plan.bytes_sent(rank, backward=backward)
                    assert sent <= count * per_step * math.ceil(math.log2(world)), (world, rank, form, backward)


def test_a_segment_is_sent_once_for_any_number_of_ranks():
    """An all-gather would send it to every other rank."""
    for world in (2, 8, 32):
        plan = scan_plan(Contiguous(), 2**18, world, 32, SIZES, 128, False)
        most = max(plan.bytes_sent(rank) for rank in range(world))
        assert most <= 6 * MIB  # (A, B) and a state


@pytest.mark.parametrize(
    ("world", "heads", "gathered", "parts"),
    [
        (2, 32, True, 1),  # the same bytes in one round
        (8, 32, False, 1),
        (8, 1, True, 1),  # small states
        (256, 4, False, 8),
    ],
)
def test_the_fastest_plan(world, heads, gathered, parts):
    """Few ranks and small states are gathered; many ranks divide columns, too."""
    plan = scan_plan(Contiguous(), 2**18, world, heads, SIZES, 128, False)
    assert (plan.gathered, plan.parts) == (gathered, parts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_the_cost_is_that_of_the_rank_that_sends_most(layout, gathered):
    segments, sizes = planned_segments(layout, 101, 5), SegmentSizes(12, 8)
    plan = gathered_plan(segments, 5, 7, sizes, True) if gathered else divided_plan(segments, 5, 7, sizes, 2, True)
    most = [max(plan.bytes_sent(rank, backward=way) for rank in range(5)) for way in (False, True)]
    assert plan.cost == sum(most) + 2 * plan.rounds * LATENCY_BYTES


def test_layouts_without_ranges_are_refused():
    with pytest.raises(ValueError, match=r"layout must give ranks ranges of consecutive positions .*, got Striped\(\)"):
        runs(Striped(), 8, 2)
    assert sum(map(size, runs(Striped(), 2, 4))) == 2  # single positions are ranges
