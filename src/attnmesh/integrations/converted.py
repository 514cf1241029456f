"""GGUF files converted once and kept: a folder of the cache for each, named after the file's bytes.

An entry is written under another name and renamed when it is whole, by one process at a time. So whoever sees it sees
all of it, and what a killed process left behind is never taken for an entry.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attnmesh.integrations.convert import convert_gguf
from attnmesh.integrations.gguf_header import read_header
from attnmesh.integrations.manifest import is_intact, sha256, write_manifest
from attnmesh.integrations.memory import check_fits, in_gib
from attnmesh.integrations.problem import ModelError, explained

_HINT = "ATTNMESH_CACHE names another folder"


def cache_folder() -> Path:
    """Where converted models are kept: $ATTNMESH_CACHE, else attnmesh in $XDG_CACHE_HOME or in ~/.cache."""
    if own := os.environ.get("ATTNMESH_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "attnmesh"


def is_converted(gguf: Path) -> bool:
    """Whether the cache has this file's model already, undamaged."""
    return is_intact(_entry(gguf))


def converted(gguf: Path) -> Path:
    """The folder with a GGUF file's model, converted now if it was not or if the folder is damaged."""
    entry = _entry(gguf)
    if not is_intact(entry):
        with _alone(entry):
            if not is_intact(entry):  # another process may have converted it while we waited
                _convert(gguf, entry)
    return entry


def _entry(gguf: Path) -> Path:
    with explained(f"{gguf} cannot be read"):
        return cache_folder() / f"gguf-{sha256(gguf)}"


def _convert(gguf: Path, entry: Path) -> None:
    weights = read_header(gguf).elements * torch.float32.itemsize
    check_fits(weights, torch.device("cpu"), gguf)
    unfinished = entry.with_name(f"{entry.name}.unfinished")
    with _writing(entry.parent):
        for old in (entry, unfinished):  # damaged, or left behind: we are alone here, so nobody is writing it
            if old.exists():
                shutil.rmtree(old)
        if weights > (free := shutil.disk_usage(entry.parent).free):
            raise ModelError(
                f"{entry.parent} has {in_gib(free)} free, and {gguf} takes {in_gib(weights)} converted; {_HINT}"
            )
        try:
            unfinished.mkdir()
            convert_gguf(gguf, unfinished)
            write_manifest(unfinished)
            unfinished.rename(entry)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Wait until no other process converts this entry. The system ends the lock of a process that dies."""
    with _writing(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_name(f"{entry.name}.lock").open("w")  # stays: whoever removes it might remove another's
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    with explained(f"converted models cannot be kept in {cache} ({_HINT})"):
        yield
