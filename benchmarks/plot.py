"""Efficiency against world and length, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnmesh.core.optional import require

_DIRECTIONS = ("forward", "forward+backward")


def plot_efficiency(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each world, a row for each direction: efficiency over length, a curve for each schedule."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    ours = [line for line in lines if line["world"] > 1]
    worlds = sorted({line["world"] for line in ours})
    schedules = list(dict.fromkeys(line["schedule"] for line in ours))
    figure, axes = pyplot.subplots(2, len(worlds), figsize=(3.6 * len(worlds), 6), sharey=True, squeeze=False)
    for direction, row in zip(_DIRECTIONS, axes, strict=True):
        for world, panel in zip(worlds, row, strict=True):
            for schedule in schedules:
                wanted = (world, direction, schedule)
                points = [x for x in ours if (x["world"], x["direction"], x["schedule"]) == wanted]
                panel.plot([x["length"] for x in points], [x["efficiency"] for x in points], marker="o", label=schedule)
            panel.axhline(1.0, color="grey", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.set_title(f"{world} ranks, {direction}", fontsize=10)
        row[0].set_ylabel("efficiency against cuDNN / ranks")
    for panel in axes[-1]:
        panel.set_xlabel("length")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
