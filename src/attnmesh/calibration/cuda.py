"""Measures a GPU with CUDA graphs, and the link between two GPUs if there are two."""

from __future__ import annotations

import gc
import warnings

import torch

from attnmesh import launch
from attnmesh.calibration.cpu import LinkFigures, Progress, time_exchanges
from attnmesh.calibration.kernels import KernelSample, Run, empty_call, kernel_curves, kernel_samples
from attnmesh.calibration.timing import cold, interleaved, queued
from attnmesh.comm import Comm
from attnmesh.planner.hardware import Device, Link

_CALLS = 16  # calls per graph if a call is short
_SHORT_MS = 0.1  # below this, the overhead of a graph counts


def measure_cuda(
    name: str, source: str, *, quick: bool, progress: Progress | None = None
) -> tuple[Device, Link | None]:
    """The first GPU as a device, and the link to the second one if there is one."""
    samples = kernel_samples("cuda", quick=quick)
    rounds = 1 if quick else 3
    shortest = _call_seconds(empty_call("cuda"), rounds)
    seconds = []
    for done, sample in enumerate(samples):
        if progress is not None:
            progress(sample.kind, done, len(samples))
        seconds.append(max(_sample_seconds(sample, rounds), shortest))
    if progress is not None:
        progress("done", len(samples), len(samples))
    device = Device(
        name,
        source,
        float(torch.cuda.get_device_properties(0).total_memory),
        shortest,
        kernel_curves(samples, seconds, causal=False),
        None,
        kernel_curves(samples, seconds, causal=True),
    )
    return device, _measure_link(name, source, quick) if torch.cuda.device_count() > 1 else None


def _sample_seconds(sample: KernelSample, rounds: int) -> float:
    """Seconds of one call. Decode is timed with a cold L2, since a real step reads its KV cache from memory."""
    gc.collect()
    torch.cuda.empty_cache()
    call = sample.make()
    if sample.kind == "decode":
        nothing = torch.zeros((), dtype=torch.float32, device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about an empty graph
            times = cold({"call": call, "nothing": lambda: nothing}, rounds=5 * rounds)
        return max(times["call"] - times["nothing"], 0.1 * times["call"]) * 1e-6
    if sample.kind in ("sparse", "sparse backward", "indexer"):
        # The sparse operations read sizes on the host, so they cannot be captured in a graph.
        return queued({"call": call}, rounds)["call"] * 1e-3
    before = 0.0 if sample.before is None else _call_seconds(sample.before(), rounds)
    return _call_seconds(call, rounds) - before


def _call_seconds(call: Run, rounds: int) -> float:
    """Seconds of a call in a graph. A short call is timed as one of several, without the overhead of the graph."""
    alone = interleaved({"call": call}, 1)["call"]
    if alone > _SHORT_MS:
        return interleaved({"call": call}, rounds)["call"] * 1e-3

    def several() -> torch.Tensor:
        for _ in range(_CALLS - 1):
            call()
        return call()

    ms = interleaved({"one": call, "several": several}, rounds)
    return max(ms["several"] - ms["one"], 1e-6) / (_CALLS - 1) * 1e-3


def _measure_link(name: str, source: str, quick: bool) -> Link:
    figures = LinkFigures.from_times(launch.run(_time_link, 2, device="cuda", quick=quick)[0])
    origin = f"{source}; two GPUs that both send"
    # The bandwidth is the sum of both directions, and every GPU has a port per direction.
    return Link(f"{name}-gpus", origin, figures.latency, figures.bandwidth / 2, figures.message)


def _time_link(comm: Comm, *, quick: bool) -> dict[tuple[int, int], float]:
    comm.agree("calibrate", {"device": "cuda"})  # the first operation of NCCL must include all ranks
    return time_exchanges(comm, "cuda", quick=quick)
