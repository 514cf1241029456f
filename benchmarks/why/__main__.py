"""`python -m benchmarks.why`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import output
from benchmarks.common import JsonOption, make_app
from benchmarks.why.figures import draw_figures
from benchmarks.why.sources import DOCS, compute, read_sources


def main(
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this folder.")] = None,
) -> None:
    """Compute docs/data/why.json (--json, a few minutes) or draw the figures of docs/why.md (--plot)."""
    if json is None and plot is None:
        raise typer.BadParameter("give --json, --plot or both", param_hint="--json, --plot")
    if json is not None:
        output.save(json, {"benchmark": "why", "machine": output.machine("cpu"), "sections": compute()})
    if plot is not None:
        for path in draw_figures(read_sources(DOCS), plot):
            print(path)


app = make_app(main)

if __name__ == "__main__":
    app()
