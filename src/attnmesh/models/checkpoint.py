"""Checkpoints: folders of safetensors that are checked before Transformers reads them, and whether they are complete.

A checkpoint must be exactly the model that its configuration declares, by size before it is loaded and by name after
it: Transformers initializes what is missing at random, and ignores what it does not expect. Here is also what loading
any model needs: its errors, Transformers without network and output, the memory of a device.
"""

from __future__ import annotations

import copy
import json
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attnmesh.utils.files import MAX_TEXT_BYTES, check_file
from attnmesh.utils.optional import MissingExtraError, require
from attnmesh.utils.sizes import check_model_sizes
from attnmesh.utils.text import printable
from attnmesh.utils.validation import shown

LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: nothing is downloaded, and code that comes with a model is not run."""

_LONGEST_REASON = 400  # characters of another library's error

CONFIG = "config.json"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TEMPLATES = "additional_chat_templates"
_TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
_ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")  # Transformers prefers them to _ONE_FILE
_CAST = ("F64", "F32", "F16", "BF16")  # types that loading converts to the requested dtype
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # types that it keeps; all others have one byte

Shape = tuple[int, ...]

_NAMED = 3
_MOST_PER_TENSOR, _FEW = 4, 64  # parameters that are built for each stored tensor: some families store several in one


class ModelError(ValueError):
    """A model cannot be loaded completely and exactly. A ValueError of one line, on every rank of a sharded model.

    Examples:
        >>> try:
        ...     am.load_model("no/such/folder")
        ... except am.models.ModelError as error:
        ...     print(error)
        no/such/folder does not exist: a model is a folder with config.json, or a .gguf file
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, keep=""))  # names and types come from the model's files


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn any exception into a ModelError of one line, after `what`; a missing extra is raised as it is.

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
    """Raise ModelError unless the configuration describes a causal language model.

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


# Folders.


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


def check_floating_point(tensors: Mapping[str, StoredTensor], model: Path) -> None:
    """Raise ModelError for weights that are stored as something else than floating point: they may lack scales."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point:
            raise ModelError(f"{model} must store floating point weights, got {tensor.kind} for {name!r}")


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


# Completeness.


@dataclass(frozen=True)
class DeclaredModel:
    """The weights of the model that a configuration declares, counted without memory for them."""

    shapes: Mapping[str, Shape]
    integers: frozenset[str]  # names of tensors that are not floating point
    elements: int  # tied weights once
    buffer_bytes: int  # of what is computed, not stored, such as masks

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of the model as `dtype`."""
        return self.elements * dtype.itemsize + self.buffer_bytes


def declared_model(config: Any, tensors: int, model: Path) -> DeclaredModel:
    """Build the model of a configuration on the meta device, which allocates nothing.

    Raises ModelError if the checkpoint has far fewer tensors than the model: to build them would take time.
    """
    layers = config.get_text_config().num_hidden_layers
    if tensors < layers:
        raise ModelError(f"{model} does not match its configuration: it has {tensors:,} tensors for {layers:,} layers")
    transformers = require_hf("transformers")
    with (
        translated_errors(f"{model} declares a model that cannot be built"),
        torch.device("meta"),
        _limited_parameters(_MOST_PER_TENSOR * tensors + _FEW, f"it has {tensors:,} tensors"),
    ):
        built = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
        )
        weights = built.state_dict(keep_vars=True)
    unique = {id(weight): weight.numel() for weight in weights.values()}
    stored = {id(weight) for weight in weights.values()}
    return DeclaredModel(
        shapes={name: tuple(weight.shape) for name, weight in weights.items()},
        integers=frozenset(name for name, weight in weights.items() if not weight.is_floating_point()),
        elements=sum(unique.values()),
        buffer_bytes=sum(buffer.nbytes for buffer in built.buffers() if id(buffer) not in stored),
    )


@contextmanager
def _limited_parameters(most: int, reason: str) -> Iterator[None]:
    """Raise ValueError as soon as this thread registers more than `most` parameters of modules."""
    thread, count = threading.get_ident(), 0

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > most:
                raise ValueError(f"it declares more than {most:,} weights, and {reason}")

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()


def check_elements(stored: int, declared: int, differences: Differences, model: Path) -> None:
    """Raise ModelError unless a checkpoint has the elements of its model: before memory for more is allocated."""
    if stored != declared:
        raise ModelError(
            f"{model} does not match its configuration: it has {stored:,} elements instead of {declared:,}{differences}"
        )


def check_loaded(info: Mapping[str, Any], model: Path) -> None:
    """Raise ModelError unless loading used every tensor of the checkpoint, for exactly the model's own weights.

    `info` is Transformers' loading info.
    """
    shapes = {name: (tuple(stored), tuple(declared)) for name, stored, declared in info["mismatched_keys"]}
    Differences(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), shapes).check(model)


@dataclass(frozen=True)
class Differences:
    """How the tensors of a checkpoint differ from a model's weights, to be printed."""

    missing: Sequence[str]
    unexpected: Sequence[str]
    shapes: Mapping[str, tuple[Shape, Shape]]  # stored and declared

    @classmethod
    def between(cls, stored: Mapping[str, Shape], declared: Mapping[str, Shape]) -> Differences:
        """Compare names and shapes."""
        return cls(
            missing=sorted(set(declared) - set(stored)),
            unexpected=sorted(set(stored) - set(declared)),
            shapes={n: (stored[n], declared[n]) for n in set(stored) & set(declared) if stored[n] != declared[n]},
        )

    def check(self, model: Path) -> None:
        """Raise ModelError if there are any."""
        if differences := str(self):
            raise ModelError(f"{model} does not match its configuration{differences}")

    def __str__(self) -> str:
        text = f"; it lacks {_list(self.missing)}" if self.missing else ""
        if self.unexpected:
            text += f"; it has {_list(self.unexpected)}, which the model does not"
        for name, (stored, declared) in sorted(self.shapes.items())[:1]:
            text += f"; {name!r} has the shape {stored} instead of {declared}"
            text += f", and {len(self.shapes) - 1} more" if len(self.shapes) > 1 else ""
        return text


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
