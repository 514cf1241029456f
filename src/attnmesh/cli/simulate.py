"""`attnmesh simulate`: simulates one attention layer under a schedule, or a recurrent layer, on a cluster."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import options, output
from attnmesh.core.layouts import LAYOUTS
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, check_schedule, shards
from attnmesh.planner.auto import choose_schedule
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models import model as known_model
from attnmesh.planner.program import Load, LoadCounter, Program
from attnmesh.planner.recurrent import KINDS, RecurrentShape, RecurrentWorkload, recurrent_program
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Simulated, Slowdown, simulate
from attnmesh.planner.vectorized import band_of
from attnmesh.trace.timeline import write_trace
from attnmesh.utils.progress import reported
from attnmesh.utils.sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_RANKS, check_sizes
from attnmesh.utils.text import counted, readable_bytes, readable_seconds
from attnmesh.utils.validation import check_choice

_LOG = logging.getLogger(__name__)

MAX_RANKS_OF_OTHER_MASKS = 512
"""Masks that are no band along the diagonal are planned rank by rank: the time grows with the square of the ranks."""

TRACED_RANKS = 16
"""How many ranks a trace has by default."""


@dataclass(frozen=True)
class _Run:
    name: str
    simulated: Simulated
    busiest: Load
    wall: float


def simulate_command(
    ranks: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Number of ranks, up to thousands.")],
    length: options.LengthOption,
    schedule: Annotated[
        str | None, typer.Option(show_default="ring", help=f"auto, {', '.join(SCHEDULES)}; of attention.")
    ] = None,
    layer: options.LayerOption = "attention",
    model: Annotated[
        str | None, typer.Option(help="Model name, config.json file or its folder to take the heads from.")
    ] = None,
    q_heads: Annotated[
        int | None, typer.Option(min=1, max=MAX_HEADS, show_default="32", help="Number of query heads.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MAX_HEADS, show_default="8", help="Number of KV heads.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, max=MAX_HEAD_DIM, show_default="128", help="Head dimension.")
    ] = None,
    batch: options.BatchOption = 1,
    layout: options.LayoutOption = options.LayoutName.ZIGZAG,
    mask: options.MaskOption = "causal",
    backward: Annotated[bool, typer.Option("--backward", help="Also simulate the backward pass.")] = False,
    hardware: options.HardwareOption = "h200",
    hardware_file: options.HardwareFileOption = None,
    links: options.LinksOption = None,
    ranks_per_node: options.ClusterNodeOption = None,
    rails: options.RailsOption = None,
    slow_ranks: Annotated[
        list[str] | None,
        typer.Option("--slow-rank", help="RANK:FACTOR; 3:1.5 makes rank 3 compute 1.5 times as long. Repeatable."),
    ] = None,
    slow_links: Annotated[
        list[str] | None,
        typer.Option("--slow-link", help="RANK:FACTOR; 7:4 leaves rank 7 a quarter of its link bandwidth. Repeatable."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    trace_ranks: Annotated[
        str | None, typer.Option(show_default="the first 16", help="Ranks in the trace, such as 0-7,12.")
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Simulate one attention layer under a schedule, or a recurrent layer: every rank, port and message."""
    if trace is not None:
        options.check_output_file("--trace", trace)
    if trace_ranks is not None and trace is None:
        raise ValueError(f"--trace-ranks {trace_ranks} requires --trace")
    cluster = options.resolve_cluster(hardware, links, ranks_per_node, rails, hardware_file)
    if cluster.ranks_per_node < ranks and ranks % cluster.ranks_per_node:
        raise ValueError(f"--ranks must be a multiple of the {cluster.ranks_per_node} ranks per node, got {ranks}")
    node = min(cluster.ranks_per_node, ranks)
    options.check_layer(layer)
    program_of: Callable[[bool], Program]
    if layer == "attention":
        shape = _shape(model, batch, q_heads, kv_heads, head_dim)
        check_sizes(length=length, batch=batch, q_heads=shape.q_heads, head_dim=shape.head_dim)
        workload = _workload(shape, mask, layout, length, ranks, node)
        with output.counting(f"choosing a schedule for {counted(ranks, 'rank')}"):
            chosen = _schedule("ring" if schedule is None else schedule, workload, cluster)
        rounds = ranks // (node if chosen == "ulysses+ring" else 1) + 1  # at most, of a ring
        program_of = lambda way: program(chosen, workload, backward=way)  # noqa: E731
        title = f"{chosen}: {length:,} tokens over {counted(ranks, 'rank')}, {layout.value}, {mask}"
    else:
        if schedule is not None or mask != "causal":
            raise ValueError(f"--schedule and --mask are of attention, and cannot be used with --layer {layer}")
        recurrent = recurrent_shape(layer, model, batch, q_heads, kv_heads, head_dim)
        check_sizes(length=length, batch=batch, q_heads=recurrent.heads, head_dim=recurrent.key_dim)
        scanned = RecurrentWorkload(recurrent, length, ranks, node, LAYOUTS[layout.value])
        chosen, rounds, program_of = layer, 5, lambda way: recurrent_program(scanned, backward=way)
        title = f"{layer}: {length:,} tokens over {counted(ranks, 'rank')}, {layout.value}"
    slow = Slowdown(_factors(slow_ranks or (), "--slow-rank", ranks), _factors(slow_links or (), "--slow-link", ranks))
    keep = _traced_ranks(trace_ranks, ranks) if trace is not None else ()
    nodes = cluster.with_ranks_per_node(node)
    runs = []
    for way in (False, True) if backward else (False,):
        with output.counting(f"simulating {chosen} {'backward' if way else 'forward'} on {counted(ranks, 'rank')}"):
            name = f"{chosen} {'backward' if way else 'forward'}"
            runs.append(_simulate(name, program_of(way), rounds, nodes, slow, keep))
    if trace is not None:
        _write_trace(trace, runs, ranks)
    if as_json:
        facts = {
            "layer": layer, "schedule": chosen if layer == "attention" else None, "ranks": ranks, "length": length,
            "layout": layout.value, "mask": mask,
            "cluster": options.describe_cluster(cluster, ranks), "runs": [_facts(run) for run in runs],
        }  # fmt: skip
        print(json.dumps(facts, indent=2))
        return
    console = output.console()
    console.print(options.describe_cluster(cluster, ranks))
    output.show(console, title, [_row(run) for run in runs])
    if trace is not None:
        console.print(f"Trace: {trace} (open it in https://ui.perfetto.dev or chrome://tracing)", soft_wrap=True)


