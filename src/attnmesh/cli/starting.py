"""The first thing that `attnmesh` and `python -m attnmesh` do, before torch is imported, which takes seconds.

A signal ends the process with one line and its exit code, as it does later (see `errors`). A standard stream that is
closed becomes /dev/null: otherwise the next file that is opened would take its number, and get what libraries print.
`attnmesh/__init__.py` calls `start` first of all, since the package is imported before any of its modules. In other
programs it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def start() -> None:
    """Prepare this process, if it is the command."""
    if is_command(sys.argv, sys.orig_argv):
        open_streams()
        end_at_signals()


def is_command(argv: list[str], original: list[str]) -> bool:
    """Whether a process runs the command: `attnmesh ...` or `python -m attnmesh ...`.

    A rank that the command started has the command's arguments, but was itself started with others.
    """
    if argv and argv[0] == "-m":  # while the package is imported
        return original[-len(argv) :][0].removeprefix("-m") == "attnmesh"
    return bool(argv) and os.path.basename(argv[0]) == "attnmesh" and argv[0] in original


def open_streams() -> None:
    """Open the standard streams that are closed, to read and write nothing."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def end_at_signals() -> None:
    """End this process at once at SIGINT and SIGTERM, wherever it is: no exception passes through what is imported.

    A signal that is ignored stays ignored. Ranks of torchrun, which sends them signals, end without a word.
    """
    if "RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def raise_at_interrupt() -> bool:
    """Raise KeyboardInterrupt at SIGINT from now on, if it has ended this process until now; return whether it has."""
    if signal.getsignal(signal.SIGINT) is not _end:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, f"attnmesh: {_SIGNALS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)
