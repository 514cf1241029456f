"""Seconds computed, transferred, both at once and waited, against a count of moments."""

from hypothesis import given
from hypothesis import strategies as st

from attnmesh.trace.overlap import Busy, busy
from attnmesh.trace.timeline import TRACKS, Span

ranges = st.builds(
    lambda rank, track, begin, length: Span(rank, track, "x", begin, begin + length, {"bytes": 10}),
    st.integers(0, 2), st.sampled_from(TRACKS), st.integers(0, 20), st.integers(0, 10),
)  # fmt: skip


@given(st.lists(ranges, max_size=15))
def test_seconds_are_moments_counted(found):
    def moments(rank: int, *tracks: str) -> set[int]:
        mine = [span for span in found if span.rank == rank and span.track in tracks]
        return {moment for span in mine for moment in range(int(span.begin), int(span.end))}

    expected = []
    for rank in sorted({span.rank for span in found}):
        computing, moving = moments(rank, "compute"), moments(rank, "send", "receive")
        sent = 10 * sum(span.rank == rank and span.track == "send" for span in found)
        waiting = len(moments(rank, "wait"))
        expected.append(Busy(rank, len(computing), len(moving), len(computing & moving), waiting, sent))
    assert busy(found) == expected
