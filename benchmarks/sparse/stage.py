"""The device of a run: how programs are timed there, what they take, and what the device can do at all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from attnmesh.calibration.timing import Name, queued, wall
from benchmarks.memory import added_bytes
from benchmarks.sparse.cases import Sizes
from benchmarks.sparse.guard import Verdict
from benchmarks.sparse.roofline import Ceilings, Work

Program = Callable[[], object]


class Stage(NamedTuple):
    """Where everything runs, at which sizes, below which ceilings."""

    device: str
    sizes: Sizes
    ceilings: Ceilings

    @property
    def dtype(self) -> torch.dtype:
        return dtype_on(self.device)

    @property
    def backend(self) -> str:
        """By name: "auto" would measure torch operations where a kernel refuses."""
        return "triton" if self.device == "cuda" else "torch"

    def milliseconds(self, programs: Mapping[Name, Program]) -> dict[Name, float]:
        """Of every program, in turns."""
        return milliseconds(self.device, programs, self.sizes.rounds)

    def added_bytes(self, program: Program) -> int | None:
        """Peak bytes it adds to what is there before it; None where nobody counts them."""
        return added_bytes(program) if self.device == "cuda" else None

    def reached(self, work: Work, ms: float) -> dict[str, object]:
        """What a time says: the speed, the larger bound, and how much of it was reached."""
        bound, least = self.ceilings.bound(work)
        return {"ms": ms, "tflops": work.flops / ms / 1e9, "bound": bound, "of_bound": least / ms}

    def row(self, operation: str, heads: int, s_kv: int, work: Work, ms: float, verdict: Verdict) -> dict[str, object]:
        """A line of a table: what was timed, what that says, and whether it was right."""
        return {"operation": operation, "heads": heads, "s_kv": s_kv, **self.reached(work, ms), **verdict._asdict()}


def dtype_on(device: str) -> torch.dtype:
    """What is measured: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def measured_ceilings(device: str, sizes: Sizes) -> Ceilings:
    """The rates of a large square product, and of a large copy."""
    a, b = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=dtype_on(device)) for _ in range(2))
    source = torch.ones(sizes.copied // 4, device=device)
    target = torch.empty_like(source)
    ms = milliseconds(
        device, {"product": partial(torch.matmul, a, b), "copy": partial(target.copy_, source)}, sizes.rounds
    )
    return Ceilings(2 * sizes.matmul**3 / ms["product"] / 1e9, 2 * source.nbytes / ms["copy"] / 1e9)


def milliseconds(device: str, programs: Mapping[Name, Program], rounds: int) -> dict[Name, float]:
    """Medians, in turns: by events on a GPU, by the wall on a CPU."""
    if device == "cuda":
        return queued(programs, rounds)
    return {name: 1e3 * seconds for name, seconds in wall(programs, rounds).items()}


def freed(device: str) -> None:
    """Give back what is no longer used, before something else is measured."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
