"""Options, output and memory measurement shared by the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from attnmesh.cli import output
from attnmesh.cli.options import check_output_file, length_argument
from attnmesh.cli.output import Rows

LengthsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        parser=length_argument,
        metavar="LENGTH",
        help="Length of the whole sequence, such as 128k. Repeatable.",
    ),
]


def _check_json(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything is measured."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_output_file("--json", path)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from None
    return path


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=_check_json, help="Also write the results to this JSON file.")
]
HardwareFileOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="TOML file of hardware, as `attnmesh calibrate` writes."),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Few small cases, to see that it runs.")]


def make_app(command: Callable[..., None]) -> typer.Typer:
    """Return a command line with one command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(command)
    return app


def publish(name: str, device: str, sections: Iterable[tuple[str, Rows]], json: Path | None) -> dict[str, Rows]:
    """Print and save each section as soon as it is measured, so that a later failure loses nothing."""
    console, machine = output.console(), output.machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    measured: dict[str, Rows] = {}
    for title, rows in sections:
        measured[title] = rows
        output.show(console, title, rows)
        if json is not None:
            output.save(json, {"benchmark": name, "machine": machine, "sections": measured})
    return measured


def added_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes a run allocates on the GPU, results included, after a first run that is not counted."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
