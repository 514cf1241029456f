"""What commands print: tables, JSON files, the machine that figures come from, and progress.

Names, paths and answers come from elsewhere. They are shown as they are: without markup, and with control characters as
escapes.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from attnmesh.utils.files import write_text
from attnmesh.utils.progress import reporting
from attnmesh.utils.text import printable

Rows = list[dict[str, object]]

_LINE_EVERY = 2.0  # seconds between lines of progress where there is no terminal


def machine(device: str) -> dict[str, str]:
    """The processor and the versions that a figure was measured with."""
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


class PlainConsole(Console):
    """A Rich console that shows every string as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The string to print, without control characters."""
        return super().render_str(printable(text), **options)

    def stream(self, text: str) -> None:
        """Print the next piece of a text, without a line break."""
        self.out(printable(text), end="", highlight=False)


def console(*, quiet: bool = False, stderr: bool = False) -> PlainConsole:
    """A console. Without a terminal it is 140 columns wide, so that tables do not fold."""
    file = sys.stderr if stderr else sys.stdout
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    plain = PlainConsole(quiet=quiet, stderr=stderr)
    return plain if plain.is_terminal else PlainConsole(quiet=quiet, stderr=stderr, width=140)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A Rich table; columns of numbers are right-aligned."""
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
    """Write a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(facts, indent=2) + "\n")


@contextmanager
def status(message: str, *, quiet: bool = False) -> Iterator[None]:
    """Show on stderr that something runs: a spinner on a terminal, else one line if it takes over two seconds."""
    err = console(stderr=True)
    if quiet:
        yield
    elif err.is_terminal:
        with err.status(Text(printable(message))):
            yield
    else:
        line = f"{printable(message)} ..."
        timer = threading.Timer(_LINE_EVERY, lambda: print(line, file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@contextmanager
def counting(message: str) -> Iterator[None]:
    """Show on stderr how far loops over `reported` items in the `with` statement are, and how long they will take."""
    with Progress() as progress:
        is_terminal = console(stderr=True).is_terminal
        with nullcontext() if is_terminal else status(message):
            if is_terminal:
                progress(message, 0, 1)
            with reporting(lambda done, total: progress(message, done, total)):
                yield


class Progress:
    """Counts steps on stderr, with an estimate: a bar on a terminal, else a line every two seconds, or for every step.

    It can be pickled before the first call, so that a rank in another process can report for the command. The bar
    disappears with the last step.
    """

    def __init__(self, *, quiet: bool = False, every_step: bool = False) -> None:
        self._quiet, self._every_step = quiet, every_step
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._printed = self._began = time.monotonic()
        self._before = 0

    def __call__(self, description: str, completed: int, total: int) -> None:
        """Report that `completed` of `total` steps are done; `description` names the next one."""
        if self._quiet:
            return
        err = console(stderr=True)
        if not err.is_terminal:
            now = time.monotonic()
            if completed < self._before:  # another loop
                self._began = now
            self._before = completed
            if self._every_step or now - self._printed >= _LINE_EVERY:
                left = _left(now - self._began, completed, total)
                print(printable(f"{completed} of {total}: {description}{left}"), file=sys.stderr, flush=True)
                self._printed = now
            return
        if self._bar is None:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=err, transient=True)
            self._task = self._bar.add_task(description, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, description=description, completed=completed, total=total)
        if completed >= total:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _left(elapsed: float, completed: int, total: int) -> str:
    """How long the other steps take at the speed of the steps that are done; "" while that is a guess."""
    if elapsed < _LINE_EVERY or not 0 < completed < total:
        return ""
    seconds = elapsed * (total - completed) / completed
    return f", about {seconds:.0f} s left" if seconds < 120 else f", about {seconds / 60:.0f} min left"


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
