"""Which positions a rank holds: against plain lists, over layouts, steps and cuts."""

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.parallel.decode.positions import Held
from helpers.models import LAYOUTS


def moved(runs, by):
    return tuple(range(run.start + by, run.stop + by, run.step) for run in runs)


@st.composite
def stories(draw):
    """A world, and what happens to a sequence: it is read on by a layout, stepped on, or cut off."""
    world = draw(st.integers(1, 5))
    events = st.one_of(
        st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("cut"), st.floats(0, 1)),
    )
    return world, draw(st.lists(events, max_size=12))


@given(stories())
def test_it_holds_what_a_list_would(story):
    world, events = story
    for rank in range(world):
        held, plain, length = Held(), [], 0
        for kind, how in events:
            if kind == "cut":
                length = int(how * length)
                before = held.runs
                cut = held.truncated(length)
                assert held.runs == before  # a cut makes another: somebody else may still hold all
                held, plain = cut, [p for p in plain if p < length]
            else:
                if kind == "step":
                    new = tuple(range(p, p + 1) for p in range(length, length + how) if p % world == rank)
                else:
                    new = moved(LAYOUTS[kind].ranges(how, world, rank), length)
                held.extend(new)
                plain += ranges.as_tensor(new).tolist()
                length += how
            assert ranges.as_tensor(held.runs).tolist() == plain
            assert len(held) == len(plain)
            for position in (0, 1, length // 2, length - 1, length, length + 3):
                assert held.below(position) == sum(p < position for p in plain)


def test_tokens_that_come_one_by_one_are_one_run():
    held = Held((range(4), range(12, 16)))
    for position in range(17, 4017, 4):
        held.extend((range(position, position + 1),))
    assert held.runs == (range(4), range(12, 16), range(17, 4014, 4))
    alone = Held()
    for position in range(100):
        alone.extend((range(position, position + 1),))
    assert alone.runs == (range(100),)


def test_nothing_is_held_at_first():
    assert (len(Held()), Held().runs, Held().below(7), len(Held().truncated(0))) == (0, (), 0, 0)
    held = Held()
    held.extend((range(3, 3), range(5, 6)))
    assert held.runs == (range(5, 6),)
