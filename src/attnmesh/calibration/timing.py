"""Times compared in one run, in turns: on a GPU graphs, warm or cold, or long programs; on the host by the wall."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
Run = Callable[[], Tensor]

_ROUNDS = 5
_SLICE_MS = 100.0
_BUSY = 40_000_000  # device cycles, about 20 ms
_COLD_ROUNDS = 15
_FLUSH = 256 * 2**20  # bytes, several times any L2


def interleaved(runs: Mapping[Name, Run], rounds: int = _ROUNDS) -> dict[Name, float]:
    """Median milliseconds of every run on the device.

    Runs are captured as graphs, so that the host is out of the picture, and replayed in turns for a slice of time long
    enough for the clocks to settle under load: a short run after a pause would profit from a cool chip.
    """
    graphs = {name: _captured(name, run) for name, run in runs.items()}
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            warm = _between_events(graph.replay, 1)
            samples[name].append(_between_events(graph.replay, max(1, round(_SLICE_MS / warm))))
    return {name: statistics.median(values) for name, values in samples.items()}


def queued(runs: Mapping[Name, Callable[[], object]], rounds: int = _ROUNDS) -> dict[Name, float]:
    """Median milliseconds of every run on the device, without a graph.

    For programs that take the device longer than the host needs to queue the next: a graph would keep all they
    allocate in a pool of its own. In turns and in slices of time, as `interleaved`; a run longer than a slice counts
    as it is.
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
    """Median microseconds of every run when nothing it reads is in the L2.

    For programs that read memory once, like a step of decoding: a real step finds its cache cold, since the layers
    before it have read theirs. Before each replay a large buffer is summed, which fills the L2 with other data. It is
    read, not written: lines that were written have to be stored before they can go, and the program would pay for
    that, some 8 to 10 us. Runs take turns, round by round, so that all see the same clocks. Nothing waits for the
    host, which is ahead of the device by a head start. The time between two events with an empty graph between them is
    in every figure (see `measured_floor`).

    A run that cannot be captured is left out, and `failures` says why; without `failures` its error is raised.
    """
    graphs: dict[Name, torch.cuda.CUDAGraph] = {}
    stream = torch.cuda.current_stream()
    for name, run in runs.items():
        try:
            graphs[name] = _captured(name, run)
        except Exception as error:
            if failures is None:
                raise
            failures[name] = reason(error)
            torch.cuda.set_stream(stream)  # a capture that broke off may have left another
    marks: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    buffer = _buffer()
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY // 10)
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


def measured_floor() -> dict[str, float]:
    """What `cold` reads when there is nothing to do, and the bandwidth it reads for a plain sum over 1 GiB."""
    nothing = torch.zeros((), device="cuda")
    numbers = torch.ones(2**28, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a graph without a node
        times = cold({"empty": lambda: nothing, "read": numbers.sum})
    return {"empty_graph_us": times["empty"], "read_tb_per_s": numbers.nbytes / times["read"] / 1e6}


def wall(runs: Mapping[Name, Callable[[], object]], rounds: int = 7) -> dict[Name, float]:
    """Median seconds of every run on the host, in turns, after one run that does not count."""
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for counts in [False] + [True] * rounds:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if counts:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def reason(error: BaseException) -> str:
    """An error in the space of a table's cell."""
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0]}"[:100] if said else type(error).__name__


@functools.cache
def _buffer() -> Tensor:
    return torch.ones(_FLUSH // 4, device="cuda")


def _captured(name: object, run: Run) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            if not torch.isfinite(run()).all():  # garbage can run at another speed
                raise RuntimeError(f"{name} computed NaN or infinity")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _between_events(run: Callable[[], object], times: int) -> float:
    """Milliseconds of one run among `times`, queued one after another."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / times


def host_ms(run: Run) -> float:
    """Milliseconds the host needs to queue a run, measured while the device is kept busy with something else."""
    samples = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY)
        begin = time.perf_counter()
        run()
        samples.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(samples)
