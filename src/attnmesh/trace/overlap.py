"""Overlap of computation and communication, from the spans of a recorded or simulated run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnmesh.trace.timeline import Span


def match_messages(spans: Iterable[Span]) -> list[Span]:
    """The spans of all ranks, with every message starting when both its send and its receive had been posted.

    A rank records a message from the moment it posted its own end. The two ends are matched by their number, since
    messages between two ranks arrive in order. `args["early_ms"]` becomes the time by which this end was posted before
    the other. An end whose counterpart was not recorded is returned unchanged.
    """
    spans = list(spans)
    ends: dict[tuple[object, ...], list[Span]] = {}
    for span in spans:
        if span.track in ("send", "receive"):
            ends.setdefault(_message_id(span), []).append(span)
    return [_matched(span, ends[_message_id(span)]) if span.track in ("send", "receive") else span for span in spans]


def _message_id(span: Span) -> tuple[object, ...]:
    """Source, target and number of a message."""
    peer, number = span.args["peer"], span.args["number"]
    return (span.rank, peer, number) if span.track == "send" else (peer, span.rank, number)


def _matched(span: Span, ends: list[Span]) -> Span:
    # A transport that buffers small messages may finish a send before the receive was posted: keep begin <= end.
    begin = min(max(end.begin for end in ends), span.end)
    return replace(span, begin=begin, args={**span.args, "early_ms": 1e3 * (begin - span.begin)})


_Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class OverlapSummary:
    """Seconds that one rank spent computing, communicating and waiting."""

    rank: int
    compute: float
    transfer: float  # with at least one message in flight
    overlap: float  # part of `transfer` during which the rank also computed
    wait: float
    bytes_sent: int


def summarize_overlap(spans: Iterable[Span]) -> list[OverlapSummary]:
    """One summary per rank, in rank order."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    return [_summary(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _summary(rank: int, spans: list[Span]) -> OverlapSummary:
    compute = _union(span for span in spans if span.track == "compute")
    transfer = _union(span for span in spans if span.track in ("send", "receive"))
    wait = _union(span for span in spans if span.track == "wait")
    bytes_sent = sum(int(str(span.args["bytes"])) for span in spans if span.track == "send")
    both = _intersection(compute, transfer)
    return OverlapSummary(rank, _length(compute), _length(transfer), _length(both), _length(wait), bytes_sent)


def _union(spans: Iterable[Span]) -> _Intervals:
    """The time covered by at least one span, as disjoint intervals."""
    disjoint: _Intervals = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if disjoint and begin <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(disjoint[-1][1], end)
        else:
            disjoint.append((begin, end))
    return disjoint


def _intersection(a: _Intervals, b: _Intervals) -> _Intervals:
    """The time covered by both."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(intervals: _Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
