"""Context parallelism of verl's FSDP engine with attnmesh: call `enable()` in every worker.

After `enable()`, verl's `EngineRegistry` gives workers an engine that shares sequences between
`ulysses_sequence_parallel_size` ranks with attnmesh instead of Ulysses (`attnmesh.training.verl.engine`). Sliding
windows, sinks, any number of heads, packs of any length and CPU ranks (gloo) are then served. Importing this module
imports nothing of verl.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from attnmesh.core.layouts import Layout, Zigzag, check_layout
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.parallel.executor import BACKENDS
from attnmesh.plan.shards import SCHEDULES
from attnmesh.utils.optional import require
from attnmesh.utils.text import see
from attnmesh.utils.validation import check_choice

__all__ = ["TESTED", "enable"]

TESTED = "0.9.1"
"""The version of verl whose engine `enable()` derives from."""

DEVICES = ("cuda", "cpu")
_VENDOR = "attnmesh"  # of the engine in verl's registry, by which verl chooses among engines of a device
_SELECTED = "VERL_ENGINE_VENDOR"  # verl's environment variable for the vendor


def enable(
    *,
    layout: Layout = Zigzag(),  # noqa: B008  (immutable)
    schedule: str = "auto",
    backend: str = "auto",
    device: str = "cuda",
) -> None:
    """Use attnmesh for the sequence parallelism of verl's FSDP engine of language models.

    Call it in every worker before its engine is created: put it into a module of yours, and name the module in
    `actor_rollout_ref.model.external_lib`. `ContextParallel` has the same arguments; packed micro-batches get the
    layout `Balanced` instead. A second call changes the arguments. Raises ValueError for a version of verl that was
    not tested.

    Args:
        layout: how a micro-batch of one sequence is divided among ranks.
        schedule: how ranks exchange keys, or "auto".
        backend: the kernels of one rank, or "auto".
        device: "cpu" for ranks without a GPU, which verl does not know: its platform is then the CPU, with gloo.

    Examples:
        >>> from attnmesh.training import verl
        >>> verl.TESTED
        '0.9.1'
        >>> verl.enable(layout=am.Zigzag(), device="cpu")  # doctest: +SKIP
    """
    check_layout("layout", layout)
    check_choice("schedule", schedule, ("auto", *SCHEDULES))
    check_choice("backend", backend, BACKENDS)
    check_choice("device", device, DEVICES)
    _check_version()
    selected = os.environ.get(_SELECTED, _VENDOR)
    if selected != _VENDOR:
        raise ValueError(f"{_SELECTED} must be unset or {_VENDOR!r}, which selects attnmesh's engine, got {selected!r}")
    _check_platform(device)
    register_attention()
    engine: Any = require("attnmesh.training.verl.engine", extra="verl").AttnmeshEngine
    engine.options = {"layout": layout, "schedule": schedule, "backend": backend}
    engines = require("verl.workers.engine", extra="verl").EngineRegistry
    for strategy, by_device in engines._engines["language_model"].items():
        if (device, _VENDOR) not in by_device:  # the engine refuses strategies other than fsdp2 by name
            engines.register("language_model", strategy, device, _VENDOR)(engine)
    os.environ[_SELECTED] = _VENDOR


def _check_version() -> None:
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        require("verl", extra="verl")  # raises
        raise
    if version != TESTED:
        raise ValueError(
            f"the version of verl must be {TESTED}, got {version}: attnmesh derives its engine from that version"
            f"{see('stacks.md#verl')}"
        )


def _check_platform(device: str) -> None:
    """Make the CPU verl's platform if it is wanted. Modules of verl read the platform as they are imported."""
    platforms = require("verl.plugin.platform", extra="verl")
    found = platforms.get_platform().device_name
    if device == "cpu" and found != "cpu":
        platforms.set_platform(require("attnmesh.training.verl.platform", extra="verl").CPUPlatform())
    elif found != device:
        raise ValueError(f"device must be the one of verl's platform, {found!r}, got {device!r}")
