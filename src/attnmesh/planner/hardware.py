"""Performance models of devices, links and clusters: kernel times by size, bandwidth and latency, nodes and ports.

A device has one curve per kind of kernel, seconds by size. Measured curves have a sample for each size that was timed;
published ones have a single sample, the vendor's peak rate times the efficiency of good kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np

from attnmesh.planner.program import Floats, KernelKind, Kernels
from attnmesh.utils.sizes import check_sizes

_SHORT = 30  # launch times: a call that takes less is too small to fill a device


@dataclass(frozen=True)
class Curve:
    """Seconds of one call by its size: samples (size, seconds), ascending in size.

    Between samples the logarithms are interpolated. Beyond them a call runs at the rate of the nearest sample.
    """

    samples: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.samples]
        if not sizes or min(map(min, self.samples)) <= 0 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"samples must be (size, seconds) above 0, ascending in size, got {self.samples}")

    def seconds(self, size: Floats | float) -> Floats:
        """Seconds of a call of each size; 0 for size 0."""
        size = np.asarray(size, dtype=np.float64)
        logs = self._logs
        # A line through log (seconds / size): beyond the ends interp is constant, which is a constant rate.
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
    source: str  # of the numbers: measured, and on what, or published
    memory: float  # bytes
    launch: float  # minimum seconds of a call
    curves: tuple[tuple[KernelKind, Curve], ...]
    cores: int | None = None  # how many ranks of a node compute at full speed at once; None: each has its own device
    causal: tuple[tuple[KernelKind, Curve], ...] = ()  # of causal squares, where their speed differs
    round: float = 0.0  # seconds per round besides its kernels, where ranks share cores

    def seconds(
        self,
        kind: KernelKind,
        size: Floats | float,
        calls: Floats | float = 1,
        *,
        causal: bool = False,
        streams: int = 1,
    ) -> Floats:
        """Seconds of `calls` equal calls of `size` in total, on causal squares or on anything else.

        Calls that alternate between `streams` fill the device as well as larger calls do.
        """
        size, calls = np.asarray(size, dtype=np.float64), np.asarray(calls, dtype=np.float64)
        if size.ndim == 1 and size.shape == calls.shape and len(size) > 64:
            first = np.flatnonzero(np.r_[True, (size[1:] != size[:-1]) | (calls[1:] != calls[:-1])])
            if 2 * len(first) < len(size):  # many ranks beside one another do the same: it is computed for one of them
                of_one = self.seconds(kind, size[first], calls[first], causal=causal, streams=streams)
                return np.repeat(of_one, np.diff(np.r_[first, len(size)]))
        number, curve = np.maximum(calls, 1), self.curve(kind, causal=causal)
        each = curve.seconds(streams * size / number) / streams
        return np.where(size > 0, number * np.maximum(each, self._minimum(curve)), 0.0)

    def kernel_seconds(self, kernels: Kernels) -> Floats:
        """Seconds of every rank for some kernels, each rank on a device of its own."""
        streams = kernels.streams if self.cores is None else 1
        if kernels.causal is None:
            computed = self.seconds(kernels.kind, kernels.size, kernels.calls, streams=streams)
        else:
            size, calls = kernels.causal
            rest = self.seconds(kernels.kind, kernels.size - size, kernels.calls - calls, streams=streams)
            computed = rest + self.seconds(kernels.kind, size, calls, causal=True, streams=streams)
        if kernels.bytes_read is None:
            return computed
        return np.maximum(computed, self.seconds("decode", kernels.bytes_read, kernels.calls))

    def curve(self, kind: KernelKind, *, causal: bool = False) -> Curve:
        """The curve of a kind of kernel."""
        curve = dict(self.curves).get(kind)
        if causal:
            curve = dict(self.causal).get(kind, curve)
        if curve is None:
            raise ValueError(f"{self.name} has no curve for {kind!r}; it has {', '.join(k for k, _ in self.curves)}")
        return curve

    def _minimum(self, curve: Curve) -> float:
        """The minimum seconds of a call: the smallest sample, if that was too small to fill the device."""
        smallest = min(seconds for _, seconds in curve.samples)
        return smallest if len(curve.samples) > 1 and smallest <= _SHORT * self.launch else self.launch


@dataclass(frozen=True)
class Link:
    """What messages cost. Every rank has a port of its own, in both directions, unless ranks share one."""

    name: str
    source: str
    latency: float  # seconds until a message arrives, however small
    bandwidth: float  # bytes per second and port, in each direction
    message: float = 5e-7  # seconds between the starts of two messages of a rank
    shared: bool = False  # whether all ranks of a node share one port


@dataclass(frozen=True)
class Cluster:
    """Devices and links: nodes of some ranks, which share the network ports of the node (rails)."""

    device: Device
    intra_node: Link
    inter_node: Link
    ranks_per_node: int
    rails: int  # network ports per node; its i-th rank uses port i % rails

    def __post_init__(self) -> None:
        check_sizes(ranks_per_node=self.ranks_per_node, rails=self.rails)

    def with_ranks_per_node(self, ranks: int) -> Cluster:
        """The same with nodes of another size; a port for every rank if there was one before."""
        every = self.rails >= self.ranks_per_node
        return replace(self, ranks_per_node=ranks, rails=ranks if every else min(self.rails, ranks))


@dataclass(frozen=True)
class Wiring:
    """How ranks of a device are usually connected."""

    intra_node: str | None = None  # name of the link within a node
    inter_node: str | None = None  # name of the link between nodes
    ranks_per_node: int | None = None
    rails: int | None = None  # network ports per node


def group_ranks_per_node(ranks: int, ranks_per_node: int, devices: int) -> int:
    """How many ranks of a rank group share a node, where groups are placed one after another on `devices` devices.

    Groups that neither divide a node nor are whole nodes extend over nodes: then the ranks that always share a node.
    """
    return ranks if devices <= ranks_per_node else gcd(ranks, ranks_per_node)


def group_cluster(cluster: Cluster, ranks: int, devices: int) -> Cluster:
    """The part of a cluster that one of several rank groups (such as replicas) has, with `ranks` ranks on a node."""
    groups = max(1, min(cluster.ranks_per_node, devices) // ranks)  # per node
    inter, intra = cluster.inter_node, cluster.intra_node
    ports = (1 if inter.shared else min(cluster.rails, cluster.ranks_per_node)) * ranks / cluster.ranks_per_node
    rails = max(1, int(ports))
    return replace(
        cluster,
        intra_node=replace(intra, bandwidth=intra.bandwidth / (groups if intra.shared else 1)),
        inter_node=replace(inter, bandwidth=inter.bandwidth * ports / rails),
        ranks_per_node=ranks,
        rails=rails,
    )
