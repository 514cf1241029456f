"""What a run says about itself: the machine and versions beside every figure, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

Rows = list[dict[str, object]]


def machine(device: str) -> dict[str, str]:
    """The processor and the versions that a figure was seen on."""
    facts = {
        "processor": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if device == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    with suppress(metadata.PackageNotFoundError):
        facts["triton"] = metadata.version("triton")
    return facts


def console(*, quiet: bool = False) -> Console:
    """Where reports go. Off a terminal there is no width to fit, so tables are not folded."""
    plain = Console(quiet=quiet)
    return plain if plain.is_terminal else Console(quiet=quiet, width=140)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A Rich table; numbers to the right, words to the left."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], (int, float)) for row in rows)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(_cell(value) for value in row))
    return drawn


def show(console: Console, title: str, rows: Sequence[dict[str, object]]) -> None:
    """Print dictionaries with the same keys as a table."""
    if rows:
        console.print(table(title, list(rows[0]), [list(row.values()) for row in rows]))


def save(path: Path, facts: dict[str, object]) -> None:
    """Write figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.3f}"
    return str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name")]
    return named[0] if named else platform.machine()
