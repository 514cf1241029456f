"""The headers of GGUF files: metadata and tensors, checked before any other library reads the file.

The readers of `gguf` and Transformers trust a file: counts and lengths beyond its end make them loop or allocate
without end, and a wrong offset makes them read other weights. What passes these checks has the layout that llama.cpp
requires: every value lies within the file, and tensors follow one another without gaps or overlaps.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path

from attnmesh.core.model_sizes import MAX_LAYERS, check_model_sizes
from attnmesh.integrations.checkpoint import ModelError, model_errors, require_hf
from attnmesh.utils.files import check_file
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
