"""The positions that each rank stores, against plain lists, over prefill layouts, decode steps and truncation."""

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.parallel.decode.positions import LocalPositions, SequenceShards, balance, interleave, key_range
from helpers.models import LAYOUTS


def moved(runs, by):
    return tuple(range(run.start + by, run.stop + by, run.step) for run in runs)


@st.composite
def stories(draw):
    """A world size, and events of a sequence: a prefill by some layout, decode steps, or a truncation."""
    world = draw(st.integers(1, 5))
    events = st.one_of(
        st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("cut"), st.floats(0, 1)),
    )
    return world, draw(st.lists(events, max_size=12))


@given(stories())
def test_local_positions_match_a_list(story):
    world, events = story
    for rank in range(world):
        held, plain, length = LocalPositions(), [], 0
        for kind, how in events:
            if kind == "cut":
                length = int(how * length)
                before = held.ranges
                cut = held.truncated(length)
                assert held.ranges == before  # the original is unchanged: a fork may share it
                held, plain = cut, [p for p in plain if p < length]
            else:
                if kind == "step":
                    new = tuple(range(p, p + 1) for p in range(length, length + how) if p % world == rank)
                else:
                    new = moved(LAYOUTS[kind].ranges(how, world, rank), length)
                held.extend(new)
                plain += ranges.as_tensor(new).tolist()
                length += how
            assert ranges.as_tensor(held.ranges).tolist() == plain
            assert len(held) == len(plain)
            for position in (0, 1, length // 2, length - 1, length, length + 3):
                assert held.count_below(position) == sum(p < position for p in plain)


def test_decoded_tokens_are_joined_into_one_range():
    held = LocalPositions((range(4), range(12, 16)))
    for position in range(17, 4017, 4):
        held.extend((range(position, position + 1),))
    assert held.ranges == (range(4), range(12, 16), range(17, 4014, 4))
    alone = LocalPositions()
    for position in range(100):
        alone.extend((range(position, position + 1),))
    assert alone.ranges == (range(100),)


def test_empty():
    held = LocalPositions()
    assert (len(held), held.ranges, held.count_below(7), len(held.truncated(0))) == (0, (), 0, 0)
    held.extend((range(3, 3), range(5, 6)))
    assert held.ranges == (range(5, 6),)


@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 8), st.none() | st.integers(1, 30))
def test_key_range_counts_visible_keys(world, length, tokens, window):
    for rank in range(world):
        local = LocalPositions(tuple(range(p, p + 1) for p in range(length + tokens) if p % world == rank))
        stored = ranges.as_tensor(local.ranges).tolist()
        first, end = key_range([local], [range(length, length + tokens)], window).tolist()
        for i, position in enumerate(range(length, length + tokens)):
            visible = [p for p in stored if p <= position and (window is None or p > position - window)]
            assert stored[first[0][i] : end[0][i]] == visible


def positions_of(parts):
    return [ranges.as_tensor(part).tolist() for part in parts]


@given(st.integers(0, 50), st.integers(0, 30), st.integers(1, 6))
def test_interleave(begin, length, world):
    new = range(begin, begin + length)
    assert positions_of(interleave(new, world)) == [[p for p in new if p % world == rank] for rank in range(world)]


@given(st.integers(0, 50), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60))
def test_balance_gives_more_to_ranks_with_fewer(begin, counts, length):
    length += len(counts)
    new = range(begin, begin + length)
    parts = balance(new, counts)
    assert [p for part in positions_of(parts) for p in part] == list(new)
    assert all(len(part) == 1 and part[0] for part in parts)
    after = [count + ranges.size(part) for count, part in zip(counts, parts, strict=True)]
    # A rank that got more than one token has at most one more than any other.
    for had, has in zip(counts, after, strict=True):
        if has > had + 1:
            assert has <= min(after) + 1


def test_sequence_shards():
    shards = SequenceShards.empty(3, rank=1)
    assert (shards.counts, len(shards.local)) == ([0, 0, 0], 0)
    shards.extend(interleave(range(8), 3))
    cut = shards.truncated(4)
    assert (shards.counts, cut.counts) == ([3, 3, 2], [2, 1, 1])
    cut.extend(balance(range(4, 9), cut.counts))
    assert (cut.counts, shards.counts) == ([3, 3, 3], [3, 3, 2])
    assert cut.local.ranges == (range(1, 2), range(5, 7))
