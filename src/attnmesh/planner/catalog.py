"""The hardware catalog: devices, links and clusters by name, from `hardware.toml` and optionally a file of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnmesh.planner.catalog_file import CAUSAL_FIELD_OF, FIELD_OF, Table, Tables, read_tables, unknown
from attnmesh.planner.hardware import Cluster, Curve, Device, Link, Wiring
from attnmesh.planner.program import KERNEL_KINDS, SIZED_IN_BYTES, KernelKind
from attnmesh.utils.validation import check_device, check_path, check_type

_BUILT_IN = Path(__file__).with_name("hardware.toml")
T = TypeVar("T")


@dataclass(frozen=True)
class Catalog:
    """Devices, links and wirings by lower-case name."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]
    wirings: Mapping[str, Wiring]

    def device(self, name: str) -> Device:
        """A device by name, ignoring case. ValueError lists similar names and all names."""
        return _found("device", name, self.devices)

    def link(self, name: str) -> Link:
        """A link by name."""
        return _found("link", name, self.links)

    def cluster(
        self,
        device: str,
        *,
        ranks_per_node: int | None = None,
        intra_node: str | None = None,
        inter_node: str | None = None,
        rails: int | None = None,
    ) -> Cluster:
        """A cluster of one kind of device, with its usual links and node size unless given."""
        found, usual = self.device(device), _found("device", device, self.wirings)
        for name, link in (("intra_node", intra_node), ("inter_node", inter_node)):
            if link is not None:
                _found(f"{name} link", link, self.links)
        intra_node, inter_node = intra_node or usual.intra_node, inter_node or usual.inter_node
        ranks, ports = usual.ranks_per_node or ranks_per_node, usual.rails or rails
        if intra_node is None or inter_node is None or ranks is None or ports is None:
            parts = {"intra_node": intra_node, "inter_node": inter_node, "ranks_per_node": ranks, "rails": ports}
            missing = " and ".join(name for name, part in parts.items() if part is None)
            raise ValueError(f"the catalog has no links or node size for {found.name}: give {missing}")
        made = Cluster(found, self.link(intra_node), self.link(inter_node), ranks, ports)
        if ranks_per_node is not None:
            made = made.with_ranks_per_node(ranks_per_node)
        return made if rails is None else replace(made, rails=rails)


def catalog(extra: Path | str | None = None) -> Catalog:
    """The built-in catalog, updated with a file if given."""
    return _built_in() if extra is None else load(check_path("extra", extra))


def load(path: Path | str) -> Catalog:
    """The built-in catalog updated with a file: its fields replace fields of the same name."""
    path = check_path("path", path)
    ours, given = _built_in_tables(), read_tables(path)
    merged = Tables(
        device=_merged(ours.device, given.device, path),
        link=_merged(ours.link, given.link, path),
        efficiency={**ours.efficiency, **given.efficiency},
    )
    for name, table in given.device.items():
        for peak in ("peak_tflops", "peak_gbs"):
            if peak in table and all(
                FIELD_OF[kind] in merged.device[name] for kind in KERNEL_KINDS if _peak_of(kind) == peak
            ):
                raise ValueError(
                    f"{path}: device.{name}.{peak} has no effect: all its kernels have rates or samples of their own"
                )
    return _catalog(merged, path)


def cluster(
    device: str, *, ranks_per_node: int | None = None, intra_node: str | None = None, inter_node: str | None = None,
    rails: int | None = None, extra: Path | str | None = None,
) -> Cluster:  # fmt: skip
    """A cluster by the names of its parts in the hardware catalog.

    Args:
        device: such as "h200" or "cpu". A name that the catalog does not have raises ValueError with those it has.
        ranks_per_node: devices of a node; by default the number in the device's usual node.
        intra_node, inter_node: names of links, by default the usual links of the device.
        rails: network interfaces of a node, by default the number in the device's usual node.
        extra: a TOML file that updates the catalog, such as one that `attnmesh calibrate` wrote.

    Examples:
        >>> cluster("h200", ranks_per_node=4).ranks_per_node
        4
        >>> cluster("abacus")
        Traceback (most recent call last):
            ...
        ValueError: unknown device 'abacus'. Known: a100, b200, cpu, h100, h200, mi300x, trainium2
    """
    return catalog(extra).cluster(
        device, ranks_per_node=ranks_per_node, intra_node=intra_node, inter_node=inter_node, rails=rails
    )


