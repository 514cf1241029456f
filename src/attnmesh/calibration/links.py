"""Measures latency and bandwidth of messages between two processes, through the library's own exchange."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from attnmesh.comm import Comm

_SMALL = 64  # bytes of a message whose time is its latency
_MANY = 17  # messages in one exchange


@dataclass(frozen=True)
class LinkFigures:
    """A link between two ranks that both send and receive at once."""

    latency: float  # seconds of a small message
    message: float  # seconds of each further message in the same exchange
    bandwidth: float  # bytes per second, of both directions together

    @staticmethod
    def from_times(seconds: dict[tuple[int, int], float]) -> LinkFigures:
        """The figures from the seconds of exchanges, by (messages per direction, bytes per message)."""
        latency = seconds[1, _SMALL]
        message = max((seconds[_MANY, _SMALL] - latency) / (_MANY - 1), 1e-8)
        large = [(nbytes, time) for (count, nbytes), time in seconds.items() if count == 1 and nbytes > _SMALL]
        rates = [2 * nbytes / max(time - latency, 1e-2 * time) for nbytes, time in large]
        return LinkFigures(latency, message, statistics.median(rates))


def time_exchanges(comm: Comm, device: str, *, quick: bool) -> dict[tuple[int, int], float]:
    """Seconds of exchanges between ranks 0 and 1, by (messages per direction, bytes per message).

    The lower decile of several rounds, since other programs on the machine only add to the time.
    """
    sizes = [2**18, 2**21] if quick else [2**16, 2**18, 2**20, 2**22, 2**24]
    cases = [(1, _SMALL), (_MANY, _SMALL), *((1, nbytes) for nbytes in sizes)]
    times = {}
    for count, nbytes in cases:
        comm.barrier()
        if comm.rank < 2:
            times[count, nbytes] = _exchange_seconds(comm, device, count, nbytes, rounds=10 if quick else 40)
    return times


def _exchange_seconds(comm: Comm, device: str, count: int, nbytes: int, rounds: int) -> float:
    peer = 1 - comm.rank
    sends, recvs = (
        [(torch.zeros(nbytes, dtype=torch.uint8, device=device), peer) for _ in range(count)] for _ in range(2)
    )
    samples = []
    for step in range(rounds + 2):
        start = time.perf_counter()
        comm.exchange(sends, recvs).wait()
        if device == "cuda":
            torch.cuda.synchronize()
        if step >= 2:
            samples.append(time.perf_counter() - start)
    return statistics.quantiles(samples, n=10)[0]
