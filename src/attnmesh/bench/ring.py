"""How close a ring comes to its ideal: a world-th of one device doing everything.

    efficiency = T(one device, torch's cuDNN attention, whole sequence) / (world x slowest rank)

On CUDA every rank's program runs by itself on the one device, in turn with the baseline, so that clocks drift for both
alike. The two floors of a rank are 4 x pairs x Hq x D operations forward (10 backward) over the device's matrix rate,
and the bytes of q, k, v, out and the travelling blocks over its bandwidth; the first is far larger at these lengths.
On the CPU real processes exchange over gloo: two of one thread against one of two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnmesh.bench.alone import AloneComm
from attnmesh.comm import Comm
from attnmesh.layout import Zigzag
from attnmesh.mask import Causal
from attnmesh.parallel.context import ContextParallel

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_ROUNDS = 5
_SLICE_MS = 100.0
_BUSY = 40_000_000  # device cycles, about 20 ms


@dataclass(frozen=True)
class Efficiency:
    """One line of the table; times in milliseconds."""

    length: int
    world: int
    direction: str
    one_device_ms: float
    slowest_rank_ms: float
    mean_rank_ms: float
    efficiency: float
    with_copies_ms: float
    with_copies: float
    host_ms: float


def measure_cuda(lengths: Sequence[int], worlds: Sequence[int]) -> list[dict[str, object]]:
    """Efficiency of every world at every length, forward and forward with backward, bf16, causal, zigzag."""
    return [
        asdict(_efficiency(length, world, backward))
        for length in lengths
        for backward in (False, True)
        for world in worlds
    ]


def _efficiency(length: int, world: int, backward: bool) -> Efficiency:
    whole = _inputs(length, backward)
    runs: dict[tuple[object, ...], Callable[[], Tensor]] = {("one",): partial(_one_device, *whole)}
    for rank in range(world):
        shard = _inputs(Zigzag().local_length(length, world, rank), backward)
        for copies in (True, False):
            cp = ContextParallel(AloneComm(rank, world, copies=copies), layout=Zigzag())
            runs[rank, copies] = partial(_rank, cp, length, *shard)
    times = _interleaved(runs)
    one = times["one",]
    alone, copied = ([times[rank, copies] for rank in range(world)] for copies in (False, True))
    return Efficiency(
        length, world, "forward+backward" if backward else "forward",
        one, max(alone), statistics.mean(alone), one / (world * max(alone)),
        max(copied), one / (world * max(copied)), _host_ms(runs[world - 1, False]),
    )  # fmt: skip


def _inputs(length: int, backward: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    def drawn(heads: int, grad: bool) -> Tensor:
        return torch.randn(1, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    q, k, v = drawn(HEADS, backward), drawn(KV_HEADS, backward), drawn(KV_HEADS, backward)
    return q, k, v, drawn(HEADS, False) if backward else None


def _one_device(q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _back(out, (q, k, v), grad)


def _rank(cp: ContextParallel, length: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Tensor:
    return _back(cp.attention(q, k, v, mask=Causal(), length=length), (q, k, v), grad)


def _back(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor | None) -> Tensor:
    if grad is None:
        return out
    return torch.autograd.grad(out, inputs, grad)[0]


def _interleaved(runs: dict[tuple[object, ...], Callable[[], Tensor]]) -> dict[tuple[object, ...], float]:
    """Median milliseconds of every run on the device.

    Runs are captured as graphs, so that the host is out of the picture, and replayed in turns for a slice of time long
    enough for the clocks to settle under load: a short run after a pause would profit from a cool chip.
    """
    graphs = {name: _captured(run) for name, run in runs.items()}
    samples: dict[tuple[object, ...], list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            warm = _replayed(graph, 1)
            samples[name].append(_replayed(graph, max(1, round(_SLICE_MS / warm))))
    return {name: statistics.median(values) for name, values in samples.items()}


def _captured(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            if not torch.isfinite(run()).all():  # garbage can run at another speed
                raise RuntimeError("a benchmark computed NaN or infinity")
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


def _host_ms(run: Callable[[], Tensor]) -> float:
    """Milliseconds the host needs to queue a run, measured while the device is kept busy with something else."""
    samples = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY)
        begin = time.perf_counter()
        run()
        samples.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(samples)


def measure_memory(per_rank: int, worlds: Sequence[int]) -> list[dict[str, object]]:
    """Peak bytes a rank adds to its inputs, forward+backward, at `per_rank` positions a rank: must not grow."""
    rows: list[dict[str, object]] = []
    for world in worlds:
        q, k, v, grad = _inputs(per_rank, True)
        cp = ContextParallel(_PlainMemory(world - 1, world), layout=Zigzag())
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _rank(cp, per_rank * world, q, k, v, grad)
        peak = torch.cuda.max_memory_allocated() - before
        rows.append({"length": per_rank * world, "world": world, "per_rank": per_rank, "peak_bytes": peak})
    return rows


class _PlainMemory(AloneComm):
    """Buffers are made and freed as in real life, so that peak memory is real."""

    buffer = Comm.buffer
