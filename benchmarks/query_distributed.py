"""Query-distributed causal attention against one device that computes everything: speed-up, balance, memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from torch import Tensor

from attnmesh.calibration.timing import Run, interleaved
from attnmesh.cli.options import Device, check_device
from attnmesh.core.masks import Causal
from attnmesh.core.visibility import Patch
from attnmesh.parallel.query_distributed import ring_chunks, ring_distributed_attention
from benchmarks.common import JsonOption, LengthsOption, added_bytes, make_app, publish
from benchmarks.peers import one_device, random_inputs, run_backward


def measure_query_distributed(lengths: Sequence[int], rings: Sequence[int]) -> list[dict[str, object]]:
    """Speed-up and balance of every ring at every length: every device's program by itself, bf16, 32/8 heads, D=128."""
    return [_speed_up(length, ring, backward) for length in lengths for backward in (False, True) for ring in rings]


def _speed_up(length: int, ring: int, backward: bool) -> dict[str, object]:
    q, k, v, grad = random_inputs(length, backward)
    runs: dict[object, Run] = {"one": partial(one_device, "cuDNN", q, k, v, grad)}
    for device in range(ring):
        runs[device] = partial(_device, ring, device, q, k, v, grad)
    times = interleaved(runs)
    devices = [times[device] for device in range(ring)]
    work = [_pairs(length, ring, device) for device in range(ring)]
    return {
        "length": length, "ranks": ring, "direction": "forward+backward" if backward else "forward",
        "one_device_ms": times["one"], "slowest_ms": max(devices), "speed_up": times["one"] / max(devices),
        "time_worst_over_mean": max(devices) / statistics.mean(devices),
        "work_worst_over_mean": max(work) / statistics.mean(work),
    }  # fmt: skip


def _device(ring: int, device: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Tensor:
    out = ring_distributed_attention(q, k, v, ring_size=ring, ring_id=device)
    return run_backward(out, (q, k, v), None if grad is None else grad[:, :, : out.shape[2]])


def _pairs(length: int, ring: int, device: int) -> int:
    chunks = tuple(chunk for chunk in ring_chunks(length, ring, device) if chunk)
    return Patch(Causal(), chunks, (range(length),)).pairs


def measure_memory(length: int, rings: Sequence[int]) -> list[dict[str, object]]:
    """Peak bytes a forward adds to the replicated inputs: one device computing everything, and a device of a ring."""
    q, k, v, _ = random_inputs(length, False)
    rows: list[dict[str, object]] = [
        {"length": length, "ranks": 1, "peak_bytes": added_bytes(partial(one_device, "cuDNN", q, k, v, None))}
    ]
    for ring in rings:
        peaks = [added_bytes(partial(_device, ring, device, q, k, v, None)) for device in range(ring)]
        rows.append({"length": length, "ranks": ring, "peak_bytes": max(peaks)})
    return rows


def main(
    lengths: LengthsOption = None,
    ranks: Annotated[list[int] | None, typer.Option("--ranks", min=2, help="Number of ranks. Repeatable.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure query-distributed causal attention on one GPU: speed-up, balance and memory."""
    check_device(Device.CUDA)
    lengths, ranks = lengths or [32768, 131072], ranks or [4, 8]
    sections = {
        "query-distributed attention against one device with cuDNN (bf16, causal, 32/8 heads, D=128)": (
            measure_query_distributed(lengths, ranks)
        ),
        "peak memory of a forward above the replicated q, k and v": measure_memory(max(lengths), ranks),
    }
    publish("query_distributed", "cuda", sections.items(), json)


app = make_app(main)

if __name__ == "__main__":
    app()
