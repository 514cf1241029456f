"""The NCCL side of a process group: its communicator, the operations that are in flight, and how to end them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from attnmesh.comm.health import caller_error
from attnmesh.comm.health.group_store import CommError
from attnmesh.comm.health.stream_watch import QueuedOperation, StreamWatch

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
