"""A pair of CUDA streams that blocks of work use in turn.

A kernel over one block of a ring ends with a wave of tiles that does not fill the device, and small memory-bound
kernels run before and after it. With two streams the next block starts while the previous one drains. Block s + 1 may
overtake block s, never block s - 1: a ring has two key buffers, and block s + 1 reads the one that block s - 1 has
finished with.

The caching allocator reuses memory on the stream that freed it. Memory that one stream allocated and another has read
is therefore safe only if the first waits for the second before it continues, which `exclusive` and `record_arrival`
ensure. (`Tensor.record_stream` would not need the wait, but it holds memory back for as long as the host runs ahead of
the device, so memory would grow with the ring.) `tests/parallel/test_streams.py` checks the order with vector clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

STREAMS = 2
"""CUDA streams that the kernels of a ring alternate between."""

_NOTHING = nullcontext()


def stream_of(x: Tensor) -> int | None:
    """The number of the current stream of the device of x, a key for results that are kept; 0 on the CPU.

    None while a graph is captured: what the graph computes is not there before it runs, and what it reads must live as
    long as the graph does.
    """
    if not x.is_cuda:
        return 0
    return None if torch.cuda.is_current_stream_capturing() else int(torch._C._cuda_getCurrentRawStream(x.get_device()))


class StreamPair:
    """Orders the blocks of one ring on two streams. Unless `enabled`, everything stays on the caller's stream."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        if enabled:
            self._main = torch.cuda.current_stream()
            self._streams = _streams(self._main.device_index, self._main.cuda_stream)
            self._current = self._main
            self._arrived = self._main.record_event()
            self._summed = self._arrived
            self._done: list[torch.cuda.Event] = []  # one per block so far, alternating between the streams

    def next_stream(self) -> AbstractContextManager[None]:
        """Runs a block on the next stream, after everything whose arrival has been recorded."""
        return self._on_next_stream() if self._enabled else _NOTHING

    @contextmanager
    def _on_next_stream(self) -> Iterator[None]:
        stream = self._current = self._streams[len(self._done) % STREAMS]
        stream.wait_event(self._arrived)
        stream.wait_event(self._summed)
        with torch.cuda.stream(stream):
            yield
        self._done.append(stream.record_event())
        self._current = self._main

    def exclusive(self) -> AbstractContextManager[None]:
        """Runs work that reads results of both streams: after all blocks so far, and before any later block."""
        return self._after_all_blocks() if self._enabled else _NOTHING

    @contextmanager
    def _after_all_blocks(self) -> Iterator[None]:
        for done in self._done[-STREAMS:]:
            self._current.wait_event(done)
        yield
        self._summed = self._current.record_event()

    def record_arrival(self) -> None:
        """Makes everything that the caller's stream has waited for available to later blocks."""
        if self._enabled:
            self._arrived = self._main.record_event()

    def wait_for_last_block(self) -> None:
        """Makes the caller's stream wait for the last block.

        Call it before receiving keys into the buffer which that block reads, and before reading what the block
        produced. Its stream reuses that memory in the block after next, which waits for `record_arrival`.
        """
        if self._enabled and self._done:
            self._main.wait_event(self._done[-1])

    def join(self) -> None:
        """Makes the caller's stream wait for all blocks."""
        if self._enabled:
            for done in self._done[-STREAMS:]:  # the last block of each stream
                self._main.wait_event(done)


SINGLE_STREAM = StreamPair(enabled=False)


@cache
def _streams(device: int, caller: int) -> tuple[torch.cuda.Stream, ...]:
    """The pair that belongs to one stream of the caller: rings on different streams must not share a pair."""
    return tuple(torch.cuda.Stream(device) for _ in range(STREAMS))
