"""Rows on their way to another rank's memory, row by row against brute force."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Striped, Zigzag
from attnmesh.plan.shards import Piece, pieces


@st.composite
def some_spans(draw, most_step: int = 4) -> ranges.Ranges:
    """Ascending arithmetic runs; without a gap between two of them at times."""
    made, at = [], draw(st.integers(0, 4))
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=5)):
        step = draw(st.integers(1, most_step))
        run = range(at + gap, at + gap + (count - 1) * step + 1, step)
        made.append(run)
        at = run[-1] + 1
    return tuple(made)


def listed(some: ranges.Ranges) -> list[int]:
    return [position for run in some for position in run]


def moves(found: tuple[Piece, ...]) -> list[tuple[int, int]]:
    """(row of the shard, row of the target) of everything that moves, in the order of the message."""
    return [move for piece in found for move in zip(piece.rows, piece.to, strict=True)]


def expected(held: ranges.Ranges, wanted: ranges.Ranges) -> list[tuple[int, int]]:
    there = {position: row for row, position in enumerate(listed(wanted))}
    return [(row, there[position]) for row, position in enumerate(listed(held)) if position in there]


@settings(max_examples=100, deadline=None)
@given(some_spans(), some_spans(most_step=1))
def test_every_wanted_row_moves_once_to_where_its_position_belongs(held, wanted):
    found = pieces(held, wanted)
    assert sorted(moves(found)) == expected(held, wanted)
    for piece in found:
        assert piece.rows.step == 1  # a slice of the shard
        assert piece.rows
        assert piece.in_place == (list(piece.to) == list(range(piece.to.start, piece.to.start + len(piece.to))))


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Zigzag(2), Striped()], ids=str)
def test_the_shards_of_a_layout_together_are_the_sequence(layout):
    for length in (0, 1, 5, 24, 29):
        for world in (1, 2, 3, 4, 7):
            arrived = {}
            for rank in range(world):
                held = layout.ranges(length, world, rank)
                for row, to in moves(pieces(held, (range(length),))):
                    assert to not in arrived
                    arrived[to] = listed(held)[row]
            assert arrived == {position: position for position in range(length)}


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Zigzag(2)], ids=str)
def test_pieces_without_a_step_arrive_in_place_a_message_a_run(layout):
    held = layout.ranges(29, 3, 1)
    found = pieces(held, (range(29),))
    assert len(found) == len(held)
    assert all(piece.in_place for piece in found)


def test_a_striped_shard_arrives_as_one_message_of_every_other_row():
    assert pieces((range(1, 12, 3),), (range(12),)) == (Piece(range(4), range(1, 11, 3)),)
    assert pieces((range(1, 12, 3),), (range(2, 6),)) == (Piece(range(1, 2), range(2, 3)),)  # a lone row is in place
