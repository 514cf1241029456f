"""Calls made by several processes at once, each in a process of its own, and the kernels that they compile.

Triton keeps what it compiles on disk (`TRITON_CACHE_DIR`), where the program finds it later. A process compiles one
kernel after another, on one core; calls of one process would share kernels that only the first reports.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from attnmesh.compilation.calls import Call
from attnmesh.utils.validation import check_count

MOST_PROCESSES = 16
"""Processes at once: each has a context on the GPU, of some hundred megabytes."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that a call needs: its name, and the seconds that Triton took to compile it, or to read it."""

    name: str
    seconds: float
    was_cached: bool


@dataclass(frozen=True)
class Outcome:
    """A call that was made: its kernels in their order, its seconds with them, and the error that ended it."""

    call: Call
    kernels: tuple[Kernel, ...]
    seconds: float
    error: str | None = None

    @property
    def compiled(self) -> tuple[Kernel, ...]:
        """The kernels that were not in the cache."""
        return tuple(kernel for kernel in self.kernels if not kernel.was_cached)


def compile_calls(calls: Sequence[Call], processes: int | None = None) -> Iterator[Outcome]:
    """Make the calls on the current GPU, at most so many at a time, and yield the outcome of each as it ends."""
    check_count("processes", processes or 1, least=1)
    most = min(processes or MOST_PROCESSES, os.cpu_count() or 1, len(calls))
    with ProcessPoolExecutor(
        max(1, most), mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:  # fmt: skip
        begun = {pool.submit(make, call): call for call in calls}
        for done in as_completed(begun):
            try:
                yield done.result()
            except BrokenProcessPool:
                yield Outcome(begun[done], (), 0.0, "its process ended, or that of another call")


def make(call: Call, device: str = "cuda") -> Outcome:
    """Make a call in this process."""
    from triton import knobs

    kernels: list[Kernel] = []

    def listen(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        name = metadata.get("name") or getattr(getattr(src, "fn", None), "__name__", "a kernel")
        kernels.append(Kernel(str(name), times.total / 1e6, cache_hit))

    knobs.compilation.listener = listen
    begin = time.monotonic()
    error = None
    try:
        call.run(torch.device(device))
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        knobs.compilation.listener = None
    return Outcome(call, tuple(kernels), time.monotonic() - begin, error)
