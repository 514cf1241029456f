"""What would fit, where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnmesh.plan.ranking import RESERVED, Memory, Ranking
from attnmesh.plan.words import readable_bytes

MOST_DEVICES = 1 << 14

Leanest = Callable[[int], Memory | None]
"""What the leanest way on so many devices asks of one of them; None if there is none."""


def advice(ranking: Ranking, devices: int, leanest: Leanest, stored: float) -> str:
    """In words: what is too large, how many devices would do, and whether smaller numbers in the cache would."""
    now = leanest(devices)
    if now is None:
        return f"Nothing can be divided over {devices} devices: {'; '.join(list(ranking.refused.values())[:1])}."
    parts = {"weights": now.weights, "KV cache": now.cache, "activations": now.working}
    largest = max(parts, key=lambda part: parts[part])
    said = [
        f"Nothing fits: the leanest way needs {readable_bytes(now.total)} a device ({largest} alone "
        f"{readable_bytes(parts[largest])}), and {readable_bytes((1 - RESERVED) * ranking.room)} can be used."
    ]
    enough = next((n for n in _more(devices) if _holds(leanest(n), ranking.room)), None)
    if enough is not None:
        said.append(f"{enough} of these devices would hold it.")
    else:
        said.append(f"Not even {MOST_DEVICES} of these devices would hold it.")
    if stored > 1 and now.cache > now.weights:
        said.append("An 8-bit KV cache (--storage fp8) halves the cache.")
    return " ".join(said)


def _holds(need: Memory | None, room: float) -> bool:
    return need is not None and need.total <= (1 - RESERVED) * room


def _more(devices: int) -> Iterator[int]:
    while devices < MOST_DEVICES:
        devices *= 2
        yield devices
