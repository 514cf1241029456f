"""Counts that size a plan: their limits, and their divisors.

Work and memory of a plan grow with these counts. A larger one is refused before any work, with the limit in the
message. Within the limits, sums of bytes and operations stay below the largest int64.
"""

from __future__ import annotations

from math import isqrt, prod

from attnmesh.core.model_sizes import MAX_LAYERS
from attnmesh.utils.validation import check_count, check_positive

MAX_RANKS = 1 << 14
MAX_LENGTH = 1 << 27
MAX_BATCH = 1 << 16
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 16
MAX_HIDDEN = 1 << 24
MAX_TOKENS = 1 << 12
"""New tokens per sequence in a decode step."""

_MAX_ELEMENTS = 1 << 56
_PER_ELEMENT = ("context", "length", "batch", "tokens", "q_heads", "head_dim")
_MOST = {
    "ranks": MAX_RANKS, "devices": MAX_RANKS, "world": MAX_RANKS, "ranks_per_node": MAX_RANKS, "rails": MAX_RANKS,
    "context": MAX_LENGTH, "length": MAX_LENGTH, "batch": MAX_BATCH, "tokens": MAX_TOKENS,
    "q_heads": MAX_HEADS, "kv_heads": MAX_HEADS, "head_dim": MAX_HEAD_DIM, "hidden": MAX_HIDDEN, "layers": MAX_LAYERS,
}  # fmt: skip


def check_sizes(**counts: object) -> None:
    """Raise ValueError for a count that is not a positive integer or exceeds its limit, and for too many elements."""
    check_positive(**counts)
    checked = {name: check_count(name, n, most=_MOST[name]) for name, n in counts.items()}
    elements = {name: n for name, n in checked.items() if name in _PER_ELEMENT}
    if prod(elements.values()) > _MAX_ELEMENTS:
        raise ValueError(f"{' x '.join(elements)} must be at most 2**56, got {' x '.join(map(str, elements.values()))}")


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
