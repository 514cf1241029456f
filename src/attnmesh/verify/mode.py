"""A mode that `attnmesh verify` and the tests check, its outcome, and the rows of a table of modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from attnmesh.testing.errors import Comparison

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL_DTYPES = DTYPES | {"fp16": torch.float16, "fp64": torch.float64}

Value = tuple[str, Any]  # the name of an axis, and one of its values
Pair = tuple[Value, Value]


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


def covering_rows(
    axes: Mapping[str, Sequence[Any]],
    forbidden: Iterable[Pair] = (),
    *,
    pairs: bool = True,
    start: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return few rows in which every two values of two axes occur together, except `forbidden` pairs. Greedy.

    Without `pairs`, every value of every axis occurs. The rows of `start` come first.
    """
    size, refused = 2 if pairs else 1, {frozenset(pair) for pair in forbidden}
    values = {name: [(name, value) for value in given] for name, given in axes.items()}
    every = (frozenset(some) for lists in combinations(values.values(), size) for some in product(*lists))
    left = dict.fromkeys(some for some in every if some not in refused)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        for some in combinations(row.items(), size):
            left.pop(frozenset(some), None)
        rows.append(row)

    for row in start:
        add(row)
    while left:
        row = dict(next(iter(left)))  # what is left first, then the values that cover most of what is left
        for name in sorted((name for name in axes if name not in row), key=lambda name: -len(axes[name])):
            turn = len(rows) % len(axes[name])
            allowed = [
                value
                for value in (*values[name][turn:], *values[name][:turn])
                if not any(frozenset((value, other)) in refused for other in row.items())
            ]
            assert allowed, f"no value of {name} is allowed with {row}"
            others: list[tuple[Value, ...]] = [(other,) for other in row.items()] if pairs else [()]
            best = max(allowed, key=lambda value: sum(frozenset((value, *other)) in left for other in others))
            row[name] = best[1]
        add({name: row[name] for name in axes})
    return rows
