"""Checks of checkpoint folders before they are loaded: completeness, memory, model type; and errors of models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnmesh.core.optional import require

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CAST = ("F64", "F32", "F16", "BF16")  # types that loading converts to the requested dtype
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # types that it keeps; all others have one byte


class ModelError(ValueError):
    """A model cannot be loaded."""


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn any exception into a ModelError that starts with `what`.

    Model files come from elsewhere, and the libraries that read them raise anything: KeyError, struct.error, their own.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {str(error).strip() or type(error).__name__}") from error


def require_hf(module: str) -> ModuleType:
    """Import a module of the extra `hf`; raises ModelError with the command to install it."""
    try:
        return require(module, extra="hf")
    except ModuleNotFoundError as missing:
        raise ModelError(str(missing)) from missing


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable the progress bars of Transformers and log errors only, then restore both."""
    logging = require_hf("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    # disable_progress_bar would also change a setting of huggingface_hub that cannot be restored.
    hook = logging.set_tqdm_hook(_disabled_bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(verbosity)


def _disabled_bar(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return factory(*args, **{**kwargs, "disable": True})


def check_causal_lm(config: Any, model: Path) -> None:
    """Raise ModelError unless the configuration is that of a causal language model.

    A family of models may have one and this checkpoint still be a classifier, which would get a random output layer.
    """
    known = require_hf("transformers").MODEL_FOR_CAUSAL_LM_MAPPING
    architecture = ", ".join(config.architectures or ()) or f"a model of type {config.model_type!r}"
    if type(config) not in known:
        raise ModelError(f"{model} must be a causal language model, got {architecture}")
    classes = known[type(config)]
    names = {one.__name__ for one in (classes if isinstance(classes, list | tuple) else (classes,))}
    if config.architectures and not names & set(config.architectures):
        raise ModelError(f"{model} must be a causal language model ({', '.join(sorted(names))}), got {architecture}")


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """The bytes of a checkpoint's weights once loaded as `dtype`, from the headers of its safetensors files."""
    safe_open = require_hf("safetensors").safe_open
    total = 0
    for file in _weight_files(folder):
        with translated_errors(f"{file} is damaged"), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                tensor = tensors.get_slice(name)
                kind = tensor.get_dtype()
                total += prod(tensor.get_shape()) * (dtype.itemsize if kind in _CAST else _BYTES.get(kind, 1))
    return total


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _ONE_FILE).is_file():
        return [folder / _ONE_FILE]
    if not (folder / _INDEX).is_file():
        raise ModelError(f"{folder} has no weights: neither {_ONE_FILE} nor {_INDEX} exists")
    with translated_errors(f"{folder / _INDEX} is damaged"):
        names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks the weight files {', '.join(missing)}")
    return [folder / name for name in names]


def check_fits(weights: int, device: torch.device, model: Path) -> None:
    """Raise ModelError if `weights` bytes are more than the device has free."""
    free = free_memory(device)
    if free is not None and weights > free:
        needed = f"its weights take {readable_gib(weights)}"
        raise ModelError(f"{model} does not fit: {needed}, and {device} has {readable_gib(free)} free")


def free_memory(device: torch.device) -> int | None:
    """The free bytes of a CPU or CUDA device; None for other devices."""
    if device.type == "cpu":
        return _free_ram()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved but does not use is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def readable_gib(count: int) -> str:
    """Bytes as GiB, to be printed."""
    return f"{count / 2**30:,.2f} GiB"


def _free_ram() -> int:
    """Linux's available memory, which includes the page cache that it would give up."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
