"""Matching both ends of messages, and the overlap summary against a count of time steps."""

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.trace.timeline import TRACKS, OverlapSummary, Span, match_messages, summarize_overlap

any_span = st.builds(
    lambda rank, track, begin, length: Span(rank, track, "x", begin, begin + length, {"bytes": 10}),
    st.integers(0, 2), st.sampled_from(TRACKS), st.integers(0, 20), st.integers(0, 10),
)  # fmt: skip


@given(st.lists(any_span, max_size=15))
def test_summary_equals_a_count_of_time_steps(found):
    def steps(rank: int, *tracks: str) -> set[int]:
        mine = [span for span in found if span.rank == rank and span.track in tracks]
        return {step for span in mine for step in range(int(span.begin), int(span.end))}

    expected = []
    for rank in sorted({span.rank for span in found}):
        computing, moving = steps(rank, "compute"), steps(rank, "send", "receive")
        sent = 10 * sum(span.rank == rank and span.track == "send" for span in found)
        waiting = len(steps(rank, "wait"))
        expected.append(OverlapSummary(rank, len(computing), len(moving), len(computing & moving), waiting, sent))
    assert summarize_overlap(found) == expected


def end(rank: int, track: str, peer: int, number: int, begin: float, stop: float) -> Span:
    return Span(rank, track, "x", begin, stop, {"bytes": 1, "peer": peer, "number": number})


def test_both_ends_begin_when_the_later_one_was_posted():
    sent, got = match_messages([end(0, "send", 1, 0, 1.0, 5.0), end(1, "receive", 0, 0, 3.0, 6.0)])
    assert (sent.begin, sent.end, sent.args["early_ms"]) == (3.0, 5.0, 2000.0)
    assert (got.begin, got.end, got.args["early_ms"]) == (3.0, 6.0, 0.0)


def test_messages_are_matched_by_number_and_direction():
    spans = [
        end(0, "send", 1, 0, 1.0, 5.0),
        end(0, "send", 1, 1, 1.0, 9.0),
        end(1, "receive", 0, 1, 7.0, 9.0),
        end(1, "receive", 0, 0, 2.0, 6.0),
        end(1, "send", 0, 0, 4.0, 8.0),
        end(0, "receive", 1, 0, 1.0, 8.0),
    ]
    assert [span.begin for span in match_messages(spans)] == [2.0, 7.0, 7.0, 2.0, 4.0, 4.0]


def test_begin_is_never_after_end():
    early, late = match_messages([end(0, "send", 1, 0, 1.0, 2.0), end(1, "receive", 0, 0, 3.0, 4.0)])
    assert (early.begin, early.end) == (2.0, 2.0)
    assert (late.begin, late.end) == (3.0, 4.0)


def test_other_spans_and_unmatched_ends_are_unchanged():
    computed, unmatched = Span(0, "compute", "attention", 1.0, 2.0), end(0, "send", 1, 0, 1.0, 5.0)
    found = match_messages([computed, unmatched])
    assert found[0] == computed
    assert (found[1].begin, found[1].end) == (1.0, 5.0)
