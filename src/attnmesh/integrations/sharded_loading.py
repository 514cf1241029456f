"""Loads one rank's part of a checkpoint's weights, slice by slice: the whole model is nowhere in memory.

At most one slice is in memory beside what is loaded already. Experts that a checkpoint stores one by one are written
into the tensor of all of them, as Transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.integrations.checkpoint import (
    LOCAL,
    ModelError,
    check_fits,
    model_errors,
    quiet_transformers,
    require_hf,
    translated_errors,
)
from attnmesh.integrations.checkpoint_folder import stored_tensors
from attnmesh.integrations.completeness import Differences, declared_model
from attnmesh.integrations.sharded_model import build_sharded
from attnmesh.integrations.transformers_models import check_config
from attnmesh.integrations.weight_splits import check_sharded_model
from attnmesh.parallel.decode.ranks import decode_ranks
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.weights import WeightPart

_GENERATION_CONFIG = "generation_config.json"
_EXPERTS = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_STORED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL_EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def load_sharded(
    folder: Path, config: Any, device: torch.device, dtype: torch.dtype, sharding: DecodeSharding, comm: Comm
) -> Any:
    """The model in a folder with this rank's part of its weights. Raises ModelError if they are not complete."""
    with translated_errors(f"the model in {folder} cannot be sharded"):
        check_config(config.get_text_config(), type(config).__name__)
        check_sharded_model(config, type(config).__name__, sharding)
        ranks = decode_ranks(comm, comm, sharding)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{folder} must store weights that are not quantized to be sharded")
    with _Checkpoint(folder, config, dtype, device) as checkpoint, model_errors():
        model = build_sharded(config, ranks, sharding, checkpoint, torch.empty(0, dtype=dtype, device=device))
    if (folder / _GENERATION_CONFIG).is_file():
        with quiet_transformers(), translated_errors(f"{folder / _GENERATION_CONFIG} cannot be read"):
            generation: Any = require_hf("transformers").GenerationConfig
            model.generation_config = generation.from_pretrained(folder, local_files_only=LOCAL["local_files_only"])
    return model


@dataclass(frozen=True)
class _Piece:
    """A stored tensor, and where it is in a tensor of the model: from `begin` of dimension `dim`, of one expert."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    begin: int = 0
    expert: int | None = None


class _Checkpoint:
    """The weights in a folder, as a source of parts."""

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._is_mixtral = config.model_type == "mixtral"
        self._stored = stored_tensors(folder)
        with quiet_transformers():
            declared_model(config, len(self._stored), folder)  # refuses sizes that would take time to build
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        self._in_float32: tuple[str, ...] = ()

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def prepare(self, model: Any, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        """Raise ModelError unless the folder has exactly these weights, and their parts fit on the device.

        Args:
            model: without weights.
            weights: by name, tied ones once.
            parts: those that are to be read.
        """
        pieces = [piece for name, weight in weights.items() for piece in self._pieces(name, tuple(weight.shape))]
        declared = {piece.name: piece.shape for piece in pieces}
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        tied = set(model.state_dict()) - set(weights)
        found = {
            name: tensor.shape for name, tensor in self._stored.items()
            if name in declared or not (name in tied or any(pattern.search(name) for pattern in ignored))
        }  # fmt: skip
        differences = str(Differences.between(found, declared))
        if differences:
            raise ModelError(f"{self._folder} does not match its configuration{differences}")
        for name in declared:
            if not self._stored[name].is_floating_point:
                kind = self._stored[name].kind
                raise ModelError(f"{self._folder} must store floating point weights, got {kind} for {name!r}")
        strict = model._keep_in_fp32_modules_strict or ()
        half = model._keep_in_fp32_modules or () if self._dtype == torch.float16 else ()
        self._in_float32 = (*strict, *half)
        needed = sum(prod(parts[name].shape) for name in weights) * self._dtype.itemsize
        check_fits(needed, self._device, self._folder)

    def read(self, name: str, whole: tuple[int, ...], part: WeightPart) -> Tensor:
        """A part of a tensor of the model."""
        in_float32 = any(each in name for each in self._in_float32)
        out = torch.empty(part.shape, dtype=torch.float32 if in_float32 else self._dtype, device=self._device)
        for piece in self._pieces(name, whole):
            for index, target in _overlaps(piece, part):
                view = out if piece.expert is None else out[piece.expert]
                view[target].copy_(self._slice(piece.name)[index])
        return out

    def _slice(self, name: str) -> Any:
        """A stored tensor, of which nothing is read before it is indexed."""
        file = self._stored[name].file
        with translated_errors(f"{file} is damaged"):
            if file not in self._files:
                safe_open = require_hf("safetensors").safe_open
                self._files[file] = self._open.enter_context(safe_open(file, framework="pt"))
            return self._files[file].get_slice(name)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[_Piece]:
        """The stored tensors that a tensor of the model consists of."""
        found = _EXPERTS.match(name)
        stored = name.replace(".mlp.", ".block_sparse_moe.") if self._is_mixtral else name
        if found is None or name in self._stored:
            yield _Piece(stored if stored in self._stored else name, shape)
            return
        parts = (_MIXTRAL_EXPERTS if self._is_mixtral else _STORED_EXPERTS)[found[2]]
        experts, rows, columns = shape
        for expert in range(experts):
            for at, part in enumerate(parts):
                rows_of_one = rows // len(parts)
                path = f"{stored.rpartition('.')[0]}.{expert}.{part}.weight"
                yield _Piece(path, (rows_of_one, columns), 0, at * rows_of_one, expert)


def _overlaps(piece: _Piece, part: WeightPart) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Indices of a stored tensor, and of (one expert of) the part, that are the same elements."""
    whole = (slice(None),) * len(piece.shape)
    dim = part.dim - (piece.expert is not None)  # of the stored tensor
    if not part.ranges:
        yield whole, _at(whole, piece.dim, slice(piece.begin, piece.begin + piece.shape[piece.dim]))
        return
    at = 0  # in the part
    for own in part.ranges:
        target = slice(at, at + len(own))
        at += len(own)
        if dim != piece.dim:  # the stored tensor has all of this dimension
            yield _at(whole, dim, slice(own.start, own.stop)), _at(whole, dim, target)
        elif piece.begin <= own.start and own.stop <= piece.begin + piece.shape[dim]:
            yield _at(whole, dim, slice(own.start - piece.begin, own.stop - piece.begin)), _at(whole, dim, target)


def _at(index: tuple[slice, ...], dim: int, at: slice) -> tuple[slice, ...]:
    return (*index[:dim], at, *index[dim + 1 :])
