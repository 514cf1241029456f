"""Small messages between CPU processes of one host: shared memory against gloo."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from attnmesh.comm import Comm, comm_from
from attnmesh.comm.in_flight import VARIABLE
from attnmesh.launch import run
from benchmarks.common import JsonOption, make_app, publish

BYTES = 2304, 16 << 10, 64 << 10
ROUNDS, CALLS = 7, 60


def measure_exchange(ranks: int) -> list[dict[str, object]]:
    """Time over gloo divided by time through shared memory, measured alternately in the same processes."""
    return run(_on_rank, ranks, threads=1)[0]


def _on_rank(comm: Comm) -> list[dict[str, object]]:
    comms = _comm(comm, "0"), _comm(comm, "1")
    rows: list[dict[str, object]] = []
    for nbytes in BYTES:
        for name, operation in _operations(comm, nbytes).items():
            rounds = [[_seconds(each, operation) for each in comms] for _ in range(ROUNDS)]
            gloo, shared = map(statistics.median, zip(*rounds, strict=True))
            rows.append({"ranks": comm.world, "operation": name, "bytes": nbytes, "ratio": gloo / shared})
    return rows


def _operations(comm: Comm, nbytes: int) -> dict[str, Callable[[Comm], object]]:
    x, buffer = torch.randn(nbytes // 4), torch.empty(nbytes // 4)
    shapes, right, left = [x.shape] * comm.world, (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    return {
        "all_gather": lambda on: on.all_gather(x, shapes),
        "all_reduce": lambda on: on.all_reduce(x),
        "exchange": lambda on: on.exchange([(x, right)], [(buffer, left)]).wait(),
    }


def _comm(comm: Comm, value: str) -> Comm:
    os.environ[VARIABLE] = value
    each = comm_from(dist.new_group(list(range(comm.world))))
    each.agree("start", {})  # here ranks connect
    return each


def _seconds(comm: Comm, operation: Callable[[Comm], object]) -> float:
    operation(comm)
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        operation(comm)
    return (time.perf_counter() - begin) / CALLS


def main(
    ranks: Annotated[list[int] | None, typer.Option("--ranks", min=2, help="Number of ranks. Repeatable.")] = None,
    json: JsonOption = None,
) -> None:
    """Time small messages over gloo and through shared memory."""
    publish(
        "exchange", "cpu", ((f"gloo over shared memory, {n} ranks", measure_exchange(n)) for n in ranks or [2, 4]), json
    )


app = make_app(main)

if __name__ == "__main__":
    app()
