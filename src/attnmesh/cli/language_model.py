"""The language model of a command: its options, and what is checked before any rank loads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnmesh import launch
from attnmesh.cli.options import Precision
from attnmesh.integrations.transformers_models import check_config
from attnmesh.models.checkpoint import (
    ModelError,
    declared_model,
    free_memory,
    quiet_transformers,
    stored_tensors,
    total_memory,
)
from attnmesh.models.sharded import check_sharded_config
from attnmesh.ops.storage import PLAIN
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.text import counted, readable_bytes

LanguageModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", show_default="SmolLM2-135M-Instruct", help="Folder written by save_pretrained, or a GGUF file."
    ),
]
DtypeOption = Annotated[
    Precision, typer.Option("--dtype", help="Dtype of weights, activations and, without --storage, the KV cache.")
]
CacheStorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        show_default="that of --dtype",
        help="Storage type of a quantized KV cache: fp8, int8 or bfp8, or fp8_ds_mla for latents (DeepSeek).",
    ),
]
ReproducibleOption = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="Compute logits that have the same bits on any number of ranks, in any chunks and batches: slower.",
    ),
]


def check_reproducible(device: str, storage: str, *, sharded: bool) -> None:
    """Raise ValueError for what --reproducible does not serve."""
    if device != "cpu":
        raise ValueError(f"--reproducible requires --device cpu, got {device}")
    if storage not in PLAIN:
        raise ValueError(f"--reproducible requires a KV cache that is not quantized, got --storage {storage}")
    if sharded:
        raise ValueError("--reproducible requires whole weights on every rank, got a sharding")


def check_language_model(folder: Path, config: Any, sharding: DecodeSharding | None = None) -> None:
    """Raise ModelError for a model that cannot generate, whole on every rank or divided by `sharding`."""
    name = ", ".join(config.architectures or ()) or str(folder)
    try:
        check_config(config, name)
        if sharding is not None:
            with quiet_transformers():
                declared_model(config, len(stored_tensors(folder)), folder)  # its sizes are computed from it
            check_sharded_config(config, sharding)
    except ValueError as error:
        raise ModelError(f"{folder}: {error}") from None


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, and the ranks that share it."""

    device: str
    ranks: int  # that load a model, or a part of it, on the same device
    stated: int | None = None  # bytes per rank, where they are given

    @property
    def planned(self) -> int:
        """Bytes per rank to choose a sharding for.

        Under torchrun every process chooses: not by what is free, which may differ between them.
        """
        if self.stated is not None:
            return self.stated
        return (total_memory(torch.device(self.device)) if launch.under_torchrun() else self._free) // self.ranks

    @property
    def _free(self) -> int:
        free = free_memory(torch.device(self.device))
        assert free is not None, "a CPU or CUDA device"
        return free

    def check_fits(self, folder: Path, weights: int, kv_cache: int, advice: str = "") -> None:
        """Raise ValueError if ranks with so many bytes each do not fit."""
        each = f"{readable_bytes(weights)} of weights and {readable_bytes(kv_cache)} of KV cache"
        if self.stated is not None:
            if weights + kv_cache > self.stated:
                raise ValueError(
                    f"{folder} does not fit: a rank has {each}, and --memory is {readable_bytes(self.stated)}{advice}"
                )
            return
        if self.ranks * (weights + kv_cache) > self._free:
            raise ValueError(
                f"{folder} does not fit: {self.ranks} x ({each}) on {self.device}, which has "
                f"{readable_bytes(self._free)} free{advice}"
            )

    def __str__(self) -> str:
        if self.stated is not None:
            return "--memory"
        kind = "of" if launch.under_torchrun() else "free on"
        return f"{kind} {self.device}, divided by {counted(self.ranks, 'rank')}"


def device_memory(device: str, world: int, *, shared: bool, share_gpu: bool, stated: int | None) -> DeviceMemory:
    """The memory of the devices that the ranks use, where `shared` ranks have one model."""
    local = local_ranks(world)
    if shared:
        return DeviceMemory(device, 1, stated)
    return DeviceMemory(
        device, -(-local // torch.cuda.device_count()) if device == "cuda" and not share_gpu else local, stated
    )


def local_ranks(world: int) -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) if launch.under_torchrun() else world
