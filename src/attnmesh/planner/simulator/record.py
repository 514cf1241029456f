"""What a simulation notes down: seconds of every rank, and what happened on the ranks that are watched."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import SIZED_IN_BYTES, Floats, Kernels, MessageTotals, Round
from attnmesh.planner.hardware import Cluster
from attnmesh.trace.timeline import Span


@dataclass(frozen=True)
class Timed:
    """A round's kernels of one kind, with their seconds by rank, not slowed down by others on the same cores."""

    kernels: Kernels
    seconds: Floats


def timed(work: Sequence[Kernels], cluster: Cluster, slower: Floats) -> list[Timed]:
    """What every rank takes for a round's work; `slower` is the factor of each.

    On a GPU, what runs beside the rest takes no time of its own unless there is more of it than of the rest.
    """
    each = [cluster.device.kernel_seconds(k) * slower for k in work]
    if cluster.device.cores is None and any(k.overlapped for k in work):
        overlapped: Floats = sum((s for k, s in zip(work, each, strict=True) if k.overlapped), np.zeros(1))
        rest: Floats = sum((s for k, s in zip(work, each, strict=True) if not k.overlapped), np.zeros(1))
        exposed = np.maximum(overlapped - rest, 0.0) / np.where(overlapped > 0, overlapped, 1.0)
        each = [s * exposed if k.overlapped else s for k, s in zip(work, each, strict=True)]
    return [Timed(k, s) for k, s in zip(work, each, strict=True)]


def beside_kernels(round_: Round, seconds: Floats, cluster: Cluster) -> Floats:
    """What a round takes of every rank's core besides its kernels, which take `seconds`; nothing where ranks have none.

    A rank's own program runs there, too, and the threads that move its messages, out and in. (On a GPU all of this is
    the host's, which is ahead.)
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
    """Seconds by rank, and the spans of the ranks in `keep`."""

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
        """A round's kernels, one after the other; on shared cores each is stretched as the whole round was."""
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
        """A message, at either end if that is watched: sent when its last byte left, received when it is there."""
        if self.kept[source]:
            facts: dict[str, object] = {"bytes": nbytes, "to": target, "link": link}
            self.spans.append(Span(source, "send", name, begin, left, facts))
        if self.kept[target]:
            facts = {"bytes": nbytes, "from": source, "link": link}
            self.spans.append(Span(target, "receive", name, begin, there, facts))

    def bundle(self, name: str, rank: int, bundle: MessageTotals, begin: float, end: float) -> None:
        """A rank's part in a bundle."""
        out, into = (
            int(bundle.intra_node_out[rank] + bundle.inter_node_out[rank]),
            int(bundle.intra_node_in[rank] + bundle.inter_node_in[rank]),
        )
        sent: dict[str, object] = {"bytes": out, "messages": int(bundle.sends[rank])}
        self.spans.append(Span(rank, "send", name, begin, end, sent))
        self.spans.append(Span(rank, "receive", name, begin, end, {"bytes": into}))

    def waiting(self, rank: int, names: Sequence[str], begin: float, end: float) -> None:
        """A rank that had nothing to do before these exchanges were done."""
        if end > begin:
            self.spans.append(Span(rank, "wait", ", ".join(names), begin, end))


def _size(kernels: Kernels, rank: int, shape: tuple[int, ...]) -> dict[str, object]:
    unit = "bytes" if kernels.kind in SIZED_IN_BYTES else "operations"
    size, calls = (np.broadcast_to(values, shape)[rank] for values in (kernels.size, kernels.calls))
    return {unit: float(size), "calls": float(calls)}
