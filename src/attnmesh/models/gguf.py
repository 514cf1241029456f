"""GGUF files: their headers, their conversion to checkpoint folders, and the cache of converted files.

The readers of `gguf` and Transformers trust a file: counts and lengths beyond its end make them loop or allocate
without end, and a wrong offset makes them read other weights. So the header is checked before any other library reads
the file. What passes has the layout that llama.cpp requires: every value lies within the file, and tensors follow one
another without gaps or overlaps.

Transformers looks for other files beside a GGUF file: a tokenizer there would replace the tokenizer in the file, and a
configuration there may name code. The conversion therefore reads the file from a private folder that holds only a link
to it.

An entry of the cache is a folder named after the hash of the GGUF file. It is written under another name by one process
at a time and renamed when complete, so a process never sees part of an entry, even if the process that wrote it was
killed. An entry that another user could have written is not read.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from attnmesh.models.checkpoint import (
    LOCAL,
    DeclaredModel,
    Differences,
    ModelError,
    Shape,
    check_causal_lm,
    check_elements,
    check_fits,
    check_loaded,
    declared_model,
    model_errors,
    quiet_transformers,
    readable_gib,
    require_hf,
    translated_errors,
)
from attnmesh.utils.files import check_file
from attnmesh.utils.sizes import MAX_LAYERS, check_model_sizes
from attnmesh.utils.validation import shown

MAX_FILE_BYTES = 2**41

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", _UINT32: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32  # of the tensors, unless the file specifies another
_MAX_DIMENSIONS = 4
_MAX_HEADER = 2**28  # bytes
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**17
_MAX_ARRAY_VALUES = 2**22  # of all arrays together: a vocabulary has some hundred thousand entries
_MAX_STRING = 2**24
_MAX_NAME = 256
_ARCHITECTURE = re.compile(r"[a-z0-9._-]{1,64}")
_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
TOKENS = "tokenizer.ggml.tokens"

_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT32 = 0  # GGML type
_READ_EXACTLY = {
    name: name.rpartition(".")[2]
    for name in ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
}
_NOT_READ = "Transformers does not read from GGUF files of this family; use the model's safetensors"

_MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 2  # entries with another number are converted again
_HINT = "set ATTNMESH_CACHE to use another folder"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


# Headers.


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file."""

    shape: tuple[int, ...]  # as in torch: the last dimension is contiguous
    kind: int  # GGML type
    start: int  # in the file
    size: int  # in bytes

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The metadata and the tensors of a GGUF file. Long arrays are represented by their lengths."""

    values: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The family of the model, such as llama."""
        return str(self.values["general.architecture"])

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    def model_value(self, name: str) -> object:
        """A value of the model's configuration, such as `block_count`; None if the file does not have it."""
        return self.values.get(f"{self.architecture}.{name}")


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file; ModelError if it is not one, damaged, too large or lacks values that models need."""
    with model_errors():
        check_file(path, str(path), most=MAX_FILE_BYTES)
    _check_magic(path)
    block_sizes = require_hf("gguf").GGML_QUANT_SIZES
    try:
        size = path.stat().st_size
        mapped = min(size, _MAX_HEADER)
        with path.open("rb") as file, mmap.mmap(file.fileno(), mapped, access=mmap.ACCESS_READ) as data:
            header = _Reader(data, size, path).header(block_sizes)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelError(f"{path} is damaged: its header is truncated or invalid ({error})") from None
    _check_values(header, path)
    return header


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ModelError(
            f"{path} is not a GGUF file: it starts with {start!r}, not {_MAGIC!r}. "
            "A model is a .gguf file, or a folder with config.json and safetensors"
        )


def _check_values(header: GgufHeader, path: Path) -> None:
    """Raise ModelError if the header lacks a value for which Transformers would use a default, or has a wrong one."""
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
        raise ModelError(f"{path} must name its family in general.architecture, got {shown(architecture)}")
    for name, value in header.values.items():
        if isinstance(value, float) and not isfinite(value):
            raise ModelError(f"{path} is damaged: {name!r} must be finite, got {value}")
    missing = [name for name in _REQUIRED if header.model_value(name) is None]
    if not any(isinstance(header.model_value(name), float) for name in _EPSILONS):
        missing.append(_EPSILONS[0])
    if missing:
        raise ModelError(f"{path} has no {header.architecture}.{missing[0]}")
    if header.values.get(TOKENS) is None:
        raise ModelError(f"{path} has no {TOKENS}")
    with model_errors():
        check_model_sizes(header.values, path)


@dataclass
class _Reader:
    """Reads values one after the other from a memory-mapped file."""

    data: mmap.mmap  # the first bytes of the file
    file_bytes: int
    path: Path
    offset: int = len(_MAGIC)
    array_values: int = 0
    values: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)

    def header(self, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
        (version,) = self.unpack("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} must be GGUF version {' or '.join(map(str, _VERSIONS))}, got {version}")
        tensors, keys = self.count("tensors", _MAX_TENSORS), self.count("metadata keys", _MAX_KEYS)
        for _ in range(keys):
            self.read_key()
        table = [self.read_tensor(block_sizes) for _ in range(tensors)]
        self.place(table)
        return GgufHeader(self.values, self.tensors)

    def read_key(self) -> None:
        name = self.string(_MAX_NAME).decode()
        if name in self.values:
            raise ModelError(f"{self.path} is damaged: it has the metadata key {name!r} twice")
        (kind,) = self.unpack("I")
        self.values[name] = self.value(name, kind)

    def value(self, name: str, kind: int) -> object:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string().decode()
        if kind != _ARRAY:
            raise ModelError(f"{self.path} is damaged: {name!r} has the unknown type {kind}")
        (inner,) = self.unpack("I")
        self.array_values += (count := self.count(f"values of {name!r}", _MAX_ARRAY_VALUES))
        if self.array_values > _MAX_ARRAY_VALUES:
            raise ModelError(f"{self.path} must have at most {_MAX_ARRAY_VALUES:,} values in arrays, got more")
        if inner in _SCALARS:
            numbers = self.unpack(f"{count}{_SCALARS[inner]}")
            return list(numbers) if count <= MAX_LAYERS else count
        if inner != _STRING:
            raise ModelError(f"{self.path} is damaged: {name!r} is an array of the unknown type {inner}")
        self.skip_strings(count)
        return count

    def skip_strings(self, count: int) -> None:
        """Skip an array of strings, such as a vocabulary: most of a header."""
        read, offset = struct.Struct("<Q").unpack_from, self.offset
        for _ in range(count):
            offset += 8 + read(self.data, offset)[0]
        self.advance(offset - self.offset)

    def read_tensor(self, block_sizes: Mapping[int, tuple[int, int]]) -> tuple[str, GgufTensor, int]:
        """A tensor's name, the tensor at start 0, and its offset from the first tensor."""
        name = self.string(_MAX_NAME).decode()
        (dimensions,) = self.unpack("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self.path} is damaged: tensor {name!r} has {dimensions:,} dimensions")
        shape = tuple(reversed(self.unpack(f"{dimensions}Q")))
        kind, offset = self.unpack("IQ")
        if kind not in block_sizes:
            raise ModelError(f"{self.path} is damaged or too new: tensor {name!r} has the unknown type {kind}")
        per_block, block_bytes = block_sizes[kind]
        if 0 in shape or shape[-1] % per_block:
            raise ModelError(f"{self.path} is damaged: tensor {name!r} of type {kind} has the shape {shape}")
        return name, GgufTensor(shape, kind, 0, prod(shape) // per_block * block_bytes), offset

    def place(self, table: list[tuple[str, GgufTensor, int]]) -> None:
        """Check that tensors follow one another up to the end of the file."""
        alignment = self.values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(
                f"{self.path} is damaged: general.alignment must be a power of two, got {shown(alignment)}"
            )
        first = end = -(-self.offset // alignment) * alignment
        for name, tensor, offset in table:
            start = -(-end // alignment) * alignment
            if name in self.tensors:
                raise ModelError(f"{self.path} is damaged: it has the tensor {name!r} twice")
            if offset != start - first:
                raise ModelError(
                    f"{self.path} is damaged: tensor {name!r} has the offset {offset:,}, expected {start - first:,}"
                )
            self.tensors[name] = GgufTensor(tensor.shape, tensor.kind, start, tensor.size)
            end = start + tensor.size
        if not end <= self.file_bytes <= end + 2 * alignment:  # the last tensor may be padded
            raise ModelError(f"{self.path} is damaged: it has {self.file_bytes:,} bytes, and its tensors need {end:,}")

    def count(self, what: str, most: int) -> int:
        (count,) = self.unpack("Q")
        if count > most:
            raise ModelError(f"{self.path} must have at most {most:,} {what}, got {count:,}")
        return int(count)

    def string(self, most: int = _MAX_STRING) -> bytes:
        length = self.count("bytes in a string", most)
        return self.data[self.advance(length) : self.offset]

    def advance(self, length: int) -> int:
        """Move on by `length` bytes; returns where they start."""
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise ModelError(f"{self.path} is damaged: its header is truncated")
        return start

    def unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{layout}")
        return values


# Conversion.


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer into `folder`: float32 safetensors, configuration and tokenizer.

    Raises ModelError if the file is invalid; any other exception comes from writing.
    """
    transformers = require_hf("transformers")
    require_hf("accelerate")
    header = _without_rope_factors(read_header(gguf), gguf)
    before = _identity(gguf)
    # The GGUF reader has a tqdm bar of its own, which no setting of Transformers disables.
    with quiet_transformers(), redirect_stderr(io.StringIO()), _alone(gguf) as link:
        # The absolute path: Transformers prefers a file of that name in the working directory to the one in the folder.
        source = {"gguf_file": str(link), **LOCAL}
        with translated_errors(f"{gguf} cannot be converted"):
            config = transformers.AutoConfig.from_pretrained(link.parent, **source)
            check_causal_lm(config, gguf)
            declared = _check_exact(config, header, gguf)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                link.parent,
                config=config,  # saves a pass over the file
                dtype=torch.float32,
                # Otherwise some families stay quantized, with a kernel from the network, and cannot be saved.
                quantization_config=transformers.GgufConfig(dequantize=True),
                ignore_mismatched_sizes=True,  # reported, and refused below
                output_loading_info=True,
                **source,
            )
            check_loaded(info, gguf)
            # Transformers does not compare the shapes of weights from GGUF files.
            loaded = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
            Differences.between(loaded, declared.shapes).check(gguf)
            tokenizer = transformers.AutoTokenizer.from_pretrained(link.parent, config=config, **source)
        if _identity(gguf) != before:
            raise ModelError(f"{gguf} changed while it was converted")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _alone(gguf: Path) -> Iterator[Path]:
    """A link to the file in a folder that holds nothing else and that nobody else can write to."""
    with tempfile.TemporaryDirectory(prefix="attnmesh-") as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(gguf.resolve())
        yield link


def _identity(file: Path) -> tuple[int, ...]:
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _without_rope_factors(header: GgufHeader, gguf: Path) -> GgufHeader:
    """Leave out a tensor that Transformers does not read; ModelError if that would change the model."""
    factors = header.tensors.get(_ROPE_FACTORS)
    if factors is None:
        return header
    if factors.kind == _FLOAT32:
        with gguf.open("rb") as file:
            file.seek(factors.start)
            values = struct.unpack(f"<{factors.elements}f", file.read(factors.size))
        if all(value == 1 for value in values):
            return replace(header, tensors={name: t for name, t in header.tensors.items() if name != _ROPE_FACTORS})
    raise ModelError(f"{gguf} has the tensor {_ROPE_FACTORS!r}, which {_NOT_READ}")


def _check_exact(config: Any, header: GgufHeader, gguf: Path) -> DeclaredModel:
    """The model of a file; ModelError unless it has exactly these weights, and Transformers read what changes it.

    Elements are compared as well as names: Transformers reports no tensor of a GGUF file that it ignores.
    """
    config.tie_word_embeddings = "output.weight" not in header.tensors
    declared = declared_model(config, len(header.tensors), gguf)
    tensors = {name: tensor.shape for name, tensor in header.tensors.items() if not _is_draft(name, config, header)}
    differences = Differences.between(tensors, _names_in_file(declared.shapes, config, header))
    check_elements(sum(map(prod, tensors.values())), declared.elements, differences, gguf)
    check_fits(declared.loaded_bytes(torch.float32), torch.device("cpu"), gguf)
    for name, attribute in _READ_EXACTLY.items():
        value = header.model_value(name)
        if value and value != getattr(config, attribute, None):
            raise ModelError(f"{gguf} has {name} {shown(value)}, which {_NOT_READ}")
    scaling = header.model_value("rope.scaling.type") or "none"
    rope = getattr(config, "rope_parameters", None) or {}
    if scaling != "none" and rope.get("rope_type", "default") == "default":
        raise ModelError(f"{gguf} has rope.scaling.type {shown(scaling)}, which {_NOT_READ}")
    tokens = header.values[TOKENS]
    if not isinstance(tokens, int) or tokens > config.vocab_size:
        raise ModelError(f"{gguf} must have at most {config.vocab_size:,} tokens, its vocabulary, got {shown(tokens)}")
    return declared


def _is_draft(name: str, config: Any, header: GgufHeader) -> bool:
    """Whether a tensor is of a layer that drafts tokens (multi-token prediction), which Transformers leaves out."""
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() else -1
    return bool(header.model_value("nextn_predict_layers")) and layer >= config.num_hidden_layers


def _names_in_file(shapes: Mapping[str, Shape], config: Any, header: GgufHeader) -> dict[str, Shape]:
    """The shapes of a model's weights by their names in GGUF files, to be printed; tied weights once."""
    gguf = require_hf("gguf")
    family = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if family is None:
        return dict(shapes)
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    translated = {names.get_name(name, try_suffixes=(".weight", ".bias")) or name: shapes[name] for name in shapes}
    if config.tie_word_embeddings:
        translated.pop("output.weight", None)
    return translated


# The cache.


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
