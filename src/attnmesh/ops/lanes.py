"""Two CUDA streams that blocks of work take in turn.

A kernel over one block of a ring ends with a wave of tiles that does not fill the device, and before and after it run
small kernels that only move bytes. On two streams the next block starts while the last one drains. Block s + 1 may
overtake block s, never block s - 1: a ring has two key buffers, and block s + 1 reads the one block s - 1 has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class Lanes:
    """The order of one ring's work on a device. Without `enabled`, everything stays on the caller's stream."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        if enabled:
            self._main = torch.cuda.current_stream()
            self._streams = _streams(self._main.device_index)
            self._arrived = self._main.record_event()
            self._done: list[torch.cuda.Event] = []

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Run a block on the next lane, as soon as what has arrived by now is there."""
        if not self._enabled:
            yield
            return
        stream = self._streams[len(self._done) % 2]
        stream.wait_event(self._arrived)
        with torch.cuda.stream(stream):
            yield
            self._done.append(stream.record_event())

    def arrived(self) -> None:
        """What the caller's stream has waited for is there for the blocks to come."""
        if self._enabled:
            self._arrived = self._main.record_event()

    def wait_for_all_but(self, last: int) -> None:
        """Let the caller's stream wait for the blocks begun so far, except the `last` ones."""
        if self._enabled and len(self._done) > last:
            self._main.wait_event(self._done[-1 - last])
            if last == 0 and len(self._done) > 1:  # one lane's end says nothing of the other's
                self._main.wait_event(self._done[-2])


@cache
def _streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
