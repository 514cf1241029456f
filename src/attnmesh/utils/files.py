"""Reads files that come from elsewhere: they are checked before they are opened, and every error is a ValueError.

Writes files: every error has the file's name.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

MAX_TEXT_BYTES = 2**28
"""The largest text file that is read: prompts, configurations, traces, figures."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_file(path: Path, name: str, *, most: int = MAX_TEXT_BYTES) -> None:
    """Raise ValueError unless `path` is a regular file of at most `most` bytes; `name` is what the message calls it.

    To open a FIFO waits for a writer, and a device may never end.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} must be a file, got {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}")
    if found.st_size > most:
        raise ValueError(f"{name} must have at most {most:,} bytes, got {found.st_size:,}")


def read_text(path: Path, name: str, *, most: int = MAX_TEXT_BYTES) -> str:
    """The content of a UTF-8 file; ValueError with `name` if it cannot be read."""
    check_file(path, name, most=most)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a text file: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None


def read_json(path: Path, name: str) -> object:
    """The value of a JSON file; ValueError with `name` if it cannot be read."""
    text = read_text(path, name)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{name} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # also a number of thousands of digits
        raise ValueError(f"{name} is not JSON: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file. An OSError names it: by itself, the error of a write to a full disk does not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
