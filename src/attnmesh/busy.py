"""How long ranks computed, transferred, did both at once, and waited, by the spans of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnmesh.timeline import Span

_Stretches = list[tuple[float, float]]


@dataclass(frozen=True)
class Busy:
    """Seconds of one rank."""

    rank: int
    computed: float
    transferred: float  # with at least one message under way
    overlapped: float  # of these, while it computed
    waited: float
    sent: int  # bytes


def busy(spans: Iterable[Span]) -> list[Busy]:
    """What every rank did, by rank."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    return [_of_rank(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _of_rank(rank: int, spans: list[Span]) -> Busy:
    computing = _union(span for span in spans if span.track == "compute")
    moving = _union(span for span in spans if span.track in ("send", "receive"))
    waiting = _union(span for span in spans if span.track == "wait")
    sent = sum(int(str(span.facts["bytes"])) for span in spans if span.track == "send")
    return Busy(rank, _length(computing), _length(moving), _length(_both(computing, moving)), _length(waiting), sent)


def _union(spans: Iterable[Span]) -> _Stretches:
    """The time that at least one of them takes, as stretches that are apart."""
    apart: _Stretches = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if apart and begin <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(apart[-1][1], end)
        else:
            apart.append((begin, end))
    return apart


def _both(one: _Stretches, other: _Stretches) -> _Stretches:
    """Where both are."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(stretches: _Stretches) -> float:
    return sum(end - begin for begin, end in stretches)
