"""Validation and parsing of numeric arguments."""

from __future__ import annotations

import re
from fractions import Fraction


def check_positive(**counts: object) -> None:
    """Raises ValueError unless all arguments are positive integers."""
    for name, n in counts.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{name} must be a positive integer, got {n!r}")


def check_count(name: str, n: object, least: int = 0) -> None:
    """Raise ValueError unless `n` is an integer of at least `least`."""
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {n!r}")


_SUFFIX = {"": 1, "k": 1024, "m": 1024**2}
_WRITTEN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([kKmM]?)", re.ASCII)


def parse_length(text: str) -> int:
    """Parses a sequence length such as `100000`, `128k` or `1.5M`; k is 1024 and M is 1024 * 1024."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is not None:
        count = Fraction(match[1]) * _SUFFIX[match[2].lower()]
        if count.denominator == 1 and count > 0:
            return int(count)
    raise ValueError(f"a length must be a whole number above 0, such as 100000, 128k or 1.5M, got {text!r}")