def _shape(model: str | None, batch: int, q_heads: int | None, kv_heads: int | None, head_dim: int | None) -> Shape:
    """The heads of the model, or the given heads; bf16, accumulated in float32."""
    if model is None:
        shape = Shape(batch, q_heads or 32, kv_heads or 8, head_dim or 128, itemsize=2, sum_itemsize=4)
        if shape.q_heads % shape.kv_heads:
            raise ValueError(f"--kv-heads must divide the {shape.q_heads} query heads, got {shape.kv_heads}")
        return shape
    if any((q_heads, kv_heads, head_dim)):
        raise ValueError("--q-heads, --kv-heads and --head-dim cannot be used with --model")
    of = known_model(model)
    heads = of.q_heads if of.latent else of.kv_heads
    return Shape(batch, of.q_heads, heads, of.head_dim, itemsize=2, sum_itemsize=4, value_dim=of.value_dim)


def recurrent_shape(
    layer: str, model: str | None, batch: int, heads: int | None, groups: int | None, dim: int | None
) -> RecurrentShape:
    """The recurrent layer of the model, or a layer with the given heads; bf16, with states in float32."""
    check_choice("--layer", layer, tuple(KINDS))
    if model is None:
        channels = layer in ("mamba1", "short_convolution")
        heads, dim = heads or (4096 if channels else 32), dim or (3 if layer == "short_convolution" else 128)
        groups = groups or (1 if channels else heads)
        if heads % groups:
            raise ValueError(f"--kv-heads must divide the {heads} heads, got {groups}")
        return RecurrentShape(KINDS[layer], batch, heads, groups, dim, 1 if channels else dim)
    if any((heads, groups, dim)):
        raise ValueError("--q-heads, --kv-heads and --head-dim cannot be used with --model")
    of = known_model(model)
    if of.recurrent is None or of.recurrent.kind != layer:
        has = "no recurrent layers" if of.recurrent is None else f"layers of kind {of.recurrent.kind}"
        raise ValueError(f"--layer must be a layer of the model, got {layer}: {of.name} has {has}")
    sizes = of.recurrent
    return RecurrentShape(KINDS[layer], batch, sizes.heads, sizes.groups, sizes.key_dim, sizes.value_dim)


