"""The work of every operation, the least time for it on a device, and the timing of programs.

Operations are those of the products, a multiplication and an addition each. Bytes are compulsory: every input read
once and every output written once. Gather bytes are those of the keys that indices name, read once for all heads of a
query, or once per 64 heads. They come partly from L2, so that their time at the rate of a copy is not a bound.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from attnmesh.calibration.timing import Name, queued
from benchmarks.common import added_bytes
from benchmarks.sparse.cases import Attention, Indexer, Sizes
from benchmarks.sparse.checks import Verdict
from benchmarks.timers import wall

_NUMBER = 4  # bytes of an index, an lse, a score, an indexer's weight
_HEADS_PER_PROGRAM = 64  # of the kernels that others have published


class Work(NamedTuple):
    """Operations and bytes of a program."""

    flops: int
    bytes: int
    gather: int = 0
    gather_64: int = 0


class Peaks(NamedTuple):
    """Peak rates measured in this run: of a large product, and of a large copy (bytes read and written)."""

    tflops: float
    tb_per_s: float

    def operations_ms(self, work: Work) -> float:
        """The least time for the products."""
        return work.flops / self.tflops / 1e9

    def bytes_ms(self, moved: int) -> float:
        """The time of so many bytes at the rate of the copy."""
        return moved / self.tb_per_s / 1e9

    def bound(self, work: Work) -> tuple[str, float]:
        """Which of operations and compulsory bytes takes longer, and its milliseconds."""
        operations, moved = self.operations_ms(work), self.bytes_ms(work.bytes)
        return ("operations", operations) if operations >= moved else ("bytes", moved)


def distribution(x: Attention) -> Work:
    """Scores of the slots, summed over heads: one product."""
    return Work(2 * _pairs(x) * x.d, _queries(x) + _keys(x) + 2 * _slots(x) + _per_head(x), *_gathered(x))


def forward(x: Attention) -> Work:
    """Scores and values: two products."""
    moved = _queries(x) + _keys(x) + _slots(x) + _out(x) + _per_head(x)
    return Work(2 * _pairs(x) * (x.d + x.d_v), moved, *_gathered(x))


def backward(x: Attention) -> Work:
    """Five products: scores again, dq and dk over d, dp and dv over d_v. Out and its gradient are read, too."""
    moved = 2 * (_queries(x) + _keys(x) + _out(x)) + _slots(x) + _per_head(x)
    return Work(2 * _pairs(x) * (3 * x.d + 2 * x.d_v), moved, *_gathered(x))


def topk(x: Indexer, *, causal: bool) -> Work:
    """Every row against every key it sees; causal: the rows are the last of the sequence."""
    seen = x.s_q * x.s_kv - (x.s_q * (x.s_q - 1) // 2 if causal else 0)
    chosen = x.s_q * (2 * x.topk + 1) * _NUMBER  # indices, scores, length
    return Work(2 * seen * x.heads * x.d, _indexer(x) + chosen)


def sparse_loss(x: Attention, i: Indexer) -> Work:
    """Attention's scores at the slots, the indexer's there, and its two gradients: four products."""
    rows, keys = _gathered(x), x.s_q * x.topk * i.d * i.itemsize
    return Work(
        2 * x.s_q * x.topk * (x.heads * x.d + 3 * i.heads * i.d),
        _queries(x) + _keys(x) + _slots(x) + _per_head(x) + 2 * _indexer(i),
        rows[0] + keys,
        rows[1] + keys * _programs(i.heads),
    )


def dense_loss(x: Attention, i: Indexer) -> Work:
    """The same over all keys: nothing is gathered."""
    flops = 2 * x.s_q * x.s_kv * (x.heads * x.d + 3 * i.heads * i.d)
    return Work(flops, _queries(x) + _keys(x) + _per_head(x) + 2 * _indexer(i))


def _pairs(x: Attention) -> int:
    return x.s_q * x.heads * x.topk


def _queries(x: Attention) -> int:
    return x.s_q * x.heads * x.d * x.itemsize


def _keys(x: Attention) -> int:
    """All keys: s_q x topk random indices name every one."""
    return x.s_kv * x.d * x.itemsize


def _out(x: Attention) -> int:
    return x.s_q * x.heads * x.d_v * x.itemsize


def _slots(x: Attention) -> int:
    return x.s_q * x.topk * _NUMBER


def _per_head(x: Attention) -> int:
    return x.s_q * x.heads * _NUMBER


def _indexer(x: Indexer) -> int:
    return (x.s_q * x.heads + x.s_kv) * x.d * x.itemsize + x.s_q * x.heads * _NUMBER


def _gathered(x: Attention) -> tuple[int, int]:
    shared = x.s_q * x.topk * x.d * x.itemsize
    return shared, shared * _programs(x.heads)


def _programs(heads: int) -> int:
    return -(-heads // _HEADS_PER_PROGRAM)


Program = Callable[[], object]


class Runner(NamedTuple):
    """Runs programs on a device, at given sizes, against its peak rates."""

    device: str
    sizes: Sizes
    peaks: Peaks

    @property
    def dtype(self) -> torch.dtype:
        return dtype_on(self.device)

    @property
    def backend(self) -> str:
        """On a GPU the kernels that "auto" takes: in Gluon where they serve a call, else in Triton."""
        return "auto" if self.device == "cuda" else "torch"

    def milliseconds(self, programs: Mapping[Name, Program]) -> dict[Name, float]:
        """Return the median milliseconds of every program, interleaved."""
        return milliseconds(self.device, programs, self.sizes.rounds)

    def added_bytes(self, program: Program) -> int | None:
        """Return the peak bytes that a program allocates on a GPU; None on a CPU."""
        return added_bytes(program) if self.device == "cuda" else None

    def speeds(self, work: Work, ms: float) -> dict[str, object]:
        """Return the speed, the larger bound, and the share of it that a time reaches."""
        bound, least = self.peaks.bound(work)
        return {"ms": ms, "tflops": work.flops / ms / 1e9, "bound": bound, "share_of_bound": least / ms}

    def row(self, operation: str, heads: int, s_kv: int, work: Work, ms: float, verdict: Verdict) -> dict[str, object]:
        """Return a row: the operation, its speed, and whether its result was right."""
        return {"operation": operation, "heads": heads, "s_kv": s_kv, **self.speeds(work, ms), **verdict._asdict()}


def dtype_on(device: str) -> torch.dtype:
    """Return the dtype that is measured: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def measure_peaks(device: str, sizes: Sizes) -> Peaks:
    """Measure the rates of a large square product and of a large copy."""
    a, b = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=dtype_on(device)) for _ in range(2))
    source = torch.ones(sizes.copied // 4, device=device)
    target = torch.empty_like(source)
    ms = milliseconds(
        device, {"product": partial(torch.matmul, a, b), "copy": partial(target.copy_, source)}, sizes.rounds
    )
    return Peaks(2 * sizes.matmul**3 / ms["product"] / 1e9, 2 * source.nbytes / ms["copy"] / 1e9)


def milliseconds(device: str, programs: Mapping[Name, Program], rounds: int) -> dict[Name, float]:
    """Return interleaved medians: by events on a GPU, by the wall clock on a CPU."""
    if device == "cuda":
        return queued(programs, rounds)
    return {name: 1e3 * seconds for name, seconds in wall(programs, rounds).items()}


def free_memory(device: str) -> None:
    """Free unused GPU memory before the next measurement."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
