"""How close a ring comes to its ideal: a world-th of one device doing everything.

    efficiency = T(one device, torch's cuDNN attention, whole sequence) / (world x slowest rank)

On CUDA every rank's program runs by itself on the one device, in turn with the baseline, so that clocks drift for both
alike. The two floors of a rank are 4 x pairs x Hq x D operations forward (10 backward) over the device's matrix rate,
and the bytes of q, k, v, out and the travelling blocks over its bandwidth; the first is far larger at these lengths.
On the CPU real processes exchange over gloo: two of one thread against one of two.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from attnmesh.calibration.timing import Run, host_ms, interleaved
from attnmesh.comm import Comm
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from benchmarks.alone import AloneComm
from benchmarks.peers import differentiated, inputs, one_device


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
    whole = inputs(length, backward)
    runs: dict[tuple[object, ...], Run] = {("one",): partial(one_device, "cuDNN", *whole)}
    for rank in range(world):
        shard = inputs(Zigzag().local_length(length, world, rank), backward)
        for copies in (True, False):
            comm = AloneComm(rank, world, copies=copies)
            cp = ContextParallel(comm, layout=Zigzag(), schedule="ring")
            runs[rank, copies] = partial(run_rank, comm, cp, length, *shard)
    times = interleaved(runs)
    one = times["one",]
    alone, copied = ([times[rank, copies] for rank in range(world)] for copies in (False, True))
    return Efficiency(
        length, world, "forward+backward" if backward else "forward",
        one, max(alone), statistics.mean(alone), one / (world * max(alone)),
        max(copied), one / (world * max(copied)), host_ms(runs[world - 1, False]),
    )  # fmt: skip


def run_rank(
    comm: AloneComm, cp: ContextParallel, length: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None
) -> Tensor:
    """One rank's program."""
    comm.begin()
    return differentiated(cp.attention(q, k, v, mask=Causal(), length=length), (q, k, v), grad)


def measure_memory(per_rank: int, worlds: Sequence[int]) -> list[dict[str, object]]:
    """Peak bytes a rank adds to its inputs, forward+backward, at `per_rank` positions a rank: must not grow."""
    rows: list[dict[str, object]] = []
    for world in worlds:
        q, k, v, grad = inputs(per_rank, True)
        comm = _PlainMemory(world - 1, world)
        cp = ContextParallel(comm, layout=Zigzag(), schedule="ring")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_rank(comm, cp, per_rank * world, q, k, v, grad)
        peak = torch.cuda.max_memory_allocated() - before
        rows.append({"length": per_rank * world, "world": world, "per_rank": per_rank, "peak_bytes": peak})
    return rows


class _PlainMemory(AloneComm):
    """Buffers are made and freed as in real life, so that peak memory is real."""

    buffer = Comm.buffer
