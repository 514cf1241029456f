"""Watches operations that NCCL carries.

Over NCCL the host does not wait for messages. A rank that never arrives blocks the streams of all others, and their
threads when they next wait for the device, or inside of a call that has to connect with it. Two threads beside them
notice operations that do not complete in time: one asks CUDA what has completed, which may block with everything else,
the other reads the clock alone.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

_INTERVAL = 0.2  # seconds between two checks of all operations
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_NOT_READY = 600  # cudaErrorNotReady


class Completion(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def query(self) -> bool:
        """Whether all work before the event has completed."""


@dataclass(eq=False)
class QueuedOperation:
    """An operation with other ranks, posted at a time of time.monotonic().

    It completes when its event does, which is set as soon as the call that posts it has returned.
    """

    name: str
    peers: Collection[int]
    posted: float
    timeout: float
    event: Completion | None = None
    has_completed: bool = False

    @property
    def is_overdue(self) -> bool:
        """Whether it was posted longer ago than its timeout."""
        return time.monotonic() > self.posted + self.timeout


class StreamWatch:
    """The operations of one comm that have not completed, oldest first.

    `on_overdue` is called, on a thread of its own, with an operation that did not complete within its timeout. It is a
    method, which is not kept alive.
    """

    def __init__(self, on_overdue: Callable[[QueuedOperation], None]) -> None:
        self._queued: deque[QueuedOperation] = deque()
        self._lock = threading.Lock()  # user, autograd and watching threads; never held during a call of CUDA
        self._on_overdue = weakref.WeakMethod(on_overdue)
        self._is_reporting = False

    def add(self, operation: QueuedOperation) -> None:
        """Watch an operation."""
        with self._lock:
            self._queued.append(operation)
        _watch(self)

    def remove(self, operation: QueuedOperation) -> None:
        """Watch an operation no more."""
        with self._lock, suppress(ValueError):
            self._queued.remove(operation)

    def oldest(self, age: float = 0) -> QueuedOperation | None:
        """The oldest operation, if it was posted at least `age` seconds ago: not completed when CUDA was last asked."""
        with self._lock:
            oldest = self._queued[0] if self._queued else None
        return oldest if oldest is not None and time.monotonic() >= oldest.posted + age else None

    def clear(self) -> None:
        """Watch none of the operations any more."""
        with self._lock:
            self._queued.clear()

    def drop_completed(self) -> None:
        """Ask CUDA for the oldest operations."""
        while (oldest := self.oldest()) is not None and oldest.event is not None and _is_completed(oldest.event):
            oldest.has_completed = True
            self.remove(oldest)

    def report_overdue(self) -> None:
        """Call `on_overdue` if an operation did not complete in time, unless that is being done."""
        oldest, on_overdue = self.oldest(), self._on_overdue()
        if oldest is None or not oldest.is_overdue or on_overdue is None or self._is_reporting:
            return

        def report() -> None:
            with suppress(RuntimeError):  # the group is being destroyed
                on_overdue(oldest)
            self._is_reporting = False

        self._is_reporting = True
        threading.Thread(target=report, name="attnmesh overdue", daemon=True).start()


def _is_completed(event: Completion) -> bool:
    runtime, handle = _cuda_runtime(), getattr(event, "cuda_event", None)
    if runtime is not None and handle is not None:  # without Python's lock, which `query` keeps even if it blocks
        return bool(runtime.cudaEventQuery(ctypes.c_void_p(handle)) != _NOT_READY)
    try:
        return event.query()
    except RuntimeError:  # the device has failed, which the rank learns by itself
        return True


@cache
def _cuda_runtime() -> ctypes.CDLL | None:
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


# Two threads for all comms of the process. None is the monitor of a comm, which a store that does not answer blocks.

_watched: weakref.WeakSet[StreamWatch] = weakref.WeakSet()
_starting = threading.Lock()
_stopping = threading.Event()
_threads: list[threading.Thread] = []


def _watch(watch: StreamWatch) -> None:
    if watch in _watched:
        return
    with _starting:
        _watched.add(watch)
        if not _threads:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            _start("attnmesh stream query", StreamWatch.drop_completed, lambda: _prepare_queries(device))
            _start("attnmesh stream watch", StreamWatch.report_overdue)


def _start(name: str, check: Callable[[StreamWatch], None], prepare: Callable[[], None] = lambda: None) -> None:
    def run() -> None:
        prepare()
        while not _stopping.wait(_INTERVAL):
            with _starting:
                watches = list(_watched)
            for watch in watches:
                check(watch)
            del watches[:]

    _threads.append(threading.Thread(target=run, name=name, daemon=True))
    _threads[-1].start()


def _prepare_queries(device: int | None) -> None:
    """Stay on the device of this process, and let another thread capture a CUDA graph: by default, asking invalidates
    the capture."""
    runtime = _cuda_runtime()
    if runtime is not None and device is not None:
        runtime.cudaSetDevice(device)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


@atexit.register
def _stop() -> None:
    _stopping.set()
    for thread in _threads:
        thread.join(1)
