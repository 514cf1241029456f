"""Options ranked by time, options that fit into memory first, each with a reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.text import readable_bytes, readable_seconds

RESERVED_MEMORY = 0.1
"""The fraction of device memory that is reserved for the runtime, fragmentation and library buffers."""

TIE = 0.005
"""Relative difference in time up to which two options are called a tie."""


def usable_memory(device_memory: float) -> float:
    """The bytes of a device that a plan may take."""
    return (1 - RESERVED_MEMORY) * device_memory


@dataclass(frozen=True)
class Memory:
    """Bytes per rank, the maximum over ranks."""

    weights: float
    cache: float  # KV cache
    working: float  # activations, messages, partial results

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.cache + self.working


@dataclass(frozen=True)
class Option:
    """One plan: how devices are divided, and what it costs."""

    name: str
    seconds: float
    memory: Memory
    sent: float  # bytes per rank, the maximum over ranks
    bottleneck: str
    parts: dict[str, float] = field(default_factory=dict)  # seconds by what they are spent on
    sharding: DecodeSharding | None = None  # of each replica, in plans for decode
    replicas: int = 1

    def fits(self, device_memory: float) -> bool:
        """Whether it fits into a device with this much memory."""
        return self.memory.total <= usable_memory(device_memory)


@dataclass(frozen=True)
class Ranking:
    """Options that fit, by time, then the other options; and advice where none fits."""

    options: tuple[Option, ...]
    device_memory: float  # bytes
    refused: dict[str, str]  # plans that are not supported, and why
    advice: str = ""

    @property
    def best(self) -> Option | None:
        """The fastest option that fits; None if none does."""
        return self.options[0] if self.options and self.options[0].fits(self.device_memory) else None

    def why(self, option: Option) -> str:
        """Why an option is the best, or why it is slower."""
        if not option.fits(self.device_memory):
            return f"does not fit in {readable_bytes(usable_memory(self.device_memory))}"
        best = self.best
        assert best is not None, "an option fits"
        if option == best:
            return "fastest that fits"
        ratio = option.seconds / best.seconds if best.seconds else 1.0
        if is_tie(option.seconds, best.seconds):
            return "tie"
        slower = f"{100 * (ratio - 1):.2g}% slower" if ratio < 1.995 else f"{ratio:.3g}x slower"
        return f"{slower}: {_main_difference(option, best)}"


def is_tie(seconds: float, best: float) -> bool:
    """Whether two times differ by less than the estimates can tell apart."""
    return seconds <= (1 + TIE) * best


def ranked(options: list[Option], device_memory: float, refused: dict[str, str]) -> Ranking:
    """The options in order of time, options that fit first."""
    order = sorted(options, key=lambda option: (not option.fits(device_memory), option.seconds, option.memory.total))
    return Ranking(tuple(order), device_memory, refused)


def _main_difference(option: Option, best: Option) -> str:
    """The part of the time that is longer than the best option's by most."""
    more = {name: seconds - best.parts.get(name, 0.0) for name, seconds in option.parts.items()}
    worst = max(more, key=lambda name: more[name], default="")
    if worst and more[worst] > 0:
        return f"+{readable_seconds(more[worst])} {worst}"
    return option.bottleneck
