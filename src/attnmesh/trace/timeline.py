"""What happened when, on which rank: of a simulated run or a real one, and as a file that trace viewers open."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Track = Literal["compute", "send", "receive", "wait"]
TRACKS: tuple[Track, ...] = get_args(Track)

Event = dict[str, object]

LANES = 1_000_000  # thread numbers a track, for spans at the same time


@dataclass(frozen=True)
class Span:
    """Something that took a rank from `begin` to `end`, in seconds since the run began."""

    rank: int
    track: Track
    name: str
    begin: float
    end: float
    facts: dict[str, object] = field(default_factory=dict)  # such as bytes, peer, operations


def write_trace(
    path: Path | str, ranges: Iterable[Span], *, title: str, facts: Mapping[str, object] | None = None
) -> None:
    """Write spans in the Trace Event Format, which Perfetto and chrome://tracing open.

    A rank is a process there, a track a thread. Viewers cannot draw spans of one thread that overlap in part, so spans
    that a track has at the same time (sends of an all-to-all) go to further threads: "send", "send 2" and so on. Times
    are written to the nanosecond. `title` and `facts` are of the whole file.
    """
    ranges = sorted(ranges, key=lambda span: (span.rank, TRACKS.index(span.track), span.begin, -span.end))
    named: dict[tuple[int, int], Event] = {}
    events: list[Event] = []
    free: list[int] = []  # by lane of the track at hand, when its last span is over
    at: tuple[int, str] | None = None
    for span in ranges:
        if span.rank < 0 or not 0 <= span.begin <= span.end < math.inf:
            raise ValueError(f"a span must be of a rank from 0 on and have 0 <= begin <= end, got {span}")
        if at != (span.rank, span.track):
            at, free = (span.rank, span.track), []
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        lane = next((i for i, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        thread = (TRACKS.index(span.track) + 1) * LANES + lane  # never 0: viewers keep that for the idle thread
        if (span.rank, thread) not in named:
            named[span.rank, thread] = {"name": span.track if lane == 0 else f"{span.track} {lane + 1}"}
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        where = {"pid": span.rank, "tid": thread}
        events.append({"name": span.name, "cat": span.track, "ph": "X", **times, **where, "args": span.facts})
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"title": title, **(facts or {})},
        "traceEvents": [*_names(named), *events],
    }
    Path(path).write_text(json.dumps(trace, default=_plain, allow_nan=False))


def _names(threads: Mapping[tuple[int, int], Event]) -> list[Event]:
    """What viewers call processes and threads, and in which order they show them."""
    ranks = sorted({rank for rank, _ in threads})
    found: list[Event] = []
    for rank in ranks:
        process = {"ph": "M", "pid": rank, "tid": LANES}
        found.append({"name": "process_name", **process, "args": {"name": f"rank {rank}"}})
        found.append({"name": "process_sort_index", **process, "args": {"sort_index": rank}})
    for (rank, thread), named in sorted(threads.items(), key=lambda item: item[0]):
        where = {"ph": "M", "pid": rank, "tid": thread}
        found.append({"name": "thread_name", **where, "args": named})
        found.append({"name": "thread_sort_index", **where, "args": {"sort_index": thread}})
    return found


def _plain(value: object) -> object:
    """Numbers of numpy and torch as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"facts must be numbers, words, lists and such, got {value!r}")


def read_trace(path: Path | str) -> list[Span]:
    """The spans of a trace that `write_trace` wrote, by rank, track and beginning; ValueError if it is none."""
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
        return [_span(event) for event in events if event["ph"] == "X"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no trace of ranks, as attnmesh writes them") from None


def _span(event: dict[str, Any]) -> Span:
    if event["cat"] not in TRACKS:
        raise ValueError(f"no track is called {event['cat']!r}")
    begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    return Span(int(event["pid"]), event["cat"], event["name"], begin, end, event["args"])
