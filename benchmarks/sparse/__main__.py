"""`python -m benchmarks.sparse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import output
from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.utils.optional import require
from benchmarks.common import JsonOption, QuickOption, make_app, publish
from benchmarks.sparse.measure import Part, measure_sparse, wrong_rows
from benchmarks.sparse.plot import FORMATS, plot_sparse


def main(
    device: MeasuredDeviceOption = None,
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="What to measure. Repeatable; everything by default.")
    ] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Also draw all results into this file.")] = None,
) -> None:
    """Measure sparse attention, its distribution, and the indexer's top-k and loss against the roofline.

    Exits with status 1 if a result is wrong.
    """
    if plot is not None:
        if plot.suffix not in FORMATS:
            raise typer.BadParameter(f"must end in one of {', '.join(FORMATS)}, got {plot.name!r}", param_hint="--plot")
        require("matplotlib.pyplot", extra="plot")  # before measuring for minutes
    chosen = default_device(device)
    sections = publish("sparse", chosen, measure_sparse(chosen, only or tuple(Part), quick=quick), json)
    if plot is not None:
        plot_sparse(sections, plot)
    if any(wrong_rows(rows) for rows in sections.values()):
        output.console().print("WRONG results: see the verdicts above")
        raise typer.Exit(1)


app = make_app(main)

if __name__ == "__main__":
    app()
