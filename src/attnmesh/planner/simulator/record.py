"""What a simulation records: seconds of every rank, and the timeline of selected ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import SIZED_IN_BYTES, Floats, Kernels, MessageTotals, Round
from attnmesh.trace.timeline import Span


@dataclass(frozen=True)
class Timed:
    """Kernels of one kind in a round, with their seconds by rank on cores of their own."""

    kernels: Kernels
    seconds: Floats


def timed(work: Sequence[Kernels], cluster: Cluster, slower: Floats) -> list[Timed]:
    """Seconds of every rank for the kernels of a round; `slower` is the slowdown of each rank.

    On a GPU, overlapped kernels only take the time by which they are longer than the rest.
    """
    each = [cluster.device.kernel_seconds(k) * slower for k in work]
    if cluster.device.cores is None and any(k.overlapped for k in work):
        overlapped: Floats = sum((s for k, s in zip(work, each, strict=True) if k.overlapped), np.zeros(1))
        rest: Floats = sum((s for k, s in zip(work, each, strict=True) if not k.overlapped), np.zeros(1))
        exposed = np.maximum(overlapped - rest, 0.0) / np.where(overlapped > 0, overlapped, 1.0)
        each = [s * exposed if k.overlapped else s for k, s in zip(work, each, strict=True)]
    return [Timed(k, s) for k, s in zip(work, each, strict=True)]


def host_seconds(round_: Round, seconds: Floats, cluster: Cluster) -> Floats:
    """Seconds of a round on every rank's core besides its kernels, which take `seconds`; 0 on a GPU.

    The program of a rank runs on its core too, and so do the threads that send and receive its messages. (On a GPU all
    of this runs on the host, ahead of the device.)
    """
    if cluster.device.cores is None:
        return np.zeros_like(seconds)
    link, world = cluster.intra_node, len(seconds)
    taken = np.where(seconds > 0, cluster.device.round, 0.0)
    for exchange in round_.starts.values():
        if isinstance(exchange, MessageTotals):
            nbytes = exchange.intra_node_out + exchange.intra_node_in + exchange.inter_node_out + exchange.inter_node_in
            taken = taken + exchange.sends * link.message + nbytes / link.bandwidth
        else:
            taken = taken + np.bincount(exchange.source, minlength=world) * link.message
            for ends in (exchange.source, exchange.target):
                taken = taken + np.bincount(ends, exchange.nbytes, world) / link.bandwidth
    return taken


class Record:
    """Seconds by rank, and the timeline spans of the ranks in `keep`."""

    def __init__(self, world: int, keep: Collection[int]) -> None:
        unknown = sorted(rank for rank in keep if not 0 <= rank < world)
        if unknown:
            raise ValueError(f"keep must name ranks within 0..{world - 1}, got {', '.join(map(str, unknown))}")
        self.finish: Floats = np.zeros(world)
        self.computed: Floats = np.zeros(world)
        self.waited: Floats = np.zeros(world)
        self.spans: list[Span] = []
        self.keep = sorted(set(keep))
        self.kept = np.zeros(world, dtype=bool)
        self.kept[self.keep] = True

    def computing(self, rank: int, round_name: str, work: Sequence[Timed], begin: float, end: float) -> None:
        """Record the kernels of a round in order; on shared cores each is stretched as the whole round was."""
        parts = [(part.kernels, float(np.broadcast_to(part.seconds, self.kept.shape)[rank])) for part in work]
        whole = sum(seconds for _, seconds in parts)
        if not whole:
            return
        at = begin
        for kernels, seconds in parts:
            if seconds > 0:
                until = at + (end - begin) * seconds / whole
                facts: dict[str, object] = {"round": round_name, **_size(kernels, rank, self.kept.shape)}
                self.spans.append(Span(rank, "compute", kernels.kind, at, until, facts))
                at = until

    def message(
        self, name: str, source: int, target: int, nbytes: int, link: str, begin: float, left: float, there: float
    ) -> None:
        """Record a message on the ranks kept: sent when its last byte has left, received when it has arrived."""
        if self.kept[source]:
            facts: dict[str, object] = {"bytes": nbytes, "to": target, "link": link}
            self.spans.append(Span(source, "send", name, begin, left, facts))
        if self.kept[target]:
            facts = {"bytes": nbytes, "from": source, "link": link}
            self.spans.append(Span(target, "receive", name, begin, there, facts))

    def totals(self, name: str, rank: int, exchange: MessageTotals, begin: float, end: float) -> None:
        """Record a rank's part of an exchange known by its totals."""
        out, into = (
            int(exchange.intra_node_out[rank] + exchange.inter_node_out[rank]),
            int(exchange.intra_node_in[rank] + exchange.inter_node_in[rank]),
        )
        sent: dict[str, object] = {"bytes": out, "messages": int(exchange.sends[rank])}
        self.spans.append(Span(rank, "send", name, begin, end, sent))
        self.spans.append(Span(rank, "receive", name, begin, end, {"bytes": into}))

    def waiting(self, rank: int, names: Sequence[str], begin: float, end: float) -> None:
        """Record that a rank waited for these exchanges."""
        if end > begin:
            self.spans.append(Span(rank, "wait", ", ".join(names), begin, end))


def _size(kernels: Kernels, rank: int, shape: tuple[int, ...]) -> dict[str, object]:
    unit = "bytes" if kernels.kind in SIZED_IN_BYTES else "operations"
    size, calls = (np.broadcast_to(values, shape)[rank] for values in (kernels.size, kernels.calls))
    return {unit: float(size), "calls": float(calls)}
