"""axolotl with attnmesh's context parallelism: one line in the YAML file.

    plugins:
      - attnmesh.training.axolotl.AttnmeshPlugin
    context_parallel_size: 2

Batches are then sharded where Transformers' Trainer does it (`training.accelerate`): labels are shifted before they are
sharded. axolotl's own code shards labels first, which drops a label at every boundary of shards, and it needs the
packages ring_flash_attn and flash_attn.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from attnmesh.integrations.transformers_attention import Patches, register_attention
from attnmesh.integrations.transformers_models import NAME
from attnmesh.training import accelerate
from attnmesh.utils.optional import require

__all__ = ["TESTED", "AttnmeshPlugin"]

TESTED = {"axolotl": "0.19", "transformers": "5.16", "accelerate": "1.13", "trl": "1.9"}
"""The versions that the plugin accepts: axolotl, and the packages that this version of axolotl requires."""

_SIZE = "context_parallel_size"

# Options that are refused with context parallelism, and why.
_OTHER_LOSS = "its loss is not one of this rank's tokens"
_OTHER_CODE = "it was not tested over ranks that share a sequence"
_REFUSED = {
    "rl": _OTHER_LOSS,
    "reward_model": _OTHER_LOSS,
    "process_reward_model": _OTHER_LOSS,
    "orpo_alpha": _OTHER_LOSS,
    "use_eaft": _OTHER_LOSS,
    "cut_cross_entropy": _OTHER_CODE,
    "chunked_cross_entropy": _OTHER_CODE,
    "flash_attn_cross_entropy": _OTHER_CODE,
    "tiled_mlp": _OTHER_CODE,
    "gemma4_hybrid_attn_impl": "its layers would not attend over ranks",
    "use_glm_dsa_kernels": "its layers would not attend over ranks",
    "neftune_noise_alpha": "every rank would add other noise",
    "deepspeed": "ranks that share a sequence need DDP or FSDP2",
    "use_ray": _OTHER_CODE,
}  # fmt: skip
_LIGER = "liger_"  # options of axolotl's plugin for Liger
# Models whose recurrent layers axolotl replaces by code of its own, which would see one rank's tokens only.
_OWN_LAYERS = (
    "nemotron_h", "falcon_h1", "granitemoehybrid", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text",
)  # fmt: skip
_OTHER_SIZES = ("tensor_parallel_size", "expert_parallel_size")

_patches = Patches()
_base = importlib.import_module("axolotl.integrations.base")  # axolotl imports this module, by its name in a file


class AttnmeshPlugin(_base.BasePlugin):  # type: ignore[misc, name-defined]
    """A plugin of axolotl that computes `context_parallel_size` with attnmesh.

    It does nothing if `context_parallel_size` is 1. Raises ValueError for versions that were not tested, and for
    options that are not served over ranks.
    """

    def register(self, cfg: Any) -> None:
        _patches.undo()
        if not _size(cfg) > 1:
            return
        accelerate.check_versions(TESTED)
        _check(cfg)
        if not torch.cuda.is_available():
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # without it accelerate sees a single process
        _patches.when_imported("axolotl.cli.config", lambda module: _replace(module, "validate_config", _validate))
        _patches.when_imported(
            "axolotl.train", lambda module: _replace(module, "SequenceParallelContextManager", _no_context)
        )
        _patches.when_imported(
            "axolotl.loaders.model", lambda module: _replace(module.ModelLoader, "_set_attention_config", _attention)
        )
        config = require("accelerate.parallelism_config", extra="hf").ParallelismConfig
        _patches.replace(config, "build_device_mesh", _build_device_mesh)

    def on_config_validation_error(self, cfg: Any) -> None:
        _patches.undo()

    def pre_model_load(self, cfg: Any) -> None:
        if not _size(cfg) > 1:
            return
        _check(cfg)
        if cfg.get("sample_packing") and not cfg.get("attn_decontaminates_packing"):
            raise ValueError(
                f"attn_implementation must be one for which axolotl separates packed documents, such as sdpa or "
                f"flash_attention_2, with sample_packing, got {cfg.get('attn_implementation')!r}"
            )
        # After axolotl has replaced methods of Trainer and Accelerator, among them those that shard batches.
        accelerate.replace_methods()

    def post_train_unload(self, cfg: Any) -> None:
        accelerate.disable()
        _patches.undo()


def _size(cfg: Mapping[str, Any]) -> int:
    return int(cfg.get(_SIZE) or cfg.get("sequence_parallel_degree") or 1)


def _check(cfg: Mapping[str, Any]) -> None:
    """Raise ValueError for options that are not served over ranks."""
    for name, reason in _REFUSED.items():
        if cfg.get(name):
            raise ValueError(f"{name} must not be set with {_SIZE} > 1, got {cfg.get(name)!r}: {reason}")
    for name, value in cfg.items():
        if name.startswith(_LIGER) and value:
            raise ValueError(f"{name} must not be set with {_SIZE} > 1, got {value!r}: {_OTHER_CODE}")
    for name in _OTHER_SIZES:
        if (cfg.get(name) or 1) > 1:
            raise ValueError(f"{name} must be 1 with {_SIZE} > 1, got {cfg.get(name)}")
    if cfg.get("model_config_type") in _OWN_LAYERS:
        raise ValueError(
            f"{_SIZE} must be 1 for {cfg.get('model_config_type')}, got {_size(cfg)}: axolotl replaces its recurrent "
            f"layers by code that would compute one rank's tokens"
        )


def _replace(owner: Any, name: str, function: Any) -> None:
    _patches.replace(owner, name, function)


def _validate(original: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """axolotl's validate_config, without its requirement of ring_flash_attn and flash_attn."""
    size = _size(cfg)
    cfg = type(cfg)({name: value for name, value in cfg.items() if name not in (_SIZE, "sequence_parallel_degree")})
    validated = original(cfg, *args, **kwargs)
    validated[_SIZE] = size
    return validated


def _no_context(original: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """In place of SequenceParallelContextManager, which would shard batches a second time."""
    return nullcontext()


def _attention(original: Any, self: Any) -> None:
    """ModelLoader._set_attention_config: the model attends with attnmesh, whatever the file names."""
    original(self)
    register_attention()
    self.model_kwargs["attn_implementation"] = self.model_config._attn_implementation = NAME
    if not torch.cuda.is_available():
        self.model_kwargs.pop("device_map", None)  # the GPU with this rank's number


def _build_device_mesh(original: Any, self: Any, device_type: str) -> Any:
    """ParallelismConfig.build_device_mesh: axolotl asks for a mesh of GPUs, also where there are none."""
    return original(self, device_type if torch.cuda.is_available() else "cpu")
