"""Host time of eager calls beside torch's own attention.

The inputs are tiny, so that on CUDA the device ends before the host does and nothing waits for it. Calls take turns in
slices, with torch's `scaled_dot_product_attention` among them; medians. One rank of a ring of 8 is measured as
`benchmarks.ring` does, called eagerly and as a replayed graph; on CUDA also other schedules, and a layer's training
step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnmesh as am
from attnmesh.calibration.timing import interleaved, queued
from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.cli.output import Rows
from benchmarks.common import JsonOption, QuickOption, make_app, publish
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import HEAD_DIM, HEADS, KV_HEADS, one_device, random_inputs, run_backward
from benchmarks.ring import rank_program, run_rank
from benchmarks.timers import host_ms

Calls = dict[tuple[str, bool], Callable[[], object]]  # by name, and whether there is a backward
_RANKS = 8
_TORCH = "torch's scaled_dot_product_attention"


def measure_calls(device: str, *, rounds: int, repeats: int) -> Rows:
    """Microseconds per call, and over those of torch's operator in the same direction."""
    calls = {**attention_calls(device), **other_calls(device)}
    samples: dict[tuple[str, bool], list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):  # compiles, and prepares
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            _wait(device)
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            samples[name].append(1e6 * (time.perf_counter() - begin) / repeats)
    _wait(device)
    us = {name: statistics.median(values) for name, values in samples.items()}
    return [
        {
            "call": name,
            "direction": "forward+backward" if backward else "forward",
            "host_us": us[name, backward],
            "over_torch": us[name, backward] / us[_TORCH, backward],
        }
        for name, backward in calls
    ]


def attention_calls(device: str) -> Calls:
    """Causal attention by torch, by every backend that serves it here, and by one rank."""
    shape, kv_shape, dtype = (1, 8, 64, 64), (1, 8, 64, 64), torch.float32
    if device == "cuda":
        shape, kv_shape, dtype = (1, 8, 128, 128), (1, 2, 128, 128), torch.bfloat16
    q, k, v = (torch.randn(size, device=device).to(dtype) for size in (shape, kv_shape, kv_shape))
    causal, one_rank = am.Causal(), am.ContextParallel(am.comm_from(None))
    programs: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        _TORCH: partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]),
        "attention": partial(am.attention, mask=causal),
    }
    why_not = dict(am.explain_attention(q, k, v, mask=causal).why_not)
    for backend in ("aten", "triton", "gluon", "torch"):
        if backend not in why_not and (device == "cpu" or backend != "torch"):
            programs[f"attention, {backend}"] = partial(am.attention, mask=causal, backend=backend)
    programs["a Function that does nothing"] = _Nothing.apply
    programs["attention, window"] = partial(am.attention, mask=am.SlidingWindow(16))
    programs["ContextParallel.attention, one rank"] = partial(one_rank.attention, mask=causal, length=q.shape[2])
    inputs = tuple(x.clone().requires_grad_() for x in (q, k, v))
    grad = torch.randn(shape, device=device).to(dtype)
    calls: Calls = {}
    for name, program in programs.items():
        calls[name, False] = partial(_no_grad, program, q, k, v)
        calls[name, True] = partial(_forward_backward, program, inputs, grad)
    return calls


class _Nothing(torch.autograd.Function):
    """The least that a function of autograd in Python takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Saves its inputs."""
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of any values."""
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def other_calls(device: str) -> Calls:
    """Decode from a block cache, sparse attention and a merge of two states."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache = am.BlockCache(
        am.CacheSpec(layers=1, kv_heads=2, head_dim=128, storage="bf16" if device == "cuda" else "fp32"),
        num_blocks=64,
        block_size=16,
        device=device,
        max_sequences=4,
        max_length=256,
    )
    tokens = 100
    sequence = cache.allocate(list(range(tokens)))
    kv = torch.randn(2, 1, 2, tokens, 128, device=device).to(dtype)
    cache.write(0, cache.append([sequence], tokens), *kv)
    q = torch.randn(4, 8, 1, 128, device=device).to(dtype)
    pools = cache.keys(0), cache.values(0), cache.block_table
    rows, heads, slots = (64, 128, 128) if device == "cuda" else (2, 4, 16)
    sparse_q = torch.randn(rows, heads, 576, device=device).to(dtype)
    sparse_k = torch.randn(512, 576, device=device).to(dtype)
    indices = torch.randint(0, 512, (rows, slots), device=device, dtype=torch.int32)
    states = [am.State(torch.randn(1, 8, 64, 64, device=device), torch.randn(1, 8, 64, device=device)) for _ in "ab"]
    return {
        ("paged_decode_attention", False): partial(am.paged_decode_attention, q, *pools, cur_pos=cache.cur_pos),
        ("sparse_attention", False): partial(am.sparse_attention, sparse_q, sparse_k, indices, scale=0.04),
        ("merge", False): partial(am.merge, states),
    }


def measure_ring(device: str, lengths: tuple[int, ...], *, rounds: int) -> Rows:
    """The last of 8 ranks: host microseconds per stage and, on CUDA, its efficiency against one device."""
    lines: Rows = []
    for length in lengths:
        for backward in (False, True):
            comm = OneRankComm(_RANKS - 1, _RANKS)
            at = am.Zigzag().local_length(length, _RANKS, comm.rank)
            line: dict[str, object] = {
                "length": length, "direction": "forward+backward" if backward else "forward",
            }  # fmt: skip
            if device == "cuda":
                run = rank_program(comm, length, random_inputs(at, backward), "auto")
                one = partial(one_device, "cuDNN", *random_inputs(length, backward))
                replayed = interleaved({"one": one, "rank": run}, rounds)
                eager = queued({"rank": run}, rounds)["rank"]
                line["host_us_per_stage"] = 1e3 * host_ms(run) / _RANKS
                line["efficiency_eager"] = replayed["one"] / (_RANKS * eager)
                line["efficiency_replayed"] = replayed["one"] / (_RANKS * replayed["rank"])
            else:
                drawn = [torch.randn(1, 4, at, 64) for _ in range(4)]
                q, k, v = (x.requires_grad_(backward) for x in drawn[:3])
                run = rank_program(comm, length, (q, k, v, drawn[3] if backward else None), "auto")
                run()
                samples = []
                for _ in range(rounds):
                    begin = time.perf_counter()
                    run()
                    samples.append(1e6 * (time.perf_counter() - begin))
                line["us_per_stage"] = statistics.median(samples) / _RANKS  # kernels included: they are the host's
            lines.append(line)
    return lines


