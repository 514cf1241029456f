"""Spans of a simulated or recorded run, their file format (the Trace Event Format of Perfetto), and their overlap.

A recorder notes one rank's run: when kernels ran, when messages were in flight, when the rank waited.

A rank that is not recorded has no recorder (`comm.recorder` is None); a hot path tests for that and does nothing else.
Times on a GPU are events in its stream and are read after the run, so recording never synchronizes the device.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from attnmesh.utils.files import read_json, write_text
from attnmesh.utils.validation import (
    MAX_RANKS,
    check_choice,
    check_count,
    check_list,
    check_number,
    check_path,
    check_type,
)

Track = Literal["compute", "send", "receive", "wait"]
TRACKS: tuple[Track, ...] = get_args(Track)

Event = dict[str, object]

THREADS_PER_TRACK = 1_000_000  # thread ids reserved for each track, for spans that run at the same time


@dataclass(frozen=True)
class Span:
    """An activity of one rank from `begin` to `end`, in seconds since the run started."""

    rank: int
    track: Track
    name: str
    begin: float
    end: float
    args: dict[str, object] = field(default_factory=dict)  # bytes, peer, operations, ...


def write_trace(
    path: Path | str, spans: Iterable[Span], *, title: str, metadata: Mapping[str, object] | None = None
) -> None:
    """Write spans in the Trace Event Format, which Perfetto and chrome://tracing open.

    A rank becomes a process, a track a thread. Viewers cannot draw partially overlapping spans of one thread, so
    concurrent spans of a track (the sends of an all-to-all) go to further threads: "send", "send 2" and so on. Times
    are written with a resolution of one nanosecond. `title` and `metadata` describe the whole file.
    """
    path = check_path("path", path)
    check_type("title", title, str, "a string")
    if metadata is not None:
        check_type("metadata", metadata, Mapping, "a mapping by name")
    spans = check_list("spans", spans, "spans")
    for i, span in enumerate(spans):
        check_type(f"spans[{i}]", span, Span)
    spans = sorted(spans, key=lambda span: (span.rank, TRACKS.index(span.track), span.begin, -span.end))
    threads: dict[tuple[int, int], Event] = {}
    events: list[Event] = []
    busy_until: list[int] = []  # per thread of the current track, the end of its last span
    current: tuple[int, str] | None = None
    for span in spans:
        if span.rank < 0 or not 0 <= span.begin <= span.end < math.inf:
            raise ValueError(f"span must have rank >= 0 and 0 <= begin <= end, got {span}")
        if current != (span.rank, span.track):
            current, busy_until = (span.rank, span.track), []
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        index = next((i for i, until in enumerate(busy_until) if until <= begin), len(busy_until))
        busy_until[index : index + 1] = [end]
        thread = (TRACKS.index(span.track) + 1) * THREADS_PER_TRACK + index  # never 0: viewers reserve it for idle
        if (span.rank, thread) not in threads:
            threads[span.rank, thread] = {"name": span.track if index == 0 else f"{span.track} {index + 1}"}
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        ids = {"pid": span.rank, "tid": thread}
        events.append({"name": span.name, "cat": span.track, "ph": "X", **times, **ids, "args": span.args})
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"title": title, **(metadata or {})},
        "traceEvents": [*_metadata_events(threads), *events],
    }
    write_text(path, json.dumps(trace, default=_to_python, allow_nan=False))


def _metadata_events(threads: Mapping[tuple[int, int], Event]) -> list[Event]:
    """The events that give processes and threads their names and their order in viewers."""
    ranks = sorted({rank for rank, _ in threads})
    events: list[Event] = []
    for rank in ranks:
        ids = {"ph": "M", "pid": rank, "tid": THREADS_PER_TRACK}
        events.append({"name": "process_name", **ids, "args": {"name": f"rank {rank}"}})
        events.append({"name": "process_sort_index", **ids, "args": {"sort_index": rank}})
    for (rank, thread), name in sorted(threads.items(), key=lambda item: item[0]):
        ids = {"ph": "M", "pid": rank, "tid": thread}
        events.append({"name": "thread_name", **ids, "args": name})
        events.append({"name": "thread_sort_index", **ids, "args": {"sort_index": thread}})
    return events


def _to_python(value: object) -> object:
    """Scalars of numpy and torch as Python numbers."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"span args and metadata must be JSON serializable, got {value!r}")


def read_trace(path: Path | str) -> list[Span]:
    """The spans of a trace that `write_trace` wrote, sorted by rank, track and begin. ValueError for other files."""
    path = check_path("path", path)
    trace = read_json(path, str(path))
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} is not a trace written by attnmesh: it must have a list traceEvents")
    spans = []
    for number, event in enumerate(events):
        if event.get("ph") == "X":
            try:
                spans.append(_span(event))
            except ValueError as error:
                raise ValueError(f"{path} is not a trace written by attnmesh: in event {number}, {error}") from None
    return spans


