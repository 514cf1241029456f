"""Something to time: a call of a known size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from attnmesh.plan.program import KernelKind
from attnmesh.planner.hardware import Curve


@dataclass(frozen=True)
class Sample:
    """One call of a kind of kernel. `make` draws its inputs, so that only one sample's are in memory."""

    kind: KernelKind
    size: float  # in the unit of the kind
    make: Callable[[], Callable[[], Tensor]]
    square: bool = False  # whether it is a causal square
    before: Callable[[], Callable[[], Tensor]] | None = None  # what the call includes and its time should not


def curves_of(samples: Iterable[Sample], seconds: Sequence[float], *, square: bool) -> tuple[tuple[KernelKind, Curve], ...]:
    """The curve of every kind, from the seconds of each sample."""
    found: dict[KernelKind, list[tuple[float, float]]] = {}
    for sample, time in zip(samples, seconds, strict=True):
        if sample.square == square:
            found.setdefault(sample.kind, []).append((sample.size, time))
    return tuple((kind, Curve(tuple(sorted(pairs)))) for kind, pairs in found.items())
