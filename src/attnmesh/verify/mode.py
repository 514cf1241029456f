"""A mode that `attnmesh verify` checks, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnmesh.testing.errors import Comparison

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Mode:
    """One way to compute something. `compare` takes a seed and a device and returns comparisons.

    Rank 0 alone runs it, or all ranks if it is `collective`; then only rank 0 returns comparisons.
    """

    name: str
    shape: str
    compare: Callable[[int, str], list[Comparison]]
    collective: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a mode that is nearest to its bound or furthest beyond it: its relative error and that bound."""

    mode: Mode
    worst: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN never is."""
        return self.error <= self.bound

    @classmethod
    def of(cls, mode: Mode, comparisons: Sequence[Comparison]) -> Outcome:
        """Return the outcome of a mode."""
        outcomes = [cls(mode, each.name, each.error, each.bound) for each in comparisons]
        return max(outcomes, key=lambda each: each.error / (each.bound or 1.0) if each.passed else torch.inf)
