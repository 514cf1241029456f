"""Options in order, and what is said of each."""

import pytest

from attnmesh.planner.cost import RESERVED_MEMORY, Memory, Option, ranked
from attnmesh.utils.text import readable_seconds


def option(name: str, seconds: float, nbytes: float, **parts: float) -> Option:
    return Option(name, seconds, Memory(nbytes / 2, nbytes / 4, nbytes / 4), 0.0, "computing", parts)


def test_those_that_fit_come_first_and_the_fastest_of_each():
    options = [option("large", 1, 95), option("slow", 3, 10), option("fast", 2, 20), option("larger", 0.5, 200)]
    found = ranked(options, 100, {})
    assert [one.name for one in found.options] == ["fast", "slow", "larger", "large"]
    assert found.best is not None
    assert found.best.name == "fast"


def test_of_equally_fast_ones_the_leaner_comes_first():
    assert [one.name for one in ranked([option("a", 1, 20), option("b", 1, 10)], 100, {}).options] == ["b", "a"]


def test_a_part_of_the_memory_is_kept_back():
    assert option("just", 1, 100 * (1 - RESERVED_MEMORY)).fits(100)
    assert not option("over", 1, 100 * (1 - RESERVED_MEMORY) + 0.01).fits(100)


def test_why_says_what_a_way_loses_by():
    best = option("best", 2.0, 10, attention=1.0, exchanges=1.0)
    slow = option("slow", 3.0, 10, attention=0.5, exchanges=2.5)
    large = option("large", 1.0, 1000)
    found = ranked([slow, large, best], 100, {})
    assert found.why(best) == "fastest that fits"
    assert found.why(slow) == "50% slower: +1.5 s exchanges"
    slowest = option("slowest", 24.0, 10, attention=23.0, exchanges=1.0)
    assert found.why(slowest) == "12x slower: +22 s attention"
    assert found.why(large) == "does not fit in 90 B"
    assert found.why(option("equal", 2.009, 10, attention=2.009)) == "tie"
    assert found.why(option("near", 2.02, 10, attention=2.02)).startswith("1% slower")


def test_where_nothing_fits_nothing_is_best():
    found = ranked([option("large", 1, 1000)], 100, {})
    assert found.best is None
    assert found.why(found.options[0]) == "does not fit in 90 B"
    assert ranked([], 100, {"all": "too many"}).best is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (12.5e-3, "12.5 ms"),
        (1.0, "1 s"),
        (3e-7, "300 ns"),
        (2.55e-6, "2.55 us"),
        (0.0, "0 ns"),
        (0.9996, "1 s"),
        (999.6e-6, "1 ms"),
        (4321.0, "4,321 s"),
    ],
)
def test_seconds_are_readable(seconds, words):
    assert readable_seconds(seconds) == words
