"""What machines can do: how long kernels of a size take, how fast links are, and how nodes are wired.

A device is a handful of curves, seconds by size. Measured ones have a sample for each size that was timed; published
ones have a single sample, the rate that its maker states times what good kernels make of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Kind = Literal[
    "attention", "attention backward", "matmul", "copy", "relayout", "decode", "sparse", "sparse backward", "indexer"
]
"""What a kernel does. A relayout is a copy that changes the order of dimensions, as messages want it. Sizes are
operations, but for `copy`, `relayout` and `decode`: bytes read and written."""

_SHORT = 30  # launches: a call that takes less is too small to fill a device

KINDS: tuple[Kind, ...] = get_args(Kind)
OF_BYTES: frozenset[Kind] = frozenset({"copy", "relayout", "decode"})


@dataclass(frozen=True)
class Curve:
    """Seconds of one call by its size: samples (size, seconds), ascending in size.

    Between samples lies a straight line in logarithms. Beyond them a call runs at the rate of the nearest sample.
    """

    samples: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.samples]
        if not sizes or min(map(min, self.samples)) <= 0 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"a curve wants samples (size, seconds) above 0, ascending in size, got {self.samples}")

    def seconds(self, size: Floats | float) -> Floats:
        """Seconds of a call of each size; none for size 0."""
        size = np.asarray(size, dtype=np.float64)
        logs = self._logs
        # A line through log (seconds / size): beyond the ends interp stays level, which is a constant rate.
        with np.errstate(divide="ignore"):
            at = np.log(size)
        return np.where(size > 0, size * np.exp(np.interp(at, logs[0], logs[1])), 0.0)

    @cached_property
    def _logs(self) -> tuple[Floats, Floats]:
        sizes, seconds = np.log(np.array(self.samples, dtype=np.float64)).T
        return sizes, seconds - sizes


@dataclass(frozen=True)
class Device:
    """What one rank computes with."""

    name: str
    source: str  # where the figures are from: measured, and on what, or published
    memory: float  # bytes
    launch: float  # seconds that a call takes at least
    curves: tuple[tuple[Kind, Curve], ...]
    cores: int | None = None  # how many ranks of a node compute at full speed at once; None: each has its own device
    squares: tuple[tuple[Kind, Curve], ...] = ()  # of causal squares, where they have a pace of their own
    round: float = 0.0  # seconds of a round besides its kernels, where ranks compute on cores

    def seconds(
        self, kind: Kind, size: Floats | float, calls: Floats | float = 1, *, squares: bool = False, lanes: int = 1
    ) -> Floats:
        """Seconds of `calls` calls of `size` in all, evenly divided; of causal `squares`, or of anything else.

        Calls that take `lanes` in turn fill the device as larger ones do.
        """
        size, calls = np.asarray(size, dtype=np.float64), np.asarray(calls, dtype=np.float64)
        number, curve = np.maximum(calls, 1), self.curve(kind, squares=squares)
        each = curve.seconds(lanes * size / number) / lanes
        return np.where(size > 0, number * np.maximum(each, self._least(curve)), 0.0)

    def _least(self, curve: Curve) -> float:
        """What a call takes at least: as long as the shortest that was timed if that filled no device."""
        smallest = min(seconds for _, seconds in curve.samples)
        return smallest if len(curve.samples) > 1 and smallest <= _SHORT * self.launch else self.launch

    def curve(self, kind: Kind, *, squares: bool = False) -> Curve:
        """The curve of a kind of kernel."""
        found = dict(self.curves).get(kind)
        if squares:
            found = dict(self.squares).get(kind, found)
        if found is None:
            raise ValueError(f"{self.name} has no figures for {kind!r}; it has {', '.join(k for k, _ in self.curves)}")
        return found


@dataclass(frozen=True)
class Link:
    """What messages cost. Every rank has a port of its own, both ways, unless ranks share one."""

    name: str
    source: str
    latency: float  # seconds until a message is there, however small
    bandwidth: float  # bytes a second and port, each way
    message: float = 5e-7  # seconds until a rank has started one and can start the next
    shared: bool = False  # whether all ranks of a node share one port


@dataclass(frozen=True)
class Cluster:
    """Devices and how they are wired: nodes of some ranks that share out the node's network ports (rails)."""

    device: Device
    near: Link  # within a node
    far: Link  # between nodes
    node: int  # ranks a node
    rails: int  # network ports a node; its i-th rank uses port i % rails

    def __post_init__(self) -> None:
        for name in ("node", "rails"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def with_node(self, node: int) -> Cluster:
        """The same with other nodes; a port for every rank if there was one before."""
        return replace(self, node=node, rails=node if self.rails >= self.node else min(self.rails, node))


@dataclass(frozen=True)
class Wiring:
    """How ranks of a device are joined unless somebody says otherwise."""

    near: str | None = None  # the name of the link within a node
    far: str | None = None  # between nodes
    node: int | None = None  # ranks a node
    rails: int | None = None  # network ports a node


def ranks_together(ranks: int, node: int, devices: int) -> int:
    """How many of a group's ranks stand in one node, where groups follow one another on `devices` devices.

    Groups that are no whole part of a node, nor whole nodes, come to lie across nodes: then as many as always do.
    """
    return ranks if devices <= node else gcd(ranks, node)


def one_of_many(cluster: Cluster, ranks: int, devices: int) -> Cluster:
    """The cluster as a group sees it that has `ranks` of a node: its share of what the ranks of a node share."""
    groups = max(1, min(cluster.node, devices) // ranks)  # in a node
    ports = (1 if cluster.far.shared else min(cluster.rails, cluster.node)) * ranks / cluster.node
    whole = max(1, int(ports))
    far = replace(cluster.far, bandwidth=cluster.far.bandwidth * ports / whole)
    near = replace(cluster.near, bandwidth=cluster.near.bandwidth / (groups if cluster.near.shared else 1))
    return replace(cluster, near=near, far=far, node=ranks, rails=whole)
