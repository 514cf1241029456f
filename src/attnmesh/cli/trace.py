"""`attnmesh trace`: runs attention or a recurrent layer over ranks and writes a timeline of it."""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from torch import Tensor

from attnmesh import launch
from attnmesh.cli import options, output
from attnmesh.comm import Comm, VirtualComm, recording
from attnmesh.core.layouts import LAYOUTS
from attnmesh.models.checkpoint import free_memory, readable_gib
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.recurrent import runs
from attnmesh.plan.shards import SCHEDULES, ScheduleName, check_schedule, shards
from attnmesh.planner.recurrent import KINDS
from attnmesh.trace.timeline import Recorder, Span, match_messages, summarize_overlap, write_trace
from attnmesh.utils.progress import reported_steps
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_timeout

_TENSORS = 8  # of the size of the queries


def trace_command(
    out: Annotated[Path, typer.Option(help="File to write, in an existing folder.")],
    ranks: options.RanksOption = None,
    schedule: Annotated[str, typer.Option(help=f"auto, {', '.join(SCHEDULES)}.")] = "ring",
    layer: options.LayerOption = "attention",
    length: options.LengthOption = 8192,
    layout: options.LayoutOption = options.LayoutName.ZIGZAG,
    mask: options.MaskOption = "causal",
    q_heads: options.QHeadsOption = 8,
    kv_heads: options.KvHeadsOption = 2,
    head_dim: options.HeadDimOption = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Also compute gradients.")] = False,
    ranks_per_node: options.RanksPerNodeOption = None,
    device: options.DeviceOption = options.Device.CPU,
    dtype: Annotated[
        options.Precision | None, typer.Option(show_default="fp32 on cpu, bf16 on cuda", help="Dtype.")
    ] = None,
    virtual: options.VirtualOption = False,
    share_gpu: options.ShareGpuOption = False,
    timeout: options.TimeoutOption = launch.TIMEOUT,
) -> None:
    """Run a layer over ranks and write when each rank computed, sent, received and waited, for a trace viewer."""
    options.check_device(device)
    options.check_share_gpu(share_gpu, device.value, virtual)
    check_timeout(timeout)
    precision = dtype or (options.Precision.BF16 if device is options.Device.CUDA else options.Precision.FP32)
    case = TraceCase(
        schedule=cast("ScheduleName", schedule),
        length=length,
        layout=layout.value,
        mask=mask,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        backward=backward,
        ranks_per_node=ranks_per_node,
        device=device.value,
        dtype=precision.value,
        layer=layer,
    )
    options.check_output_file("--out", out)
    world = launch.world_size(ranks, virtual=virtual)
    case.check(world, local=int(os.environ.get("LOCAL_WORLD_SIZE", world)) if launch.under_torchrun() else world)
    launch.run(
        _trace, ranks, device=device.value, virtual=virtual, share_gpu=share_gpu, timeout=timeout, case=case, out=out
    )


