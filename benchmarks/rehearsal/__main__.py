"""`python -m benchmarks.rehearsal`, or `make rehearse`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from attnmesh.calibration.cpu import measure_cpu
from attnmesh.cli import output
from attnmesh.cli.output import Rows
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.rehearsal.nodes import Namespace, Nodes, missing
from benchmarks.rehearsal.study import (
    WORLD,
    Machine,
    attention_sections,
    failure_rows,
    generate_row,
    is_wrong,
    program_rows,
)


class Part(Enum):
    """What is rehearsed."""

    ATTENTION = "attention"
    PROGRAMS = "programs"
    FAILURES = "failures"


FAILURES = {"node killed": Namespace.end, "node unreachable": Namespace.disconnect}


def main(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Two nodes, prefill once and two training steps; without backward, generation and failures."
        ),
    ] = False,
    megabits: Annotated[
        float, typer.Option(min=1, max=1000, help="Speed of every node's link, in megabits per second.")
    ] = 100,
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="What to rehearse. Repeatable; everything by default.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Rehearse training, prefill and generation on nodes that are network namespaces of this machine.

    Exits with 1 if a result, the bytes of a link or a time is not as it should be. Without root, iproute2 or tc
    nothing is run, and it exits with 0.
    """
    lacking = missing()
    if lacking is not None:
        typer.echo(f"rehearse: skipped: {lacking}.")
        return
    signal.signal(signal.SIGTERM, _interrupted)  # as Ctrl-C does: everything that was started is ended
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    begin = time.monotonic()
    parts = only or [part for part in Part if not quick or part is not Part.FAILURES]
    with tempfile.TemporaryDirectory() as folder:
        sections = publish("rehearsal", "cpu", _sections(Path(folder), megabits, parts, quick), json)
    wrong = sum(is_wrong(row) for rows in sections.values() for row in rows)
    verdict = f"{wrong} rows are wrong" if wrong else "everything is as it should be"
    output.console().print(f"{verdict}, after {time.monotonic() - begin:.0f} s")
    if wrong:
        raise typer.Exit(1)


def _interrupted(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _sections(folder: Path, megabits: float, parts: Collection[Part], quick: bool) -> Iterator[tuple[str, Rows]]:
    if Part.ATTENTION in parts or Part.PROGRAMS in parts:
        with output.status("measuring this machine"):
            machine = Machine(*measure_cpu("this-machine", "measured", quick=True))
    for count in (2,) if quick else (2, 4):
        shape = f"{count} nodes x {WORLD // count} ranks"
        if Part.ATTENTION in parts:
            with Nodes(count, megabits) as nodes, output.status(f"{shape}: attention"):
                sections = attention_sections(nodes, machine, folder, quick=quick)
            yield from ((f"{shape}: {title}", rows) for title, rows in sections)
        if Part.PROGRAMS in parts:
            with Nodes(count, megabits) as nodes, output.status(f"{shape}: programs"):
                rows = program_rows(nodes, machine, folder)
                generated = [] if quick else [generate_row(nodes, folder, 6)]
            yield f"{shape}: programs over links of {megabits:g} Mbit/s", rows
            if generated:
                yield f"{shape}: attnmesh generate", generated
    if Part.FAILURES in parts:
        yield "2 nodes x 2 ranks: a node fails", list(_failures(folder, megabits))


def _failures(folder: Path, megabits: float) -> Iterator[dict[str, object]]:
    for name, fail in FAILURES.items():
        own = folder / name.replace(" ", "-")
        own.mkdir()
        with Nodes(2, megabits) as nodes, output.status(name):
            yield from failure_rows(nodes, own, name, fail)


app = make_app(main)

if __name__ == "__main__":
    app()
