"""When messages of a process group were done, although the rank was busy with something else.

gloo does not say: its works have no future, and are not `is_completed` before somebody has waited. So while a run is
recorded a thread waits for each message. NCCL's works order streams: a stream of its own waits for them.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch

from attnmesh.comm.parcel import Parcel
from attnmesh.trace.recorder import Mark, Message, Recorder

FOREVER = timedelta(days=1)


class Waitable(Protocol):
    """What is left of a `torch.distributed.Work` here."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return when it is done."""


class WatchedWork:
    """A work for which a thread waits; others wait for the thread, since a work of gloo's ends only one wait."""

    def __init__(self, work: Waitable, limit: float, message: Message, posted: Mark) -> None:
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        # Not a threading.Thread: its start() would hold the rank up until the thread has had its first turn.
        _thread.start_new_thread(self._watch, (work, limit, message, posted))

    def _watch(self, work: Waitable, limit: float, message: Message, posted: Mark) -> None:
        try:
            work.wait(timedelta(seconds=limit))
            message.done(posted, message.recorder.now())
        except RuntimeError as error:
            self._error = error
        finally:
            self._over.set()

    def wait(self, limit: timedelta = FOREVER, /) -> bool:
        """As the work's own."""
        if not self._over.wait(limit.total_seconds()):
            raise RuntimeError(f"Timed out after {limit.total_seconds():.1f} s")
        if self._error is not None:
            raise self._error
        return True


def watched(
    works: Sequence[Waitable], parcels: Sequence[Parcel], verb: str, recorder: Recorder, limit: float, posted: Mark
) -> list[WatchedWork]:
    """The works of these parcels, which end as they did and are noted as well."""
    messages = _messages(parcels, verb, recorder)
    pairs = zip(works, messages, strict=True)
    return [WatchedWork(work, limit, message, posted) for work, message in pairs]


def watch_on_stream(
    works: Sequence[Waitable], parcels: Sequence[Parcel], verb: str, recorder: Recorder, posted: Mark
) -> None:
    """Note parcels that NCCL carries as one batch: they are done together."""
    device = parcels[0].tensor.device
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for work in works:
            work.wait()
        end = recorder.now(device)
    for message in _messages(parcels, verb, recorder):
        message.done(posted, end)


def _messages(parcels: Sequence[Parcel], verb: str, recorder: Recorder) -> list[Message]:
    return [recorder.message("send" if p.send else "receive", verb, p.peer, p.tensor.nbytes) for p in parcels]
