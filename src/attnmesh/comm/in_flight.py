"""Messages in flight between processes: staging for gloo, and recording of when they complete."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.comm.base import Message, detached
from attnmesh.comm.local_peers import SharedWork
from attnmesh.trace.timeline import MessageRecord, Recorder, Timestamp


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
    """Give CUDA tensors pinned host buffers; buffers of messages to be sent are filled."""
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
