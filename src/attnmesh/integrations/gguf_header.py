"""What the head of a GGUF file says of its tensors: how large they are, and how long the file must be.

Read here because it takes a tenth of a second, and the readers of `gguf` and Transformers take seconds. A file that is
cut short or too large for this machine is found before the work begins.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from attnmesh.integrations.problem import ModelError, needed

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a plain value's type
_ALIGNMENT = 32  # of the tensors, unless the file says another


@dataclass(frozen=True)
class GgufHeader:
    """How many numbers the tensors of a GGUF file hold, and how many bytes the file has when it is whole."""

    elements: int
    file_bytes: int


def check_magic(path: Path) -> None:
    """Refuse a file that does not begin as GGUF files do."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ModelError(
            f"{path} is no GGUF file: it begins with {start!r}, not {_MAGIC!r}. "
            "A model is a .gguf file, or a folder with config.json and safetensors"
        )


def read_header(path: Path) -> GgufHeader:
    """The head of a GGUF file; a ModelError if the file is damaged or of a version nobody here can read."""
    check_magic(path)
    block_sizes = needed("gguf").GGML_QUANT_SIZES
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Cursor(data, path).header(block_sizes)
    except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:  # sizes that are noise
        raise ModelError(f"{path} is damaged: its head ends too early or makes no sense ({error})") from None
    if (have := path.stat().st_size) < header.file_bytes:
        raise ModelError(f"{path} is damaged: it has {have:,} bytes, and its tensors need {header.file_bytes:,}")
    return header


class _Cursor:
    """A place in a file that moves on as values are read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = len(_MAGIC)

    def header(self, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
        (version,) = self.take("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version}; versions {_VERSIONS} can be read")
        tensors, values = self.take("QQ")
        alignment = _ALIGNMENT
        for _ in range(values):
            name = self.string()
            (kind,) = self.take("I")
            if name == b"general.alignment" and kind == _UINT32:
                (alignment,) = self.take("I")
            else:
                self.skip(kind)
        sizes = [self.tensor(block_sizes) for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment if alignment else self.at
        return GgufHeader(
            elements=sum(elements for elements, _ in sizes),
            file_bytes=start + max((end for _, end in sizes), default=0),
        )

    def tensor(self, block_sizes: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
        """A tensor's number of elements, and where it ends behind the head."""
        name = self.string().decode()
        (dims,) = self.take("I")
        elements = prod(self.take(f"{dims}Q"))
        kind, offset = self.take("IQ")
        if kind not in block_sizes:
            raise ModelError(f"{self.path} is damaged or too new: its tensor {name!r} is of the unknown type {kind}")
        per_block, block_bytes = block_sizes[kind]
        return elements, offset + elements // per_block * block_bytes

    def skip(self, kind: int) -> None:
        if kind in _WIDTHS:
            self.at += _WIDTHS[kind]
        elif kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            inner, count = self.take("IQ")
            if inner in _WIDTHS:
                self.at += _WIDTHS[inner] * count
            else:
                for _ in range(count):
                    self.skip(inner)
        else:
            raise ModelError(f"{self.path} is damaged: its head has a value of the unknown type {kind}")

    def string(self) -> bytes:
        (length,) = self.take("Q")
        start, self.at = self.at, self.at + length
        return self.data[start : self.at]

    def take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values
