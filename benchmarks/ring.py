"""Efficiency of ring context parallelism against one device that computes everything.

    efficiency = T(one device, torch's cuDNN attention, whole sequence) / (ranks x slowest rank)

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

from attnmesh import launch
from attnmesh.calibration.timing import Run, interleaved
from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.ops.dense.api import attention
from attnmesh.parallel.context import ContextParallel
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.one_rank import AllocatingComm, OneRankComm
from benchmarks.peers import Inputs, one_device, random_inputs, run_backward
from benchmarks.timers import host_ms


@dataclass(frozen=True)
class Efficiency:
    """One line of the table; times in milliseconds."""

    length: int
    ranks: int
    direction: str
    one_device_ms: float
    slowest_rank_ms: float
    mean_rank_ms: float
    efficiency: float
    with_copies_ms: float
    with_copies: float
    host_ms: float


def measure_cuda(
    lengths: Sequence[int], worlds: Sequence[int], directions: Sequence[bool] = (False, True), backend: str = "auto"
) -> list[dict[str, object]]:
    """Efficiency of every world at every length, forward and forward with backward, bf16, causal, zigzag."""
    return [
        asdict(_efficiency(length, world, backward, backend))
        for length in lengths
        for backward in directions
        for world in worlds
    ]


def _efficiency(length: int, world: int, backward: bool, backend: str) -> Efficiency:
    whole = random_inputs(length, backward)
    runs: dict[tuple[object, ...], Run] = {("one",): partial(one_device, "cuDNN", *whole)}
    for rank in range(world):
        shard = random_inputs(Zigzag().local_length(length, world, rank), backward)
        for copies in (True, False):
            comm = OneRankComm(rank, world, copies=copies)
            runs[rank, copies] = rank_program(comm, length, shard, backend)
    times = interleaved(runs)
    one = times["one",]
    alone, copied = ([times[rank, copies] for rank in range(world)] for copies in (False, True))
    return Efficiency(
        length, world, "forward+backward" if backward else "forward",
        one, max(alone), statistics.mean(alone), one / (world * max(alone)),
        max(copied), one / (world * max(copied)), host_ms(runs[world - 1, False]),
    )  # fmt: skip


def rank_program(comm: OneRankComm, length: int, shard: Inputs, backend: str) -> Run:
    """The program of one rank of a ring, on its shard of the inputs."""
    cp = ContextParallel(comm, layout=Zigzag(), schedule="ring", backend=backend)
    return partial(run_rank, comm, cp, length, *shard)


def run_rank(
    comm: OneRankComm, cp: ContextParallel, length: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None
) -> Tensor:
    """One rank's program."""
    comm.begin()
    return run_backward(cp.attention(q, k, v, mask=Causal(), length=length), (q, k, v), grad)


def measure_memory(per_rank: int, worlds: Sequence[int]) -> list[dict[str, object]]:
    """Return peak bytes per rank above its inputs, forward+backward: constant at `per_rank` positions per rank."""
    rows: list[dict[str, object]] = []
    for world in worlds:
        q, k, v, grad = random_inputs(per_rank, True)
        comm = AllocatingComm(world - 1, world)
        cp = ContextParallel(comm, layout=Zigzag(), schedule="ring")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_rank(comm, cp, per_rank * world, q, k, v, grad)
        peak = torch.cuda.max_memory_allocated() - before
        rows.append({"length": per_rank * world, "ranks": world, "length_per_rank": per_rank, "peak_bytes": peak})
    return rows


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
_ROUNDS = 3


def measure_cpu(length: int, world: int) -> list[dict[str, object]]:
    """Efficiency, T(one process, `world` threads) / T(slowest of `world` processes of one thread), causal, zigzag."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for backward in (False, True):
            torch.set_num_threads(world)
            inputs = _inputs(length, dtype, backward)
            ours = _timed(partial(_attnmesh, inputs))
            # torch's bf16 kernel takes minutes on processors without bf16 instructions
            peer = _timed(partial(_torch, inputs)) if dtype == torch.float32 else None
            spread = _in_processes(length, world, dtype, backward)
            one = ours if peer is None else min(ours, peer)
            rows.append(
                {
                    "length": length, "ranks": world, "dtype": str(dtype).removeprefix("torch."),
                    "direction": "forward+backward" if backward else "forward",
                    "attnmesh_over_torch_sdpa": "not run" if peer is None else round(ours / peer, 3),
                    "efficiency": one / spread,
                }
            )  # fmt: skip
    return rows


def _attnmesh(inputs: list[Tensor]) -> None:
    q, k, v = inputs[:3]
    _back(attention(q, k, v, mask=Causal()), inputs)


def _torch(inputs: list[Tensor]) -> None:
    q, k, v = inputs[:3]
    _back(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), inputs)


def _in_processes(length: int, world: int, dtype: torch.dtype, backward: bool) -> float:
    """Seconds of the slowest rank."""
    return max(launch.run(_rank, world, threads=1, length=length, dtype=dtype, backward=backward))


def _rank(comm: Comm, length: int, dtype: torch.dtype, backward: bool) -> float:
    cp = ContextParallel(comm, layout=Zigzag(), schedule="ring")
    inputs = _inputs(cp.layout.local_length(length, comm.world, comm.rank), dtype, backward)

    def run() -> None:
        comm.barrier()
        _back(cp.attention(*inputs[:3], mask=Causal(), length=length), inputs)

    return _timed(run)


def _inputs(length: int, dtype: torch.dtype, backward: bool) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    drawn = [torch.randn(1, n, length, HEAD_DIM).to(dtype) for n in heads]
    return [x.requires_grad_(backward) for x in drawn[:3]] + drawn[3:]


def _back(out: Tensor, inputs: list[Tensor]) -> None:
    if inputs[0].requires_grad:
        torch.autograd.grad(out, inputs[:3], inputs[3])


def _timed(run: Callable[[], None]) -> float:
    run()
    samples = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def main(device: MeasuredDeviceOption = None, json: JsonOption = None) -> None:
    """Measure the efficiency of ring context parallelism against one device and, on CUDA, its peak memory."""
    chosen = default_device(device)
    if chosen == "cuda":
        sections = {
            "efficiency against one device with cuDNN (bf16, causal, zigzag, 32/8 heads, D=128)": measure_cuda(
                (32768, 131072), (4, 8)
            ),
            "peak memory per rank above its inputs, forward+backward": measure_memory(8192, (4, 8, 16)),
        }
    else:
        sections = {"efficiency of 2 processes x 1 thread against 1 x 2 (gloo, causal, zigzag)": measure_cpu(8192, 2)}
    publish("ring", chosen, sections.items(), json)


app = make_app(main)

if __name__ == "__main__":
    app()
