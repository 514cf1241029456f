"""Groups of ranks that do the same side by side, such as replicas: what one of them has of a cluster."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from attnmesh.planner.hardware import Cluster


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
