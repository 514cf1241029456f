"""Draw the masks of MagiAttention's paper, in text or as a picture (docs/masks.svg).

    python examples/draw_masks.py
    python examples/draw_masks.py --out masks.svg     # requires the extra "plot"

Every mask is drawn from what a plan uses, its intervals, and compared with its definition, `mask.visible`.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch

import attnmesh as am

LENGTH = 24
LENGTHS = [8, 6, 7, 3]  # of documents, or of a question and its answers
START = LENGTH - LENGTHS[-1]  # of the last document

MASKS: dict[str, am.Mask] = {
    "full": am.Full(),
    "causal": am.Causal(),
    "full document": am.Documents(LENGTHS),
    "causal document": am.Causal() & am.Documents(LENGTHS),
    "sliding window causal": am.Causal() & am.SlidingWindow(5),
    "shared question": am.Causal() & (am.Global(LENGTHS[0]) | am.Documents(LENGTHS)),
    "causal block-wise": am.Causal() & (am.Documents(LENGTHS) | am.Slices([((START, LENGTH), (0, START), "full")])),
}


def drawn(mask: am.Mask) -> list[list[int]]:
    """Whether each query attends to each key, read from the drawing in text."""
    cells = [[int(cell == "#") for cell in row.split()] for row in mask.draw(LENGTH).splitlines()]
    at = torch.arange(LENGTH)
    assert cells == mask.visible(at[:, None], at).int().tolist()
    return cells


def runs(cells: list[int]) -> list[tuple[int, int]]:
    """The first key and the length of every interval in a row."""
    edges = [i for i, (a, b) in enumerate(pairwise([0, *cells, 0])) if a != b]
    return [(first, end - first) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def plot(path: Path) -> None:
    """Draw all masks side by side: queries from top to bottom, keys from left to right."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "attnmesh"  # the same file in every run
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 4, figsize=(10, 5.6))
    for panel, (name, mask) in zip(panels.flat, MASKS.items(), strict=False):
        for row, cells in enumerate(drawn(mask)):
            panel.broken_barh(runs(cells), (row + 0.06, 0.88), color="tab:blue", linewidth=0)
        panel.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), aspect="equal")
        panel.set_title(name, fontsize=10)
        panel.set_xticks([])
        panel.set_yticks([])
    panels[1][0].set(xlabel="keys", ylabel="queries")
    for panel in panels.flat[len(MASKS) :]:
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    """Parse the options and draw."""
    parser = argparse.ArgumentParser(description="Draw the masks of MagiAttention's paper.")
    parser.add_argument("--out", type=Path, help="picture to write, such as masks.svg, instead of text")
    out = parser.parse_args().out
    if out is not None:
        plot(out)
        return
    for name, mask in MASKS.items():
        drawn(mask)
        print(f"{name}: {mask}\n{mask.draw(LENGTH)}\n")


if __name__ == "__main__":
    main()
