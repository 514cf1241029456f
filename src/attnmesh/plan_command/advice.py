"""What would fit, where nothing does."""

from __future__ import annotations

from collections.abc import Callable

from attnmesh.plan.ranking import RESERVED, Memory, Ranking
from attnmesh.plan.words import readable_bytes

MOST_DEVICES = 1 << 14

Leanest = Callable[[int], Memory | None]
"""What the leanest way on so many devices asks of one of them; None if there is none."""


def advice(ranking: Ranking, devices: int, leanest: Leanest, stored: float) -> str:
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
        f"{readable_bytes(parts[largest])}), and {readable_bytes((1 - RESERVED) * ranking.room)} can be used."
    ]
    more = {n: need for n in _more(devices) if (need := leanest(n)) is not None}
    enough = next((n for n, need in more.items() if need.total <= (1 - RESERVED) * ranking.room), None)
    if enough is not None:
        said.append(f"{enough} of these devices would hold it.")
    elif more:
        said.append(f"Not even {max(more)} of these devices, the most that can share it, would hold it.")
    else:
        said.append("More of these devices cannot share it.")
    if stored > 1 and now.cache > now.weights:
        said.append("An 8-bit KV cache (--storage fp8) halves the cache.")
    return " ".join(said)


def _more(devices: int) -> list[int]:
    """Larger clusters to look at: twice as many and so on, and powers of two, which most heads divide by."""
    doubled = {devices << n for n in range(1, MOST_DEVICES.bit_length())}
    powers = {1 << n for n in range(MOST_DEVICES.bit_length())}
    return sorted(n for n in doubled | powers if devices < n <= MOST_DEVICES)
