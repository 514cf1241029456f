"""Clusters with round figures, and small programs, for tests of the simulator."""

from collections.abc import Sequence

import numpy as np

from attnmesh.plan.program import Kernels, Messages, Program, Round
from attnmesh.planner.hardware import Cluster, Curve, Device, Link


def device(cores: int | None = None) -> Device:
    """An operation a second, so that sizes of work are seconds."""
    seconds = {"attention": 1.0, "copy": 2.0, "relayout": 2.0}
    return Device("toy", "made up", 1e9, 0.0, tuple((kind, Curve(((1.0, s),))) for kind, s in seconds.items()), cores)


def cluster(
    ranks_per_node: int = 8,
    rails: int = 8,
    *,
    intra_node: tuple[float, float] = (0.0, 100.0),
    inter_node: tuple[float, float] = (0.0, 10.0),
    message: float = 0.0,
    shared: bool = False,
    cores: int | None = None,
) -> Cluster:
    """Links are (latency, bandwidth)."""
    return Cluster(
        device(cores),
        Link("near", "made up", *intra_node, message=message, shared=shared),
        Link("far", "made up", *inter_node, message=message),
        ranks_per_node,
        rails,
    )


def work(*seconds: float) -> tuple[Kernels, ...]:
    return (Kernels("attention", np.array(seconds, dtype=float), np.ones(len(seconds))),)


def program(world: int, *rounds: Round) -> Program:
    return Program("test", world, lambda: iter(rounds))


def ring(seconds: Sequence[Sequence[float]], nbytes: Sequence[Sequence[int]]) -> Program:
    """Round s: rank r computes `seconds[s][r]` and sends `nbytes[s][r]` to the next (nothing if that is 0)."""
    world = len(seconds[0])

    def make():
        for s, (spent, sent) in enumerate(zip(seconds, nbytes, strict=True)):
            messages = Messages.of((r, (r + 1) % world, sent[r]) for r in range(world))
            yield Round(f"round {s}", {f"keys {s}": messages}, work(*spent), (f"keys {s}",))

    return Program("ring", world, make)


def long_ring(world: int, rounds: int, nbytes: int = 10_000_000) -> Program:
    """As `ring`, with work that differs from rank to rank and round to round, for many ranks."""

    def make():
        ranks = np.arange(world)
        for s in range(rounds):
            keys = Messages(ranks, (ranks + 1) % world, np.full(world, nbytes))
            seconds = 1e-4 * (1 + ((ranks * 7 + s * 3) % 11) / 10)
            yield Round(
                f"round {s}", {f"keys {s}": keys}, (Kernels("attention", seconds, np.ones(world)),), (f"keys {s}",)
            )

    return Program("ring", world, make)


def all_to_all(nbytes: np.ndarray) -> Program:
    """Rank s sends `nbytes[s, t]` to rank t; everybody begins with the next."""
    world = len(nbytes)
    messages = Messages.of(
        (s, (s + k) % world, int(nbytes[s, (s + k) % world])) for s in range(world) for k in range(1, world)
    )
    return program(world, Round("all to all", {"rows": messages}, (), ("rows",)))
