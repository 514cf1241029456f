"""Two CUDA streams that blocks of work take in turn.

A kernel over one block of a ring ends with a wave of tiles that does not fill the device, and before and after it run
small kernels that only move bytes. On two streams the next block starts while the last one drains. Block s + 1 may
overtake block s, never block s - 1: a ring has two key buffers, and block s + 1 reads the one block s - 1 has left.

Memory freed on a lane is used again by that lane. What one lane made and another stream has read is therefore safe
only if the maker waits for the reader before it goes on, which `summing` and `arrived` see to. (Tensor.record_stream
would do without waiting, but holds memory back for as long as the host runs ahead of the device: it would grow with
the ring.) `tests/parallel/test_streams.py` replays all of this on streams with vector clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class StreamPair:
    """The order of one ring's blocks on a device. Without `enabled`, everything stays on the caller's stream."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        if enabled:
            self._main = torch.cuda.current_stream()
            self._streams = _streams(self._main.device_index, self._main.cuda_stream)
            self._current = self._main
            self._arrived = self._main.record_event()
            self._summed = self._arrived
            self._done: list[torch.cuda.Event] = []  # of the blocks so far, in turns from either lane

    @contextmanager
    def next_stream(self) -> Iterator[None]:
        """Run a block on the next lane, as soon as what has arrived by now is there."""
        if not self._enabled:
            yield
            return
        stream = self._current = self._streams[len(self._done) % 2]
        stream.wait_event(self._arrived)
        stream.wait_event(self._summed)
        with torch.cuda.stream(stream):
            yield
        self._done.append(stream.record_event())
        self._current = self._main

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Sum what both lanes have made: after all blocks so far, and before any block to come."""
        if not self._enabled:
            yield
            return
        for done in self._done[-2:]:
            self._current.wait_event(done)
        yield
        self._summed = self._current.record_event()

    def record_arrival(self) -> None:
        """What the caller's stream has waited for is there for the blocks to come."""
        if self._enabled:
            self._arrived = self._main.record_event()

    def wait_for_last_block(self) -> None:
        """Let the caller's stream wait for the last block begun.

        Before it lets keys be received into the buffer which that block reads; and before it reads what that block has
        made. The lane comes to use that memory again with the block after next, which waits for `arrived`.
        """
        if self._enabled and self._done:
            self._main.wait_event(self._done[-1])

    def join(self) -> None:
        """Let the caller's stream wait for all blocks."""
        if self._enabled:
            for done in self._done[-2:]:  # the last of either lane
                self._main.wait_event(done)


SINGLE_STREAM = StreamPair(enabled=False)


@cache
def _streams(device: int, caller: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The lanes beside one stream of the caller's: rings on two streams of his must not share lanes."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
