"""Bytes and seconds as text."""

from __future__ import annotations


def readable_bytes(nbytes: float) -> str:
    """Bytes as text: `9.664 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def readable_seconds(seconds: float) -> str:
    """Seconds as text: `12.5 ms`."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:  # what rounds to 1000 of a unit is shown as 1 of the next
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
