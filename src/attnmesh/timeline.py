"""What happened when, on which rank: of a simulated run or a real one, and as a file that trace viewers open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Track = Literal["compute", "send", "receive", "wait"]


@dataclass(frozen=True)
class Span:
    """Something that took a rank from `begin` to `end`, in seconds since the run began."""

    rank: int
    track: Track
    name: str
    begin: float
    end: float
    facts: dict[str, object] = field(default_factory=dict)  # such as bytes, peer, operations
