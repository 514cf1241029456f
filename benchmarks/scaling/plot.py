"""Plots: efficiency and the time of a decode step against the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmesh.utils.optional import require
from benchmarks.scaling.study import SHARDING_KINDS, Part
from benchmarks.scaling.tables import short

Lines = Sequence[Mapping[str, Any]]


def plot_scaling(sections: Mapping[str, Lines], folder: Path) -> list[Path]:
    """Draw what there are figures for, from the sections of a run or of its JSON file; the pictures drawn."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if lines := sections.get(Part.PREFILL):
        forward = [line for line in lines if line["direction"] == "forward"]
        drawn.append(_efficiency(pyplot, forward, folder / "scaling-prefill.svg"))
    if lines := sections.get(Part.DECODE):
        drawn.append(_steps(pyplot, lines, folder / "scaling-decode.svg"))
    return drawn


def _efficiency(pyplot: Any, lines: Lines, path: Path) -> Path:
    """A panel for each length, a curve for each schedule; hollow where a rank cannot hold it."""
    lengths = sorted({line["length"] for line in lines})
    figure, axes = pyplot.subplots(1, len(lengths), figsize=(3.6 * len(lengths), 3.8), sharey=True, squeeze=False)
    for length, panel in zip(lengths, axes[0], strict=True):
        for schedule in dict.fromkeys(line["schedule"] for line in lines):
            points = [x for x in lines if (x["length"], x["schedule"]) == (length, schedule)]
            _curve(panel, points, "ranks", "efficiency", 1.0, schedule)
        _ticks(panel, lines, "ranks")
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set_title(f"{short(length)} tokens", fontsize=10)
    axes[0][0].set_ylabel("one GPU's time / (GPUs x time)")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].legend(fontsize=7)
    return _saved(pyplot, figure, axes[-1], path)


def _steps(pyplot: Any, lines: Lines, path: Path) -> Path:
    """A row for each model, a column for each batch, a curve for each kind of sharding; hollow: does not fit."""
    models, batches = (list(dict.fromkeys(line[name] for line in lines)) for name in ("model", "batch"))
    size = 3.6 * len(batches), 3.2 * len(models)
    figure, axes = pyplot.subplots(len(models), len(batches), figsize=size, squeeze=False)
    for model, row in zip(models, axes, strict=True):
        for batch, panel in zip(batches, row, strict=True):
            for kind in SHARDING_KINDS:
                points = [x for x in lines if (x["model"], x["batch"], x["kind"]) == (model, batch, kind)]
                _curve(panel, points, "devices", "seconds", 1e3, kind)
            _ticks(panel, lines, "devices")
            panel.set_ylim(bottom=0)
            panel.set_title(f"{model}, batch {batch}", fontsize=10)
            panel.legend(fontsize=7)
        row[0].set_ylabel("ms per step")
    return _saved(pyplot, figure, axes[-1], path)


def _curve(panel: Any, points: Lines, across: str, up: str, factor: float, label: str) -> None:
    if not points:
        return
    points = sorted(points, key=lambda point: float(point[across]))
    where, heights = [x[across] for x in points], [factor * x[up] for x in points]
    (curve,) = panel.plot(where, heights, label=label, linewidth=1.2)
    for at, height, point in zip(where, heights, points, strict=True):
        face = curve.get_color() if point["fits"] else "white"
        panel.plot(at, height, marker="o", markersize=4, color=curve.get_color(), markerfacecolor=face)


def _ticks(panel: Any, lines: Lines, across: str) -> None:
    where = sorted({x[across] for x in lines})
    panel.set_xscale("log", base=2)
    panel.set_xticks(where, [str(x) for x in where], fontsize=7)
    panel.set_xticks([], minor=True)


def _saved(pyplot: Any, figure: Any, bottom: Any, path: Path) -> Path:
    for panel in bottom:
        panel.set_xlabel("GPUs")
    figure.tight_layout()
    with pyplot.rc_context({"svg.hashsalt": path.name}):  # the same figures make the same file
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
