"""`python -m benchmarks.scaling`."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from attnmesh.cli import output
from attnmesh.cli.output import Rows
from attnmesh.utils.optional import require
from benchmarks.common import HardwareFileOption, JsonOption, QuickOption, make_app
from benchmarks.scaling.plot import plot_scaling
from benchmarks.scaling.study import Part, study
from benchmarks.scaling.tables import all_tables, replace_tables


def main(
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="What to simulate. Repeatable; everything by default.")
    ] = None,
    quick: QuickOption = False,
    hardware_file: HardwareFileOption = None,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw plots into this folder.")] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", exists=True, dir_okay=False, help="Simulate nothing; show the results of a --json file."
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Replace the tables of this document, at its comments."),
    ] = None,
) -> None:
    """Simulate schedules on 8 to 4,096 GPUs, shardings of token generation, and slow ranks; tables in Markdown."""
    if source is not None:
        if only or quick or hardware_file or json is not None:
            raise typer.BadParameter("simulates nothing: give --plot and --into only", param_hint="--from")
        _show(loads(source.read_text())["sections"], plot, into)
        return
    if plot is not None:
        require("matplotlib.pyplot", extra="plot")  # before simulating for minutes
    _show(_simulate(tuple(only or Part), quick, hardware_file, json), plot, into)


def _simulate(parts: tuple[Part, ...], quick: bool, hardware_file: Path | None, json: Path | None) -> dict[str, Rows]:
    machine = output.machine("cpu")
    sections: dict[str, Rows] = {}
    with Progress(console=output.console(), transient=True) as progress:
        task = progress.add_task("simulating", total=None)
        for part, rows in study(parts, quick=quick, hardware_file=hardware_file):
            sections.setdefault(part.value, []).extend(rows)
            progress.update(task, description=f"{part.value}: {sum(map(len, sections.values()))} rows")
            if json is not None:  # the largest cases take a minute each: keep what is done
                output.save(json, {"benchmark": "scaling", "machine": machine, "sections": sections})
    return sections


def _show(sections: dict[str, Rows], plot: Path | None, into: Path | None) -> None:
    print(all_tables(sections))
    if into is not None:
        into.write_text(replace_tables(into.read_text(), sections))
    if plot is not None:
        plot_scaling(sections, plot)


app = make_app(main)

if __name__ == "__main__":
    app()
