"""Context parallelism of accelerate, Transformers' Trainer and TRL's SFTTrainer with attnmesh: call `enable()` once.

After `enable()`, `ParallelismConfig(cp_size=N)` computes attention with attnmesh. Sliding windows, sinks, chunked
layers, packed and padded batches, lengths that N does not divide and CPU ranks (gloo) are then served. Importing this
module changes nothing, and `disable()` restores everything.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from attnmesh.core.layouts import Layout, Zigzag, check_layout
from attnmesh.integrations.accelerate_ranks import AcceleratorRanks, is_sharding, ranks_of
from attnmesh.integrations.patches import Patches
from attnmesh.integrations.trainer import patch_sft_trainer, patch_trainer
from attnmesh.parallel.executor import BACKENDS
from attnmesh.plan.schedules import SCHEDULES
from attnmesh.utils.optional import require
from attnmesh.utils.validation import check_choice

__all__ = ["TESTED", "disable", "enable"]

TESTED = {"accelerate": "1.15", "transformers": "5.22", "trl": "1.16"}
"""The versions whose private functions `enable()` replaces."""

_patches = Patches()


def enable(*, layout: Layout = Zigzag(), schedule: str = "auto", backend: str = "auto") -> None:  # noqa: B008
    """Use attnmesh for the context parallelism of accelerate, Transformers' Trainer and TRL's SFTTrainer.

    Call it before an `Accelerator`, `TrainingArguments` or a trainer is created. Arguments are those of
    `ContextParallel`; packed and padded batches of a trainer get the layout `Balanced` instead. A second call changes
    the arguments. Raises ValueError for a version of accelerate, Transformers or TRL that was not tested.

    Examples:
        >>> from attnmesh.integrations import accelerate
        >>> accelerate.enable(layout=am.Zigzag(), schedule="ring")  # ParallelismConfig(cp_size=N) now uses attnmesh
        >>> accelerate.disable()
    """
    check_layout("layout", layout)
    check_choice("schedule", schedule, ("auto", *SCHEDULES))
    check_choice("backend", backend, BACKENDS)
    _check_versions()
    disable()
    options = {"layout": layout, "schedule": schedule, "backend": backend}
    _patch_accelerate(require("accelerate", extra="hf"), options)
    _patches.when_imported("transformers.trainer", lambda module: patch_trainer(_patches, module, options))
    _patches.when_imported("trl.trainer.sft_trainer", lambda module: patch_sft_trainer(_patches, module, options))


def disable() -> None:
    """Restore accelerate, Transformers and TRL. A model that was prepared before keeps attnmesh's attention.

    Examples:
        >>> from attnmesh.integrations import accelerate
        >>> accelerate.disable()  # nothing to restore is no error
    """
    _patches.undo()


def _check_versions() -> None:
    for package, tested in TESTED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "trl":
                continue
            require(package, extra="hf")  # raises
            raise
        if version.split(".")[:2] != tested.split("."):
            known = ", ".join(f"{name} {number}" for name, number in TESTED.items())
            raise ValueError(
                f"the version of {package} must be {tested}, got {version}: attnmesh replaces private functions of "
                f"these packages and was tested with {known}"
            )


def _patch_accelerate(accelerate: ModuleType, options: dict[str, Any]) -> None:
    accelerator = accelerate.Accelerator
    _patches.replace(accelerator, "_prepare_cp", lambda _: _prepare_cp(options))
    _patches.replace(accelerator, "prepare_data_loader", _prepare_data_loader)
    _patches.replace(accelerator, "gather_for_metrics", _gather_for_metrics)
    _patches.replace(accelerate.ParallelismConfig, "_validate_accelerator", _validate_accelerator)
    state = require("accelerate.state", extra="hf").AcceleratorState
    _patches.replace(state, "__init__", _init_state)


def _prepare_cp(options: dict[str, Any]) -> Any:
    def prepare_cp(self: Any, *args: Any) -> tuple[Any, ...]:
        """Accelerator._prepare_cp: models get attnmesh's attention, and batches are sharded by its layouts."""
        ranks: AcceleratorRanks = ranks_of(self, options)
        for arg in args:
            if isinstance(arg, nn.Module):
                ranks.prepare(arg)
        self._cp_context = ranks.shard_buffers
        return args

    return prepare_cp


def _prepare_data_loader(original: Any) -> Any:
    def prepare_data_loader(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Accelerator.prepare_data_loader: every rank reads a stream itself.

        By default rank 0 reads it and sends another batch to each rank, also to those that share a sequence.
        """
        config = self.dataloader_config
        if self.parallelism_config is None or not self.parallelism_config.cp_enabled:
            return original(self, *args, **kwargs)
        if config.dispatch_batches:
            raise ValueError(
                "dispatch_batches must be False or None under context parallelism, got True: ranks that share a "
                "sequence would get different batches"
            )
        before, config.dispatch_batches = config.dispatch_batches, False
        try:
            return original(self, *args, **kwargs)
        finally:
            config.dispatch_batches = before

    return prepare_data_loader


def _gather_for_metrics(original: Any) -> Any:
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        """Accelerator.gather_for_metrics.

        At the end of a dataset it keeps as many entries as there are samples. Values of shards are no samples.
        """
        if use_gather_object or not is_sharding(self):
            return original(self, input_data, use_gather_object)
        return self.gather(input_data)

    return gather_for_metrics


def _validate_accelerator(original: Any) -> Any:
    def validate_accelerator(self: Any, accelerator: Any) -> None:
        """ParallelismConfig._validate_accelerator: CPU ranks are ranks like others."""
        if self.cp_enabled and accelerator.distributed_type == "MULTI_CPU":
            accelerator = SimpleNamespace(
                multi_device=True, is_fsdp2=False, distributed_type=accelerator.distributed_type,
                num_processes=accelerator.num_processes, is_main_process=accelerator.is_main_process,
            )  # fmt: skip
        original(self, accelerator)

    return validate_accelerator


def _init_state(original: Any) -> Any:
    def init_state(self: Any, *args: Any, **kwargs: Any) -> None:
        """AcceleratorState.__init__: an FSDP plugin takes effect on CPU ranks too, if there is context parallelism."""
        original(self, *args, **kwargs)
        plugin, config = kwargs.get("fsdp_plugin"), self.parallelism_config
        if plugin is None or config is None or not config.cp_enabled or self.distributed_type != "MULTI_CPU":
            return
        if plugin.fsdp_version != 2:
            raise ValueError(f"fsdp_version must be 2 with cp_size > 1, got {plugin.fsdp_version}")
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        kinds = require("accelerate.utils", extra="hf").DistributedType
        self.fsdp_plugin, self.distributed_type = plugin, kinds.FSDP
        require("accelerate.state", extra="hf").PartialState._shared_state["distributed_type"] = kinds.FSDP

    return init_state
