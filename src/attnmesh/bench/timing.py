"""Times on a GPU, compared in one run: programs as graphs, replayed in turns under load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
Run = Callable[[], Tensor]

_ROUNDS = 5
_SLICE_MS = 100.0
_BUSY = 40_000_000  # device cycles, about 20 ms


def interleaved(runs: Mapping[Name, Run], rounds: int = _ROUNDS) -> dict[Name, float]:
    """Median milliseconds of every run on the device.

    Runs are captured as graphs, so that the host is out of the picture, and replayed in turns for a slice of time long
    enough for the clocks to settle under load: a short run after a pause would profit from a cool chip.
    """
    graphs = {name: _captured(name, run) for name, run in runs.items()}
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            warm = _replayed(graph, 1)
            samples[name].append(_replayed(graph, max(1, round(_SLICE_MS / warm))))
    return {name: statistics.median(values) for name, values in samples.items()}


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


def _replayed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Milliseconds of one replay among `times`."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
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
