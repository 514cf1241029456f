"""The NCCL side of a process group: its communicator, the operations that are in flight, and how to end them.

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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist

from attnmesh.comm.health import caller_error
from attnmesh.comm.health.group_store import CommError

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


_WATCHDOG_DELAY = 60.0  # seconds by which torch's watchdog, which ends the process, waits longer than the comm
_ABORT_LIMIT = 5.0  # seconds
_POSTING_LIMIT = 1.0  # seconds that an abort waits for a call that posts an operation
_POLL_INTERVAL = 0.05  # seconds
_LEAST_TIME = 30.0  # seconds that NCCL has to connect all ranks, however short the timeout of messages


class NcclSide:
    """The communicator of a group for CUDA tensors. `on_overdue` is as for `StreamWatch`."""

    def __init__(self, group: dist.ProcessGroup, on_overdue: Callable[[QueuedOperation], None]) -> None:
        self._group = weakref.ref(group)
        self._in_flight = StreamWatch(on_overdue)
        self._watchdog_timeout = 0.0
        self._posting = threading.RLock()  # held by a call that posts an operation
        self._is_over = False
        self.is_initialized = self.has_begun = False
        """Whether all ranks are connected, and whether this rank has tried to send anything."""

    def initialize(self, timeout: float, has_failed: Callable[[], bool]) -> None:
        """Run a first operation: NCCL needs all ranks in it, and the first messages of a ring may leave some out.

        Raises TimeoutError if NCCL does not find all ranks, or once the comm has failed: NCCL itself would wait
        forever, and cannot be interrupted.
        """
        self.has_begun = True
        self._set_watchdog(timeout)
        device, done = torch.cuda.current_device(), threading.Event()
        errors: list[Exception] = []

        def first_operation() -> None:
            try:
                torch.cuda.set_device(device)
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=f"cuda:{device}"), group=self._group())
                torch.cuda.current_stream().synchronize()  # done, not only queued: nothing watches it
            except Exception as error:
                errors.append(error)
            done.set()

        threading.Thread(target=first_operation, name="attnmesh NCCL", daemon=True).start()
        timeout = max(timeout, _LEAST_TIME)
        deadline = time.monotonic() + timeout
        while not done.wait(_POLL_INTERVAL):
            if has_failed() or time.monotonic() > deadline:
                raise TimeoutError(f"NCCL did not find all ranks within {timeout:g} s")
        if errors:
            raise errors[0]
        self.is_initialized = True

    @contextmanager
    def posting(self, operation: QueuedOperation) -> Iterator[None]:
        """Around the call that posts an operation: NCCL may have to connect, and wait for other ranks on the host.

        Raises CommError after an abort.
        """
        if self._watchdog_timeout != operation.timeout:
            self._set_watchdog(operation.timeout)
        self.has_begun = True
        self._in_flight.add(operation)
        try:
            with self._posting:
                if self._is_over:
                    raise CommError("the operations of this group have been ended")
                yield
        finally:
            self._in_flight.remove(operation)

    def post(self, messages: list[dist.P2POp], operation: QueuedOperation) -> list[dist.Work]:
        """Post messages as one batch, which is begun and ended in this thread, whatever happens in between.

        NCCL keeps a batch per thread. If one is not ended, by an error of NCCL or by one that is sent to the thread,
        whatever the thread posts from then on, in any group, is not sent, and seems to complete.
        """
        with self.posting(operation), caller_error.uninterrupted():
            try:
                return list(dist.batch_isend_irecv(messages))
            except BaseException:
                self._end_batch(messages[0].tensor.device)
                raise

    def _end_batch(self, device: torch.device) -> None:
        """End a batch that has failed, which torch leaves open. If it was not begun, NCCL refuses that."""
        group = self._group()
        if group is not None:
            with suppress(RuntimeError):
                group._end_coalescing(device)
            dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)

    def watch(self, operation: QueuedOperation) -> None:
        """Watch what an operation has queued on the current stream. Nothing is queued while a graph is captured."""
        if not torch.cuda.is_current_stream_capturing():
            operation.event = torch.cuda.Event()
            operation.event.record()
            self._in_flight.add(operation)

    def oldest(self, age: float = 0) -> QueuedOperation | None:
        """The oldest operation that has not completed, as `StreamWatch.oldest`."""
        return self._in_flight.oldest(age)

    def abort(self) -> None:
        """End all operations, which may wait for other ranks and block the device.

        A call that is about to post one returns before, unless it waits for other ranks: NCCL would use what is gone.
        """
        self._is_over = True  # for calls that have not begun to post
        if self._posting.acquire(timeout=_POSTING_LIMIT):
            self._posting.release()
        group = self._group()
        if group is not None and self.has_begun:
            self.is_initialized = self.has_begun = False
            with suppress(RuntimeError):
                group._get_backend(torch.device("cuda")).abort()
            self._in_flight.clear()

    def _set_watchdog(self, timeout: float) -> None:
        """Give torch's watchdog a longer timeout: it does not raise, and ends the process a minute later."""
        self._watchdog_timeout = timeout
        group = self._group()
        if group is not None:
            limit = timedelta(seconds=timeout + _WATCHDOG_DELAY)
            group._get_backend(torch.device("cuda"))._set_default_timeout(limit)


def abort_all(sides: Iterable[NcclSide]) -> None:
    """Abort several groups at once: an abort waits for the device, which another group may block."""
    threads = [threading.Thread(target=side.abort, name="attnmesh abort", daemon=True) for side in sides]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ABORT_LIMIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
