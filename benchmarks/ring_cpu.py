"""The ring on the CPU: two processes of one thread over gloo against one process of two threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm import Comm, launch
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.ops.dense.api import attention
from attnmesh.parallel.context import ContextParallel

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
