"""Checkpoint folders: which files Transformers would read, checked before it does."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from attnmesh.core.model_sizes import check_model_sizes
from attnmesh.integrations.checkpoint import ModelError, model_errors, require_hf, translated_errors
from attnmesh.utils.files import MAX_TEXT_BYTES, check_file
from attnmesh.utils.validation import shown

CONFIG = "config.json"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TEMPLATES = "additional_chat_templates"
_TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
_ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")  # Transformers prefers them to _ONE_FILE
_CAST = ("F64", "F32", "F16", "BF16")  # types that loading converts to the requested dtype
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # types that it keeps; all others have one byte


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    shape: tuple[int, ...]
    kind: str  # as safetensors names it, such as BF16
    file: Path

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_floating_point(self) -> bool:
        """Whether loading converts it to another floating point type without scales."""
        return self.kind in _CAST

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Its bytes once loaded as `dtype`."""
        return self.elements * (dtype.itemsize if self.is_floating_point else _BYTES.get(self.kind, 1))

    @property
    def stored_bytes(self) -> int:
        """Its bytes in the file, at least."""
        return self.elements * (2 if self.is_floating_point else _BYTES.get(self.kind, 1))


def check_folder(folder: Path) -> None:
    """Raise ModelError for a folder with files that block, are too large, or replace the model's own.

    Every file is checked, since Transformers looks for many names: to open a FIFO would wait for ever.
    """
    for entry in _entries(folder):
        path = Path(entry.path)
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue  # a link to nothing: Transformers does not see it either
        if stat.S_ISDIR(mode):
            continue
        with model_errors():
            check_file(path, str(path), most=MAX_TEXT_BYTES if path.suffix in _TEXT_SUFFIXES else 2**63)
        if entry.name == _ADAPTER:
            raise ModelError(f"{folder} has {_ADAPTER}: adapters are not supported, merge it into the model first")
        if _SHARD.fullmatch(entry.name):
            raise ModelError(f"{folder} has {entry.name}: distributed checkpoints are not supported")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with translated_errors(f"{folder} cannot be read"):
        for inner in (folder, folder / _TEMPLATES):
            if inner.is_dir():
                with os.scandir(inner) as entries:
                    yield from entries


def read_config_file(folder: Path) -> dict[str, Any]:
    """The content of config.json; ModelError if it is not a configuration, or one of a model beyond all limits.

    Checked before Transformers reads it, which builds lists with one entry for each layer.
    """
    path = folder / CONFIG
    with translated_errors(f"{path} cannot be read"):
        fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ModelError(f"{path} cannot be read: it must hold one JSON object, got {type(fields).__name__}")
    with translated_errors(f"{path} cannot be read"), model_errors():
        check_model_sizes(fields, path)
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"architectures in {path} must be a list of names, got {shown(architectures)}")
    if fields.get("transformers_weights") is not None:
        raise ModelError(f"{path} must not name its weights with transformers_weights: {_ONE_FILE} is read")
    return fields


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name, from the headers of its safetensors files."""
    safe_open = require_hf("safetensors").safe_open
    found: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        with translated_errors(f"{file} is damaged"), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name in found:
                    raise ModelError(f"{folder} has the tensor {name!r} in two files")
                tensor = tensors.get_slice(name)
                found[name] = StoredTensor(tuple(tensor.get_shape()), tensor.get_dtype(), file)
    return found


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """The bytes of a checkpoint's weights once loaded as `dtype`."""
    return sum(tensor.loaded_bytes(dtype) for tensor in stored_tensors(folder).values())


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _ONE_FILE).is_file():
        return [folder / _ONE_FILE]
    index = folder / _INDEX
    if not index.is_file():
        raise ModelError(f"{folder} has no weights: neither {_ONE_FILE} nor {_INDEX} exists")
    with translated_errors(f"{index} is damaged"):
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise ModelError(f"{index} must name safetensors files in the same folder, got {strange[0]!r}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks the weight files {', '.join(missing)}")
    return [folder / name for name in names]
