"""Decode as pictures: speed against the length of the cache, time against the number of splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmesh.utils.optional import require
from benchmarks.decode import measure as parts

Lines = Sequence[Mapping[str, Any]]


def plot_decode(sections: Mapping[str, Lines], folder: Path) -> list[Path]:
    """Draw what there are figures for, from the sections of a run or of its JSON file; the pictures drawn."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    random_case = []
    folder.mkdir(parents=True, exist_ok=True)
    if grid := sections.get(parts.GRID):
        random_case.append(_against_length(pyplot, grid, "tflops", 1.0, "TFLOP/s", folder / "decode-tflops.svg"))
        random_case.append(_against_length(pyplot, grid, "tb_per_s", 1e3, "GB/s", folder / "decode-bandwidth.svg"))
    if splits := sections.get(parts.SPLITS):
        random_case.append(_against_splits(pyplot, splits, folder / "decode-splits.svg"))
    return random_case


def _against_length(pyplot: Any, lines: Lines, column: str, factor: float, unit: str, path: Path) -> Path:
    """A row for each storage type, a column for each head_dim, a curve for each batch."""
    storages, head_dims, batches = (
        list(dict.fromkeys(line[name] for line in lines)) for name in ("storage", "head_dim", "batch")
    )
    size = (3.6 * len(head_dims), 3.0 * len(storages))
    figure, axes = pyplot.subplots(len(storages), len(head_dims), figsize=size, sharey=True, squeeze=False)
    for storage, row in zip(storages, axes, strict=True):
        for head_dim, panel in zip(head_dims, row, strict=True):
            for batch in batches:
                wanted = (storage, head_dim, batch)
                points = [x for x in lines if (x["storage"], x["head_dim"], x["batch"]) == wanted]
                heights = [factor * x[column] for x in points]
                panel.plot([x["length"] for x in points], heights, marker="o", markersize=3, label=f"batch {batch}")
            panel.set_xscale("log", base=2)
            panel.set_title(f"{storage}, D = {head_dim}", fontsize=10)
        row[0].set_ylabel(unit)
    for panel in axes[-1]:
        panel.set_xlabel("cache length")
    axes[0][0].set_ylim(bottom=0)  # of all panels, and now that all are drawn: it ends their growing
    axes[0][0].legend(fontsize=7)
    return _saved(pyplot, figure, path)


def _against_splits(pyplot: Any, lines: Lines, path: Path) -> Path:
    """A curve for each shape; what is chosen without a limit as a dashed line."""
    names = ("batch", "q_heads", "kv_heads", "length", "head_dim")
    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for shape in dict.fromkeys(tuple(line[name] for name in names) for line in lines):
        points = [x for x in lines if tuple(x[name] for name in names) == shape]
        limited = [x for x in points if x["max_splits"] != "free"]
        label = "B={}, {}/{} heads, L={}, D={}".format(*shape)
        (curve,) = panel.plot([x["max_splits"] for x in limited], [x["us"] for x in limited], marker="o", label=label)
        for free in (x for x in points if x["max_splits"] == "free"):
            panel.axhline(free["us"], color=curve.get_color(), linestyle="--", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("maximum splits per sequence and head (dashed: no limit)")
    panel.set_ylabel("microseconds")
    panel.legend(fontsize=7)
    return _saved(pyplot, figure, path)


def _saved(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
