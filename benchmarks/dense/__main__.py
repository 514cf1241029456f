"""`python -m benchmarks.dense`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import output
from attnmesh.cli.options import Device, check_device
from attnmesh.utils.optional import require
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.dense.cases import CASES, Part, select
from benchmarks.dense.measure import measure_dense, wrong_rows
from benchmarks.dense.plot import plot_dense


def main(
    part: Annotated[
        list[Part] | None, typer.Option("--part", help="Kernels to measure. Repeatable; both by default.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Cases whose name contains this (* and ? match). Repeatable."),
    ] = None,
    variants: Annotated[bool, typer.Option("--variants", help="Also time other tiles of the Gluon kernels.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times each program is timed.")] = 3,
    time_limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Stop after this time.")] = 1800.0,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names of the cases and exit.")] = False,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Also draw the speeds into this file.")] = None,
) -> None:
    """Compare the dense kernels with cuDNN, FlashAttention-2 and FlexAttention on one Hopper GPU.

    The most important cases come first. Exits with status 1 if a program of ours is wrong, fails or hangs.
    """
    cases = select(part or tuple(Part), only or ())
    if not cases:
        names = "; ".join(case.name for case in CASES)
        raise typer.BadParameter(f"matches none of: {names}", param_hint="--only")
    console = output.console()
    if list_cases:
        for case in cases:
            console.print(case.name)
        return
    check_device(Device.CUDA)
    if plot is not None:
        require("matplotlib.pyplot", extra="plot")  # before measuring for minutes
    measured = measure_dense(
        cases, with_variants=variants, rounds=rounds, time_limit=time_limit, say=lambda text: print(text, flush=True)
    )
    sections = publish("dense", "cuda", measured, json)
    if plot is not None:
        plot_dense(sections, plot)
    if any(wrong_rows(rows) for rows in sections.values()):
        console.print("WRONG or FAILED programs: see above")
        raise typer.Exit(1)


app = make_app(main)

if __name__ == "__main__":
    app()
