"""`attnmesh calibrate`: measures this machine and writes a hardware file for the planner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.calibration.cpu import measure_cpu
from attnmesh.calibration.cuda import measure_cuda
from attnmesh.cli import output
from attnmesh.cli.options import MeasuredDeviceOption, check_output_file, default_device
from attnmesh.planner.catalog import as_toml, catalog
from attnmesh.planner.hardware import Link, Wiring
from attnmesh.utils.files import write_text


def calibrate_command(
    device: MeasuredDeviceOption = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("hardware.toml"),
    name: Annotated[str, typer.Option(help="Name of the device in the file.")] = "this-machine",
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes and rounds: faster, less exact.")] = False,
) -> None:
    """Measure kernels and messages on this machine and write a file for --hardware-file."""
    chosen = default_device(device)
    _check_name(name)
    check_output_file("--out", out)
    write_text(out, calibrate(chosen, name, quick=quick))
    output.console().print(f"Hardware file: {out} (device {name})", soft_wrap=True)


def calibrate(device: str, name: str = "this-machine", *, quick: bool = False) -> str:
    """Measure the device and return the text of the hardware file."""
    _check_name(name)
    facts = output.machine(device)
    processor = facts.pop("processor")
    source = f"measured: {processor}, {', '.join(f'{key} {value}' for key, value in facts.items())}"
    if quick:
        source += "; quick"
    with output.Progress() as progress:
        if device == "cpu":
            cpu, link = measure_cpu(name, source, quick=quick, progress=progress)
            return as_toml(
                cpu, [link], Wiring(intra_node=link.name, inter_node="ethernet", ranks_per_node=cpu.cores, rails=1)
            )
        gpu, between = measure_cuda(name, source, quick=quick, progress=progress)
    return as_toml(gpu, [between] if between else [], _wiring(processor, between))


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"--name must consist of letters, digits, '-', '_' and '.', got {name!r}")
    if name.lower() in catalog().devices:
        raise ValueError(f"--name must not be a device of the catalogue, got {name!r}")


def _wiring(processor: str, between: Link | None) -> Wiring:
    """The catalogue's links for a GPU of this name; otherwise PCIe and Ethernet, to be edited in the file."""
    usual = Wiring("pcie", "ethernet", 1, 1)
    for name, wiring in catalog().wirings.items():
        if name != "cpu" and name in processor.lower():
            usual = wiring
    return usual if between is None else Wiring(between.name, usual.inter_node, usual.ranks_per_node, usual.rails)
