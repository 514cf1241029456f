"""Both ends of every message: none moves before its sender and its receiver have posted it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnmesh.trace.timeline import Span


def met(ranges: Iterable[Span]) -> list[Span]:
    """The spans of all ranks, messages from when both ends were posted; `early_ms` is how long this end was before.

    What a rank notes of a message begins when it posted its own end. Numbers match ends: messages from one rank to
    another arrive in order. An end whose other one was not recorded stays as it is.
    """
    ranges = list(ranges)
    ends: dict[tuple[object, ...], list[Span]] = {}
    for span in ranges:
        if span.track in ("send", "receive"):
            ends.setdefault(_message(span), []).append(span)
    return [_from_meeting(span, ends[_message(span)]) if span.track in ("send", "receive") else span for span in ranges]


def _message(span: Span) -> tuple[object, ...]:
    """Source, target, number."""
    peer, number = span.facts["peer"], span.facts["number"]
    return (span.rank, peer, number) if span.track == "send" else (peer, span.rank, number)


def _from_meeting(span: Span, ends: list[Span]) -> Span:
    # A sender may be done before the receiver came, where a transport keeps what is small; its time is then its own.
    begin = min(max(end.begin for end in ends), span.end)
    return replace(span, begin=begin, facts={**span.facts, "early_ms": 1e3 * (begin - span.begin)})


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


def busy(ranges: Iterable[Span]) -> list[Busy]:
    """What every rank did, by rank."""
    by_rank: dict[int, list[Span]] = {}
    for span in ranges:
        by_rank.setdefault(span.rank, []).append(span)
    return [_of_rank(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _of_rank(rank: int, ranges: list[Span]) -> Busy:
    computing = _union(span for span in ranges if span.track == "compute")
    moving = _union(span for span in ranges if span.track in ("send", "receive"))
    waiting = _union(span for span in ranges if span.track == "wait")
    sent = sum(int(str(span.facts["bytes"])) for span in ranges if span.track == "send")
    return Busy(rank, _length(computing), _length(moving), _length(_both(computing, moving)), _length(waiting), sent)


def _union(ranges: Iterable[Span]) -> _Stretches:
    """The time that at least one of them takes, as stretches that are apart."""
    apart: _Stretches = []
    for begin, end in sorted((span.begin, span.end) for span in ranges):
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