@dataclass(frozen=True)
class TraceCase:
    """Attention over `length` positions, to be run on ranks."""

    schedule: ScheduleName
    length: int
    layout: str
    mask: str  # as `parse_mask` takes it
    q_heads: int
    kv_heads: int
    head_dim: int
    backward: bool
    ranks_per_node: int | None
    device: str
    dtype: str
    layer: str = "attention"  # or one of `planner.recurrent.KINDS`

    def check(self, ranks: int, local: int) -> None:
        """Raise ValueError if the case cannot run on this number of ranks, `local` of them on this machine."""
        options.check_layer(self.layer)
        if self.schedule not in ("auto", *SCHEDULES):
            raise ValueError(f"schedule must be one of auto, {', '.join(SCHEDULES)}, got {self.schedule!r}")
        mask = options.parse_mask(self.mask, self.length)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide the {self.q_heads} query heads, got {self.kv_heads}")
        if self.ranks_per_node is not None and ranks % self.ranks_per_node:
            raise ValueError(f"ranks_per_node must divide the {ranks} ranks, got {self.ranks_per_node}")
        # q, k, v, the result and their gradients, on all ranks of this machine
        needed = _TENSORS * self.length * self.q_heads * self.head_dim * self.torch_dtype.itemsize * local // ranks
        free = free_memory(torch.device(self.device))
        if free is not None and needed > free:
            raise ValueError(
                f"{self.length:,} tokens of {self.q_heads} heads of {self.head_dim} do not fit: about "
                f"{readable_gib(needed)} on {self.device}, which has {readable_gib(free)} free"
            )
        if self.layer != "attention":
            runs(LAYOUTS[self.layout], self.length, ranks)
        elif self.schedule != "auto":
            places = shards(mask, LAYOUTS[self.layout], self.length, ranks)
            check_schedule(self.schedule, places, ranks if self.ranks_per_node is None else self.ranks_per_node)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return options.Precision(self.dtype).dtype


def _trace(comm: Comm, *, case: TraceCase, out: Path) -> None:
    """One rank's run; rank 0 writes the file and prints the summary."""
    message = f"tracing {case.schedule if case.layer == 'attention' else case.layer} on {counted(comm.world, 'rank')}"
    with output.counting(message) if comm.rank == 0 else nullcontext():
        spans = record_attention(comm, case)
    if comm.rank > 0:
        return
    schedule = case.schedule if case.schedule != "auto" else f"auto ({_selected(comm, case)})"
    schedule = schedule if case.layer == "attention" else case.layer
    title = _title(comm, case, schedule)
    facts: dict[str, object] = {"schedule": schedule, "ranks": comm.world, **output.machine(case.device)}
    write_trace(out, spans, title=title, metadata=facts)
    _show(spans, title, out, virtual=isinstance(comm, VirtualComm))


def record_attention(comm: Comm, case: TraceCase) -> list[Span]:
    """The spans of all ranks of the second of two runs, on every rank, in seconds since it began."""
    cp = ContextParallel(comm, layout=LAYOUTS[case.layout], schedule=case.schedule, ranks_per_node=case.ranks_per_node)
    attend = _attention(case, cp) if case.layer == "attention" else _recurrence(case, cp)
    with reported_steps() if comm.rank == 0 else nullcontext(lambda done, total: None) as report:
        attend()
        report(1, 2)
        with recording(comm, case.device) as recorder:
            attend()
    return gather_spans(comm, recorder, case.device)


def _attention(case: TraceCase, cp: ContextParallel) -> Callable[[], None]:
    q, k, v, grad = (_random(case, cp, heads) for heads in (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads))
    mask = options.parse_mask(case.mask, case.length)

    def attend() -> None:
        inputs = [x.detach().requires_grad_(case.backward) for x in (q, k, v)]
        out = cp.attention(*inputs, mask=mask, length=case.length)
        if case.backward:
            out.backward(grad)

    return attend


def _recurrence(case: TraceCase, cp: ContextParallel) -> Callable[[], None]:
    """A layer with random inputs: decays below 1, keys of about unit length."""
    kind, rows = KINDS[case.layer], len(cp.positions(case.length))
    value_dim = 1 if case.layer in ("mamba1", "short_convolution") else case.head_dim
    sizes = {
        "batch": 1, "heads": case.q_heads, "groups": case.kv_heads, "seq": rows, "key_dim": case.head_dim,
        "value_dim": value_dim, "width": case.head_dim + 1,
    }  # fmt: skip
    generator = torch.Generator(case.device).manual_seed(cp.rank)

    def drawn(name: str, words: str) -> Tensor:
        shape = [sizes[word] for word in words.split()]
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=case.device)
        x = -x.abs() if name in ("g", "A", "w") else x.sigmoid() if name in ("dt", "beta") else x / shape[-1] ** 0.5
        return x.to(case.torch_dtype)

    inputs = {name: drawn(name, words) for name, words in kind._DIMS.items()}

    def scan() -> None:
        layer = kind(**{name: x.detach().requires_grad_(case.backward) for name, x in inputs.items()})
        out = cp.recurrent(layer, length=case.length)
        if case.backward:
            out.backward(torch.ones_like(out))

    return scan


