"""Numbers that count something."""

from __future__ import annotations


def check_positive(**counts: object) -> None:
    """Raise ValueError unless all these are positive integers."""
    for name, n in counts.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{name} must be a positive integer, got {n!r}")
