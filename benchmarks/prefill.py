"""Every schedule side by side: forward, forward with backward, efficiency, bytes a rank.

    efficiency = T(one device, torch's cuDNN attention, whole sequence) / (world x slowest rank)

The programs of three ranks (the first, the middle one, the last) run by themselves on the one device, their messages
not sent: what is measured is the work a schedule makes of its share. Bytes are the plan's. Meshes of two dimensions
have two ranks a node.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import torch

from attnmesh.calibration.timing import Run, interleaved
from attnmesh.core.layouts import Zigzag
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.schedules import SCHEDULES
from benchmarks.alone import AloneComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS, PEERS, inputs, one_device
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
    whole = inputs(length, backward)
    peers: dict[tuple[object, ...], Run] = {(peer,): partial(one_device, peer, *whole) for peer in PEERS}
    lines: list[dict[str, object]] = []
    for at, world in enumerate(worlds):
        runs = dict(peers) if at == 0 else {("cuDNN",): peers["cuDNN",]}
        for schedule in SCHEDULES:
            for rank in sorted({0, world // 2, world - 1}):  # the ends and the middle of the fold
                shard = inputs(Zigzag().local_length(length, world, rank), backward)
                comm = AloneComm(rank, world)
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
        "length": length, "world": world, "direction": direction, "schedule": what, "slowest_rank_ms": ms,
        "efficiency": one / (world * ms), "most_bytes_a_rank": sent,
    }  # fmt: skip


def _context(comm: AloneComm, schedule: str) -> ContextParallel:
    return ContextParallel(comm, layout=Zigzag(), schedule=schedule, ranks_per_node=_INNER if "+" in schedule else None)


def _bytes(schedule: str, world: int, length: int, backward: bool) -> int:
    """The most that a rank sends, by the plan."""
    plan = _context(AloneComm(0, world), schedule).explain(
        length=length, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    forward, back = ([load.sent for load in way] for way in (plan.forward, plan.backward))
    return max(a + b for a, b in zip(forward, back, strict=True)) if backward else max(forward)
