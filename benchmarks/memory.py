"""What a program takes from the device's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch


def added_bytes(run: Callable[[], object]) -> int:
    """Peak bytes a run adds to what is allocated before it, results included; a run before it does not count."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
