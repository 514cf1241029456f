"""What loading any model needs: its errors, Transformers without network and output, the memory of a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnmesh.utils.optional import MissingExtraError, require
from attnmesh.utils.text import printable

LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: nothing is downloaded, and code that comes with a model is not run."""

_LONGEST_REASON = 400  # characters of another library's error


class ModelError(ValueError):
    """A model cannot be loaded completely and exactly. A ValueError of one line, on every rank of a sharded model.

    Examples:
        >>> try:
        ...     am.load_model("no/such/folder")
        ... except am.ModelError as error:
        ...     print(error)
        no/such/folder does not exist: a model is a folder with config.json, or a .gguf file
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, keep=""))  # names and types come from the model's files


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn any exception but that of an extra that is not installed into a ModelError of one line, after `what`.

    Model files come from elsewhere, and the libraries that read them raise anything: KeyError, struct.error, their own.
    """
    try:
        yield
    except (ModelError, MissingExtraError):
        raise
    except Exception as error:
        raise ModelError(f"{what}: {_one_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust; not an Exception, but it can be handled
            raise
        raise ModelError(f"{what}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    if "trust_remote_code" in text:
        return "it needs code that comes with the model, which is not run"
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


@contextmanager
def model_errors() -> Iterator[None]:
    """Turn a ValueError of a check into a ModelError with the same message."""
    try:
        yield
    except ValueError as error:
        raise ModelError(str(error)) from None


def require_hf(module: str) -> ModuleType:
    """Import a module of the extra `hf`; raises ModuleNotFoundError with the command to install it."""
    return require(module, extra="hf")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable the progress bars and the downloads of Transformers and log errors only, then restore all three.

    `local_files_only` does not cover kernels that Transformers would download for some models.
    """
    logging = require_hf("transformers.utils.logging")
    hub: Any = require_hf("huggingface_hub.constants")
    verbosity, offline = logging.get_verbosity(), hub.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    hub.HF_HUB_OFFLINE = True
    # disable_progress_bar would also change a setting of huggingface_hub that cannot be restored.
    hook = logging.set_tqdm_hook(_disabled_bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        hub.HF_HUB_OFFLINE = offline
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


def total_memory(device: torch.device) -> int:
    """The bytes of a CPU or CUDA device, free or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def readable_gib(count: int) -> str:
    """Bytes as GiB, to be printed."""
    return f"{count / 2**30:,.2f} GiB"


def _free_ram() -> int:
    """Linux's available memory, which includes the page cache that it would give up."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return total_memory(torch.device("cpu"))
