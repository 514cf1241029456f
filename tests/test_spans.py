"""Positions as spans: there and back, and index arithmetic against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import spans
from attnmesh.layout import Contiguous, Striped, Zigzag

plenty = settings(max_examples=100, deadline=None)

runs = st.builds(lambda gap, count, step: (gap, count, step), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))


@st.composite
def some_spans(draw) -> spans.Spans:
    """Ascending arithmetic runs with gaps between them."""
    made, at = [], draw(st.integers(-5, 5))
    for gap, count, step in draw(st.lists(runs, max_size=5)):
        run = range(at + gap, at + gap + count * step, step)
        made.append(run)
        at = run[-1]
    return tuple(made)


def listed(some: spans.Spans) -> list[int]:
    return [position for run in some for position in run]


@plenty
@given(some_spans())
def test_as_tensor_lists_the_positions(some):
    tensor = spans.as_tensor(some)
    assert tensor.dtype == torch.long
    assert tensor.tolist() == listed(some)
    assert spans.size(some) == len(listed(some))


@plenty
@given(st.sets(st.integers(-50, 50)))
def test_any_ascending_positions_survive_the_round_trip(positions):
    tensor = torch.tensor(sorted(positions), dtype=torch.long)
    found = spans.from_tensor(tensor)
    assert all(found)
    assert spans.as_tensor(found).tolist() == tensor.tolist()


@plenty
@given(some_spans())
def test_from_tensor_finds_no_more_than_twice_the_runs_there_are(some):
    # A lone position at a run's end may join the next run's first; it never takes more than one span each for that.
    assert len(spans.from_tensor(spans.as_tensor(some))) <= 2 * len(some)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_from_tensor_finds_the_very_spans_of_a_layout(layout):
    for length in (32, 33, 40, 64):
        for world in (1, 2, 3, 4):
            for rank in range(world):
                held = layout.spans(length, world, rank)
                assert spans.from_tensor(spans.as_tensor(held)) == held, (length, world, rank)


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
def test_from_tensor_finds_the_runs_a_reader_sees(positions, found):
    assert spans.from_tensor(torch.tensor(positions, dtype=torch.long)) == found


@pytest.mark.parametrize("positions", [[1, 0], [0, 0], [0, 1, 2, 2], [5, 6, 7, 0, 1], [0, 2, 1]])
def test_from_tensor_gives_none_for_positions_that_do_not_ascend(positions):
    assert spans.from_tensor(torch.tensor(positions)) is None


def test_from_tensor_gives_none_for_positions_too_irregular_to_plan_over():
    torch.manual_seed(1)
    scattered = torch.randint(1, 50, (10_000,)).cumsum(0)
    assert spans.from_tensor(scattered) is None


def test_a_thousand_runs_are_still_spans():
    some = tuple(range(10 * i, 10 * i + 4) for i in range(1000))
    assert spans.from_tensor(spans.as_tensor(some)) == some


@plenty
@given(some_spans(), st.integers(0, 40), st.integers(0, 40))
def test_narrowed_keeps_just_those_rows(some, start, count):
    kept = spans.narrowed(some, range(start, start + count))
    assert all(kept)
    assert listed(kept) == listed(some)[start : start + count]


def test_rows_between_is_what_brute_force_says():
    for start in (-3, 0, 2):
        for step in (1, 2, 3, 5):
            for count in range(5):
                span = range(start, start + count * step, step)
                for first in range(-6, 24):
                    for end in range(-6, 24):
                        rows = spans.rows_between(span, first, end)
                        truth = [i for i, position in enumerate(span) if first <= position < end]
                        assert list(rows) == truth, (span, first, end)
                        assert 0 <= rows.start <= rows.stop <= len(span)  # it can be used as a slice
