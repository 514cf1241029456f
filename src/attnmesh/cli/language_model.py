"""The language model of a command: its options, and what is checked before any rank loads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnmesh.cli.options import Precision
from attnmesh.comm import launch
from attnmesh.generation.engine import check_attention, check_generation
from attnmesh.integrations.checkpoint import ModelError, free_memory, readable_gib
from attnmesh.integrations.weight_splits import check_sharded_model
from attnmesh.plan.decode import DecodeSharding

LanguageModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", show_default="SmolLM2-135M-Instruct", help="Folder written by save_pretrained, or a GGUF file."
    ),
]
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Dtype of weights, activations and KV cache.")]


def check_language_model(folder: Path, config: Any, sharding: DecodeSharding | None = None) -> None:
    """Raise ModelError for a model that cannot generate, whole on every rank or divided by `sharding`."""
    name = ", ".join(config.architectures or ()) or str(folder)
    try:
        if sharding is None:
            check_generation(config, name)
        else:
            check_attention(config, name)
            check_sharded_model(config, name, sharding)
    except ValueError as error:
        raise ModelError(f"{folder}: {error}") from None


def models_per_device(device: str, world: int, *, shared: bool, share_gpu: bool) -> int:
    """The number of ranks that load a model, or a part of it, on the same device: one if ranks have a `shared` one."""
    if shared:
        return 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if launch.under_torchrun() else world
    return -(-local // torch.cuda.device_count()) if device == "cuda" and not share_gpu else local


def check_fits(folder: Path, device: str, weights: int, kv_cache: int, copies: int, advice: str = "") -> None:
    """Raise ValueError if `copies` ranks with so many bytes each do not fit on the device that they share."""
    free = free_memory(torch.device(device))
    if free is not None and copies * (weights + kv_cache) > free:
        each = f"{readable_gib(weights)} of weights and {readable_gib(kv_cache)} of KV cache"
        raise ValueError(
            f"{folder} does not fit: {copies} x ({each}) on {device}, which has {readable_gib(free)} free{advice}"
        )
