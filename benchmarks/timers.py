"""Timers besides those of `attnmesh.calibration.timing`: wall time, time of the host, and what a timer itself takes."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import torch

from attnmesh.calibration.timing import Name, Run, cold

_ROUNDS = 5
_BUSY = 40_000_000  # device cycles, about 20 ms


def measured_floor() -> dict[str, float]:
    """What `cold` measures for an empty graph, and the bandwidth it measures for a sum over 1 GiB."""
    nothing = torch.zeros((), dtype=torch.float32, device="cuda")
    numbers = torch.ones(2**28, dtype=torch.float32, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about an empty graph
        times = cold({"empty": lambda: nothing, "read": numbers.sum})
    return {"empty_graph_us": times["empty"], "read_tb_per_s": numbers.nbytes / times["read"] / 1e6}


def wall(runs: Mapping[Name, Callable[[], object]], rounds: int = 7) -> dict[Name, float]:
    """Median wall seconds of every run, in turns, after one warm-up."""
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for counts in [False] + [True] * rounds:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if counts:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


def host_ms(run: Run) -> float:
    """Milliseconds that the host needs to queue a run, measured while the device is busy."""
    samples = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY)
        begin = time.perf_counter()
        run()
        samples.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(samples)
