"""What to say about a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that none of the known ones is: the nearest of them, then all."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return ValueError(f"unknown {what} {name!r}.{meant} Known: {', '.join(names)}")
