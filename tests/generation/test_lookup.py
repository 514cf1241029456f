"""Drafts from the text itself, against a search through all of it."""

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.generation.sampling import Lookup


def searched(ids, most, longest=4):
    """What followed the last place, before the end, of the longest run that the text ends with."""
    for n in range(min(longest, len(ids)), 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                return ids[end : end + most]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=20), st.integers(1, 8)
)
def test_it_finds_what_a_search_does(ids, growths, most):
    lookup, length = Lookup(), min(len(ids), 5)
    while True:
        assert lookup.draft(ids[:length], most) == searched(ids[:length], most)
        if length == len(ids) or not growths:
            break
        length = min(len(ids), length + growths.pop())


def test_the_longest_match_wins_and_the_latest_of_its_places():
    assert Lookup().draft([1, 2, 3, 9, 2, 3, 8, 5, 3, 7, 1, 2, 3], 4) == [9, 2, 3, 8]
    assert Lookup().draft([5, 1, 6, 5, 2, 6, 5], 2) == [2, 6]
    assert Lookup().draft([4, 4, 4, 4, 4, 4], 3) == [4]  # the place before the end has but one token behind it
    assert Lookup().draft([1, 2, 3], 4) == []
    assert Lookup().draft([1], 4) == []


def test_a_draft_may_be_as_long_as_the_text_has_it():
    text = [*range(20), 0, 1]
    assert Lookup().draft(text, 3) == [2, 3, 4]
    assert Lookup().draft(text, 100) == [*range(2, 20), 0, 1]