def default_cluster(device: torch.device | str) -> Cluster:
    """The cluster to plan for on a torch device type: a CPU host, or H200 nodes for anything else."""
    return _default_cluster(check_device("device", device).type)


@cache
def _default_cluster(device: str) -> Cluster:
    return cluster("cpu" if device == "cpu" else "h200")


@cache
def _built_in() -> Catalog:
    return _catalog(_built_in_tables(), _BUILT_IN)


@cache
def _built_in_tables() -> Tables:
    return read_tables(_BUILT_IN)


def _found(what: str, name: str, among: Mapping[str, T]) -> T:
    check_type(what, name, str, "a name of the catalog")
    key = name.strip().lower()
    if key not in among:
        raise unknown(what, name, among)
    return among[key]


def _merged(ours: Mapping[str, Table], given: Mapping[str, Table], path: Path) -> dict[str, Table]:
    merged = dict(ours)
    for name, table in given.items():
        before = ours.get(name, {})
        merged[name] = {**before, **table}
        changed = [field for field in table if field != "name"]
        if before and changed and "source" not in table:  # record which fields come from which source
            merged[name] = {**merged[name], "source": f"{before['source']}; {', '.join(changed)}: {path}"}
    return merged


def _catalog(tables: Tables, path: Path) -> Catalog:
    links = {name: _link(table, path) for name, table in tables.link.items()}
    for table in tables.device.values():
        for end in ("intra_node", "inter_node"):
            if end in table and str(table[end]).lower() not in links:
                raise unknown(f"link in {path}: device.{table['name']}.{end} names", str(table[end]), links)
    return Catalog(
        devices={name: _device(table, tables.efficiency, path) for name, table in tables.device.items()},
        links=links,
        wirings={
            name: Wiring(**{end: table.get(end) for end in ("intra_node", "inter_node", "ranks_per_node", "rails")})  # type: ignore[arg-type]
            for name, table in tables.device.items()
        },
    )


def _device(table: Mapping[str, Any], efficiency: Table, path: Path) -> Device:
    _require(table, ("source", "memory_gb", "launch_us"), f"device.{table['name']}", path)
    curves = tuple((kind, curve) for kind in KERNEL_KINDS if (curve := _curve(kind, table, efficiency)) is not None)
    if not curves:
        kinds = ", ".join(FIELD_OF.values())
        raise ValueError(f"{path}: device.{table['name']} has no rates: give peak_tflops, peak_gbs or any of {kinds}")
    return Device(
        table["name"], table["source"], table["memory_gb"], table["launch_us"], curves, cores=table.get("cores"),
        causal=tuple((kind, table[name]) for kind, name in CAUSAL_FIELD_OF.items() if name in table),
        round=table.get("round_us", 0.0),
    )  # fmt: skip


def _curve(kind: KernelKind, table: Mapping[str, Any], efficiency: Mapping[str, Any]) -> Curve | None:
    given: Curve | None = table.get(FIELD_OF[kind])
    if given is not None or _peak_of(kind) not in table:
        return given
    return Curve(((table[_peak_of(kind)] * efficiency[FIELD_OF[kind]], 1.0),))


def _peak_of(kind: KernelKind) -> str:
    return "peak_gbs" if kind in SIZED_IN_BYTES else "peak_tflops"


def _link(table: Mapping[str, Any], path: Path) -> Link:
    _require(table, ("source", "latency_us", "bandwidth_gbs"), f"link.{table['name']}", path)
    usual = Link("", "", 0, 1)
    return Link(
        table["name"], table["source"], table["latency_us"], table["bandwidth_gbs"],
        message=table.get("message_us", usual.message), shared=table.get("shared", usual.shared),
    )  # fmt: skip


def _require(table: Table, fields: tuple[str, ...], where: str, path: Path) -> None:
    missing = [field for field in fields if field not in table]
    if missing:
        raise ValueError(f"{path}: {where} is new and lacks {' and '.join(missing)}")
