"""Whether a model's weights fit where they are to lie, found out before any of them is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from attnmesh.integrations.problem import ModelError


def check_fits(weights: int, device: torch.device, model: Path) -> None:
    """Refuse a model whose weights, of that many bytes, are more than the device has free."""
    free = free_memory(device)
    if free is not None and weights > free:
        raise ModelError(
            f"{model} does not fit: its weights take {in_gib(weights)}, and {device} has {in_gib(free)} free"
        )


def free_memory(device: torch.device) -> int | None:
    """The bytes a device can still give; None of a device that does not say."""
    if device.type == "cpu":
        return _free_ram()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps for itself without using it is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def in_gib(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:,.2f} GiB"


def _free_ram() -> int:
    """What Linux calls available: with what it would take back from its caches of files, which fill what is free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
