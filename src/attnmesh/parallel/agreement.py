"""Arguments examined on every rank before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

T = TypeVar("T")
Facts = dict[str, object]


class Agreeing(Protocol):
    """Ranks that can compare notes: a comm, or the ranks of a mesh."""

    def agree(
        self, operation: str, facts: Mapping[str, object], error: str | None = None, *, anew: bool = False
    ) -> None:
        """As `Comm.agree`."""


def agreed(ranks: Agreeing, operation: str, examined: Callable[[], tuple[T, Facts]], *, anew: bool = False) -> T:
    """What this rank makes of its arguments, once all ranks agree: what is wrong on one is raised on every rank.

    `examined` returns it together with the facts that must be equal everywhere, or raises ValueError. What was agreed
    before is not asked again, and then others do not hear of a mistake in time, unless it is asked `anew`.
    """
    try:
        found, facts = examined()
    except ValueError as wrong:
        ranks.agree(operation, {}, str(wrong))
        raise
    ranks.agree(operation, facts, anew=anew)
    return found


def check_count(name: str, n: object, least: int = 0) -> None:
    """Raise ValueError unless `n` is an integer of at least `least`."""
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {n!r}")
