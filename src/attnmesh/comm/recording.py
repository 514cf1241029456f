"""Recording what the ranks of a comm do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attnmesh.comm.base import Comm, Pending
from attnmesh.trace.recorder import Recorder


@contextmanager
def recording(comm: Comm, device: torch.device | str = "cpu") -> Iterator[Recorder]:
    """Record what this rank does inside; all ranks begin together, and do the same inside.

    Comms made of parts of `comm` (`SubComm`) are recorded with it; other process groups are not.
    """
    if comm.recorder is not None:
        raise RuntimeError(f"rank {comm.rank} is being recorded already")
    comm.barrier()
    recorder = comm.recorder = Recorder(comm.rank, device)
    try:
        yield recorder
    finally:
        comm.recorder = None


class NotedPending(Pending):
    """Messages under way whose waiting is noted: on the host, or on the stream of `device` if that is what waits."""

    def __init__(self, pending: Pending, verb: str, recorder: Recorder, device: torch.device | None) -> None:
        self._pending, self._verb, self._recorder, self._device = pending, verb, recorder, device
        self._waited = False

    def wait(self) -> None:
        """As the messages' own; only the first time is noted, as others take none."""
        if self._waited:
            self._pending.wait()
            return
        self._waited = True
        with self._recorder.noting("wait", self._verb, self._device):
            self._pending.wait()
