"""What one rank notes of a run while somebody watches: when kernels ran, when messages travelled, when it waited.

Where nobody watches there is no recorder: `comm.recorder` is None, and a hot path looks at that and at nothing else.
Moments on a GPU are events in its stream. They are read when the run is over: noting them holds nobody up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from attnmesh.trace.timeline import Span, Track

Mark = float | torch.cuda.Event
"""A moment: the host's, in seconds of its monotonic clock, or one that a CUDA stream comes to."""


@dataclass(frozen=True)
class _Note:
    track: Track
    name: str
    begin: Mark
    end: Mark
    facts: dict[str, object]


class Recorder:
    """The notes of rank `rank`, which computes on `device`. It begins when it is made."""

    def __init__(self, rank: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self._notes: list[_Note] = []  # other threads append, too
        self._counted: Counter[tuple[Track, int]] = Counter()
        self._device = torch.device(device)
        self.began = time.perf_counter()
        """When it began, on the host's clock. That clock is the same for all processes of a machine."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # an idle device comes to the event at once: the two clocks meet here
            self.began = time.perf_counter()
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record(torch.cuda.current_stream(self._device))

    def now(self, device: torch.device | None = None) -> Mark:
        """This moment on the host; with a CUDA `device`, the one when its current stream has done all so far."""
        if device is None or device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(device))
        return mark

    def note(self, track: Track, name: str, begin: Mark, end: Mark, **facts: object) -> None:
        """Note what lasted from `begin` to `end`."""
        self._notes.append(_Note(track, name, begin, end, facts))

    @contextmanager
    def noting(self, track: Track, name: str, device: torch.device | None = None, **facts: object) -> Iterator[None]:
        """Note what happens inside."""
        begin = self.now(device)
        yield
        self.note(track, name, begin, self.now(device), **facts)

    def message(self, track: Track, verb: str, peer: int, nbytes: int) -> Message:
        """A message that is posted now, to be noted once it is done."""
        number = self._counted[track, peer]
        self._counted[track, peer] += 1
        name = f"{verb} {'to' if track == 'send' else 'from'} rank {peer}"
        return Message(self, track, name, {"bytes": nbytes, "peer": peer, "number": number})

    def ranges(self) -> list[Span]:
        """All notes so far, in seconds of the host's clock, by their beginning. On CUDA it waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        notes = [
            Span(self.rank, note.track, note.name, self._seconds(note.begin), self._seconds(note.end), note.facts)
            for note in list(self._notes)
        ]
        return sorted(notes, key=lambda span: (span.begin, span.end))

    def _seconds(self, mark: Mark) -> float:
        return mark if isinstance(mark, float) else self.began + self._first.elapsed_time(mark) / 1e3


@dataclass(frozen=True)
class Message:
    """One end of a message under way. `number` counts those of one direction between two ranks: so both ends match."""

    recorder: Recorder
    track: Track
    name: str
    facts: dict[str, object]

    def done(self, begin: Mark, end: Mark) -> None:
        """It travelled from `begin`, when this end was posted, to `end`."""
        self.recorder.note(self.track, self.name, begin, end, **self.facts)
