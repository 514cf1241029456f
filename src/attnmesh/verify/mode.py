"""A mode that `attnmesh verify` checks: results, what they should be, and what the plain computation makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Compared(NamedTuple):
    """A result, what it should be, and what the plain computation makes of it; None: it must be the very same."""

    name: str
    found: Tensor
    exact: Tensor
    plain: Tensor | None = None


@dataclass(frozen=True)
class ComparedMode:
    """One way to compute something: `compared` turns a seed and a device into results.

    It is rank 0's alone; or all ranks run it `together`, and those but rank 0 have nothing to compare.
    """

    name: str
    shape: str
    compared: Callable[[int, str], list[Compared]]
    together: bool = False
