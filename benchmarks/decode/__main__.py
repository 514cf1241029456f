"""`python -m benchmarks.decode`."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli.options import Device, MeasuredDeviceOption, default_device
from attnmesh.utils.optional import require
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.decode.measure import CPU_PARTS, Part, measure_decode
from benchmarks.decode.plot import plot_decode


def main(
    device: MeasuredDeviceOption = None,
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="What to measure. Repeatable; everything by default.")
    ] = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw plots into this folder.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", exists=True, dir_okay=False, help="Measure nothing; draw --plot from a --json file."),
    ] = None,
) -> None:
    """Measure decode steps over long KV caches: speed, peers, storage types, splits and accuracy."""
    if source is not None:
        if plot is None or json is not None or only or device:
            raise typer.BadParameter("measures nothing: give --plot and no other option", param_hint="--from")
        plot_decode(loads(source.read_text())["sections"], plot)
        return
    chosen = default_device(device)
    available = tuple(Part) if chosen == Device.CUDA else CPU_PARTS
    if missing := [part for part in only or () if part not in available]:
        raise typer.BadParameter(f"{', '.join(missing)}: measured on a GPU only", param_hint="--only")
    if plot is not None:
        require("matplotlib.pyplot", extra="plot")  # before measuring for minutes
    sections = publish("decode", chosen, measure_decode(chosen, only or available), json)
    if plot is not None:
        plot_decode(sections, plot)


app = make_app(main)

if __name__ == "__main__":
    app()
