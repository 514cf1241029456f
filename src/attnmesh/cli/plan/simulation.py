"""`attnmesh simulate`: one schedule on a cluster, who is slow, and a trace of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnmesh.cli import output as report
from attnmesh.cli.plan.machines import Machines
from attnmesh.core.layouts import LAYOUTS
from attnmesh.core.masks import parse_mask
from attnmesh.core.validation import parse_length
from attnmesh.plan.program import Load, LoadCounter
from attnmesh.plan.schedules import SCHEDULES, check_schedule, program
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.auto import choose_schedule
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.simulator.network import Slowdown
from attnmesh.planner.simulator.simulate import Simulated, simulate
from attnmesh.planner.units import readable_bytes, readable_seconds
from attnmesh.trace.timeline import write_trace

SHOWN = 16
"""Ranks of a trace if nobody says which."""


@dataclass(frozen=True)
class Asked:
    """What a person asked for."""

    schedule: str
    length: str
    ranks: int
    machines: Machines
    shape: Shape
    layout: str = "zigzag"
    mask: str = "causal"
    backward: bool = False
    slow_ranks: Sequence[str] = ()  # "3:1.5": rank 3 computes 1.5 times as long
    slow_links: Sequence[str] = ()
    trace: Path | None = None
    traced: str | None = None  # "0-7,12"
    as_json: bool = False


@dataclass(frozen=True)
class _Run:
    schedule: str
    simulated: Simulated
    busiest: Load
    wall: float


def run(asked: Asked) -> None:
    """Simulate, print, and write the trace; ValueError for what cannot be done."""
    if asked.trace is not None and not asked.trace.parent.is_dir():
        raise ValueError(f"the folder {asked.trace.parent} does not exist")
    if asked.trace is not None and asked.trace.is_dir():
        raise ValueError(f"--trace wants a file, and {asked.trace} is a folder")
    if asked.traced is not None and asked.trace is None:
        raise ValueError("--trace-ranks are of a trace: give --trace, too")
    found = asked.machines.cluster()
    workload = _case(asked, found)
    schedule = _schedule(asked, workload, found)
    slow = Slowdown(
        _factors(asked.slow_ranks, "--slow-rank", asked.ranks), _factors(asked.slow_links, "--slow-link", asked.ranks)
    )
    keep = _ranks(asked) if asked.trace is not None else ()
    ways = (False, True) if asked.backward else (False,)
    runs = [
        _simulated(schedule, workload, found.with_ranks_per_node(workload.ranks_per_node), way, slow, keep)
        for way in ways
    ]
    if asked.trace is not None:
        _write(asked, asked.trace, runs)
    facts = _facts(asked, found, schedule, runs)
    if asked.as_json:
        print(json.dumps(facts, indent=2))
        return
    _show(asked, found, schedule, runs)


def _simulated(
    schedule: str, workload: Workload, found: Cluster, backward: bool, slow: Slowdown, keep: Sequence[int]
) -> _Run:
    whole = program(schedule, workload, backward=backward)
    counter = LoadCounter(whole.world, found.ranks_per_node)
    begin = time.perf_counter()
    ran = simulate(counter.counting(whole), found, slow=slow, keep=keep)
    return _Run(f"{schedule} {'backward' if backward else 'forward'}", ran, counter.maximum(), time.perf_counter() - begin)


def _case(asked: Asked, found: Cluster) -> Workload:
    positions_held = shards(parse_mask(asked.mask), LAYOUTS[asked.layout], parse_length(asked.length), asked.ranks)
    if found.ranks_per_node < asked.ranks and asked.ranks % found.ranks_per_node:
        raise ValueError(f"{asked.ranks} ranks must be whole nodes of {found.ranks_per_node}: give --node")
    return Workload(positions_held, asked.shape, min(found.ranks_per_node, asked.ranks))


def _schedule(asked: Asked, workload: Workload, found: Cluster) -> str:
    if asked.schedule == "auto":
        return choose_schedule(workload, found).schedule
    if asked.schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of auto, {', '.join(SCHEDULES)}, got {asked.schedule!r}")
    check_schedule(asked.schedule, workload.shards, workload.ranks_per_node)
    return asked.schedule


def _show(asked: Asked, found: Cluster, schedule: str, runs: Sequence[_Run]) -> None:
    console = report.console()
    console.print(asked.machines.in_words(found, asked.ranks))
    rows = []
    for one in runs:
        ran = one.simulated
        waited = ran.waited[ran.finish > 0] / ran.finish[ran.finish > 0]  # ranks without a position are done at once
        rows.append(
            {
                "run": one.schedule,
                "slowest rank": readable_seconds(ran.seconds),
                "computes": readable_seconds(float(ran.computed.max())),
                "waits, most": readable_seconds(float(ran.waited.max())),
                "busy, least": f"{100 * (1 - waited.max(initial=0.0)):.1f}%",
                "sends, most": readable_bytes(one.busiest.sent),
                "between nodes": readable_bytes(one.busiest.inter_node),
                "TFLOP a rank": f"{one.busiest.flops / 1e12:.4g}",
                "simulated in": f"{one.wall:.1f} s",
            }
        )
    title = (
        f"{schedule}: {parse_length(asked.length):,} positions over {asked.ranks:,} ranks, {asked.layout}, {asked.mask}"
    )
    report.show(console, title, [dict(row) for row in rows])
    for method in dict.fromkeys(one.simulated.method for one in runs):
        console.print(f"Simulated {method}.")
    if asked.trace is not None:
        console.print(f"Trace: {asked.trace} (open it in Perfetto or chrome://tracing)")


def _facts(asked: Asked, found: Cluster, schedule: str, runs: Sequence[_Run]) -> dict[str, object]:
    return {
        "schedule": schedule, "ranks": asked.ranks, "length": parse_length(asked.length), "layout": asked.layout,
        "mask": asked.mask, "machines": asked.machines.in_words(found, asked.ranks),
        "runs": [
            {
                "run": one.schedule, "seconds": one.simulated.seconds, "computed": float(one.simulated.computed.max()),
                "waited": float(one.simulated.waited.max()), "bytes_sent": one.busiest.sent,
                "bytes_between_nodes": one.busiest.inter_node, "flops": one.busiest.flops, "method": one.simulated.method,
            }
            for one in runs
        ],
    }  # fmt: skip


def _write(asked: Asked, path: Path, runs: Sequence[_Run]) -> None:
    """All runs one after the other in one file."""
    spans, begin = [], 0.0
    for one in runs:
        spans += [replace(span, begin=span.begin + begin, end=span.end + begin) for span in one.simulated.spans]
        begin += one.simulated.seconds
    write_trace(path, spans, title=f"simulated {runs[0].schedule}", metadata={"ranks": asked.ranks})


def _factors(given: Sequence[str], option: str, ranks: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in given:
        rank, _, factor = text.partition(":")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"{option} wants RANK:FACTOR, such as 3:1.5, got {text!r}") from None
        if not 0 <= int(rank) < ranks:
            raise ValueError(f"{option} must be of a rank within 0..{ranks - 1}, got {text!r}")
    return found


def _ranks(asked: Asked) -> list[int]:
    if asked.traced is None:
        return list(range(min(asked.ranks, SHOWN)))
    found: set[int] = set()
    for part in asked.traced.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ValueError(f"--trace-ranks wants ranks such as 0-7,12, got {asked.traced!r}")
        found.update(range(int(first), int(last or first) + 1))
    if not found or max(found) >= asked.ranks:
        raise ValueError(f"--trace-ranks must be within 0..{asked.ranks - 1}, got {asked.traced!r}")
    return sorted(found)
