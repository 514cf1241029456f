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
        near = far = None
        if self.links is not None:
            near, _, far = self.links.partition(",")
            far = far or near
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"there is no file {self.file}")
        return cluster(self.hardware, node=self.node, near=near, far=far, rails=self.rails, extra=self.file)

    def in_words(self, found: Cluster, devices: int) -> str:
        """What is planned for, and where its figures are from."""
        nodes = -(-devices // found.node)
        where = f"{devices} x {found.device.name}"
        if nodes == 1:
            where += f", one node, {found.near.name}"
        else:
            where += f", {nodes} nodes of {found.node}, {found.near.name} within, {found.far.name} between"
            where += f" ({found.rails} ports a node)"
        return f"{where}; the device's figures: {found.device.source}"
