"""A mode that `attnmesh verify` and the tests check, its outcome, and the rows of a table of modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from attnmesh.testing.errors import Comparison

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

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
    refused = {frozenset(pair) for pair in forbidden}
    left = dict.fromkeys(
        frozenset(values)
        for names in combinations(axes, 2 if pairs else 1)
        for values in _products(axes, names)
        if frozenset(values) not in refused
    )
    rows: list[dict[str, Any]] = []
    while left or len(rows) < len(start):
        row = dict(
            start[len(rows)] if len(rows) < len(start) else next(iter(left))
        )  # then the values that cover most of what is left
        for name in sorted((name for name in axes if name not in row), key=lambda name: -len(axes[name])):
            best, most = None, -1
            for turn in range(len(axes[name])):
                value = (name, axes[name][(turn + len(rows)) % len(axes[name])])
                if any(frozenset((value, other)) in refused for other in row.items()):
                    continue
                together = [frozenset((value, other)) for other in row.items()] if pairs else [frozenset((value,))]
                covered = sum(each in left for each in together)
                if covered > most:
                    best, most = value, covered
            assert best is not None, f"no value of {name} is allowed with {row}"
            row[name] = best[1]
        row = {name: row[name] for name in axes}
        for values in combinations(row.items(), 2 if pairs else 1):
            left.pop(frozenset(values), None)
        rows.append(row)
    return rows


def _products(axes: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Iterable[tuple[Value, ...]]:
    return product(*([(name, value) for value in axes[name]] for name in names))