def _workload(shape: Shape, mask: str, layout: options.LayoutName, length: int, ranks: int, node: int) -> Workload:
    chosen_mask = options.parse_mask(mask, length)
    if ranks > MAX_RANKS_OF_OTHER_MASKS and band_of(chosen_mask) is None:
        most = f"at most {MAX_RANKS_OF_OTHER_MASKS} ranks (causal, full and window:N on {MAX_RANKS:,})"
        raise ValueError(f"--mask {mask} can be simulated on {most}, got {ranks:,}")
    return Workload(shards(chosen_mask, LAYOUTS[layout.value], length, ranks), shape, node)


def _schedule(schedule: str, workload: Workload, cluster: Cluster) -> str:
    if schedule == "auto":
        choice = choose_schedule(workload, cluster, all_costs=False)
        _LOG.info("%s", choice)
        return choice.schedule
    if schedule not in SCHEDULES:
        raise ValueError(f"--schedule must be one of auto, {', '.join(SCHEDULES)}, got {schedule!r}")
    check_schedule(schedule, workload.shards, workload.ranks_per_node)
    return schedule


def _simulate(
    name: str, whole: Program, rounds: int, cluster: Cluster, slow: Slowdown, keep: Sequence[int]
) -> _Run:  # fmt: skip
    counter = LoadCounter(whole.world, cluster.ranks_per_node)
    watched = replace(whole, make=lambda: reported(whole.rounds(), rounds))
    begin = time.perf_counter()
    simulated = simulate(counter.counting(watched), cluster, slow=slow, keep=keep)
    return _Run(name, simulated, counter.maximum(), time.perf_counter() - begin)


def _row(run: _Run) -> dict[str, object]:
    simulated = run.simulated
    active = simulated.finish > 0  # ranks without positions finish at once
    waiting = simulated.waited[active] / simulated.finish[active]
    return {
        "run": run.name,
        "slowest rank": readable_seconds(simulated.seconds),
        "max compute": readable_seconds(float(simulated.computed.max())),
        "max waiting": readable_seconds(float(simulated.waited.max())),
        "min utilization": f"{100 * (1 - waiting.max(initial=0.0)):.1f}%",
        "max bytes sent": readable_bytes(run.busiest.sent),
        "between nodes": readable_bytes(run.busiest.inter_node),
        "TFLOP per rank": f"{run.busiest.flops / 1e12:.4g}",
        "simulated in": f"{run.wall:.1f} s",
    }


def _facts(run: _Run) -> dict[str, object]:
    simulated = run.simulated
    return {
        "run": run.name,
        "seconds": simulated.seconds,
        "computed": float(simulated.computed.max()),
        "waited": float(simulated.waited.max()),
        "bytes_sent": run.busiest.sent,
        "bytes_between_nodes": run.busiest.inter_node,
        "flops": run.busiest.flops,
    }


def _write_trace(path: Path, runs: Sequence[_Run], ranks: int) -> None:
    """Write all runs into one file, one after the other."""
    spans, begin = [], 0.0
    for run in runs:
        spans += [replace(span, begin=span.begin + begin, end=span.end + begin) for span in run.simulated.spans]
        begin += run.simulated.seconds
    write_trace(path, spans, title=f"simulated {runs[0].name}", metadata={"ranks": ranks})


def _factors(given: Sequence[str], option: str, ranks: int) -> dict[int, float]:
    factors: dict[int, float] = {}
    for text in given:
        rank, _, factor = text.partition(":")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"{option} must be RANK:FACTOR, such as 3:1.5, got {text!r}") from None
        if not 0 <= int(rank) < ranks:
            raise ValueError(f"{option} must name a rank in 0..{ranks - 1}, got {text!r}")
    return factors


def _traced_ranks(text: str | None, ranks: int) -> list[int]:
    if text is None:
        return list(range(min(ranks, TRACED_RANKS)))
    found: set[int] = set()
    for part in text.split(","):
        named = re.fullmatch(r" *([0-9]{1,9}) *(?:- *([0-9]{1,9}) *)?", part, re.ASCII)
        if named is None:
            raise ValueError(f"--trace-ranks must be ranks such as 0-7,12, got {text!r}")
        first, last = int(named[1]), int(named[2] or named[1])
        if not first <= last < ranks:
            raise ValueError(f"--trace-ranks must be within 0..{ranks - 1}, got {text!r}")
        found.update(range(first, last + 1))
    return sorted(found)
