"""A GPU, measured in CUDA graphs, and the link between two of them where there are two."""

from __future__ import annotations

import gc
import warnings

import torch

from attnmesh.calibration.kernels import Run, empty_call, samples
from attnmesh.calibration.links import LinkFigures, time_exchanges
from attnmesh.calibration.sample import Sample, curves_of
from attnmesh.calibration.timing import cold, interleaved, queued
from attnmesh.comm import Comm, launch
from attnmesh.planner.hardware import Device, Link

_CALLS = 16  # of a crowd
_SHORT_MS = 0.1  # what a graph takes besides its calls counts for shorter ones


def measure_cuda(name: str, source: str, *, quick: bool) -> tuple[Device, Link | None]:
    """The first GPU, and the link between it and the second, if there is one."""
    timed = samples("cuda", quick=quick)
    rounds = 1 if quick else 3
    least = _among_others(empty_call("cuda"), rounds)
    seconds = [max(_seconds(sample, rounds), least) for sample in timed]
    device = Device(
        name, source, float(torch.cuda.get_device_properties(0).total_memory), least,
        curves_of(timed, seconds, square=False), None, curves_of(timed, seconds, square=True),
    )  # fmt: skip
    return device, _link(name, source, quick) if torch.cuda.device_count() > 1 else None


def _seconds(sample: Sample, rounds: int) -> float:
    """Of one call; a cache that is decoded is read from memory, not from the L2, as in real steps."""
    gc.collect()
    torch.cuda.empty_cache()
    call = sample.make()
    if sample.kind == "decode":
        nothing = torch.zeros((), device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a graph without a node
            times = cold({"call": call, "nothing": lambda: nothing}, rounds=5 * rounds)
        return max(times["call"] - times["nothing"], 0.1 * times["call"]) * 1e-6
    if sample.kind in ("sparse", "sparse backward", "indexer"):
        # The sparse family asks its host for sizes on the way: it is queued, as it will be, and not captured.
        return queued({"call": call}, rounds)["call"] * 1e-3
    before = 0.0 if sample.before is None else _among_others(sample.before(), rounds)
    return _among_others(call, rounds) - before


def _among_others(call: Run, rounds: int) -> float:
    """Seconds of a call in a graph of several: a short one is timed in a crowd, without what the graph itself takes."""
    alone = interleaved({"call": call}, 1)["call"]
    if alone > _SHORT_MS:
        return interleaved({"call": call}, rounds)["call"] * 1e-3

    def several() -> torch.Tensor:
        for _ in range(_CALLS - 1):
            call()
        return call()

    ms = interleaved({"one": call, "several": several}, rounds)
    return max(ms["several"] - ms["one"], 1e-6) / (_CALLS - 1) * 1e-3


def _link(name: str, source: str, quick: bool) -> Link:
    link = LinkFigures.of(launch.run(_rank, 2, device="cuda", quick=quick)[0])
    between = f"{source}; two GPUs that both send"
    # Each has a port of its own, both ways: half of what both directions pass together.
    return Link(f"{name}-gpus", between, link.latency, link.bandwidth / 2, link.message)


def _rank(comm: Comm, quick: bool) -> dict[tuple[int, int], float]:
    comm.agree("calibrate", {"device": "cuda"})  # NCCL's first operation wants everybody
    return time_exchanges(comm, "cuda", quick=quick)
