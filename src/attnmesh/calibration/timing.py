"""Timers that compare several functions in turns on a GPU: graphs with a warm or cold L2, and queued programs."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
Run = Callable[[], Tensor]

_ROUNDS = 5
_SLICE_MS = 100.0
_BUSY = 4_000_000  # device cycles, about 2 ms
_COLD_ROUNDS = 15
_FLUSH = 256 * 2**20  # bytes, several times any L2


def interleaved(
    runs: Mapping[Name, Run], rounds: int = _ROUNDS, *, failures: dict[Name, str] | None = None
) -> dict[Name, float]:
    """Median milliseconds of every run on the device.

    Runs are captured as graphs, so that the host does not count, and replayed in turns for a slice of time that is long
    enough for the clocks to settle under load: a short run after a pause would be faster on a cool chip.

    A run that cannot be captured is left out and the reason stored in `failures`; without `failures` it raises.
    """
    graphs = _graphs(runs, failures)
    samples: dict[Name, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            warm = _between_events(graph.replay, 1)
            samples[name].append(_between_events(graph.replay, max(1, round(_SLICE_MS / warm))))
    return {name: statistics.median(values) for name, values in samples.items()}


def queued(runs: Mapping[Name, Callable[[], object]], rounds: int = _ROUNDS) -> dict[Name, float]:
    """Median milliseconds of every run on the device, without a graph.

    For programs that the host queues faster than the device runs them, and whose allocations a graph would keep in a
    pool of its own. In turns and in slices of time, as `interleaved`; a run longer than a slice is timed once.
    """
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiles
    for _ in range(rounds):
        for name, run in runs.items():
            ms = _between_events(run, 1)
            if ms < _SLICE_MS:
                ms = _between_events(run, round(_SLICE_MS / ms))
            samples[name].append(ms)
    return {name: statistics.median(values) for name, values in samples.items()}


def cold(
    runs: Mapping[Name, Run], *, rounds: int = _COLD_ROUNDS, failures: dict[Name, str] | None = None
) -> dict[Name, float]:
    """Median microseconds of every run with a cold L2.

    For programs that read memory once, such as a decode step, whose KV cache is not in the L2 because the layers before
    it have read theirs. Before each replay a large buffer is summed, which fills the L2 with other data. It is read and
    not written, since evicting written lines would cost the program 8 to 10 us. Runs take turns, round by round, so
    that all see the same clocks. The host is ahead of the device, so nothing waits for it. Every figure includes the
    time between two events around an empty graph.

    A run that cannot be captured is left out and the reason stored in `failures`; without `failures` it raises.
    """
    graphs = _graphs(runs, failures)
    marks: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    buffer = _buffer()
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY)
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.sum()
            start.record()
            graph.replay()
            stop.record()
            marks[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in marks.items()}


def reason(error: BaseException) -> str:
    """An error message short enough for a table cell."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:100] if text else type(error).__name__


@functools.cache
def _buffer() -> Tensor:
    return torch.ones(_FLUSH // 4, dtype=torch.float32, device="cuda")


def _graphs(runs: Mapping[Name, Run], failures: dict[Name, str] | None) -> dict[Name, torch.cuda.CUDAGraph]:
    graphs: dict[Name, torch.cuda.CUDAGraph] = {}
    stream = torch.cuda.current_stream()
    for name, run in runs.items():
        try:
            graphs[name] = _captured(name, run)
        except Exception as error:
            if failures is None:
                raise
            failures[name] = reason(error)
            torch.cuda.set_stream(stream)  # a failed capture may have left another one
    return graphs


def _captured(name: object, run: Run) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            if not torch.isfinite(run()).all():  # NaN can change the speed
                raise RuntimeError(f"{name} computed NaN or infinity")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _between_events(run: Callable[[], object], times: int) -> float:
    """Milliseconds per run of `times` runs that are queued one after the other."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / times
