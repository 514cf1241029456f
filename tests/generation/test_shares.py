"""Who holds which positions: each somebody's, and as even as can be."""

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.parallel.decode.positions import Shares, evened, grown, in_turn


def positions_of(parts):
    return [ranges.as_tensor(part).tolist() for part in parts]


@given(st.integers(0, 50), st.integers(0, 30), st.integers(1, 6))
def test_in_turn_everyone_gets_its_number(begin, length, world):
    new = range(begin, begin + length)
    assert positions_of(in_turn(new, world)) == [[p for p in new if p % world == rank] for rank in range(world)]


@given(st.integers(0, 50), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60))
def test_those_with_fewer_get_more(begin, counts, length):
    length += len(counts)
    new = range(begin, begin + length)
    parts = evened(new, counts)
    assert [p for part in positions_of(parts) for p in part] == list(new)
    assert all(len(part) == 1 and part[0] for part in parts)
    after = grown(counts, parts)
    # Nobody who got more than one token has more than anybody else has, but for one token.
    for had, has in zip(counts, after, strict=True):
        if has > had + 1:
            assert has <= min(after) + 1


def test_books_of_all_ranks():
    shares = Shares.nothing(3, rank=1)
    assert (shares.counts, len(shares.own)) == ([0, 0, 0], 0)
    shares.extend(in_turn(range(8), 3))
    cut = shares.truncated(4)
    assert (shares.counts, cut.counts) == ([3, 3, 2], [2, 1, 1])
    cut.extend(evened(range(4, 9), cut.counts))
    assert (cut.counts, shares.counts) == ([3, 3, 3], [3, 3, 2])
    assert cut.own.runs == (range(1, 2), range(5, 7))
