"""The `attnmesh` command: generate, serve, verify, trace, plan, simulate, report, calibrate and warmup."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from attnmesh.cli.calibrate import calibrate_command
from attnmesh.cli.errors import CommandGroup, run_command
from attnmesh.cli.generate import generate_command
from attnmesh.cli.plan import plan_app
from attnmesh.cli.report import report_command
from attnmesh.cli.serve import serve_command
from attnmesh.cli.simulate import simulate_command
from attnmesh.cli.trace import trace_command
from attnmesh.cli.verify import verify_command
from attnmesh.cli.warmup import warmup_command
from attnmesh.launch import under_torchrun
from attnmesh.utils.log import VERBOSE, show

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exact attention over a mesh of devices.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"attnmesh {metadata.version('attnmesh')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ATTNMESH_DEBUG", help="Print the whole traceback of an error.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", envvar=VERBOSE, help="Log what is chosen, compiled, evicted and timed out, of all ranks."
        ),
    ] = False,
) -> None:
    if verbose:
        os.environ[VERBOSE] = "1"  # for the ranks
        show(int(os.environ["RANK"]) if under_torchrun() else None)


app.command("generate")(generate_command)
app.command("serve")(serve_command)
app.command("verify")(verify_command)
app.command("trace")(trace_command)
app.add_typer(plan_app, name="plan")
app.command("simulate")(simulate_command)
app.command("report")(report_command)
app.command("calibrate")(calibrate_command)
app.command("warmup")(warmup_command)


def main() -> NoReturn:
    """Run the command that the arguments of this process name."""
    run_command(app)
