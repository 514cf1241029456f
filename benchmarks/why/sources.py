"""What the figures are drawn from: docs/data/why.json, docs/data/scaling.json and docs/results/*.json."""

from __future__ import annotations

from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Any, NamedTuple

from attnmesh.core.layouts import Contiguous, Layout, Zigzag
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.parallel.context import ContextParallel
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS
from benchmarks.tables import read_rows
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
    forward = [row for row in scaling["prefill"] if row["direction"] == "forward"]
    schedules, decode = (read_rows(name, docs) for name in ("schedules", "decode"))
    return Sources(own["errors"], own["bytes"], forward, schedules, decode, _by_backend(read_rows("accuracy", docs)))


def _by_backend(rows: Rows) -> Rows:
    """A row for each backend and world that was measured, from columns such as "gluon, out"."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        for name, error in row.items():
            backend, _, what = name.partition(", ")
            if what and error is not None:
                line = found.setdefault((backend, row["world"]), {"backend": backend, "world": row["world"]})
                line[what] = error
    return list(found.values())


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
