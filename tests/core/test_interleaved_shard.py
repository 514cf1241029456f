"""Positions dealt out in turn, held against dealing them one by one."""

import pytest
import torch

from attnmesh.core.ranges import InterleavedShard

LONGEST = 100


def dealt(ranks: int, run: int, length: int) -> list[list[int]]:
    """Who holds what, by a dealer who walks around the table."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for position in range(length):
        turn = sum(1 for p in range(1, position + 1) if p % run == 0)  # how often the turn has passed on
        hands[turn % ranks].append(position)
    return hands


@pytest.mark.parametrize(("ranks", "run"), [(1, 1), (2, 2), (4, 4), (5, 16), (7, 3), (8, 2)])
def test_every_position_has_one_owner_who_holds_it_in_order(ranks, run):
    share = InterleavedShard(ranks, 0, run)
    hands = dealt(ranks, run, LONGEST)
    for rank, hand in enumerate(hands):
        assert [p for p in range(LONGEST) if share.owner(p) == rank] == hand
        assert [share.index(p) for p in hand] == list(range(len(hand)))  # dense, and ascending with the position
        assert [share.position(i, rank) for i in range(len(hand))] == hand
        assert [InterleavedShard(ranks, rank, run).position(i) for i in range(len(hand))] == hand


@pytest.mark.parametrize(("ranks", "run"), [(1, 1), (2, 2), (4, 4), (5, 16), (7, 3), (8, 2)])
def test_length_counts(ranks, run):
    hands = dealt(ranks, run, LONGEST)
    for length in range(LONGEST + 1):
        held = [sum(p < length for p in hand) for hand in hands]
        assert [InterleavedShard(ranks, 0, run).length(length, rank) for rank in range(ranks)] == held
        assert [InterleavedShard(ranks, rank, run).length(length) for rank in range(ranks)] == held
        assert held[0] == max(held)
        assert max(held) - min(held) <= run


@pytest.mark.parametrize(("ranks", "run"), [(1, 1), (2, 2), (4, 4), (5, 16), (7, 3), (8, 2)])
def test_tensors_give_what_integers_give(ranks, run):
    numbers = list(range(LONGEST + 1))
    for dtype in (torch.int32, torch.int64):
        given = torch.tensor(numbers, dtype=dtype)
        for rank in range(ranks):
            share = InterleavedShard(ranks, rank, run)
            for function in (share.owner, share.index, share.length, share.position):
                answer = function(given)
                assert answer.dtype == dtype
                assert answer.tolist() == [function(n) for n in numbers]
            assert InterleavedShard(ranks, 0, run).length(given, rank).tolist() == [share.length(n) for n in numbers]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranks": 0}, "ranks must be a positive integer, got 0"),
        ({"ranks": True}, "ranks must be a positive integer, got True"),
        ({"ranks": 2, "interleave": 1.5}, "interleave must be a positive integer, got 1.5"),
        ({"ranks": 2, "rank": 2}, "rank must be 0 to 1, got 2"),
        ({"ranks": 2, "rank": -1}, "rank must be 0 to 1, got -1"),
        ({"ranks": 2, "rank": False}, "rank must be 0 to 1, got False"),
    ],
)
def test_invalid_arguments_raise(arguments, said):
    with pytest.raises(ValueError, match=said):
        InterleavedShard(**arguments)


def test_invalid_rank_raises():
    for function in (InterleavedShard(3).length, InterleavedShard(3).position):
        with pytest.raises(ValueError, match="rank must be 0 to 2, got 3"):
            function(10, 3)
