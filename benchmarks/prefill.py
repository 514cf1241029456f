"""All schedules compared: forward, forward with backward, efficiency, bytes per rank.

    efficiency = T(one device, torch's cuDNN attention, whole sequence) / (ranks x slowest rank)

The programs of three ranks (the first, the middle one, the last) run by themselves on the one device, their messages
not sent: what is measured is the work of a rank's share. Bytes are the plan's. Two-level
schedules have two ranks per node.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnmesh.calibration.timing import Run, interleaved
from attnmesh.cli.options import Device, check_device
from attnmesh.core.layouts import Zigzag
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.shards import SCHEDULES
from attnmesh.utils.optional import require
from benchmarks.common import JsonOption, LengthsOption, make_app, publish
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS, PEERS, one_device, random_inputs
from benchmarks.ring import run_rank

_INNER = 2


def measure_prefill(lengths: Sequence[int], worlds: Sequence[int], *, rounds: int) -> list[dict[str, object]]:
    """A line for every length, direction, peer, and world x schedule: bf16, causal, zigzag, 32/8 heads, D=128."""
    return [
        line
        for length in lengths
        for backward in (False, True)
        for line in _side_by_side(length, worlds, backward, rounds)
    ]


def _side_by_side(length: int, worlds: Sequence[int], backward: bool, rounds: int) -> list[dict[str, object]]:
    direction = "forward+backward" if backward else "forward"
    whole = random_inputs(length, backward)
    peers: dict[tuple[object, ...], Run] = {(peer,): partial(one_device, peer, *whole) for peer in PEERS}
    lines: list[dict[str, object]] = []
    for at, world in enumerate(worlds):
        runs = dict(peers) if at == 0 else {("cuDNN",): peers["cuDNN",]}
        for schedule in SCHEDULES:
            for rank in sorted({0, world // 2, world - 1}):  # the ends and the middle of the fold
                shard = random_inputs(Zigzag().local_length(length, world, rank), backward)
                comm = OneRankComm(rank, world)
                cp = _context(comm, schedule)
                runs[schedule, rank] = partial(run_rank, comm, cp, length, *shard)
        times = interleaved(runs, rounds)
        one = times["cuDNN",]
        if at == 0:
            lines += [_line(length, 1, direction, peer, times[peer,], one, 0) for peer in PEERS]
        for schedule in SCHEDULES:
            worst = max(ms for name, ms in times.items() if name[0] == schedule)
            sent = _bytes(schedule, world, length, backward)
            lines.append(_line(length, world, direction, schedule, worst, one, sent))
        del runs
        gc.collect()
        torch.cuda.empty_cache()
    return lines


def _line(
    length: int, world: int, direction: str, what: str, ms: float, one: float, sent: int
) -> dict[str, object]:  # fmt: skip
    return {
        "length": length, "ranks": world, "direction": direction, "schedule": what, "slowest_rank_ms": ms,
        "efficiency": one / (world * ms), "max_bytes_per_rank": sent,
    }  # fmt: skip


def _context(comm: OneRankComm, schedule: str) -> ContextParallel:
    return ContextParallel(comm, layout=Zigzag(), schedule=schedule, ranks_per_node=_INNER if "+" in schedule else None)


def _bytes(schedule: str, world: int, length: int, backward: bool) -> int:
    """The most that a rank sends, by the plan."""
    plan = _context(OneRankComm(0, world), schedule).explain(
        length=length, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    forward, back = ([load.sent for load in way] for way in (plan.forward, plan.backward))
    return max(a + b for a, b in zip(forward, back, strict=True)) if backward else max(forward)


_DIRECTIONS = ("forward", "forward+backward")


def plot_efficiency(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each world, a row for each direction: efficiency over length, a curve for each schedule."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    ours = [line for line in lines if line["ranks"] > 1]
    worlds = sorted({line["ranks"] for line in ours})
    schedules = list(dict.fromkeys(line["schedule"] for line in ours))
    figure, axes = pyplot.subplots(2, len(worlds), figsize=(3.6 * len(worlds), 6), sharey=True, squeeze=False)
    for direction, row in zip(_DIRECTIONS, axes, strict=True):
        for world, panel in zip(worlds, row, strict=True):
            for schedule in schedules:
                wanted = (world, direction, schedule)
                points = [x for x in ours if (x["ranks"], x["direction"], x["schedule"]) == wanted]
                panel.plot([x["length"] for x in points], [x["efficiency"] for x in points], marker="o", label=schedule)
            panel.axhline(1.0, color="grey", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.set_title(f"{world:.0f} ranks, {direction}", fontsize=10)
        row[0].set_ylabel("efficiency against cuDNN / ranks")
    for panel in axes[-1]:
        panel.set_xlabel("length")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(
    lengths: LengthsOption = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=4, help="Number of ranks, even. Repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times each program is timed.")] = 3,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also plot efficiency against ranks and length.")] = None,
) -> None:
    """Compare all schedules on one GPU: time, efficiency and bytes per rank."""
    check_device(Device.CUDA)
    if any(world % 2 for world in ranks or ()):
        raise typer.BadParameter("must be even: two-level schedules use two ranks per node", param_hint="--ranks")
    rows = measure_prefill(lengths or (16384, 32768, 65536, 131072), ranks or (4, 8, 16), rounds=rounds)
    title = (
        "prefill and training: all schedules against one device with cuDNN (bf16, causal, zigzag, 32/8 heads, D=128)"
    )
    publish("prefill", "cuda", [(title, rows)], json)
    if plot is not None:
        plot_efficiency(rows, plot)


app = make_app(main)

if __name__ == "__main__":
    app()
