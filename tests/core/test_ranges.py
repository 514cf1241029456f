"""Positions as spans: there and back, and index arithmetic against brute force."""

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Striped, Zigzag

plenty = settings(max_examples=100, deadline=None)

runs = st.builds(lambda gap, count, step: (gap, count, step), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))


@st.composite
def some_ranges(draw) -> ranges.Ranges:
    """Ascending arithmetic runs with gaps between them."""
    made, at = [], draw(st.integers(-5, 5))
    for gap, count, step in draw(st.lists(runs, max_size=5)):
        run = range(at + gap, at + gap + count * step, step)
        made.append(run)
        at = run[-1]
    return tuple(made)


def listed(some: ranges.Ranges) -> list[int]:
    return [position for run in some for position in run]


@plenty
@given(some_ranges())
def test_as_tensor_lists_the_positions(some):
    tensor = ranges.as_tensor(some)
    assert tensor.dtype == torch.long
    assert tensor.tolist() == listed(some)
    assert ranges.size(some) == len(listed(some))


@plenty
@given(st.sets(st.integers(-50, 50)))
def test_any_ascending_positions_survive_the_round_trip(positions):
    tensor = torch.tensor(sorted(positions), dtype=torch.long)
    found = ranges.from_tensor(tensor)
    assert all(found)
    assert ranges.as_tensor(found).tolist() == tensor.tolist()


@plenty
@given(some_ranges())
def test_from_tensor_returns_at_most_twice_the_ranges(some):
    # A lone position at a run's end may join the next run's first; it never takes more than one span each for that.
    assert len(ranges.from_tensor(ranges.as_tensor(some))) <= 2 * len(some)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_from_tensor_returns_the_ranges_of_a_layout(layout):
    for length in (32, 33, 40, 64):
        for world in (1, 2, 3, 4):
            for rank in range(world):
                held = layout.ranges(length, world, rank)
                assert ranges.from_tensor(ranges.as_tensor(held)) == held, (length, world, rank)


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        ([], ()),
        ([7], (range(7, 8),)),
        ([3, 9], (range(3, 10, 6),)),
        ([0, 1, 2, 3], (range(4),)),
        ([0, 2, 4], (range(0, 5, 2),)),
        ([0, 1, 2, 10], (range(3), range(10, 11))),
        ([0, 1, 2, 10, 11, 12], (range(3), range(10, 13))),
        ([0, 1, 2, 10, 12, 14], (range(3), range(10, 15, 2))),
    ],
)
def test_from_tensor_returns_the_obvious_ranges(positions, found):
    assert ranges.from_tensor(torch.tensor(positions, dtype=torch.long)) == found


@pytest.mark.parametrize("positions", [[1, 0], [0, 0], [0, 1, 2, 2], [5, 6, 7, 0, 1], [0, 2, 1]])
def test_from_tensor_gives_none_for_positions_that_do_not_ascend(positions):
    assert ranges.from_tensor(torch.tensor(positions)) is None


def test_from_tensor_gives_none_for_positions_too_irregular_to_plan_over():
    torch.manual_seed(1)
    scattered = torch.randint(1, 50, (10_000,)).cumsum(0)
    assert ranges.from_tensor(scattered) is None


def test_a_thousand_ranges_are_accepted():
    some = tuple(range(10 * i, 10 * i + 4) for i in range(1000))
    assert ranges.from_tensor(ranges.as_tensor(some)) == some


@plenty
@given(some_ranges(), st.integers(0, 40), st.integers(0, 40))
def test_narrow_keeps_the_given_rows(some, start, count):
    kept = ranges.narrow(some, range(start, start + count))
    assert all(kept)
    assert listed(kept) == listed(some)[start : start + count]


def test_rows_between_matches_brute_force():
    for start in (-3, 0, 2):
        for step in (1, 2, 3, 5):
            for count in range(5):
                span = range(start, start + count * step, step)
                for first in range(-6, 24):
                    for end in range(-6, 24):
                        rows = ranges.rows_between(span, first, end)
                        truth = [i for i, position in enumerate(span) if first <= position < end]
                        assert list(rows) == truth, (span, first, end)
                        assert 0 <= rows.start <= rows.stop <= len(span)  # it can be used as a slice


# Several shards together.

PARTITIONS = [Contiguous(), Zigzag(), Zigzag(2), Striped()]


