"""Layouts and masks by the names that commands take."""

from __future__ import annotations

from attnmesh.layout import Contiguous, Layout, Striped, Zigzag
from attnmesh.mask import Causal, Full, Mask, SlidingWindow

LAYOUTS: dict[str, Layout] = {"zigzag": Zigzag(), "striped": Striped(), "contiguous": Contiguous()}


def mask_named(name: str) -> Mask:
    """The mask that `causal`, `full` or `window:N` means."""
    kind, _, width = name.partition(":")
    if kind == "window" and width.isascii() and width.isdigit() and int(width):
        return Causal() & SlidingWindow(int(width) - 1)
    if name not in ("causal", "full"):
        raise ValueError(f"mask must be causal, full or window:N (the last N keys, N at least 1), got {name!r}")
    return Causal() if name == "causal" else Full()
