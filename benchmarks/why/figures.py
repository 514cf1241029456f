"""The figures of docs/why.md: one style, readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnmesh.utils.optional import require
from benchmarks.scaling.tables import short
from benchmarks.why.policies import FLOAT32, HALF_BLOCKS, HALF_SUM
from benchmarks.why.sources import EVERY_BLOCK, MASKS, Rows, Sources

PAPER, INK, GRID = "#ffffff", "#24292f", "#d0d7de"
DARK = {PAPER: "#0d1117", INK: "#e6edf3", GRID: "#30363d"}  # what a dark page shows instead
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f7fd1", "#c9721a", "#2f9e55", "#d6455d", "#9467c8", "#7d8590"
COLORS = {"ring": BLUE, "allgather": GREEN, "ulysses": ORANGE, "ulysses+ring": PURPLE}
_STYLE = {
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER, "text.color": INK,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": GRID,
    "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "font.size": 9, "axes.titlesize": 9, "legend.frameon": False, "legend.fontsize": 8,
    "lines.linewidth": 1.6, "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08, "figure.constrained_layout.w_pad": 0.08, "lines.markersize": 4,
}  # fmt: skip


def draw_figures(sources: Sources, folder: Path) -> list[Path]:
    """Draw every figure into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_drawn(name, draw, sources, folder) for name, draw in FIGURES.items()]


def _drawn(name: str, draw: Callable[[Any, Sources], Any], sources: Sources, folder: Path) -> Path:
    pyplot = require("matplotlib.pyplot", extra="plot")
    path = folder / f"{name}.svg"
    with pyplot.rc_context({**_STYLE, "svg.hashsalt": name}):  # the same data make the same file
        figure = draw(pyplot, sources)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    path.write_text(for_dark_pages(path.read_text()))
    return path


