"""Clusters with round figures, for tests of plans."""

import math

from attnmesh.plan.program import KERNEL_KINDS
from attnmesh.planner.hardware import Cluster, Curve, Device, Link


def device(flops: float = 1.0, nbytes: float = math.inf, launch: float = 0.0, **more) -> Device:
    """One that computes so many operations a second, and moves bytes for nothing unless told otherwise."""
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
