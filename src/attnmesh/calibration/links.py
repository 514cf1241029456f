"""What messages between two processes cost, through the library's own exchange and whatever is beneath it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from attnmesh.comm import Comm

_SMALL = 64  # bytes of a message whose size does not matter
_MANY = 17  # messages in one exchange


@dataclass(frozen=True)
class LinkFigures:
    """Of two ranks that both send and receive at once."""

    latency: float  # seconds until a small message is there
    message: float  # seconds that one more in the same exchange takes
    bandwidth: float  # bytes a second, of both directions together

    @staticmethod
    def of(seconds: dict[tuple[int, int], float]) -> LinkFigures:
        """From the seconds of exchanges of (messages each way, bytes each)."""
        latency = seconds[1, _SMALL]
        message = max((seconds[_MANY, _SMALL] - latency) / (_MANY - 1), 1e-8)
        large = [(nbytes, time) for (count, nbytes), time in seconds.items() if count == 1 and nbytes > _SMALL]
        rates = [2 * nbytes / max(time - latency, 1e-2 * time) for nbytes, time in large]
        return LinkFigures(latency, message, statistics.median(rates))


def time_exchanges(comm: Comm, device: str, *, quick: bool) -> dict[tuple[int, int], float]:
    """Seconds of exchanges between ranks 0 and 1; other ranks stand by.

    The lower decile of some rounds: whatever else runs on the machine only ever adds.
    """
    sizes = [2**18, 2**21] if quick else [2**16, 2**18, 2**20, 2**22, 2**24]
    cases = [(1, _SMALL), (_MANY, _SMALL), *((1, nbytes) for nbytes in sizes)]
    found = {}
    for workload in cases:
        comm.barrier()
        if comm.rank < 2:
            found[workload] = _timed(comm, device, *workload, rounds=10 if quick else 40)
    return found


def _timed(comm: Comm, device: str, count: int, nbytes: int, rounds: int) -> float:
    other = 1 - comm.rank
    sends, recvs = (
        [(torch.zeros(nbytes, dtype=torch.uint8, device=device), other) for _ in range(count)] for _ in range(2)
    )
    samples = []
    for at in range(rounds + 2):
        start = time.perf_counter()
        comm.exchange(sends, recvs).wait()
        if device == "cuda":
            torch.cuda.synchronize()
        if at >= 2:
            samples.append(time.perf_counter() - start)
    return statistics.quantiles(samples, n=10)[0]
