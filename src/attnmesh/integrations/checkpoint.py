"""The safetensors files of a model's folder, as their heads tell."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import torch

from attnmesh.integrations.problem import ModelError, explained, needed

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CAST = ("F64", "F32", "F16", "BF16")  # what loading turns into the dtype that was asked for
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # of what stays as it is; all others take one


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """The bytes that a folder's weights take once they are loaded as `dtype`; a ModelError if files are damaged."""
    safe_open = needed("safetensors").safe_open
    total = 0
    for file in _files(folder):
        with explained(f"{file} is damaged"), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                tensor = tensors.get_slice(name)
                kind = tensor.get_dtype()
                total += prod(tensor.get_shape()) * (dtype.itemsize if kind in _CAST else _BYTES.get(kind, 1))
    return total


def _files(folder: Path) -> list[Path]:
    if (folder / _ONE_FILE).is_file():
        return [folder / _ONE_FILE]
    if not (folder / _INDEX).is_file():
        raise ModelError(f"{folder} has no weights: neither {_ONE_FILE} nor {_INDEX} is there")
    with explained(f"{folder / _INDEX} is damaged"):
        names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks some of its weights: {', '.join(missing)}")
    return [folder / name for name in names]
