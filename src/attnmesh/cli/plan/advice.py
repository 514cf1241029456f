"""What would fit, where nothing does."""

from __future__ import annotations

from collections.abc import Callable

from attnmesh.planner.ranking import RESERVED_MEMORY, Memory, Ranking
from attnmesh.planner.units import readable_bytes

MOST_DEVICES = 1 << 14

Leanest = Callable[[int], Memory | None]
"""What the leanest way on so many devices asks of one of them; None if there is none."""


def advice(ranking: Ranking, devices: int, leanest: Leanest, weight_bits: float) -> str:
    """In words: what is too large, how many devices would do, and whether smaller numbers in the cache would."""
    now = leanest(devices)
    if now is None:
        most = next((n for n in range(devices - 1, 0, -1) if leanest(n) is not None), 0)
        why = next(iter(ranking.refused.values()), "no division is even")
        return f"Nothing can be divided over {devices} devices: {why}. {most} can be kept busy."
    parts = {"weights": now.weights, "KV cache": now.cache, "activations": now.working}
    largest = max(parts, key=lambda part: parts[part])
    said = [
        f"Nothing fits: the leanest way needs {readable_bytes(now.total)} a device ({largest} alone "
        f"{readable_bytes(parts[largest])}), and {readable_bytes((1 - RESERVED_MEMORY) * ranking.device_memory)} can be used."
    ]
    said.append(_enough(devices, leanest, (1 - RESERVED_MEMORY) * ranking.device_memory))
    if weight_bits > 1 and now.cache > now.weights:
        said.append("An 8-bit KV cache (--storage fp8) halves the cache.")
    return " ".join(said)


def _enough(devices: int, leanest: Leanest, device_memory: float) -> str:
    most = None
    for n in _more(devices):
        need = leanest(n)
        if need is not None and need.total <= device_memory:
            return f"{n} of these devices would hold it."
        most = most if need is None else n
    if most is None:
        return "More of these devices cannot share it."
    return f"Not even {most} of these devices, the most that can share it, would hold it."


def _more(devices: int) -> list[int]:
    """Larger clusters to look at: twice as many and so on, and powers of two, which most heads divide by."""
    doubled = {devices << n for n in range(1, MOST_DEVICES.bit_length())}
    powers = {1 << n for n in range(MOST_DEVICES.bit_length())}
    return sorted(n for n in doubled | powers if devices < n <= MOST_DEVICES)