def for_dark_pages(svg: str) -> str:
    """Add other colors of paper, ink and grid where the reader prefers a dark page."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}: {dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>", 1)


def _error(pyplot: Any, sources: Sources) -> Any:
    curves = {
        HALF_SUM: (RED, "bf16 blocks, bf16 sum\n(TransformerEngine p2p)"),
        HALF_BLOCKS: (ORANGE, "bf16 blocks, float32 sum\n(ring_flash_attn, torch)"),
        FLOAT32: (BLUE, "float32 blocks and sum\n(attnmesh: triton, gluon, torch)"),
    }
    figure, panels = pyplot.subplots(1, 2, figsize=(7.6, 3.3), sharey=True)
    for name, title, panel in zip(("out", "dk"), ("out", "gradient of K"), panels, strict=True):
        for policy, (color, label) in curves.items():
            points = [row for row in sources.errors if row["policy"] == policy]
            panel.plot(*_xy(points, "ranks", name, 1e3), marker="o", color=color, label=label)
        for backend, marker, color in (("triton", "x", BLUE), ("aten", "+", ORANGE)):
            points = [row for row in sources.accuracy if row["backend"] == backend]
            label = f"attnmesh on an H200, {backend}"
            panel.plot(*_xy(points, "world", name, 1e3), marker, color=color, markersize=8, label=label)
        _ranks(panel, sources.errors)
        panel.set_title(title)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("relative RMS error, 10⁻³")
    panels[0].legend(loc="upper left")
    return figure


def _bytes(pyplot: Any, sources: Sources) -> Any:
    labels = {"allgather": "ring, allgather", "ulysses": "ulysses", "ulysses+ring": "ulysses+ring, 8 ranks per node"}
    figure, panels = pyplot.subplots(1, 2, figsize=(7.6, 3.1), sharey=True)
    for mask, panel in zip(MASKS, panels, strict=True):
        for schedule in (*labels, EVERY_BLOCK):
            points = [row for row in sources.bytes if (row["mask"], row["schedule"]) == (mask, schedule)]
            color, style = COLORS.get(schedule, INK), ":" if schedule == EVERY_BLOCK else "-o"
            panel.plot(*_xy(points, "ranks", "bytes", 1e-6), style, color=color, label=labels.get(schedule, schedule))
        _ranks(panel, sources.bytes)
        panel.set_yscale("log")
        panel.set_yticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
        panel.set_yticks([], minor=True)
        panel.set_title(mask)
    panels[0].set_ylabel("MB that the busiest rank sends")
    panels[0].legend(loc="lower left")
    return figure


def _efficiency(pyplot: Any, sources: Sources) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(7.6, 3.1), sharey=True)
    for direction, panel in zip(("forward", "forward+backward"), panels, strict=True):
        points = [row for row in sources.prefill if (row["world"], row["direction"]) == (8, direction)]
        for schedule in ("ring", "allgather", "ulysses"):
            panel.plot(*_xy(points, "S", schedule), marker="o", color=COLORS[schedule], label=schedule)
        peer = [row["cuDNN, ms"] / row["FlashAttention-2, ms"] for row in points]
        panel.plot([row["S"] for row in points], peer, ":", color=GREY, label="FlashAttention-2, one device")
        panel.axhline(1.0, color=INK, linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks([row["S"] for row in points], [short(int(row["S"])) for row in points])
        panel.set_xlabel("tokens in the whole sequence")
        panel.set_title(f"{direction}, 8 ranks")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("cuDNN's time on one device\n/ (8 x slowest rank)")
    panels[0].legend(loc="lower right")
    return figure


def _decode(pyplot: Any, sources: Sources) -> Any:
    ours, plain = "ours, paged", {"cuDNN": BLUE, "FlashAttention-2": ORANGE, "FlexDecoding": GREEN}
    figure, panel = pyplot.subplots(figsize=(7.6, 3.5))
    shapes = [tuple(map(int, row["B, Hq, Hkv, L, D"].split(", "))) for row in sources.decode]
    heights = range(len(shapes), 0, -1)

    def rates(column: str) -> list[float]:  # bytes of bf16 keys and values, divided by microseconds
        return [
            4 * batch * kv_heads * length * head_dim / row[column] / 1e6
            for row, (batch, _, kv_heads, length, head_dim) in zip(sources.decode, shapes, strict=True)
        ]

    for column, color in plain.items():
        panel.plot(rates(column), heights, "o", color=color, markerfacecolor=PAPER, label=f"{column}, contiguous")
    panel.plot(rates("JAX Pallas paged"), heights, "s", color=GREY, markerfacecolor=PAPER, label="JAX Pallas, paged")
    panel.plot(rates(ours), heights, "D", color=RED, markersize=6, label="attnmesh, paged")
    bandwidth = max(row["TB/s"] / row["fraction of read bandwidth"] for row in sources.decode[:1])
    panel.axvline(bandwidth, color=INK, linewidth=0.8)
    panel.annotate("what a sum reads ", (bandwidth, 4), ha="right", va="center", fontsize=8)
    panel.set_yticks(heights, [f"{b} x {short(n)} tokens, {q}/{kv} heads, D {d}" for b, q, kv, n, d in shapes])
    panel.set_ylim(0.4, len(shapes) + 0.6)
    panel.set_xlim(left=0)
    panel.set_xlabel("TB/s of keys and values read")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _scaling(pyplot: Any, sources: Sources) -> Any:
    figure, panel = pyplot.subplots(figsize=(7.6, 3.3))
    lengths = sorted({row["length"] for row in sources.scaling})
    for length, color in zip(lengths, (RED, ORANGE, BLUE, GREEN), strict=True):
        ring = [row for row in sources.scaling if (row["length"], row["schedule"]) == (length, "ring") and row["fits"]]
        best = best_that_fit([row for row in sources.scaling if row["length"] == length])
        panel.plot(*_xy(best, "ranks", "efficiency"), marker="o", color=color, label=f"{short(length)} tokens")
        panel.plot(*_xy(ring, "ranks", "efficiency"), ":", color=color)
    panel.plot([], [], ":", color=GREY, label="the ring alone")
    _ranks(panel, sources.scaling, "GPUs")
    panel.set_ylim(0, 1.05)
    panel.set_ylabel("one GPU's time / (GPUs x time)")
    panel.legend(loc="lower left")
    return figure


def best_that_fit(rows: Rows) -> Rows:
    """The fastest schedule for every number of ranks whose memory holds it; none where nothing fits."""
    fitting = [row for row in rows if row["fits"]]
    return [
        max((row for row in fitting if row["ranks"] == world), key=lambda row: float(row["efficiency"]))
        for world in sorted({row["ranks"] for row in fitting})
    ]


FIGURES: dict[str, Callable[[Any, Sources], Any]] = {
    "why-error": _error,
    "why-bytes": _bytes,
    "why-efficiency": _efficiency,
    "why-decode": _decode,
    "why-scaling": _scaling,
}


def _xy(points: Rows, x: str, y: str, factor: float = 1.0) -> tuple[list[float], list[float]]:
    return [row[x] for row in points], [factor * row[y] for row in points]


def _ranks(panel: Any, rows: Rows, label: str = "ranks") -> None:
    worlds: Sequence[int] = sorted({row["ranks"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(worlds, [f"{world:,}" for world in worlds])
    panel.set_xticks([], minor=True)
    panel.set_xlabel(label)
