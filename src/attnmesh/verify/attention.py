"""Attention on one device and over ranks: out, lse, dq, dk, dv and the gradient through lse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.comm import Comm
from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import (
    And,
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Or,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from attnmesh.core.merge import merge
from attnmesh.core.state import State
from attnmesh.ops.dense.api import attention
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_distributed_attention
from attnmesh.plan.schedules import SCHEDULES, refusal
from attnmesh.plan.shards import shards
from attnmesh.testing.attention import (
    NAMES,
    compare,
    forward_backward,
    gather_results,
    random_inputs,
    reference_results,
    shard_results,
)
from attnmesh.testing.errors import Comparison
from attnmesh.verify.mode import DTYPES, Mode

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
LENGTH = 263
PREFIX, BLOCK_SIZE = 150, 16  # of prompts that continue a prefix

SCORES: dict[str, object] = {
    "softcap": 2.0,
    "alibi_slopes": [0.25, 0.125, 0.0625, 0.0],
    "sinks": [0.5, -1.0, 2.0, 0.0],
}
"""Arguments that change scores; lists are tensors with one entry per query head."""
VALUE_DIM = 24  # where it differs from HEAD_DIM

Compute = Callable[..., list[Tensor]]  # of the inputs, and of the arguments that change scores


def attention_modes(comm: Comm, device: str) -> Iterator[Mode]:
    """Yield every mode of dense attention."""
    fused = "aten" if device == "cpu" else "triton"
    yield from _merge_modes()
    yield from _backend_modes(fused)
    for backend in ("auto", fused):
        yield from _ring_modes(comm, backend)
    yield from _schedule_modes(comm)
    yield from _mask_modes(comm)
    yield from _score_modes(comm)
    yield from _cross_attention_modes(comm)
    yield from _query_distributed_modes(comm)


def schedule_modes(comm: Comm, layout: Layout, mask: Mask, ranks_per_node: int, length: int = LENGTH) -> list[Mode]:
    """Return a mode in float32 for every schedule that supports this layout, mask and number of ranks per node."""
    supported = [
        name for name in SCHEDULES if refusal(name, shards(mask, layout, length, comm.world), ranks_per_node) is None
    ]
    return [
        _sharded(comm, f"{name} {_layout_name(layout)} {_mask_name(mask)}", mask, "fp32", layout, length=length,
                 schedule=name, ranks_per_node=ranks_per_node if "+" in name else None)
        for name in supported
    ]  # fmt: skip


def _mode(
    name: str, compute: Compute, mask: Mask, dtype: str, length: int, key_length: int | None = None,
    comm: Comm | None = None, q_offset: int = 0, value_dim: int = HEAD_DIM, scores: Mapping[str, object] | None = None,
) -> Mode:  # fmt: skip
    """Return a mode. `compute` maps the inputs to the whole out, lse, dq, dk, dv, dsinks on every rank of `comm`.

    Without a backward it returns out and lse. `q_offset` is the position of the first query, `scores` are some of
    SCORES.
    """

    def run(seed: int, device: str) -> list[Comparison]:
        inputs = random_inputs(
            length, key_length, heads=(Q_HEADS, KV_HEADS), dtype=DTYPES[dtype], batch=BATCH, head_dim=HEAD_DIM,
            value_dim=value_dim, seed=seed, device=device,
        )  # fmt: skip
        options: dict[str, Any] = {
            name: torch.tensor(x, dtype=torch.float32, device=device) if isinstance(x, list) else x
            for name, x in (scores or {}).items()
        }
        actual = compute(inputs, **options)
        if comm is not None and comm.rank > 0:
            return []
        positions = torch.arange(q_offset, q_offset + length, device=device)
        if len(actual) >= len(NAMES):
            return compare(actual, inputs, mask, q_positions=positions, **options)
        exact, plain = (reference_results(inputs, mask, q_positions=positions, plain=plain) for plain in (False, True))
        return [Comparison(*each) for each in zip(NAMES, actual, exact, plain, strict=False)]

    lengths = f"{length}" if key_length is None else f"{length}:{key_length}"
    widths = f"{HEAD_DIM}" if value_dim == HEAD_DIM else f"{HEAD_DIM}/{value_dim}"
    shape = f"{BATCH}x{Q_HEADS}/{KV_HEADS}x{lengths}x{widths} {dtype}"
    return Mode(name, shape, run, collective=comm is not None)


def _sharded(
    comm: Comm, name: str, mask: Mask, dtype: str, layout: Layout, *, length: int = LENGTH,
    key_length: int | None = None, key_layout: Layout | None = None, schedule: str, backend: str = "auto",
    ranks_per_node: int | None = None, value_dim: int = HEAD_DIM, scores: Mapping[str, object] | None = None,
) -> Mode:  # fmt: skip
    def compute(inputs: list[Tensor], **options: Any) -> list[Tensor]:
        own = shard_results(
            comm, inputs, mask, layout, backend=backend, schedule=schedule, ranks_per_node=ranks_per_node,
            key_layout=key_layout, **options,
        )  # fmt: skip
        return gather_results(comm, own, inputs, layout, key_layout)

    return _mode(name, compute, mask, dtype, length, key_length, comm, value_dim=value_dim, scores=scores)


def _merge_modes() -> Iterator[Mode]:
    def attend(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> State:
        """Merge three uneven parts of the keys; some rows see nothing of some parts."""
        at = torch.arange(k.shape[2], device="cpu")
        parts = [slice(0, 1), slice(1, 90), slice(90, None)]
        states = [
            State(*attention(q, k[:, :, p], v[:, :, p], mask=mask, k_positions=at[p], return_lse=True)) for p in parts
        ]
        out, lse = merge(states)
        return State(out.to(q.dtype), lse)

    for mask in (Full(), Causal(), SlidingWindow(20)):
        yield _mode(f"merge {_mask_name(mask)}", partial(forward_backward, partial(attend, mask)), mask, "fp32", 257)


def _backend_modes(fused: str) -> Iterator[Mode]:
    length = 257
    for backend, dtype, mask in product(("auto", "reference", fused), DTYPES, _masks(length)):
        attend = partial(attention, mask=mask, return_lse=True, backend=backend)
        compute = partial(forward_backward, attend)
        yield _mode(f"attention {backend} {_mask_name(mask)}", compute, mask, dtype, length)


def _ring_modes(comm: Comm, backend: str) -> Iterator[Mode]:
    for layout, dtype, mask in product((Contiguous(), Zigzag(), Striped()), DTYPES, _masks(LENGTH)):
        name = f"ring {backend} {_layout_name(layout)} {_mask_name(mask)}"
        yield _sharded(comm, name, mask, dtype, layout, schedule="ring", backend=backend)


def _schedule_modes(comm: Comm) -> Iterator[Mode]:
    """Yield the other schedules, under every mask, on layouts with different requirements."""
    dtypes = cycle(DTYPES)
    for schedule, ranks_per_node in _schedules(comm.world, ("auto", *list(SCHEDULES)[1:])):
        for mask in _masks(LENGTH):
            for layout in (Zigzag(), Balanced(mask), Joint((100, Zigzag()), (LENGTH - 100, Contiguous()))):
                name = f"{schedule} {_layout_name(layout)} {_mask_name(mask)}"
                dtype = next(dtypes)
                yield _sharded(comm, name, mask, dtype, layout, schedule=schedule, ranks_per_node=ranks_per_node)


def _mask_modes(comm: Comm) -> Iterator[Mode]:
    """Yield the other masks on one device, and each under some schedules and layouts."""
    dtypes, layouts = cycle(DTYPES), cycle((Zigzag(), Contiguous()))
    schedules = cycle(_schedules(comm.world, SCHEDULES))
    for name, mask in _more_masks(LENGTH).items():
        dtype = next(dtypes)
        attend = partial(attention, mask=mask, return_lse=True)
        yield _mode(f"attention auto {name}", partial(forward_backward, attend), mask, dtype, LENGTH)
        for layout in (next(layouts), Balanced(mask)):
            schedule, ranks_per_node = next(schedules)
            yield _sharded(
                comm, f"{schedule} {_layout_name(layout)} {name}", mask, next(dtypes), layout, schedule=schedule,
                ranks_per_node=ranks_per_node,
            )  # fmt: skip


def _score_modes(comm: Comm) -> Iterator[Mode]:
    """Yield softcap, ALiBi, sinks and values of another width, one by one on one device and together over ranks."""
    mask = Causal() & (Global(5) | SlidingWindow(31))

    def compute(inputs: list[Tensor], sinks: Tensor | None = None, **options: Any) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
            return attention(q, k, v, mask=mask, return_lse=True, sinks=sinks, **options)

        return forward_backward(attend, inputs, sinks)

    for name, value in SCORES.items():
        yield _mode(f"attention auto {name}", compute, mask, "fp32", LENGTH, scores={name: value})
    for dtype in DTYPES:
        yield _mode(f"attention auto value_dim={VALUE_DIM}", compute, mask, dtype, LENGTH, value_dim=VALUE_DIM)
    for schedule, ranks_per_node in _schedules(comm.world, SCHEDULES):
        yield _sharded(
            comm, f"{schedule} zigzag softcap alibi sinks value_dim={VALUE_DIM}", mask, "fp32", Zigzag(),
            schedule=schedule, ranks_per_node=ranks_per_node, value_dim=VALUE_DIM, scores=SCORES,
        )  # fmt: skip


def _cross_attention_modes(comm: Comm) -> Iterator[Mode]:
    """Yield queries and keys of different lengths, each with its own layout."""
    for (schedule, ranks_per_node), mask in product(_schedules(comm.world, SCHEDULES), (Full(), Causal())):
        yield _sharded(
            comm, f"cross {schedule} {_mask_name(mask)}", mask, "fp32", Zigzag(), length=201, key_length=77,
            key_layout=Contiguous(), schedule=schedule, ranks_per_node=ranks_per_node,
        )  # fmt: skip


def _query_distributed_modes(comm: Comm) -> Iterator[Mode]:
    """Yield query-distributed attention, with keys and values on every rank."""

    def compute(pairs: int, mask: Mask, inputs: list[Tensor]) -> list[Tensor]:
        own = [x if i < 3 else Zigzag(pairs).shard(x, 2, comm.world, comm.rank) for i, x in enumerate(inputs)]
        q_offset = inputs[1].shape[2] - inputs[0].shape[2]
        attend = partial(
            ring_distributed_attention, group=comm, pairs=pairs, mask=mask, q_offset=q_offset, return_lse=True
        )
        out, lse, dq, dk, dv = forward_backward(attend, own)
        whole = [gather_ring_outputs(x, length=inputs[0].shape[2], group=comm, pairs=pairs) for x in (out, lse)]
        return [*whole, comm.all_reduce(dq), dk, dv]

    def compute_cached(mask: Mask, inputs: list[Tensor]) -> list[Tensor]:
        """Out and lse over K and V in blocks, the last first."""
        q, k, v = inputs[:3]
        blocks = -(-k.shape[2] // BLOCK_SIZE)
        pools = [
            pad(x, (0, 0, 0, blocks * BLOCK_SIZE - x.shape[2])).unflatten(2, (blocks, BLOCK_SIZE)).flip(2)
            .permute(0, 2, 3, 1, 4).flatten(0, 1)
            for x in (k, v)
        ]  # fmt: skip
        table = torch.arange(BATCH * blocks, dtype=torch.int32, device=q.device).view(BATCH, blocks).flip(1)
        local = ring_distributed_attention(
            q, *pools, block_table=table, group=comm, mask=mask, q_offset=k.shape[2] - q.shape[2], return_lse=True
        )
        return [gather_ring_outputs(x, length=q.shape[2], group=comm) for x in local]

    for dtype, pairs in product(DTYPES, (1, 3)):
        name = f"query-distributed pairs={pairs}"
        yield _mode(name, partial(compute, pairs, Causal()), Causal(), dtype, LENGTH, comm=comm)
    for dtype, mask in product(DTYPES, (Causal(), Causal() & SlidingWindow(31))):
        name = f"query-distributed prefix {_mask_name(mask)}"
        for kind, run in (("", partial(compute, 1, mask)), (" paged", partial(compute_cached, mask))):
            yield _mode(name + kind, run, mask, dtype, LENGTH, LENGTH + PREFIX, comm, q_offset=PREFIX)


def _schedules(world: int, names: Iterable[str]) -> list[tuple[str, int | None]]:
    """Return schedules and their ranks per node; two-level schedules only where `world` has two factors."""
    ranks_per_node = next((n for n in range(2, world) if world % n == 0), None)
    return [(name, ranks_per_node if "+" in name else None) for name in names if ranks_per_node or "+" not in name]


def _masks(length: int) -> list[Mask]:
    documents = Documents([1, length // 3, 7, length - length // 3 - 8])
    return [Full(), Causal(), SlidingWindow(31, 5), documents, Causal() & documents, Causal() & SlidingWindow(31)]


def _more_masks(length: int) -> dict[str, Mask]:
    image = range(40, 90)
    return {
        "prefix": Prefix(length // 3),
        "document prefixes": Documents([1, 100, length - 101], prefixes=[1, 30, 0]),
        "chunked": Chunked(60),
        "block-causal": BlockCausal(32),
        "window+global": Causal() & (Global(5) | SlidingWindow(31)),
        "longformer": Global(9, both=True) | SlidingWindow(12, 12),
        "images": Causal() | Slices([(image, image, "full")]),
        "slices": Slices([((0, 90), (3, 200), "inverse_causal"), ((50, length), (100, 180), "bidirectional_causal")]),
        "padding": Causal() & Padding([length - 100, length], side="left", length=length),
        "per sequence": PerSequence([Prefix(50), Causal() & Documents([100, length - 100])]),
    }


def _mask_name(mask: Mask) -> str:
    if isinstance(mask, Or):
        return f"({'|'.join(map(_mask_name, mask.parts))})"
    if isinstance(mask, And):
        return "+".join(map(_mask_name, mask.parts))
    name = type(mask).__name__
    return {"SlidingWindow": "window"}.get(name, name.lower())


def _layout_name(layout: Layout) -> str:
    return type(layout).__name__.lower()
