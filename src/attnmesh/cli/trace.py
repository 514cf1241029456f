"""A real run as a timeline: attention over ranks, what every rank computed, sent, received and waited for, and when."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from attnmesh.cli import output as report
from attnmesh.comm import Comm, recording
from attnmesh.core.layouts import LAYOUTS
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.schedules import SCHEDULES, check_schedule
from attnmesh.plan.shards import shards
from attnmesh.trace.overlap import match_messages, summarize_overlap
from attnmesh.trace.recorder import Recorder
from attnmesh.trace.timeline import Span, write_trace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Attending:
    """What to run: causal attention over `length` positions, and where to write what happened."""

    out: Path
    schedule: str
    length: int
    layout: str
    heads: int
    kv_heads: int
    head_dim: int
    backward: bool
    ranks_per_node: int | None
    device: str
    dtype: str

    def check(self, ranks: int) -> None:
        """Raise ValueError for what cannot be run on so many ranks, before any of them is started."""
        sizes = {"ranks": ranks, "length": self.length, "heads": self.heads, "kv-heads": self.kv_heads}
        for name, size in {**sizes, "head-dim": self.head_dim}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.schedule not in ("auto", *SCHEDULES):
            raise ValueError(f"schedule must be one of auto, {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"the {self.kv_heads} kv heads must divide the {self.heads} query heads")
        if self.ranks_per_node is not None and (self.ranks_per_node < 1 or ranks % self.ranks_per_node):
            raise ValueError(f"ranks_per_node must divide the {ranks} ranks, got {self.ranks_per_node}")
        if not self.out.parent.is_dir():
            raise ValueError(f"out must be in a folder that exists, got {self.out}")
        if self.out.is_dir():
            raise ValueError(f"out must be a file, and {self.out} is a folder")
        if self.schedule != "auto":
            places = shards(Causal(), LAYOUTS[self.layout], self.length, ranks)
            check_schedule(self.schedule, places, ranks if self.ranks_per_node is None else self.ranks_per_node)


def run(comm: Comm, asked: Attending, *, virtual: bool = False) -> None:
    """One rank's part: run once for warmth and once recorded; rank 0 writes the file and shows what it says."""
    spans = traced(comm, asked)
    if comm.rank > 0:
        return
    title, facts = _described(comm, asked, virtual)
    write_trace(asked.out, spans, title=title, metadata=facts)
    show(spans, title, asked.out, virtual=virtual)


def traced(comm: Comm, asked: Attending) -> list[Span]:
    """The spans of all ranks of one run, on every rank, in seconds since it began."""
    cp = ContextParallel(
        comm, layout=LAYOUTS[asked.layout], schedule=asked.schedule, ranks_per_node=asked.ranks_per_node
    )
    q, k, v, grad = (_drawn(asked, cp, heads) for heads in (asked.heads, asked.kv_heads, asked.kv_heads, asked.heads))

    def attend() -> None:
        given = [x.detach().requires_grad_(asked.backward) for x in (q, k, v)]
        out = cp.attention(*given, length=asked.length)
        if asked.backward:
            out.backward(grad)

    attend()
    with recording(comm, asked.device) as recorder:
        attend()
    return gathered(comm, recorder, asked.device)


def gathered(comm: Comm, recorder: Recorder, device: str) -> list[Span]:
    """What all ranks recorded, on one clock that starts when the run began.

    The processes of a machine share a clock. Those of different machines left the same barrier when they began: the
    first of a machine to leave it says what time that was there. So they are as exact as a barrier is.
    """
    mine = _machine(), recorder.start, recorder.spans()
    ranks = [pickle.loads(data) for data in _all_bytes(comm, pickle.dumps(mine), device)]
    zero: dict[str, float] = {}
    for machine, began, _ in ranks:
        zero[machine] = min(began, zero.get(machine, began))
    return match_messages(
        replace(span, begin=max(0.0, span.begin - zero[machine]), end=max(0.0, span.end - zero[machine]))
        for machine, _, spans in ranks
        for span in spans
    )


def show(spans: Sequence[Span], title: str, out: Path, *, virtual: bool) -> None:
    """Print what ranks did with their time, and where to see it."""
    rows: list[list[object]] = []
    for each in summarize_overlap(spans):
        share = f"{each.overlap / each.transfer:.0%}" if each.transfer else "-"
        times = (each.compute, each.transfer, each.overlap, each.wait)
        rows.append([each.rank, *(f"{1e3 * seconds:.2f}" for seconds in times), share, f"{each.bytes_sent / 1e6:.2f}"])
    console = report.console()
    columns = ["rank", "computed ms", "transferred ms", "overlapped ms", "waited ms", "hidden", "MB sent"]
    console.print(report.table(f"attnmesh trace: {title}", columns, rows))
    console.print("overlapped: computing while a message is under way; hidden: that as a share of transferred")
    if virtual:
        console.print("virtual ranks take turns: a rank that waits lets another compute, so nothing overlaps")
    console.print(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing", soft_wrap=True)


def _drawn(asked: Attending, cp: ContextParallel, heads: int) -> Tensor:
    """This rank's rows of something random; nobody looks at the numbers."""
    rows = len(cp.positions(asked.length))
    made = torch.Generator(asked.device).manual_seed(cp.rank)
    return torch.randn(1, heads, rows, asked.head_dim, generator=made, device=asked.device).to(DTYPES[asked.dtype])


def _described(comm: Comm, asked: Attending, virtual: bool) -> tuple[str, dict[str, object]]:
    way = "forward and backward" if asked.backward else "forward"
    ranks = f"{comm.world} virtual ranks" if virtual else f"{comm.world} ranks"
    shape = f"{asked.length} positions, {asked.heads}/{asked.kv_heads} heads of {asked.head_dim}, {asked.dtype}"
    schedule = asked.schedule if asked.schedule != "auto" else f"auto ({_chosen(comm, asked)})"
    title = f"{schedule}, {way}, {ranks}, {asked.device}, {shape}, {asked.layout}"
    return title, {"schedule": schedule, "ranks": comm.world, **report.machine(asked.device)}


def _chosen(comm: Comm, asked: Attending) -> str:
    cp = ContextParallel(comm, layout=LAYOUTS[asked.layout], ranks_per_node=asked.ranks_per_node)
    return cp.explain(
        length=asked.length, q_heads=asked.heads, kv_heads=asked.kv_heads, head_dim=asked.head_dim,
        dtype=DTYPES[asked.dtype], device=asked.device,
    ).schedule  # fmt: skip


def _all_bytes(comm: Comm, data: bytes, device: str) -> list[bytes]:
    """Everybody's bytes, in rank order."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    sizes = [int(n) for n in comm.all_gather(size, [(1,)] * comm.world)]
    return [x.cpu().numpy().tobytes() for x in comm.all_gather(mine, [(n,) for n in sizes])]


def _machine() -> str:
    """The same for all processes whose clock is the same: this machine, since it was started."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return platform.node()
