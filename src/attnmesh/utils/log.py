"""The package's log: `logging.getLogger("attnmesh")`, with a child for every module, such as `attnmesh.ops.decode.api`.

Nothing is shown until a program asks for it: the package adds no handler besides a NullHandler and sets no level. The
command line, and the ranks that it starts, show the log with `--verbose` (`show`).
"""

from __future__ import annotations

import logging
import os

import torch

from attnmesh.utils.text import one_line

ROOT = logging.getLogger("attnmesh")
ROOT.addHandler(logging.NullHandler())

VERBOSE = "ATTNMESH_VERBOSE"
"""The environment variable by which a command tells the processes that it starts to show their log."""

_MAX_SIGNATURES = 4096
_logged: set[tuple[object, ...]] = set()


def wants_choices(logger: logging.Logger) -> bool:
    """Whether to log what "auto" chose. To be asked before anything is put into words; it takes under a microsecond.

    What torch.compile traces is not logged: a logger would split the graph.
    """
    return not torch.compiler.is_dynamo_compiling() and logger.isEnabledFor(logging.INFO)


def log_choice(logger: logging.Logger, text: str, *values: object) -> None:
    """Log a choice at INFO, the first time that it is made with these values."""
    signature = (logger.name, text, *map(str, values))
    if signature in _logged:
        return
    if len(_logged) >= _MAX_SIGNATURES:
        _logged.clear()
    _logged.add(signature)
    logger.info(text, *values)


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


def show(rank: int | None = None) -> None:
    """Show the log of this process on stderr from INFO on, one line per message; again: no more than once."""
    if any(isinstance(handler.formatter, _Line) for handler in ROOT.handlers):
        return
    handler = logging.StreamHandler()
    prefix = "" if rank is None else f"rank {rank}: "
    handler.setFormatter(_Line(f"{prefix}%(levelname)s %(name)s: %(message)s"))
    ROOT.addHandler(handler)
    ROOT.setLevel(logging.INFO)


def show_if_asked(rank: int) -> None:
    """Show the log of a rank if the command that started it has `--verbose`."""
    if os.environ.get(VERBOSE):
        show(rank)