def _span(event: dict[str, Any]) -> Span:
    rank, track, name, args = (cast(Any, event.get(key)) for key in ("pid", "cat", "name", "args"))
    check_count("pid", rank, most=MAX_RANKS)
    check_choice("cat", track, TRACKS)
    check_type("name", name, str, "a string")
    check_type("args", args, dict, "an object")
    start, length = (check_number(key, event.get(key), least=0) for key in ("ts", "dur"))
    return Span(rank, track, name, start / 1e6, (start + length) / 1e6, args)


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


# Recording of one rank's run: when kernels ran, when messages were in flight, when the rank waited.


Timestamp = float | torch.cuda.Event
"""A point in time: seconds of the host's monotonic clock, or an event in a CUDA stream."""


@dataclass(frozen=True)
class _Record:
    track: Track
    name: str
    begin: Timestamp
    end: Timestamp
    args: dict[str, object]


_SHARED_SECONDS = 1.0  # for so long, recorders share an anchor: events tell milliseconds in float32


class _Anchor:
    """A moment on the host's clock and on a GPU's."""

    def __init__(self, device: torch.device) -> None:
        # An idle device reaches the event immediately, which ties its clock to the host's.
        torch.cuda.synchronize(device)
        self.host = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))


_anchors: dict[torch.device, _Anchor] = {}
_anchors_lock = threading.Lock()


def _anchor_of(device: torch.device) -> _Anchor:
    """A recent anchor, the same for virtual ranks that begin together: so what one stream runs does not overlap."""
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    with _anchors_lock:
        anchor = _anchors.get(device)
        if anchor is None or time.perf_counter() - anchor.host > _SHARED_SECONDS:
            anchor = _anchors[device] = _Anchor(device)
        return anchor


class Recorder:
    """Records the spans of rank `rank`, which computes on `device`. Recording starts on construction."""

    def __init__(self, rank: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self._records: list[_Record] = []  # appended to by several threads
        self._message_counts: Counter[tuple[Track, int]] = Counter()
        self._device = torch.device(device)
        self.start = time.perf_counter()
        """When recording started, on the host's clock, which all processes of a machine share."""
        self._anchor: _Anchor | None = None
        if self._device.type == "cuda":
            self._anchor = _anchor_of(self._device)
            torch.cuda.synchronize(self._device)
            self.start = time.perf_counter()

    def now(self, device: torch.device | None = None) -> Timestamp:
        """The current time on the host; for a CUDA `device`, the time when its stream has done all work so far."""
        if device is None or device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def add(self, track: Track, name: str, begin: Timestamp, end: Timestamp, **args: object) -> None:
        """Record a span from `begin` to `end`."""
        self._records.append(_Record(track, name, begin, end, args))

    @contextmanager
    def span(self, track: Track, name: str, device: torch.device | None = None, **args: object) -> Iterator[None]:
        """Record the body of a `with` statement as a span."""
        begin = self.now(device)
        yield
        self.add(track, name, begin, self.now(device), **args)

    def message(self, track: Track, op: str, peer: int, nbytes: int) -> MessageRecord:
        """A record for a message that is being posted; call its `done` when the message has completed."""
        number = self._message_counts[track, peer]
        self._message_counts[track, peer] += 1
        name = f"{op} {'to' if track == 'send' else 'from'} rank {peer}"
        return MessageRecord(self, track, name, {"bytes": nbytes, "peer": peer, "number": number})

    def spans(self) -> list[Span]:
        """All spans so far in seconds of the host's clock, sorted by begin. Synchronizes a CUDA device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spans = [
            Span(self.rank, each.track, each.name, self._seconds(each.begin), self._seconds(each.end), each.args)
            for each in list(self._records)
        ]
        return sorted(spans, key=lambda span: (span.begin, span.end))

    def _seconds(self, time: Timestamp) -> float:
        if isinstance(time, float):
            return time
        assert self._anchor is not None
        return self._anchor.host + float(self._anchor.event.elapsed_time(time)) / 1e3


@dataclass(frozen=True)
class MessageRecord:
    """One end of a message in flight. Both ends carry the same `number`, counted per direction and pair of ranks."""

    recorder: Recorder
    track: Track
    name: str
    args: dict[str, object]

    def done(self, begin: Timestamp, end: Timestamp) -> None:
        """Record the message: posted at `begin`, completed at `end`."""
        self.recorder.add(self.track, self.name, begin, end, **self.args)