@st.composite
def some_shards(draw) -> list[ranges.Ranges]:
    """Positions dealt out to a few shards, each as the runs that a reader sees."""
    owners = draw(st.lists(st.integers(-1, 3), max_size=24))  # -1: nobody's
    held = [[p for p, owner in enumerate(owners) if owner == shard] for shard in range(4)]
    return [ranges.from_tensor(torch.tensor(positions, dtype=torch.long)) for positions in held]


def assert_united(found: ranges.Ranges, shards: list[ranges.Ranges]) -> None:
    assert listed(found) == sorted(position for shard in shards for position in listed(shard))
    assert all(run.step == 1 for run in found if len(run) > 1)


@plenty
@given(some_shards())
def test_a_union_holds_every_position_once_in_order_or_there_is_none(shards):
    found = ranges.union(shards)
    if found is None:
        assert any(run.step > 1 and len(run) > 1 for shard in shards for run in shard)
    else:
        assert_united(found, shards)


@pytest.mark.parametrize("layout", PARTITIONS, ids=str)
def test_the_union_of_all_shards_is_the_sequence(layout):
    for length in (1, 2, 5, 32, 33):
        for world in (1, 2, 3, 4, 7):
            assert ranges.union(layout.ranges(length, world, rank) for rank in range(world)) == (range(length),)
    assert ranges.union(layout.ranges(0, 3, rank) for rank in range(3)) == ()


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Zigzag(2)], ids=str)
def test_adjacent_shards_have_a_minimal_union(layout):
    for length in (1, 5, 32, 33):
        shards = [layout.ranges(length, 6, rank) for rank in range(6)]
        for first in range(6):
            for last in range(first, 6):
                found = ranges.union(shards[first : last + 1])
                assert_united(found, shards[first : last + 1])
                assert all(a.stop < b.start for a, b in itertools.pairwise(found))


def test_shards_that_interleave_have_no_union():
    assert ranges.union([(range(0, 12, 4),), (range(1, 12, 4),)]) is None
    assert ranges.union([(range(0, 12, 2),), (range(1, 12, 2),)]) == (range(12),)


def test_a_lone_position_with_a_step_is_just_that_position():
    """`range(1, 3, 4)` holds only 1, wherever it says that it stops."""
    shards = [(range(0, 3, 4), range(3, 6, 4)), (range(1, 3, 4), range(4, 6, 4))]
    assert listed(ranges.union(shards)) == [0, 1, 3, 4]


# Ranges as sets of rows.


some_rows = st.sets(st.integers(0, 30)).map(lambda kept: ranges.merged(range(row, row + 1) for row in kept))


@given(some_rows, some_rows, st.integers(1, 6))
def test_ranges_are_sets_of_rows(a, b, count):
    for found, expected in (
        (ranges.intersection(a, b), set(listed(a)) & set(listed(b))),
        (ranges.difference(a, b), set(listed(a)) - set(listed(b))),
    ):
        assert listed(found) == sorted(expected)
        assert found == ranges.merged(found)
    few = ranges.at_most(count, a)
    assert few == ranges.merged(few)
    assert set(listed(a)) <= set(listed(few))
    assert len(few) == min(count, len(a))
    gaps = sorted((y.start - x.stop for x, y in itertools.pairwise(a)), reverse=True)
    assert len(listed(few)) - len(listed(a)) == sum(gaps[count - 1 :])


@given(some_rows)
def test_selected_rows_are_those_of_the_positions(kept):
    held = range(5, 29, 3), range(40, 63)
    positions = listed(held)
    assert listed(ranges.select(held, kept)) == [positions[row] for row in listed(kept)]
    assert listed(ranges.rows_of(held)) == list(range(len(positions)))


def test_common_positions_of_ranges_with_any_steps():
    random = Random(3)
    for _ in range(2000):
        a, b = (
            tuple(range(start, start + random.randint(1, 40), random.randint(1, 9)) for start in [random.randrange(30)])
            for _ in range(2)
        )
        assert sorted(p for run in ranges.common(a, b) for p in run) == sorted(set(*a) & set(*b)), (a, b)


def test_interleaved_positions_as_few_ranges():
    for ranks, interleave, length, begin in itertools.product((1, 2, 3), (1, 2, 5), (0, 1, 7, 24, 61), (0, 1, 6, 30)):
        for rank in range(ranks):
            shard = ranges.InterleavedShard(ranks, rank, interleave)
            runs = shard.ranges(length, begin)
            own = [p for p in range(begin, length) if shard.owner(p) == rank]
            assert sorted(p for run in runs for p in run) == own
            assert all(runs)
            assert len(runs) <= max(1, min(interleave, -(-length // (ranks * interleave)) + 1))
