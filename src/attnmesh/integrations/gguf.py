"""GGUF files: their headers, their conversion to checkpoint folders, and the cache of converted files.

A cache entry is a folder named after the hash of the GGUF file. It is written under another name by one process at a
time and renamed when complete, so a process never sees part of an entry, even if the one that wrote it was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from attnmesh.integrations.checkpoint import (
    ModelError,
    check_causal_lm,
    check_fits,
    quiet_transformers,
    readable_gib,
    require_hf,
    translated_errors,
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of scalar value types
_ALIGNMENT = 32  # of the tensors, unless the file specifies another

_MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 1  # entries with another number are converted again
_HINT = "set ATTNMESH_CACHE to use another folder"


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
            unfinished.mkdir()
            convert_gguf(gguf, unfinished)
            _write_manifest(unfinished)
            unfinished.rename(entry)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    """Wait until no other process converts this entry. The lock of a process that dies is released."""
    with _cache_errors(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_name(f"{entry.name}.lock").open("w")  # never removed: it could be another process's
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    with translated_errors(f"converted models cannot be written to {cache} ({_HINT})"):
        yield


def _write_manifest(folder: Path) -> None:
    """List the names, sizes and hashes of a folder's files. Written last, so it marks the folder as complete."""
    files = [
        {"name": file.name, "size": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name != _MANIFEST
    ]
    (folder / _MANIFEST).write_text(json.dumps({"format": _MANIFEST_FORMAT, "files": files}, indent=1))


def _is_intact(folder: Path) -> bool:
    """Whether a folder is complete and its files have not changed: first their sizes, then their hashes."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = [(folder / str(file["name"]), file["size"], file["sha256"]) for file in manifest["files"]]
        return (
            manifest["format"] == _MANIFEST_FORMAT
            and len(files) > 0
            and all(path.stat().st_size == size for path, size, _ in files)
            and all(_sha256(path) == digest for path, _, digest in files)
        )
    except (OSError, ValueError, KeyError, TypeError):  # missing, unreadable, or not a manifest
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer into `folder`: float32 safetensors, configuration and tokenizer.

    Raises ModelError if the file is invalid; any other exception comes from writing.
    """
    transformers = require_hf("transformers")
    require_hf("gguf"), require_hf("accelerate")
    # The absolute path: Transformers prefers a file of that name in the working directory to the one in the folder.
    source = {"gguf_file": str(gguf.absolute()), "local_files_only": True}
    # The GGUF reader has a tqdm bar of its own, which no setting of Transformers disables.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        with translated_errors(f"{gguf} cannot be converted"):
            config = transformers.AutoConfig.from_pretrained(gguf.parent, **source)
            check_causal_lm(config, gguf)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                config=config,  # saves a pass over the file
                dtype=torch.float32,
                # Otherwise some families stay quantized, with a kernel from the network, and cannot be saved.
                quantization_config=transformers.GgufConfig(dequantize=True),
                **source,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, config=config, **source)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # safetensors makes its file readable by the owner only, but a cache may be shared.
    for file in folder.iterdir():
        file.chmod((folder / "config.json").stat().st_mode)


@dataclass(frozen=True)
class GgufHeader:
    """The number of elements of all tensors, and the size of the complete file in bytes."""

    elements: int
    file_bytes: int


def check_magic(path: Path) -> None:
    """Raise ModelError unless the file starts as GGUF files do."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ModelError(
            f"{path} is not a GGUF file: it starts with {start!r}, not {_MAGIC!r}. "
            "A model is a .gguf file, or a folder with config.json and safetensors"
        )


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file; ModelError if the file is damaged or its version is not supported.

    Reads only what is needed, in a tenth of a second where the readers of `gguf` and Transformers take seconds, so that
    a truncated file or one too large for this machine is found before any work.
    """
    check_magic(path)
    block_sizes = require_hf("gguf").GGML_QUANT_SIZES
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _HeaderReader(data, path).header(block_sizes)
    except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:  # sizes that are noise
        raise ModelError(f"{path} is damaged: its header is truncated or invalid ({error})") from None
    if (have := path.stat().st_size) < header.file_bytes:
        raise ModelError(f"{path} is damaged: it has {have:,} bytes, and its tensors need {header.file_bytes:,}")
    return header


class _HeaderReader:
    """Reads values one after the other from a memory-mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = len(_MAGIC)

    def header(self, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
        (version,) = self.unpack("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} must be GGUF version {' or '.join(map(str, _VERSIONS))}, got {version}")
        tensors, values = self.unpack("QQ")
        alignment = _ALIGNMENT
        for _ in range(values):
            name = self.string()
            (kind,) = self.unpack("I")
            if name == b"general.alignment" and kind == _UINT32:
                (alignment,) = self.unpack("I")
            else:
                self.skip(kind)
        sizes = [self.tensor(block_sizes) for _ in range(tensors)]
        start = -(-self.offset // alignment) * alignment if alignment else self.offset
        return GgufHeader(
            elements=sum(elements for elements, _ in sizes),
            file_bytes=start + max((end for _, end in sizes), default=0),
        )

    def tensor(self, block_sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        """A tensor's number of elements, and its end relative to the end of the header."""
        name = self.string().decode()
        (dims,) = self.unpack("I")
        elements = prod(self.unpack(f"{dims}Q"))
        kind, offset = self.unpack("IQ")
        if kind not in block_sizes:
            raise ModelError(f"{self.path} is damaged or too new: tensor {name!r} has the unknown type {kind}")
        per_block, block_bytes = block_sizes[kind]
        return elements, offset + elements // per_block * block_bytes

    def skip(self, kind: int) -> None:
        if kind in _WIDTHS:
            self.offset += _WIDTHS[kind]
        elif kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            inner, count = self.unpack("IQ")
            if inner in _WIDTHS:
                self.offset += _WIDTHS[inner] * count
            else:
                for _ in range(count):
                    self.skip(inner)
        else:
            raise ModelError(f"{self.path} is damaged: its header has a value of the unknown type {kind}")

    def string(self) -> bytes:
        (length,) = self.unpack("Q")
        start, self.offset = self.offset, self.offset + length
        return self.data[start : self.offset]

    def unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{layout}")
        return values
