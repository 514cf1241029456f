"""The base of a log-sum-exp, always by name."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

Base = Literal["e", "2"]
_LOG = {"e": 1.0, "2": math.log(2.0)}


def convert_lse(lse: Tensor, src: Base, dst: Base) -> Tensor:
    """An lse in base `src` ("e" or "2") as one in base `dst`. Infinite ones stay what they are."""
    check_base("src", src)
    check_base("dst", dst)
    return lse if src == dst else lse * (_LOG[src] / _LOG[dst])


def check_base(name: str, base: object) -> None:
    """Raise ValueError unless this names a base."""
    if base not in _LOG:
        raise ValueError(f"{name} must be 'e' (natural) or '2', got {base!r}")
