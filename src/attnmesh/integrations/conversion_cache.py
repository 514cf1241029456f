"""The cache of converted GGUF files.

An entry is a folder named after the hash of the GGUF file. It is written under another name by one process at a time
and renamed when complete, so a process never sees part of an entry, even if the one that wrote it was killed. An entry
that another user could have written is not read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attnmesh.integrations.checkpoint import ModelError, check_fits, readable_gib, translated_errors
from attnmesh.integrations.gguf import read_header
from attnmesh.integrations.gguf_conversion import convert_gguf

_MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 2  # entries with another number are converted again
_HINT = "set ATTNMESH_CACHE to use another folder"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """The folder of converted models: $ATTNMESH_CACHE, else attnmesh in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("ATTNMESH_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "attnmesh"


def is_converted(gguf: Path) -> bool:
    """Whether the cache has an undamaged conversion of this file."""
    return _is_intact(_cache_entry(gguf))


def converted_folder(gguf: Path) -> Path:
    """The checkpoint folder of a GGUF file in the cache, converted now if it is missing or damaged."""
    entry = _cache_entry(gguf)
    if not _is_intact(entry):
        with _locked(entry):
            if not _is_intact(entry):  # another process may have converted it in the meantime
                _convert_into_cache(gguf, entry)
    return entry


def _cache_entry(gguf: Path) -> Path:
    with translated_errors(f"{gguf} cannot be read"):
        return cache_folder() / f"gguf-{_sha256(gguf)}"


def _convert_into_cache(gguf: Path, entry: Path) -> None:
    weights = read_header(gguf).elements * torch.float32.itemsize
    check_fits(weights, torch.device("cpu"), gguf)
    unfinished = entry.with_name(f"{entry.name}.unfinished")
    with _cache_errors(entry.parent):
        for old in (entry, unfinished):  # damaged, or left by a killed process: the lock is ours
            if old.exists():
                shutil.rmtree(old)
        if weights > (free := shutil.disk_usage(entry.parent).free):
            needed = f"{gguf} takes {readable_gib(weights)} converted"
            raise ModelError(f"{entry.parent} has {readable_gib(free)} free, and {needed}; {_HINT}")
        try:
            unfinished.mkdir(mode=0o755)
            convert_gguf(gguf, unfinished)
            _write_manifest(unfinished)
            unfinished.rename(entry)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    """Wait until no other process converts this entry. The lock of a process that dies is released."""
    with _cache_errors(entry.parent):
        entry.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_private(entry.parent)
        path = entry.with_name(f"{entry.name}.lock")  # never removed: it could be another process's
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _check_private(path, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    with translated_errors(f"converted models cannot be written to {cache} ({_HINT})"):
        yield


def _check_private(path: Path, opened: int | None = None) -> None:
    """Raise ModelError if another user, except root, owns a file or folder of the cache or can write to it."""
    found = os.stat(path if opened is None else opened)
    if found.st_uid not in (os.geteuid(), 0):
        raise ModelError(f"{path} in the cache belongs to another user (uid {found.st_uid}) and is not used; {_HINT}")
    if found.st_mode & _WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(found.st_mode)
        raise ModelError(
            f"{path} in the cache can be written by other users (mode {mode:04o}) and is not used; "
            f"remove it, or run chmod -R go-w {cache_folder()}, or {_HINT}"
        )


def _write_manifest(folder: Path) -> None:
    """List the names, sizes and hashes of a folder's files. Written last, so it marks the folder as complete.

    All files get the permissions of the manifest: safetensors makes its file readable by the owner only, but a cache
    may be shared.
    """
    files = [
        {"name": file.name, "size": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())
    ]
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"format": _MANIFEST_FORMAT, "files": files}, indent=1))
    mode = manifest.stat().st_mode & ~_WRITABLE_BY_OTHERS
    for file in folder.iterdir():
        file.chmod(mode)


def _is_intact(folder: Path) -> bool:
    """Whether a folder has exactly the files of its manifest, unchanged: first their sizes, then their hashes.

    Raises ModelError if another user could have changed the manifest too.
    """
    if not folder.is_dir() or folder.is_symlink():
        return False
    for path in (folder.parent, folder, *folder.iterdir()):
        if not path.is_symlink():
            _check_private(path)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = {str(file["name"]): (file["size"], file["sha256"]) for file in manifest["files"]}
        return (
            manifest["format"] == _MANIFEST_FORMAT
            and len(files) > 0
            and {path.name for path in folder.iterdir()} == {*files, _MANIFEST}
            and all(_is_plain(folder / name, size) for name, (size, _) in files.items())
            and all(_sha256(folder / name) == digest for name, (_, digest) in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing, unreadable, or not a manifest
        return False


def _is_plain(file: Path, size: int) -> bool:
    found = os.lstat(file)
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
