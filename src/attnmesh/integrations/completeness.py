"""Whether a checkpoint is exactly the model that its configuration declares: by size before loading, by name after it.

Transformers initializes what is missing at random, and ignores what it does not expect.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnmesh.integrations.checkpoint import ModelError, require_hf, translated_errors

Shape = tuple[int, ...]

_NAMED = 3
_MOST_PER_TENSOR, _FEW = 4, 64  # parameters that are built for each stored tensor: some families store several in one


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
    """Raise ModelError unless a checkpoint has as many elements as its model: before memory for more is allocated."""
    if stored != declared:
        raise ModelError(
            f"{model} does not match its configuration: it has {stored:,} elements instead of {declared:,}{differences}"
        )


def check_loaded(info: Mapping[str, Any], model: Path) -> None:
    """Raise ModelError unless loading used every tensor of the checkpoint, for exactly the model's own weights.

    Args:
        info: Transformers' loading info.
        model: named in the message.
    """
    shapes = {name: (tuple(stored), tuple(declared)) for name, stored, declared in info["mismatched_keys"]}
    differences = Differences(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), shapes)
    if str(differences):
        raise ModelError(f"{model} does not match its configuration{differences}")


def check_shapes(model: Any, declared: DeclaredModel, path: Path) -> None:
    """Raise ModelError if loaded weights have other names or shapes: Transformers does not compare those of GGUF files.

    Args:
        model: of Transformers.
        declared: what its configuration declares.
        path: named in the message.
    """
    loaded = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if loaded != declared.shapes:
        raise ModelError(f"{path} does not match its configuration{Differences.between(loaded, declared.shapes)}")


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
