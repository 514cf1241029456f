"""What the figures are drawn from: docs/data/why.json, docs/data/scaling.json and tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Any, NamedTuple

from attnmesh.core.layouts import Contiguous, Layout, Zigzag
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.parallel.context import ContextParallel
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS
from benchmarks.why.policies import measure_policies

DOCS = Path(__file__).parents[2] / "docs"
WORLDS = (1, 2, 4, 8, 16, 32, 64)
LENGTH, WINDOW, NODE = 131072, 4096, 8
MASKS: dict[str, tuple[Mask, Layout]] = {
    "causal, zigzag": (Causal(), Zigzag()),
    f"window of {WINDOW:,}, contiguous": (SlidingWindow(WINDOW - 1), Contiguous()),
}
EVERY_BLOCK = "every block to every rank"

Rows = list[dict[str, Any]]


class Sources(NamedTuple):
    errors: Rows  # of merge policies, emulated
    bytes: Rows  # per rank, from plans
    scaling: Rows  # forward, simulated
    prefill: Rows  # the rest was measured on one H200
    decode: Rows
    accuracy: Rows


def compute(worlds: Sequence[int] = WORLDS, length: int = 4096) -> dict[str, Rows]:
    """Return the sections of docs/data/why.json: a few minutes on a CPU."""
    return {"errors": measure_policies(worlds, length=length), "bytes": count_bytes(worlds)}


def read_sources(docs: Path = DOCS) -> Sources:
    """Read everything that the figures need."""
    own, scaling = (loads((docs / "data" / name).read_text())["sections"] for name in ("why.json", "scaling.json"))
    measured = (docs / "benchmarks.md").read_text()
    tables = ("Every schedule on one H200", "Decode on one H200", "Error against the number of ranks")
    forward = [row for row in scaling["prefill"] if row["direction"] == "forward"]
    return Sources(own["errors"], own["bytes"], forward, *(read_table(measured, heading) for heading in tables))


def count_bytes(worlds: Sequence[int]) -> Rows:
    """The bytes that the busiest rank sends in a forward, by the plan: bf16, 128k tokens, 32/8 heads, D = 128."""
    rows: Rows = []
    for mask, (which, layout) in MASKS.items():
        for world in worlds:
            if world == 1:
                continue
            everything = 2 * KV_HEADS * HEAD_DIM * 2 * (LENGTH - LENGTH // world)
            rows.append({"mask": mask, "schedule": EVERY_BLOCK, "ranks": world, "bytes": everything})
            for schedule in ("ring", "allgather", "ulysses", "ulysses+ring"):
                if "+" in schedule and world <= NODE:
                    continue
                cp = ContextParallel(
                    OneRankComm(0, world),
                    layout=layout,
                    schedule=schedule,
                    ranks_per_node=NODE if "+" in schedule else None,
                )
                plan = cp.explain(length=LENGTH, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, mask=which)
                sent = max(load.sent for load in plan.forward)
                rows.append({"mask": mask, "schedule": schedule, "ranks": world, "bytes": sent})
    return rows


def read_table(text: str, heading: str) -> Rows:
    """Return the first table below a heading of a Markdown text: numbers as float, k as 1024, empty cells as None."""
    below = text.split(f"## {heading}\n", 1)[1]
    lines = re.search(r"(^\|.*\|\n)+", below, flags=re.MULTILINE)
    assert lines is not None, heading
    header, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [dict(zip(header, map(_cell, cells), strict=True)) for cells in body]


def _cell(text: str) -> float | str | None:
    text = text.strip("*")
    if match := re.fullmatch(r"(-?\d[\d.e-]*)(k?)", text):
        return float(match[1]) * (1024 if match[2] else 1)
    return text or None
