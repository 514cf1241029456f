"""`attnmesh report`: from what was asked to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path

from attnmesh.cli import output as report
from attnmesh.comm import Comm, run_virtual
from attnmesh.core.layouts import LAYOUTS, Layout
from attnmesh.core.masks import Mask, parse_mask
from attnmesh.plan.workload import Shape
from attnmesh.report.data import default_node, make_report, read_figures
from attnmesh.report.page import write_report
from attnmesh.trace.timeline import read_trace
from attnmesh.verify import run as verify
from attnmesh.verify.attention import schedule_modes
from attnmesh.verify.mode import Outcome


@dataclass(frozen=True)
class Asked:
    """What a person asked for."""

    out: Path
    ranks: int
    length: int
    layout: str
    mask: str
    shape: Shape
    node: int | None
    device: str  # the kind to plan for
    traces: Sequence[Path]
    figures: Path | None
    check: bool  # whether to compute a small case on virtual ranks


def write(asked: Asked) -> None:
    """Write the report; ValueError for what cannot be done."""
    if not asked.out.parent.is_dir():
        raise ValueError(f"the folder {asked.out.parent} does not exist")
    if asked.out.is_dir():
        raise ValueError(f"{asked.out} is a folder: give a file")
    mask, layout = parse_mask(asked.mask), LAYOUTS[asked.layout]
    made = make_report(
        mask, layout, asked.length, asked.ranks, asked.shape, ranks_per_node=asked.node, device=asked.device,
        facts=facts(),
        timelines={path.stem: read_trace(path) for path in asked.traces},
        figures=read_figures(asked.figures) if asked.figures else {},
        outcomes=checked(asked.ranks, layout, mask, asked.node) if asked.check else (),
    )  # fmt: skip
    write_report(asked.out, made)


def facts() -> dict[str, object]:
    """This machine, the versions on it, and the date."""
    here = report.machine("cpu")
    with_version = {"attnmesh": metadata.version("attnmesh")} | {name: here[name] for name in ("torch", "python")}
    return {
        "machine": f"{here['processor']}, {here['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in with_version.items()),
        "written": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
    }


def checked(ranks: int, layout: Layout, mask: Mask, node: int | None = None, seed: int = 0) -> list[Outcome]:
    """Every schedule on virtual ranks of this process, a small case of random numbers, against float64."""
    ranks_per_node = node or default_node(ranks)

    def run(comm: Comm) -> list[Outcome]:
        return list(verify.run(comm, "cpu", seed, schedule_modes(comm, layout, mask, ranks_per_node)))

    return run_virtual(ranks, run)[0]
