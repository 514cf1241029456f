"""Watches operations that were queued on CUDA streams.

Over NCCL the host does not wait for messages. A rank that never arrives blocks the streams of all others, and their
threads when they next wait for the device. A thread beside them notices operations that do not complete in time.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

_INTERVAL = 0.2  # seconds between two looks at all operations
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Completion(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def query(self) -> bool:
        """Whether all work before the event has completed."""


@dataclass(frozen=True)
class QueuedOperation:
    """An operation that completes when the event does. Times are those of time.monotonic()."""

    name: str
    event: Completion
    posted: float
    timeout: float

    @property
    def is_overdue(self) -> bool:
        """Whether it was posted longer ago than its timeout."""
        return time.monotonic() > self.posted + self.timeout


class StreamWatch:
    """The operations of one comm that were queued and have not completed, oldest first.

    `on_overdue` is called, on the thread that watches all comms of the process, with an operation that did not complete
    within its timeout. It is a method, which is not kept alive.
    """

    def __init__(self, on_overdue: Callable[[QueuedOperation], None]) -> None:
        self._queued: deque[QueuedOperation] = deque()
        self._lock = threading.Lock()  # user, autograd and watching threads
        self._on_overdue = weakref.WeakMethod(on_overdue)

    def add(self, name: str, posted: float, timeout: float, event: Completion) -> None:
        """Watch an operation that was posted at a time."""
        with self._lock:
            self._drop_completed()
            self._queued.append(QueuedOperation(name, event, posted, timeout))
        _watch(self)

    def oldest(self, age: float = 0) -> QueuedOperation | None:
        """The oldest operation that has not completed, if it was posted at least `age` seconds ago."""
        with self._lock:
            if not self._queued or time.monotonic() < self._queued[0].posted + age:
                return None  # without a call of CUDA
            self._drop_completed()
            return self._queued[0] if self._queued and time.monotonic() >= self._queued[0].posted + age else None

    def clear(self) -> None:
        """Watch none of the operations any more."""
        with self._lock:
            self._queued.clear()

    def report_overdue(self) -> None:
        """Call `on_overdue` if an operation did not complete in time."""
        oldest, on_overdue = self.oldest(_INTERVAL), self._on_overdue()
        if oldest is not None and oldest.is_overdue and on_overdue is not None:
            on_overdue(oldest)

    def _drop_completed(self) -> None:
        while self._queued and _is_completed(self._queued[0].event):
            self._queued.popleft()


def _is_completed(event: Completion) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the device has failed, which the rank learns by itself
        return True


# One thread for all comms of the process. It is not the monitor of a comm, which a store that does not answer blocks.

_watched: weakref.WeakSet[StreamWatch] = weakref.WeakSet()
_starting = threading.Lock()
_stopping = threading.Event()
_thread: threading.Thread | None = None


def _watch(watch: StreamWatch) -> None:
    global _thread
    if watch in _watched:
        return
    with _starting:
        _watched.add(watch)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="attnmesh stream watch", daemon=True)
            _thread.start()


def _run() -> None:
    _allow_queries_during_capture()
    while not _stopping.wait(_INTERVAL):
        with _starting:
            watches = list(_watched)
        for watch in watches:
            with suppress(RuntimeError):  # of a group that is destroyed meanwhile: go on with the others
                watch.report_overdue()
        del watches[:]


def _allow_queries_during_capture() -> None:
    """Another thread may capture a CUDA graph; without this, asking for an event here would invalidate the capture."""
    if torch.version.cuda is not None:
        with suppress(OSError, AttributeError):
            runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


@atexit.register
def _stop() -> None:
    _stopping.set()
    if _thread is not None:
        _thread.join(1)
