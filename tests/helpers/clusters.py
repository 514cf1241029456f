"""Clusters with round figures, and small programs for the simulator."""

import math
from collections.abc import Sequence

import numpy as np

from attnmesh.planner.hardware import Cluster, Curve, Device, Link
from attnmesh.planner.program import KERNEL_KINDS, Kernels, Messages, Program, Round


def device(flops: float = 1.0, nbytes: float = math.inf, launch: float = 0.0, **more) -> Device:
    """Return a device of so many operations per second, which moves bytes in no time unless `nbytes` is given."""
    of_bytes = {"copy", "relayout", "decode"}
    rate = {kind: min(nbytes, 1e300) if kind in of_bytes else flops for kind in KERNEL_KINDS}
    curves = tuple((kind, Curve(((rate[kind], 1.0),))) for kind in KERNEL_KINDS)
    return Device("round", "made up", 1e9, launch, curves, **more)


def link(bandwidth: float = math.inf, latency: float = 0.0, message: float = 0.0, **more) -> Link:
    return Link("link", "made up", latency, bandwidth, message, **more)


def cluster(
    flops: float = 1.0,
    intra_node: float = math.inf,
    inter_node: float = math.inf,
    *,
    launch: float = 0.0,
    ranks_per_node: int = 1,
) -> Cluster:
    return Cluster(device(flops, launch=launch), link(intra_node), link(inter_node), ranks_per_node, ranks_per_node)


def simulated_device(cores: int | None = None) -> Device:
    """Return a device of one operation per second: amounts of work are seconds."""
    seconds = {"attention": 1.0, "copy": 2.0, "relayout": 2.0}
    return Device("toy", "made up", 1e9, 0.0, tuple((kind, Curve(((1.0, s),))) for kind, s in seconds.items()), cores)


def simulated_cluster(
    ranks_per_node: int = 8,
    rails: int = 8,
    *,
    intra_node: tuple[float, float] = (0.0, 100.0),
    inter_node: tuple[float, float] = (0.0, 10.0),
    message: float = 0.0,
    shared: bool = False,
    cores: int | None = None,
) -> Cluster:
    """Return a cluster with links of (latency, bandwidth)."""
    return Cluster(
        simulated_device(cores),
        Link("near", "made up", *intra_node, message=message, shared=shared),
        Link("far", "made up", *inter_node, message=message),
        ranks_per_node,
        rails,
    )


def attention_kernels(*seconds: float) -> tuple[Kernels, ...]:
    return (Kernels("attention", np.array(seconds, dtype=float), np.ones(len(seconds))),)


def make_program(world: int, *rounds: Round) -> Program:
    return Program("test", world, lambda: iter(rounds))


def ring_program(seconds: Sequence[Sequence[float]], nbytes: Sequence[Sequence[int]]) -> Program:
    """Round s: rank r computes `seconds[s][r]` and sends `nbytes[s][r]` to the next (nothing if that is 0)."""
    world = len(seconds[0])

    def make():
        for s, (spent, sent) in enumerate(zip(seconds, nbytes, strict=True)):
            messages = Messages.of((r, (r + 1) % world, sent[r]) for r in range(world))
            yield Round(f"round {s}", {f"keys {s}": messages}, attention_kernels(*spent), (f"keys {s}",))

    return Program("ring", world, make)


def long_ring_program(world: int, rounds: int, nbytes: int = 10_000_000) -> Program:
    """As `ring_program`, with work that differs from rank to rank and round to round, for many ranks."""

    def make():
        ranks = np.arange(world)
        for s in range(rounds):
            keys = Messages(ranks, (ranks + 1) % world, np.full(world, nbytes))
            seconds = 1e-4 * (1 + ((ranks * 7 + s * 3) % 11) / 10)
            yield Round(
                f"round {s}", {f"keys {s}": keys}, (Kernels("attention", seconds, np.ones(world)),), (f"keys {s}",)
            )

    return Program("ring", world, make)


def all_to_all_program(nbytes: np.ndarray) -> Program:
    """Rank s sends `nbytes[s, t]` to rank t; each rank begins with the next one."""
    world = len(nbytes)
    messages = Messages.of(
        (s, (s + k) % world, int(nbytes[s, (s + k) % world])) for s in range(world) for k in range(1, world)
    )
    return make_program(world, Round("all to all", {"rows": messages}, (), ("rows",)))
