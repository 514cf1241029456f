"""Messages in flight between processes: staging for gloo, recording of when they complete, and waiting for them."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.comm.base import Message, Pending, detached
from attnmesh.comm.health.group_store import CommError
from attnmesh.comm.health.stream_watch import QueuedOperation
from attnmesh.comm.local_peers import LocalPeers, SharedWork
from attnmesh.comm.nccl import NcclSide
from attnmesh.trace.recorder import MessageRecord, Recorder, Timestamp


class Waitable(Protocol):
    """The part of `torch.distributed.Work` that is used here."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return when the work has completed."""


@dataclass(slots=True)
class InFlightMessage:
    """A message in flight and the buffer that the backend uses: the tensor itself, or a pinned copy."""

    tensor: Tensor
    peer: int
    send: bool
    tag: int = 0
    staged: Tensor | None = None

    @property
    def wire_buffer(self) -> Tensor:
        """The buffer that the backend reads or writes."""
        return self.tensor if self.staged is None else self.staged

    def unstage(self) -> None:
        """Copy a received message from its staging buffer to the tensor."""
        if self.staged is not None and not self.send:
            self.tensor.copy_(self.staged, non_blocking=True)


def messages_of(recvs: Sequence[Message], sends: Sequence[Message], tag: int = 0) -> list[InFlightMessage]:
    """The messages of an exchange, in the order in which they are posted."""
    received = [InFlightMessage(detached(tensor), peer, False, tag) for tensor, peer in recvs]
    return received + [InFlightMessage(detached(tensor), peer, True, tag) for tensor, peer in sends]


def describe(messages: Sequence[InFlightMessage], names: Callable[[Iterable[int]], str]) -> str:
    """`, receiving 8 bytes from ranks 1, 2 and sending 16 bytes to rank 0`, or nothing."""
    peers: dict[tuple[str, int, str], set[int]] = {}
    for message in messages:
        action, preposition = ("sending", "to") if message.send else ("receiving", "from")
        peers.setdefault((action, message.tensor.nbytes, preposition), set()).add(message.peer)
    parts = (f"{action} {nbytes} bytes {word} {names(ranks)}" for (action, nbytes, word), ranks in peers.items())
    return f", {' and '.join(parts)}" if peers else ""


def stage(messages: Sequence[InFlightMessage]) -> None:
    """Give CUDA tensors pinned host buffers, filled for those to be sent."""
    if not messages[0].tensor.is_cuda:  # all are on one device
        return
    for message in messages:
        message.staged = torch.empty_like(message.tensor, device="cpu", pin_memory=True)
        if message.send:
            message.staged.copy_(message.tensor, non_blocking=True)
    for device in {message.tensor.device for message in messages if message.send}:
        torch.cuda.current_stream(device).synchronize()  # gloo reads host memory without regard to streams


# Recording when messages complete while the rank does something else. gloo's works have no future and are not
# `is_completed` before a wait, so during a recording a thread waits for each message. NCCL's works order streams: a
# stream of its own waits for them.

_NO_LIMIT = timedelta(days=1)


class RecordedWork:
    """A work that a thread waits for and records. Others wait for the thread: a gloo work supports a single wait."""

    def __init__(self, work: Waitable, timeout: float, record: MessageRecord, posted: Timestamp) -> None:
        self._completed = threading.Event()
        self._error: RuntimeError | None = None
        # Not a threading.Thread: its start() blocks until the thread has been scheduled for the first time.
        _thread.start_new_thread(self._wait_and_record, (work, timeout, record, posted))

    def _wait_and_record(self, work: Waitable, timeout: float, record: MessageRecord, posted: Timestamp) -> None:
        try:
            work.wait(timedelta(seconds=timeout))
            record.done(posted, record.recorder.now())
        except RuntimeError as error:
            self._error = error
        finally:
            self._completed.set()

    def wait(self, timeout: timedelta = _NO_LIMIT, /) -> bool:
        """Wait as for the work itself."""
        if not self._completed.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out after {timeout.total_seconds():.1f} s")
        if self._error is not None:
            raise self._error
        return True


class RecordedSharedWork:
    """A work of shared memory, which is recorded when it is waited for: it knows when its message was sent."""

    def __init__(self, work: SharedWork, record: MessageRecord, posted: Timestamp) -> None:
        self._work, self._record, self._posted = work, record, posted

    def wait(self, timeout: timedelta = _NO_LIMIT, /) -> bool:
        """Wait as for the work itself."""
        self._work.wait(timeout)
        assert isinstance(self._posted, float)
        self._record.done(self._posted, max(self._posted, self._work.completed))
        return True