def gather_spans(comm: Comm, recorder: Recorder, device: str) -> list[Span]:
    """The spans of all ranks on one clock that starts when the run began.

    Processes on one machine share a clock. Machines are aligned by the barrier that starts the recording: the first
    process of a machine to leave it defines time 0 there, so their clocks agree up to the skew of the barrier.
    """
    mine = _machine(), recorder.start, recorder.spans()
    ranks = [pickle.loads(data) for data in _all_gather_bytes(comm, pickle.dumps(mine), device)]
    zero: dict[str, float] = {}
    for machine, began, _ in ranks:
        zero[machine] = min(began, zero.get(machine, began))
    return match_messages(
        replace(span, begin=max(0.0, span.begin - zero[machine]), end=max(0.0, span.end - zero[machine]))
        for machine, _, spans in ranks
        for span in spans
    )


def _show(spans: Sequence[Span], title: str, out: Path, *, virtual: bool) -> None:
    rows: list[list[object]] = []
    for each in summarize_overlap(spans):
        share = f"{each.overlap / each.transfer:.0%}" if each.transfer else "-"
        times = (each.compute, each.transfer, each.overlap, each.wait)
        rows.append([each.rank, *(f"{1e3 * seconds:.2f}" for seconds in times), share, f"{each.bytes_sent / 1e6:.2f}"])
    console = output.console()
    columns = ["rank", "compute ms", "communication ms", "overlapped ms", "waiting ms", "overlapped", "MB sent"]
    console.print(output.table(f"attnmesh trace: {title}", columns, rows))
    console.print("Overlapped: communication while the rank computes, in ms and as a share of its communication.")
    if virtual:
        console.print("Virtual ranks take turns: while a rank waits, another one computes, so nothing overlaps.")
    console.print(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing", soft_wrap=True)


def _title(comm: Comm, case: TraceCase, schedule: str) -> str:
    direction = "forward+backward" if case.backward else "forward"
    ranks = counted(comm.world, "virtual rank" if isinstance(comm, VirtualComm) else "rank")
    shape = f"{case.length} tokens, {case.q_heads}/{case.kv_heads} heads, head dim {case.head_dim}, {case.dtype}"
    return f"{schedule}, {direction}, {ranks}, {case.device}, {shape}, {case.layout}, {case.mask}"


def _selected(comm: Comm, case: TraceCase) -> str:
    cp = ContextParallel(comm, layout=LAYOUTS[case.layout], ranks_per_node=case.ranks_per_node)
    return cp.explain(
        mask=options.parse_mask(case.mask, case.length),
        length=case.length,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.torch_dtype,
        device=case.device,
    ).schedule


def _random(case: TraceCase, cp: ContextParallel, heads: int) -> Tensor:
    """This rank's rows of a random tensor."""
    rows = len(cp.positions(case.length))
    generator = torch.Generator(case.device).manual_seed(cp.rank)
    drawn = torch.randn(1, heads, rows, case.head_dim, generator=generator, dtype=torch.float32, device=case.device)
    return drawn.to(case.torch_dtype)


def _all_gather_bytes(comm: Comm, data: bytes, device: str) -> list[bytes]:
    """The bytes of all ranks, in rank order."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    sizes = [int(n) for n in comm.all_gather(size, [(1,)] * comm.world)]
    return [x.cpu().numpy().tobytes() for x in comm.all_gather(mine, [(n,) for n in sizes])]


def _machine() -> str:
    """An identifier of this machine since it was booted: processes with the same one share a clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return platform.node()
