"""A GPU, measured in CUDA graphs, and the link between two of them where there are two."""

from __future__ import annotations

import gc
import json
import tempfile
import warnings
from pathlib import Path

import torch

from attnmesh import launch
from attnmesh.bench.timing import cold, interleaved, queued
from attnmesh.calibrate.kernels import Run, empty_call, samples
from attnmesh.calibrate.links import LinkFigures, time_exchanges
from attnmesh.calibrate.sample import Sample, curves_of
from attnmesh.comm import Comm
from attnmesh.plan.hardware import Device, Link

_CALLS = 32  # in one graph, for what a call takes at least


def measure_cuda(name: str, source: str, *, quick: bool) -> tuple[Device, Link | None]:
    """The first GPU, and the link between it and the second, if there is one."""
    timed = samples("cuda", quick=quick)
    call, graph = _launch()
    seconds = [_seconds(sample, call, graph, rounds=1 if quick else 3) for sample in timed]
    device = Device(
        name, source, float(torch.cuda.get_device_properties(0).total_memory), call,
        curves_of(timed, seconds, square=False), None, curves_of(timed, seconds, square=True),
    )  # fmt: skip
    return device, _link(name, source, quick) if torch.cuda.device_count() > 1 else None


def _seconds(sample: Sample, least: float, graph: float, rounds: int) -> float:
    """Of one call, without what a `graph` takes that holds nothing else, but the `least` that a call does.

    A cache that is decoded is read from memory, not from the L2, as in real steps.
    """
    gc.collect()
    torch.cuda.empty_cache()
    runs: dict[str, Run] = {"call": sample.make()}
    if sample.kind == "decode":
        nothing = torch.zeros((), device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a graph without a node
            times = cold({**runs, "nothing": lambda: nothing}, rounds=5 * rounds)
        return max(times["call"] - times["nothing"], 0.1 * times["call"]) * 1e-6
    if sample.before is not None:
        runs["before"] = sample.before()
    # The sparse family asks its host for sizes on the way: it is queued, as it will be, and not captured.
    ms = (queued if sample.kind in ("sparse", "sparse backward", "indexer") else interleaved)(runs, rounds)
    before = ms["before"] if "before" in ms else 1e3 * graph
    return max((ms["call"] - before) * 1e-3, least)


def _launch() -> tuple[float, float]:
    """What one more small call in a graph takes, and the graph itself."""
    small = empty_call("cuda")

    def several() -> torch.Tensor:
        for _ in range(_CALLS - 1):
            small()
        return small()

    ms = interleaved({"one": small, "several": several}, 3)
    call = max(ms["several"] - ms["one"], 1e-6) / (_CALLS - 1) * 1e-3
    return call, max(ms["one"] * 1e-3 - call, 0.0)


def _link(name: str, source: str, quick: bool) -> Link:
    with tempfile.TemporaryDirectory() as folder:
        launch.start(2, "cuda", _rank, folder, quick)
        exchanges = json.loads(Path(folder, "0").read_text())
    link = LinkFigures.of({tuple(case): time for case, time in exchanges})
    between = f"{source}; two GPUs that both send"
    # Each has a port of its own, both ways: half of what both directions pass together.
    return Link(f"{name}-gpus", between, link.latency, link.bandwidth / 2, link.message)


def _rank(comm: Comm, folder: str, quick: bool) -> None:
    comm.agree("calibrate", {"device": "cuda"})  # NCCL's first operation wants everybody
    exchanges = time_exchanges(comm, "cuda", quick=quick)
    Path(folder, str(comm.rank)).write_text(json.dumps([[list(case), time] for case, time in exchanges.items()]))