def record_on_threads(
    works: Sequence[Waitable], messages: Sequence[InFlightMessage], op: str, recorder: Recorder, timeout: float,
    posted: Timestamp,
) -> list[Waitable]:  # fmt: skip
    """Record each message when it completes; wait for the returned works instead."""
    return [
        RecordedSharedWork(work, record, posted)
        if isinstance(work, SharedWork)
        else RecordedWork(work, timeout, record, posted)
        for work, record in zip(works, _message_records(messages, op, recorder), strict=True)
    ]


def record_on_stream(
    works: Sequence[Waitable], messages: Sequence[InFlightMessage], op: str, recorder: Recorder, posted: Timestamp
) -> None:
    """Record messages that NCCL carries as one batch, which complete together."""
    device = messages[0].tensor.device
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for work in works:
            work.wait()
        end = recorder.now(device)
    for record in _message_records(messages, op, recorder):
        record.done(posted, end)


def _message_records(messages: Sequence[InFlightMessage], op: str, recorder: Recorder) -> list[MessageRecord]:
    return [recorder.message("send" if m.send else "receive", op, m.peer, m.tensor.nbytes) for m in messages]


# Waiting for messages.


@dataclass(slots=True)
class Waiting:
    """A thread waits on the host, since a time of `time.monotonic`, for messages of `ranks`, now for that of `peer`."""

    ranks: Collection[int]
    since: float
    thread: int
    peer: int | None = None


class BatchComm(Protocol):
    """The part of a comm that its batches use."""

    timeout: float
    nccl: NcclSide
    waiting: Waiting | None

    def queued(self, op: str, messages: Sequence[InFlightMessage], /) -> QueuedOperation:
        """Messages that NCCL carries, as an operation to watch."""

    def watch(self, operation: QueuedOperation, /) -> None:
        """Watch it; CommError if it was ended."""

    def message_error(self, op: str, messages: Sequence[InFlightMessage], error: Exception, /) -> CommError:
        """An error of the backend, after which the comm has failed."""


class Batch(Pending):
    """Messages that were posted together. With `blocking`, waiting blocks the host; otherwise it orders streams."""

    def __init__(
        self, comm: BatchComm, op: str, messages: list[InFlightMessage], works: Sequence[Waitable], *, blocking: bool
    ) -> None:
        self._comm, self._op, self._messages, self._works = comm, op, messages, works
        self._blocking = blocking

    def wait(self) -> None:
        if self._blocking:
            self._wait_on_host()
        else:
            self._wait_on_stream()
        self._messages, self._works = [], []  # a second wait returns at once, and buffers are released

    def _wait_on_stream(self) -> None:
        comm = self._comm
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise comm.message_error(self._op, self._messages, error) from error
        if self._works:
            comm.watch(comm.queued(self._op, self._messages))

    def _wait_on_host(self) -> None:
        comm, now = self._comm, time.monotonic()
        try:
            comm.waiting = waiting = Waiting({message.peer for message in self._messages}, now, threading.get_ident())
            self._wait_for_each(waiting, now + comm.timeout)
        finally:
            comm.waiting = None

    def _wait_for_each(self, waiting: Waiting, deadline: float) -> None:
        for i, (message, work) in enumerate(zip(self._messages, self._works, strict=True)):
            waiting.peer = message.peer
            try:
                if isinstance(work, SharedWork):
                    work.wait_until(deadline)
                else:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._comm.message_error(self._op, self._messages[i:], error) from error
            if message.staged is not None:
                message.unstage()


def exchange_in_memory(
    comm: BatchComm, peers: LocalPeers, op: str, tag: int, sends: Sequence[Message], recvs: Sequence[Message]
) -> None:
    """Post messages that all go through shared memory, and wait: as a `Batch`, in half the time."""
    now, done = time.monotonic(), 0
    try:
        comm.waiting = waiting = Waiting({peer for _, peer in (*recvs, *sends)}, now, threading.get_ident())
        for work in peers.post(tag, recvs, sends):
            assert work is not None
            waiting.peer = work.peer
            work.wait_until(now + comm.timeout)
            done += 1
    except RuntimeError as error:
        raise comm.message_error(op, messages_of(recvs, sends)[done:], error) from error
    finally:
        comm.waiting = None
