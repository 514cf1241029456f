"""Recording of one rank's run: when kernels ran, when messages were in flight, when the rank waited.

A rank that is not recorded has no recorder (`comm.recorder` is None); a hot path tests for that and does nothing else.
Times on a GPU are events in its stream and are read after the run, so recording never synchronizes the device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from attnmesh.trace.timeline import Span, Track

Timestamp = float | torch.cuda.Event
"""A point in time: seconds of the host's monotonic clock, or an event in a CUDA stream."""


@dataclass(frozen=True)
class _Record:
    track: Track
    name: str
    begin: Timestamp
    end: Timestamp
    args: dict[str, object]


class Recorder:
    """Records the spans of rank `rank`, which computes on `device`. Recording starts on construction."""

    def __init__(self, rank: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self._records: list[_Record] = []  # appended to by several threads
        self._message_counts: Counter[tuple[Track, int]] = Counter()
        self._device = torch.device(device)
        self.start = time.perf_counter()
        """When recording started, on the host's clock, which all processes of a machine share."""
        if self._device.type == "cuda":
            # An idle device reaches the event immediately, which ties its clock to the host's.
            torch.cuda.synchronize(self._device)
            self.start = time.perf_counter()
            self._start_event = torch.cuda.Event(enable_timing=True)
            self._start_event.record(torch.cuda.current_stream(self._device))

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
        return time if isinstance(time, float) else self.start + self._start_event.elapsed_time(time) / 1e3


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
