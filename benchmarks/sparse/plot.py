"""The sparse benchmark as a picture: each part beside its bound, its peers, or what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmesh.utils.optional import require
from benchmarks.sparse import measure as parts

FORMATS = (".pdf", ".png", ".svg")
Lines = Sequence[Mapping[str, Any]]


def plot_sparse(sections: Mapping[str, Lines], path: Path) -> None:
    """A panel for each part that there are figures for: milliseconds from a GPU, ratios from a CPU."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    panels = [(title, draw) for title, draw in _PANELS.items() if sections.get(title)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), squeeze=False)
    for (title, draw), panel in zip(panels, axes[0], strict=True):
        draw(panel, sections[title])
        panel.set_title(_NAMES[title], fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _against_length(panel: Any, lines: Lines) -> None:
    """Draw a curve for each operation and number of heads, its bound dashed."""
    names = [(line["operation"], line["heads"]) for line in lines]
    column = "ms" if "ms" in lines[0] else "share_of_bound"
    for name in dict.fromkeys(names):
        points = [line for line, at in zip(lines, names, strict=True) if at == name]
        lengths = [x["s_kv"] for x in points]
        label = f"{name[0]}, {name[1]} heads"
        (curve,) = panel.plot(lengths, [x[column] for x in points], marker="o", label=label)
        if column == "ms":
            bounds = [x["share_of_bound"] * x["ms"] for x in points]
            panel.plot(lengths, bounds, color=curve.get_color(), linestyle="--", marker="_")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("keys")
    panel.set_ylabel("ms (dashed: the larger bound)" if column == "ms" else "share of the larger bound")
    heights = [line[column] for line in lines]
    if max(heights) > 10 * min(heights):  # a forward of few heads and a backward of many
        panel.set_yscale("log")
        panel.legend(fontsize=7)
    else:
        _from_zero(panel)


def _side_by_side(panel: Any, lines: Lines) -> None:
    """Ours and the other way next to each other: time and, where it was counted, memory, both over ours."""
    ours, others = lines[::2], lines[1::2]
    labels = [f"{x['operation']},\n{x['s_kv']} keys" for x in others]
    columns = {"time over ours": [x["over_ours"] for x in others]}
    for memory in ("memory_over_io", "added_gb"):
        if memory in lines[0]:
            columns["memory over ours"] = [b[memory] / a[memory] for a, b in zip(ours, others, strict=True)]
    _bars(panel, labels, columns)


def _bars(panel: Any, labels: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
    width = 0.8 / len(columns)
    for at, (name, heights) in enumerate(columns.items()):
        bars = panel.bar([x + at * width for x in range(len(labels))], heights, width, label=name)
        panel.bar_label(bars, fmt="%.3g", fontsize=7)
    panel.set_xticks([x + 0.4 - width / 2 for x in range(len(labels))], labels, fontsize=7)
    panel.axhline(1.0, color="grey", linewidth=0.8)
    panel.set_ylabel("over ours")
    _from_zero(panel)


def _from_zero(panel: Any) -> None:
    panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    panel.legend(fontsize=7)


_PANELS: dict[str, Callable[[Any, Lines], None]] = {
    parts.DIST: _against_length,
    parts.ATTENTION: _against_length,
    parts.TOPK_TITLE: _side_by_side,
    parts.LOSS: _side_by_side,
}
_NAMES = {
    parts.DIST: "attention_distribution",
    parts.ATTENTION: "sparse_attention",
    parts.TOPK_TITLE: "indexer_topk",
    parts.LOSS: "the indexer's loss step",
}
