"""`attnmesh report`: writes an HTML report about a workload."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import options, output
from attnmesh.cli.simulate import recurrent_shape
from attnmesh.comm import Comm, run_virtual
from attnmesh.core.layouts import LAYOUTS, Layout
from attnmesh.core.masks import Mask
from attnmesh.plan.shards import Shape
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.recurrent import KINDS, RecurrentWorkload, explain_recurrent, recurrent_program
from attnmesh.planner.simulator import simulate
from attnmesh.report.data import MOST_RANKS, default_ranks_per_node, read_figures, schedule_report
from attnmesh.report.page import write_report
from attnmesh.trace.timeline import read_trace
from attnmesh.verify import run as verify
from attnmesh.verify.attention import LENGTH, schedule_modes
from attnmesh.verify.mode import Outcome


def report_command(
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    ranks: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Number of ranks.")] = 8,
    length: options.LengthOption = 131072,
    layout: options.LayoutOption = options.LayoutName.ZIGZAG,
    mask: options.MaskOption = "causal",
    q_heads: options.QHeadsOption = 32,
    kv_heads: options.KvHeadsOption = 8,
    head_dim: options.HeadDimOption = 128,
    batch: options.BatchOption = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node",
            min=1,
            max=MOST_RANKS,
            show_default="the middle divisor of --ranks",
            help="Number of ranks per node.",
        ),
    ] = None,
    device: Annotated[
        options.Device, typer.Option(help="Device type that schedules are ranked for.")
    ] = options.Device.CUDA,
    traces: Annotated[list[Path] | None, typer.Option("--trace", help="Trace to include. Repeatable.")] = None,
    figures: Annotated[Path | None, typer.Option(help="JSON file with figures to include.")] = None,
    layer: Annotated[
        str | None, typer.Option(help=f"A recurrent layer to include, simulated: {', '.join(KINDS)}.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compute a small case on virtual ranks and compare with float64.")] = True,
) -> None:
    """Write an HTML report: what each rank holds, computes and sends, and which schedule is the fastest."""
    shape = Shape(batch, q_heads, kv_heads, head_dim, itemsize=2, sum_itemsize=4)  # bf16, accumulated in float32
    options.check_output_file("--out", out)
    chosen_mask, chosen_layout = options.parse_mask(mask, length), LAYOUTS[layout.value]
    timelines = {path.stem: read_trace(path) for path in traces or ()}
    tables = read_figures(figures) if figures else {}
    if layer is not None:
        dim = None if layer == "short_convolution" else head_dim
        recurrent = recurrent_shape(layer, None, batch, q_heads, kv_heads, dim)
        node = ranks_per_node or default_ranks_per_node(ranks)
        scanned = RecurrentWorkload(recurrent, length, ranks, node, chosen_layout)
        cluster = default_cluster(device.value).with_ranks_per_node(node)
        tables |= {f"{layer} over ranks": explain_recurrent(scanned, "", cluster).rows()}
        forward = recurrent_program(scanned, backward=False)
        timelines[f"{layer}, simulated forward"] = simulate(forward, cluster, keep=range(ranks)).spans
    with output.counting("planning and simulating every schedule"):
        made = schedule_report(
            chosen_mask,
            chosen_layout,
            length,
            ranks,
            shape,
            ranks_per_node=ranks_per_node,
            device=device.value,
            facts=run_facts(),
            timelines=timelines,
            figures=tables,
        )
    if check:
        outcomes = compare_schedules(ranks, chosen_layout, options.parse_mask(mask, LENGTH), ranks_per_node)
        made = replace(made, outcomes=outcomes)
    write_report(out, made)
    output.console().print(f"Report: {out}", soft_wrap=True)


def run_facts() -> dict[str, object]:
    """This machine, the versions on it, and the date, for a report."""
    here = output.machine("cpu")
    versions = {"attnmesh": metadata.version("attnmesh")} | {name: here[name] for name in ("torch", "python")}
    return {
        "machine": f"{here['processor']}, {here['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "written": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
    }


def compare_schedules(
    ranks: int, layout: Layout, mask: Mask, ranks_per_node: int | None = None, seed: int = 0
) -> list[Outcome]:
    """Every schedule on virtual ranks, a small random case of `LENGTH` tokens, compared with float64."""
    per_node = ranks_per_node or default_ranks_per_node(ranks)

    def run(comm: Comm) -> list[Outcome]:
        modes, outcomes = schedule_modes(comm, layout, mask, per_node), list[Outcome]()
        with output.Progress(quiet=comm.rank > 0) as progress:
            progress("comparing every schedule with float64", 0, len(modes))
            for outcome in verify.run(comm, "cpu", seed, enumerate(modes)):
                outcomes.append(outcome)
                progress("comparing every schedule with float64", len(outcomes), len(modes))
        return outcomes

    return run_virtual(ranks, run)[0]
