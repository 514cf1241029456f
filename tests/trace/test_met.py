"""A message moves once both its ends are posted."""

from attnmesh.trace.overlap import met
from attnmesh.trace.timeline import Span


def end(rank: int, track: str, peer: int, number: int, begin: float, stop: float) -> Span:
    return Span(rank, track, "x", begin, stop, {"bytes": 1, "peer": peer, "number": number})


def test_both_ends_begin_when_the_later_was_posted():
    sent, got = met([end(0, "send", 1, 0, 1.0, 5.0), end(1, "receive", 0, 0, 3.0, 6.0)])
    assert (sent.begin, sent.end, sent.facts["early_ms"]) == (3.0, 5.0, 2000.0)
    assert (got.begin, got.end, got.facts["early_ms"]) == (3.0, 6.0, 0.0)


def test_numbers_and_directions_tell_messages_apart():
    ranges = [
        end(0, "send", 1, 0, 1.0, 5.0),
        end(0, "send", 1, 1, 1.0, 9.0),
        end(1, "receive", 0, 1, 7.0, 9.0),
        end(1, "receive", 0, 0, 2.0, 6.0),
        end(1, "send", 0, 0, 4.0, 8.0),
        end(0, "receive", 1, 0, 1.0, 8.0),
    ]
    assert [span.begin for span in met(ranges)] == [2.0, 7.0, 7.0, 2.0, 4.0, 4.0]


def test_an_end_is_never_over_before_it_begins():
    early, late = met([end(0, "send", 1, 0, 1.0, 2.0), end(1, "receive", 0, 0, 3.0, 4.0)])
    assert (early.begin, early.end) == (2.0, 2.0)
    assert (late.begin, late.end) == (3.0, 4.0)


def test_other_spans_and_lonely_ends_stay():
    computed, lonely = Span(0, "compute", "attention", 1.0, 2.0), end(0, "send", 1, 0, 1.0, 5.0)
    found = met([computed, lonely])
    assert found[0] == computed
    assert (found[1].begin, found[1].end) == (1.0, 5.0)
