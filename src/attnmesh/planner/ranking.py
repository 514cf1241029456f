"""Choices side by side: the fastest that fits, and why the others lose."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnmesh.planner.units import readable_bytes, readable_seconds

RESERVED = 0.1
"""The share of a device's memory that is left to everything else: the runtime, fragments, buffers of libraries."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank needs, at most."""

    weights: float
    cache: float  # keys and values
    working: float  # activations, messages, partial results

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.working


@dataclass(frozen=True)
class Option:
    """One way to do it."""

    name: str
    seconds: float
    memory: Memory
    sent: float  # bytes that a rank sends, at most
    bottleneck: str
    parts: dict[str, float] = field(default_factory=dict)  # where the seconds go

    def fits(self, room: float) -> bool:
        """Whether a device with so much memory holds it."""
        return self.memory.total <= (1 - RESERVED) * room


@dataclass(frozen=True)
class Ranking:
    """Options, those that fit first, the fastest of each first; and what to do where none fits."""

    options: tuple[Option, ...]
    room: float  # bytes of a device's memory
    refused: dict[str, str]  # what cannot serve at all, and why
    advice: str = ""

    @property
    def best(self) -> Option | None:
        """The fastest that fits; None where nothing does."""
        return self.options[0] if self.options and self.options[0].fits(self.room) else None

    def why(self, option: Option) -> str:
        """Why an option is the best, or what it loses by."""
        if not option.fits(self.room):
            return f"does not fit in {readable_bytes((1 - RESERVED) * self.room)}"
        best = self.best
        assert best is not None, "an option that fits makes one the best"
        if option == best:
            return "the fastest that fits"
        times = option.seconds / best.seconds if best.seconds else 1.0
        slower = f"{100 * (times - 1):.2g}% slower" if times < 1.995 else f"{times:.3g} times as long"
        return f"{slower}: {_loses_by(option, best)}"


def ranked(options: list[Option], room: float, refused: dict[str, str]) -> Ranking:
    """The options in order."""
    order = sorted(options, key=lambda option: (not option.fits(room), option.seconds, option.memory.total))
    return Ranking(tuple(order), room, refused)


def _loses_by(option: Option, best: Option) -> str:
    """The part of the time that grew most against the best."""
    more = {name: seconds - best.parts.get(name, 0.0) for name, seconds in option.parts.items()}
    worst = max(more, key=lambda name: more[name], default="")
    if worst and more[worst] > 0:
        return f"{readable_seconds(more[worst])} more for {worst}"
    return option.bottleneck
