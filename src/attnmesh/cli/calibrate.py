"""`attnmesh calibrate`: measure this machine, and write what was found as a file that the catalogue reads."""

from __future__ import annotations

import re
from pathlib import Path

from attnmesh.calibration.on_cpu import measure_cpu
from attnmesh.calibration.on_cuda import measure_cuda
from attnmesh.cli import output as report
from attnmesh.planner.catalog import catalog
from attnmesh.planner.catalog_file import as_toml
from attnmesh.planner.hardware import Link, Wiring


def check_out(out: Path) -> None:
    """Refuse a place that cannot be written to before minutes are spent."""
    if out.is_dir():
        raise ValueError(f"out must be a file, {out} is a folder")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"out must be in a folder that exists, {out.absolute().parent} does not")


def check_name(name: str) -> None:
    """Refuse a name that could not be given on a command line, or that is another device's."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"name must be letters, digits, '-', '_' or '.', got {name!r}")
    if name.lower() in catalog().devices:
        raise ValueError(f"name must be a new one, the catalogue has a {name} already")


def calibrate(device: str, name: str = "this-machine", *, quick: bool = False) -> str:
    """The file's text."""
    check_name(name)
    facts = report.machine(device)
    source = f"measured: {facts.pop('processor')}, {', '.join(f'{key} {value}' for key, value in facts.items())}"
    if quick:
        source += "; quickly"
    if device == "cpu":
        cpu, link = measure_cpu(name, source, quick=quick)
        return as_toml(
            cpu, [link], Wiring(intra_node=link.name, inter_node="ethernet", ranks_per_node=cpu.cores, rails=1)
        )
    gpu, between = measure_cuda(name, source, quick=quick)
    return as_toml(gpu, [between] if between else [], _wiring(report.machine(device)["processor"], between))


def _wiring(processor: str, between: Link | None) -> Wiring:
    """As the catalogue wires a GPU that has this one's name; else PCIe and Ethernet, in the file to be changed."""
    usual = Wiring("pcie", "ethernet", 1, 1)
    for name, wiring in catalog().wirings.items():
        if name != "cpu" and name in processor.lower():
            usual = wiring
    return usual if between is None else Wiring(between.name, usual.inter_node, usual.ranks_per_node, usual.rails)
