"""Converts a GGUF file to a checkpoint folder, completely and exactly, from nothing but the file.

Transformers looks for other files beside a GGUF file: a tokenizer there would replace the file's own, and a
configuration there may name code. The conversion therefore reads the file from a private folder that holds only a link
to it.
"""

from __future__ import annotations

import io
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from attnmesh.integrations.checkpoint import (
    LOCAL,
    ModelError,
    check_causal_lm,
    check_fits,
    quiet_transformers,
    require_hf,
    translated_errors,
)
from attnmesh.integrations.completeness import (
    DeclaredModel,
    Differences,
    Shape,
    check_elements,
    check_loaded,
    check_shapes,
    declared_model,
)
from attnmesh.integrations.gguf import TOKENS, GgufHeader, read_header
from attnmesh.utils.validation import shown

_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT32 = 0  # GGML type
_READ_EXACTLY = {
    name: name.rpartition(".")[2]
    for name in ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
}
_NOT_READ = "Transformers does not read from GGUF files of this family; use the model's safetensors"


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
            check_shapes(model, declared, gguf)
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
    """The shapes of a model's weights by their names in GGUF files, to be printed; those of tied weights once."""
    gguf = require_hf("gguf")
    family = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if family is None:
        return dict(shapes)
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    translated = {names.get_name(name, try_suffixes=(".weight", ".bias")) or name: shapes[name] for name in shapes}
    if config.tie_word_embeddings:
        translated.pop("output.weight", None)
    return translated
