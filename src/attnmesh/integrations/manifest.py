"""A folder's list of its own files: names, sizes and hashes. It is written last, so a folder with one was finished."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_NAME = "manifest.json"
_FORMAT = 1  # another number, and all that was kept before is made anew


def write_manifest(folder: Path) -> None:
    """List every file of a folder in it."""
    files = [
        {"name": file.name, "size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != _NAME
    ]
    (folder / _NAME).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))


def is_intact(folder: Path) -> bool:
    """Whether a folder was finished and every file is still what it was.

    Sizes first: they cost nothing. Then every byte: half a GB takes less than half a second.
    """
    try:
        listed = json.loads((folder / _NAME).read_text())
        files = [(folder / str(file["name"]), file["size"], file["sha256"]) for file in listed["files"]]
        return (
            listed["format"] == _FORMAT
            and len(files) > 0
            and all(path.stat().st_size == size for path, size, _ in files)
            and all(sha256(path) == digest for path, _, digest in files)
        )
    except (OSError, ValueError, KeyError, TypeError):  # missing, unreadable, or no longer JSON as we write it
        return False


def sha256(file: Path) -> str:
    """The hash of a file's bytes."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
