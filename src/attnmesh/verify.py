"""Every mode that exists, on fresh random inputs, against float64: out, lse, dq, dk, dv and the gradient through lse.

An error passes if it is at most twice that of the plain computation in the same precision (scores, softmax and products
all in the inputs' dtype), plus a floor for what is zero but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.layout import Contiguous, Layout, Striped, Zigzag
from attnmesh.mask import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.ops.dense import reference
from attnmesh.ops.dense.api import attention
from attnmesh.ops.dense.check import scale_for
from attnmesh.parallel.context import ContextParallel
from attnmesh.state import State, merge

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
_NAMES = ("out", "lse", "dq", "dk", "dv")

Attend = Callable[[Tensor, Tensor, Tensor, Mask], State]


@dataclass(frozen=True)
class Mode:
    """One way to compute attention over `length` positions; `layout` says that ranks share it."""

    name: str
    attend: Attend
    mask: Mask
    dtype: torch.dtype
    length: int
    layout: Layout | None = None

    @property
    def shape(self) -> str:
        """The problem in words."""
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{BATCH}x{HEADS}/{KV_HEADS}x{self.length}x{HEAD_DIM} {dtype}"


@dataclass(frozen=True)
class Outcome:
    """How a mode did: the result nearest to its bound, its relative error, and that bound."""

    mode: Mode
    worst: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN never is."""
        return self.error <= self.bound


def modes(comm: Comm, device: str) -> list[Mode]:
    """Every mode that exists on this device, the same list on every rank."""
    rings = [mode for backend in ("auto", "aten" if device == "cpu" else "triton") for mode in _rings(comm, backend)]
    return [*_merges(), *_backends(device), *rings]


def run(comm: Comm, device: str, seed: int) -> Iterator[Outcome]:
    """Run all modes on all ranks; rank 0 judges, and gets the outcomes as they come."""
    for number, mode in enumerate(modes(comm, device)):
        inputs = _drawn(mode, seed + number, device)
        if mode.layout is not None:
            found = _shared(mode, comm, inputs)
        elif comm.rank == 0:
            found = _differentiated(mode.attend, mode.mask, inputs)
        if comm.rank == 0:
            yield _judged(mode, inputs, found)


def _merges() -> Iterator[Mode]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> State:
        """Three uneven parts of the keys, merged: some rows see nothing of some parts."""
        at = torch.arange(k.shape[2])
        parts = [slice(0, 1), slice(1, 90), slice(90, None)]
        states = [
            State(*attention(q, k[:, :, p], v[:, :, p], mask=mask, k_positions=at[p], return_lse=True)) for p in parts
        ]
        out, lse = merge(states)
        return State(out.to(q.dtype), lse)

    for mask in (Full(), Causal(), SlidingWindow(20)):
        yield Mode(f"merge {_named(mask)}", attend, mask, torch.float32, 257)


def _backends(device: str) -> Iterator[Mode]:
    def through(backend: str) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> State:
            return State(*attention(q, k, v, mask=mask, return_lse=True, backend=backend))

        return attend

    # By name each backend serves what it serves; `auto` picks among them and serves everything.
    names = ["auto", "reference", "aten" if device == "cpu" else "triton"]
    for name, length, dtype in product(names, (257,), (torch.float32, torch.bfloat16)):
        for mask in _masks(length):
            yield Mode(f"attention {name} {_named(mask)}", through(name), mask, dtype, length)


def _rings(comm: Comm, backend: str) -> Iterator[Mode]:
    def around(layout: Layout, length: int) -> Attend:
        cp = ContextParallel(comm, layout=layout, schedule="ring", backend=backend)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> State:
            return State(*cp.attention(q, k, v, mask=mask, length=length, return_lse=True))

        return attend

    layouts: tuple[Layout, ...] = (Contiguous(), Zigzag(), Striped())
    for layout, length, dtype in product(layouts, (263,), (torch.float32, torch.bfloat16)):
        for mask in _masks(length):
            name = f"ring {backend} {type(layout).__name__.lower()} {_named(mask)}"
            yield Mode(name, around(layout, length), mask, dtype, length, layout)


def _masks(length: int) -> list[Mask]:
    documents = Documents([1, length // 3, 7, length - length // 3 - 8])
    return [Full(), Causal(), SlidingWindow(31, 5), documents, Causal() & documents, Causal() & SlidingWindow(31)]


def _named(mask: Mask) -> str:
    parts = getattr(mask, "parts", (mask,))
    return "+".join({"SlidingWindow": "window"}.get(n, n.lower()) for n in (type(p).__name__ for p in parts))


def _judged(mode: Mode, inputs: list[Tensor], found: list[Tensor]) -> Outcome:
    exact = _differentiated(_reference, mode.mask, [x.double() for x in inputs])
    plain = _differentiated(_plain, mode.mask, inputs)
    results = []
    for name, a, b, e in zip(_NAMES, found, plain, exact, strict=True):
        bound = 2 * _error(b, e) + 4 * torch.finfo(torch.float32).eps
        results.append(Outcome(mode, name, _error(a, e), bound))
    return max(results, key=lambda outcome: outcome.error / outcome.bound if outcome.passed else torch.inf)


def _drawn(mode: Mode, seed: int, device: str) -> list[Tensor]:
    """q, k, v and the gradients of out and lse; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(BATCH, heads, mode.length, HEAD_DIM, generator=generator).to(device, mode.dtype)

    q, k, v, grad_out = (normal(heads) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    grad_lse = torch.randn(BATCH, HEADS, mode.length, generator=generator).to(device)
    return [q, k, v, grad_out, grad_lse]


def _differentiated(attend: Attend, mask: Mask, inputs: list[Tensor]) -> list[Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    out, lse = attend(q, k, v, mask)
    seen = lse > -torch.inf  # a row that sees nothing has no lse to differentiate
    lse_grad = torch.where(seen, inputs[4].to(lse.dtype), 0.0)
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad([out, lse], [q, k, v], [inputs[3].to(out.dtype), lse_grad]),
    ]


def _shared(mode: Mode, comm: Comm, inputs: list[Tensor]) -> list[Tensor]:
    """The same by all ranks together: each takes its shard, and the whole is put together again on every rank."""
    assert mode.layout is not None
    cp = ContextParallel(comm, layout=mode.layout)
    shards = _differentiated(mode.attend, mode.mask, [cp.shard(x, 2) for x in inputs])
    return [cp.unshard(x, 2, mode.length) for x in shards]


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, plain: bool = False) -> State:
    at = torch.arange(q.shape[2], device=q.device)
    return reference.attention(q, k, v, mask, scale_for(q, None), at, at, plain=plain)


_plain = partial(_reference, plain=True)


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative error in the norm; NaN where finite and infinite entries do not match."""
    finite = torch.isfinite(exact)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("nan")
    found, exact = found.double()[finite], exact[finite]
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))
