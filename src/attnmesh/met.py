"""Both ends of every message: none moves before its sender and its receiver have posted it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmesh.timeline import Span


def met(spans: Iterable[Span]) -> list[Span]:
    """The spans of all ranks, messages from when both ends were posted; `early_ms` is how long this end was before.

    What a rank notes of a message begins when it posted its own end. Numbers match ends: messages from one rank to
    another arrive in order. An end whose other one was not recorded stays as it is.
    """
    spans = list(spans)
    ends: dict[tuple[object, ...], list[Span]] = {}
    for span in spans:
        if span.track in ("send", "receive"):
            ends.setdefault(_message(span), []).append(span)
    return [_from_meeting(span, ends[_message(span)]) if span.track in ("send", "receive") else span for span in spans]


def _message(span: Span) -> tuple[object, ...]:
    """Source, target, number."""
    peer, number = span.facts["peer"], span.facts["number"]
    return (span.rank, peer, number) if span.track == "send" else (peer, span.rank, number)


def _from_meeting(span: Span, ends: list[Span]) -> Span:
    # A sender may be done before the receiver came, where a transport keeps what is small; its time is then its own.
    begin = min(max(end.begin for end in ends), span.end)
    return replace(span, begin=begin, facts={**span.facts, "early_ms": 1e3 * (begin - span.begin)})
