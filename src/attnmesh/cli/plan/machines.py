"""The machines that a person means: a device by name, links, nodes, and a file of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnmesh.planner.catalog import cluster
from attnmesh.planner.hardware import Cluster


@dataclass(frozen=True)
class Machines:
    """As they were asked for."""

    hardware: str
    links: str | None = None  # "near,far", or one of them for both
    node: int | None = None
    rails: int | None = None
    file: Path | None = None

    def cluster(self) -> Cluster:
        """The cluster; ValueError names what is not known, and what is near it."""
        intra_node = inter_node = None
        if self.links is not None:
            intra_node, _, inter_node = self.links.partition(",")
            inter_node = inter_node or intra_node
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"there is no file {self.file}")
        return cluster(
            self.hardware,
            ranks_per_node=self.node,
            intra_node=intra_node,
            inter_node=inter_node,
            rails=self.rails,
            extra=self.file,
        )

    def in_words(self, found: Cluster, devices: int) -> str:
        """What is planned for, and where its figures are from."""
        nodes = -(-devices // found.ranks_per_node)
        where = f"{devices} x {found.device.name}"
        if nodes == 1:
            where += f", one node, {found.intra_node.name}"
        else:
            where += f", {nodes} nodes of {found.ranks_per_node}, {found.intra_node.name} within, {found.inter_node.name} between"
            where += f" ({found.rails} ports a node)"
        return f"{where}; the device's figures: {found.device.source}"
