"""Every mode that exists, on fresh random inputs, against float64: out, lse, dq, dk, dv and the gradient through lse.

An error passes if it is at most twice that of the plain computation in the same precision (scores, softmax and products
all in the inputs' dtype), plus a floor for what is zero but for rounding. Token generation, which has no gradients, is
in `verify_decode`, `verify_cache` and `verify_generation`, sparse attention in `verify_sparse` and
`verify_sparse_ranks`; they are judged here by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.core.merge import merge
from attnmesh.core.state import State
from attnmesh.ops.dense import reference
from attnmesh.ops.dense.api import attention
from attnmesh.ops.dense.call import resolve_scale
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_distributed_attention
from attnmesh.plan.programs import SCHEDULES
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import refusal
from attnmesh.verify.cache import cache_modes
from attnmesh.verify.decode import decode_modes
from attnmesh.verify.generation import generation_modes
from attnmesh.verify.mode import Compared, ComparedMode
from attnmesh.verify.sparse import sparse_modes
from attnmesh.verify.sparse_ranks import sparse_rank_modes

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
_NAMES = ("out", "lse", "dq", "dk", "dv")

Attend = Callable[[Tensor, Tensor, Tensor, Mask], State]
Found = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Mode:
    """One way to compute attention over `length` positions (and `key_length` keys), alone or by all ranks together.

    `found` turns q, k, v and the gradients of out and lse into out, lse, dq, dk and dv, whole, on every rank.
    """

    name: str
    found: Found
    mask: Mask
    dtype: torch.dtype
    length: int
    key_length: int | None = None
    together: bool = False

    @property
    def shape(self) -> str:
        """The problem in words."""
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        lengths = f"{self.length}" if self.key_length is None else f"{self.length}:{self.key_length}"
        return f"{BATCH}x{HEADS}/{KV_HEADS}x{lengths}x{HEAD_DIM} {dtype}"


@dataclass(frozen=True)
class Outcome:
    """How a mode did: the result nearest to its bound, its relative error, and that bound."""

    mode: Mode | ComparedMode
    worst: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN never is."""
        return self.error <= self.bound


def modes(comm: Comm, device: str) -> list[Mode | ComparedMode]:
    """Every mode that exists on this device, the same list on every rank."""
    fused = "aten" if device == "cpu" else "triton"
    rings = [mode for backend in ("auto", fused) for mode in _rings(comm, backend)]
    meshes = [*rings, *_schedules(comm), *_crossings(comm), *_queries(comm)]
    generation = [*decode_modes(device), *cache_modes(), *generation_modes(comm)]
    return [*_merges(), *_backends(device), *meshes, *generation, *sparse_modes(), *sparse_rank_modes(comm)]


def schedule_modes(
    comm: Comm, layout: Layout, mask: Mask, ranks_per_node: int, length: int = 263
) -> list[Mode | ComparedMode]:
    """Every schedule that serves this layout and mask, with `ranks_per_node` ranks a node, in float32."""
    served = [
        name for name in SCHEDULES if refusal(name, shards(mask, layout, length, comm.world), ranks_per_node) is None
    ]
    modes: list[Mode | ComparedMode] = []
    for name in served:
        cp = ContextParallel(comm, layout=layout, schedule=name, ranks_per_node=ranks_per_node if "+" in name else None)
        said = f"{name} {_placed(layout)} {_named(mask)}"
        modes.append(Mode(said, partial(_spread, cp, mask), mask, torch.float32, length, together=True))
    return modes


def run(comm: Comm, device: str, seed: int, chosen: Sequence[Mode | ComparedMode] | None = None) -> Iterator[Outcome]:
    """Run all modes (or those chosen) on all ranks; rank 0 judges, and gets the outcomes as they come."""
    for number, mode in enumerate(modes(comm, device) if chosen is None else chosen):
        if not mode.together and comm.rank > 0:  # one device's: the other ranks have nothing to do
            continue
        if isinstance(mode, ComparedMode):
            compared = mode.compared(seed + number, device)
        else:
            inputs = _drawn(mode, seed + number, device)
            found = mode.found(inputs)
            compared = _beside(mode, inputs, found) if comm.rank == 0 else []
        if comm.rank == 0:
            yield _worst(mode, compared)


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
        yield Mode(f"merge {_named(mask)}", partial(_differentiated, attend, mask), mask, torch.float32, 257)


def _backends(device: str) -> Iterator[Mode]:
    def through(backend: str) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> State:
            return State(*attention(q, k, v, mask=mask, return_lse=True, backend=backend))

        return attend

    # By name each backend serves what it serves; `auto` picks among them and serves everything.
    names = ["auto", "reference", "aten" if device == "cpu" else "triton"]
    for name, length, dtype in product(names, (257,), (torch.float32, torch.bfloat16)):
        for mask in _masks(length):
            found = partial(_differentiated, through(name), mask)
            yield Mode(f"attention {name} {_named(mask)}", found, mask, dtype, length)


def _rings(comm: Comm, backend: str) -> Iterator[Mode]:
    layouts: tuple[Layout, ...] = (Contiguous(), Zigzag(), Striped())
    for layout, length, dtype in product(layouts, (263,), (torch.float32, torch.bfloat16)):
        cp = ContextParallel(comm, layout=layout, schedule="ring", backend=backend)
        for mask in _masks(length):
            name = f"ring {backend} {_placed(layout)} {_named(mask)}"
            yield Mode(name, partial(_spread, cp, mask), mask, dtype, length, together=True)


