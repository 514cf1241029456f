"""The dense benchmark as a picture: bars of TFLOP/s for every case, a color for each program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmesh.utils.optional import require
from benchmarks.dense.measure import SUMMARY
from benchmarks.dense.programs import GLUON, STAGE, THEIRS, TRITON


def plot_dense(sections: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the last table; a program that does not serve a case has no bar."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    lines = sections[SUMMARY]
    names = [name for name in (*THEIRS, TRITON, GLUON, STAGE) if any(line[name] != "" for line in lines)]
    figure, panel = pyplot.subplots(figsize=(max(6.0, 1.2 * len(lines)), 4.5))
    width = 0.8 / max(1, len(names))
    for at, name in enumerate(names):
        bars = [(x, line[name]) for x, line in enumerate(lines) if line[name] != ""]
        panel.bar([x + at * width for x, _ in bars], [speed for _, speed in bars], width, label=name)
    panel.set_xticks(
        [x + 0.4 - width / 2 for x in range(len(lines))], [line["case"].replace(" ", "\n", 1) for line in lines],
        fontsize=7, rotation=20,
    )  # fmt: skip
    panel.set_ylabel("TFLOP/s of visible pairs")
    if names:
        panel.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
