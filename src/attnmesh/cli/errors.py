"""How commands end: an error is one line on stderr and an exit code, and so is a signal.

| exit code | reason |
|---|---|
| 1 | a rank or a check failed, a disk is full, or an error that was not expected |
| 2 | invalid input |
| 130, 143 | SIGINT, SIGTERM |
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from attnmesh.cli import output, starting
from attnmesh.comm import CommError
from attnmesh.launch import under_torchrun
from attnmesh.utils.optional import MissingExtraError
from attnmesh.utils.text import one_line, printable

# Typer has a copy of Click since version 0.26, and depended on Click before: its exceptions are found through Typer.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
# Not errors: the help of a group is shown as an error since Click 8.2.
_HELP = getattr(sys.modules[_ClickException.__module__], "NoArgsIsHelpError", typer.Exit)
_ENDS: tuple[type[BaseException], ...] = (typer.Exit, typer.Abort, SystemExit, BrokenPipeError, _HELP)
_FLAGS = ("--debug", "--verbose")
_IN_PYTHON = {"explain": "attnmesh report shows why a schedule is chosen, and in Python ContextParallel.explain does"}
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors that are not of the input."""


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM."""


class CommandGroup(TyperGroup):
    """Commands that report every error in one line; with `--debug` its traceback too. Flags may follow the command."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the options of the group. Its flags may follow the command."""
        if parent is None:
            flags = [flag for flag in _FLAGS if flag in args]
            args = [*flags, *(argument for argument in args if argument not in flags)]
        with _reported("attnmesh" if parent is None else f"attnmesh {info_name}"):
            return super().make_context(info_name, args, parent, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names; an unknown name is answered with one suggestion."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            similar = get_close_matches(name, known, n=1)
            meant = f"did you mean {similar[0]!r}?" if similar else f"the commands are {', '.join(known)}"
            ctx.fail(f"No such command {name!r}: {_IN_PYTHON.get(name, meant)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command of the group."""
        with _reported("attnmesh", ctx):
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextmanager
def _reported(name: str, ctx: Any = None) -> Iterator[None]:
    try:
        yield
    except _ENDS:
        raise
    except BaseException as error:
        if ctx is not None:
            name = " ".join([name, *ctx.command_path.split()[1:], ctx.invoked_subcommand or ""]).strip()
        _report(error, name, debug=ctx is not None and bool(ctx.find_root().params.get("debug")))
        raise typer.Exit(_exit_code(error)) from None


def run_command(app: typer.Typer) -> NoReturn:
    """Run a command as this process: SIGINT and SIGTERM end it soon, whatever it does."""
    code, early = 0, False
    try:
        if under_torchrun():  # which sends signals to its ranks: they end a rank even while it waits inside torch
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        else:
            signal.signal(signal.SIGTERM, _terminate)
            early = starting.raise_at_interrupt()
        app(prog_name="attnmesh")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt as error:  # before the command began
        _report(error, "attnmesh")
        code = _exit_code(error)
    if early:
        starting.end_at_signals()  # while Python ends
    # Python would end with an abort while a virtual rank, a thread, still computes.
    if code in (130, 143) or any(thread.name.startswith("virtual rank") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _exit_code(error: BaseException) -> int:
    match error:
        case Terminated():
            return 143
        case KeyboardInterrupt():
            return 130
        case _ClickException():
            return int(error.exit_code)
        case OSError() if error.errno in _OF_THE_MACHINE:
            return 1
        case ValueError() | OSError() | MissingExtraError():
            return 2
    return 1


def _report(error: BaseException, command: str, *, debug: bool = False) -> None:
    """Print the error, on local rank 0 for all ranks of torchrun if it was raised before they ran."""
    while_running = any(note.startswith("raised on rank") for note in getattr(error, "__notes__", ()))
    if os.environ.get("LOCAL_RANK", "0") != "0" and not while_running:
        return
    for stderr in (False, True):  # a rank that was stopped leaves its progress bar's cursor hidden
        output.console(stderr=stderr).show_cursor()
    if isinstance(error, KeyboardInterrupt) and sys.stderr.isatty():
        typer.echo(err=True)  # after the terminal's ^C
    if debug:
        typer.echo(printable("".join(traceback.format_exception(error))), err=True)
    rank = f"rank {os.environ['RANK']}: " if while_running and under_torchrun() else ""
    typer.echo(f"{command}: {rank}{one_line(_message(error, command))}", err=True)


def _message(error: BaseException, command: str) -> str:
    match error:
        case Terminated():
            return "terminated"
        case KeyboardInterrupt():
            return "interrupted"
        case _ClickException():
            text = error.format_message()
            return f"{text.rstrip('.')}{'' if text.endswith('?') else '.'} See {command} --help."
        case OSError() if error.errno == errno.ENOSPC and error.filename is None:
            return f"{error}: standard output, or a temporary file"  # files that were asked for have a name
        case ValueError() | OSError() | CommError() | MissingExtraError():
            return str(error)
    return f"{type(error).__name__}: {error} ({command} --debug prints the traceback)"