_SCHEDULES: dict[str, dict[str, object]] = {
    "ring": {"schedule": "ring"}, "allgather": {"schedule": "allgather"}, "ulysses": {"schedule": "ulysses"},
    "ring+ring": {"schedule": "ring+ring", "ranks_per_node": 4},
}  # fmt: skip


def measure_schedules(length: int) -> Rows:
    """The last of 8 ranks by every schedule: host milliseconds per call, while the device is busy with other work."""
    lines: Rows = []
    for name, options in _SCHEDULES.items():
        for backward in (False, True):
            comm = OneRankComm(_RANKS - 1, _RANKS)
            cp = am.ContextParallel(comm, **options)  # type: ignore[arg-type]
            shard = random_inputs(cp.layout.local_length(length, _RANKS, comm.rank), backward)
            run = partial(run_rank, comm, cp, length, *shard)
            for _ in range(3):
                run()
            direction = "forward+backward" if backward else "forward"
            lines.append({"schedule": name, "length": length, "direction": direction, "host_ms": host_ms(run)})
    return lines


class Layer(torch.nn.Module):
    """A layer of Llama 3.1 8B, whose attention is one rank's share."""

    cos: Tensor
    sin: Tensor

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int) -> None:
        super().__init__()
        width, hidden = HEADS * HEAD_DIM, 14336
        self.attend = attend
        sizes = (width, width + 2 * KV_HEADS * HEAD_DIM), (width, width), (width, 2 * hidden), (hidden, width)
        self.qkv, self.proj, self.gate_up, self.down = (torch.nn.Linear(*size, bias=False) for size in sizes)
        self.norms = torch.nn.ParameterList([torch.ones(width) for _ in range(2)])
        angles = torch.randn(rows, HEAD_DIM // 2).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Pre-norm attention with rotary positions, then a gated MLP."""
        rows, width = x.shape
        qkv = self.qkv(F.rms_norm(x, (width,), self.norms[0])).view(1, rows, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        out = self.attend(self._rotated(q), self._rotated(k), v)
        x = x + self.proj(out.transpose(1, 2).reshape(rows, width))
        gate, up = self.gate_up(F.rms_norm(x, (width,), self.norms[1])).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


def measure_layer(length: int) -> Rows:
    """A training step of a layer on the last of 8 ranks: host and device milliseconds, and when the device is idle.

    Idle is the share of the time between the first and the last kernel of five steps in which no kernel runs, as
    torch's profiler records it (which itself slows the host down).
    """
    comm = OneRankComm(_RANKS - 1, _RANKS)
    cp = am.ContextParallel(comm, layout=am.Zigzag(), schedule="ring")
    rows = am.Zigzag().local_length(length, _RANKS, comm.rank)
    layer = Layer(partial(cp.attention, mask=am.Causal(), length=length), rows).cuda().bfloat16()
    x = torch.randn(rows, HEADS * HEAD_DIM, device="cuda").bfloat16().requires_grad_()
    inputs = (x, *layer.parameters())
    grad = torch.randn_like(x)

    def step() -> Tensor:
        comm.begin()
        return run_backward(layer(x), inputs, grad)

    device = interleaved({"layer": step}, 3)["layer"]
    eager, host = queued({"layer": step}, 3)["layer"], host_ms(step)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    idle, end = 0.0, spans[0][1]
    for begin, stop in spans:
        idle += max(0.0, begin - end)
        end = max(end, stop)
    return [
        {
            "length": length, "host_ms": host, "eager_ms": eager, "replayed_ms": device,
            "idle_share": idle / (end - spans[0][0]),
        }
    ]  # fmt: skip


def _no_grad(program: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return program(*inputs)


def _forward_backward(
    program: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor
) -> Tensor:  # fmt: skip
    return run_backward(program(*inputs), inputs, grad)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(device: MeasuredDeviceOption = None, quick: QuickOption = False, json: JsonOption = None) -> None:
    """Measure the host time of eager calls beside torch's attention, and one rank of a ring without graphs."""
    chosen = default_device(device)

    def sections() -> Iterator[tuple[str, Rows]]:
        yield "host time per eager call", measure_calls(chosen, rounds=2 if quick else 7, repeats=2 if quick else 50)
        lengths = (16384, 32768) if chosen == "cuda" else (1024,)
        title = f"one of {_RANKS} ranks of a ring (causal, zigzag{', bf16, 32/8 heads, D=128' * (chosen == 'cuda')})"
        yield title, measure_ring(chosen, lengths, rounds=2 if quick else 5)
        if chosen == "cuda":
            yield f"host time of one of {_RANKS} ranks by schedule", measure_schedules(lengths[0])
            step = "training step of a Llama 3.1 8B layer"
            yield f"{step}, one of {_RANKS} ranks", [line for n in lengths for line in measure_layer(n)]

    publish("host", chosen, sections(), json)


app = make_app(main)

if __name__ == "__main__":
    app()