def _schedules(comm: Comm) -> Iterator[Mode]:
    """The other schedules, under every mask, on layouts that ask different things of them."""
    length = 263
    dtypes = cycle((torch.float32, torch.bfloat16))
    for schedule in ("auto", *SCHEDULES[1:]):
        ranks_per_node = _ranks_a_node(comm.world) if "+" in schedule else None
        if "+" in schedule and ranks_per_node is None:
            continue  # no mesh of two dimensions has so many ranks
        for mask in _masks(length):
            joint = Joint((100, Zigzag()), (length - 100, Contiguous()))
            for layout in (Zigzag(), Balanced(mask), joint):
                cp = ContextParallel(comm, layout=layout, schedule=schedule, ranks_per_node=ranks_per_node)
                name = f"{schedule} {_placed(layout)} {_named(mask)}"
                yield Mode(name, partial(_spread, cp, mask), mask, next(dtypes), length, together=True)


def _crossings(comm: Comm) -> Iterator[Mode]:
    """Queries and keys of different lengths, each with its own layout."""
    for schedule, mask in product(SCHEDULES, (Full(), Causal())):
        ranks_per_node = _ranks_a_node(comm.world) if "+" in schedule else None
        if "+" in schedule and ranks_per_node is None:
            continue
        cp = ContextParallel(comm, layout=Zigzag(), schedule=schedule, ranks_per_node=ranks_per_node)
        found = partial(_spread, cp, mask, key_layout=Contiguous())
        yield Mode(f"cross {schedule} {_named(mask)}", found, mask, torch.float32, 201, 77, together=True)


def _queries(comm: Comm) -> Iterator[Mode]:
    """Query-distributed attention: K and V on every rank."""

    def attend(pairs: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> State:
        return State(*ring_distributed_attention(q, k, v, group=comm, pairs=pairs, return_lse=True))

    def found(pairs: int, inputs: list[Tensor]) -> list[Tensor]:
        own = [x if i < 3 else Zigzag(pairs).shard(x, 2, comm.world, comm.rank) for i, x in enumerate(inputs)]
        out, lse, dq, dk, dv = _differentiated(partial(attend, pairs), Causal(), own)
        whole = [gather_ring_outputs(x, length=inputs[0].shape[2], group=comm, pairs=pairs) for x in (out, lse)]
        return [*whole, comm.all_reduce(dq), dk, dv]

    for dtype, pairs in product((torch.float32, torch.bfloat16), (1, 3)):
        yield Mode(f"queries distributed pairs={pairs}", partial(found, pairs), Causal(), dtype, 263, together=True)


def _ranks_a_node(world: int) -> int | None:
    return next((n for n in range(2, world) if world % n == 0), None)


def _masks(length: int) -> list[Mask]:
    documents = Documents([1, length // 3, 7, length - length // 3 - 8])
    return [Full(), Causal(), SlidingWindow(31, 5), documents, Causal() & documents, Causal() & SlidingWindow(31)]


def _named(mask: Mask) -> str:
    parts = getattr(mask, "parts", (mask,))
    return "+".join({"SlidingWindow": "window"}.get(n, n.lower()) for n in (type(p).__name__ for p in parts))


def _placed(layout: Layout) -> str:
    return type(layout).__name__.lower()


def _beside(mode: Mode, inputs: list[Tensor], found: list[Tensor]) -> list[Compared]:
    """What was found, float64 and the plain computation."""
    exact = _differentiated(_reference, mode.mask, [x.double() for x in inputs])
    plain = _differentiated(_plain, mode.mask, inputs)
    return [Compared(*each) for each in zip(_NAMES, found, exact, plain, strict=True)]


def _worst(mode: Mode | ComparedMode, compared: list[Compared]) -> Outcome:
    """The result nearest to its bound, or beyond it."""
    results = []
    for name, found, exact, plain in compared:
        bound = 0.0 if plain is None else 2 * _error(plain, exact) + 4 * torch.finfo(torch.float32).eps
        results.append(Outcome(mode, name, _error(found, exact), bound))
    return max(results, key=lambda outcome: outcome.error / (outcome.bound or 1.0) if outcome.passed else torch.inf)


def _drawn(mode: Mode, seed: int, device: str) -> list[Tensor]:
    """q, k, v and the gradients of out and lse; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(BATCH, heads, length, HEAD_DIM, generator=generator).to(device, mode.dtype)

    q, grad_out = (normal(HEADS, mode.length) for _ in range(2))
    k, v = (normal(KV_HEADS, mode.key_length or mode.length) for _ in range(2))
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


def _spread(cp: ContextParallel, mask: Mask, inputs: list[Tensor], *, key_layout: Layout | None = None) -> list[Tensor]:
    """The same by all ranks together: each takes its shards, and the whole is put together again on every rank."""
    keys = ContextParallel(cp.comm, layout=key_layout or cp.layout)
    lengths = {"length": inputs[0].shape[2], "key_length": inputs[1].shape[2]}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> State:
        return State(*cp.attention(q, k, v, mask=mask, key_layout=key_layout, return_lse=True, **lengths))

    sides = [cp, keys, keys, cp, cp]
    found = _differentiated(attend, mask, [side.shard(x, 2) for side, x in zip(sides, inputs, strict=True)])
    sides = [cp, cp, cp, keys, keys]
    whole = [lengths["length"]] * 3 + [lengths["key_length"]] * 2
    return [side.unshard(x, 2, n) for side, x, n in zip(sides, found, whole, strict=True)]


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, plain: bool = False) -> State:
    at = [torch.arange(x.shape[2], device=q.device) for x in (q, k)]
    return reference.attention(q, k, v, mask, resolve_scale(q, None), *at, plain=plain)


_plain = partial(_reference, plain=True)


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative error in the norm; NaN where finite and infinite entries do not match."""
    finite = torch.isfinite(exact)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("nan")
    found, exact = found.double()[finite], exact.double()[finite]
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))
