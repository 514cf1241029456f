"""Attention on one device and over ranks: out, lse, dq, dk, dv and the gradient through lse.

The axes of the table are below. Every two values of two axes occur together in some mode, and every schedule and
backend with the first values of the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.comm import Comm
from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from attnmesh.core.state import State, merge
from attnmesh.ops.dense.api import attention
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_distributed_attention
from attnmesh.plan.shards import SCHEDULES, shards, why_not
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
from attnmesh.verify.mode import ALL_DTYPES, DTYPES, Mode, Pair, covering_rows

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
LENGTH = 263
PREFIX, BLOCK_SIZE = 150, 16  # of prompts that continue a prefix

LAYOUTS: dict[str, Callable[[Mask, int], Layout]] = {
    "zigzag": lambda mask, length: Zigzag(),
    "contiguous": lambda mask, length: Contiguous(),
    "zigzag of two pairs": lambda mask, length: Zigzag(2),
    "striped": lambda mask, length: Striped(),
    "balanced": lambda mask, length: Balanced(mask),
    "joint": lambda mask, length: Joint((length - length // 3, Zigzag()), (length // 3, Contiguous())),
}
"""Layouts by name, of a mask and a length."""

MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda n: Causal(),
    "full": lambda n: Full(),
    "window": lambda n: SlidingWindow(31, 5),
    "documents": lambda n: _documents(n),
    "causal+documents": lambda n: Causal() & _documents(n),
    "causal+window": lambda n: Causal() & SlidingWindow(31),
    "causal+window+documents": lambda n: Causal() & SlidingWindow(6, 2) & _documents(n),
    "prefix": lambda n: Prefix(n // 3),
    "document prefixes": lambda n: Documents([1, n // 2, n - n // 2 - 1], prefixes=[1, n // 8, 0]),
    "chunked": lambda n: Chunked(n // 4),
    "block-causal": lambda n: BlockCausal(n // 8),
    "window+global": lambda n: Causal() & (Global(5) | SlidingWindow(31)),
    "longformer": lambda n: Global(9, both=True) | SlidingWindow(12, 12),
    "images": lambda n: Causal() | Slices([(range(n // 7, n // 3), range(n // 7, n // 3), "full")]),
    "slices": lambda n: Slices(
        [((0, n // 3), (3, 2 * n // 3), "inverse_causal"), ((n // 5, n), (n // 2, n), "bidirectional_causal")]
    ),
    "padding": lambda n: Causal() & Padding([n - n // 3, n], side="left", length=n),
    "per sequence": lambda n: PerSequence([Prefix(n // 5), Causal() & Documents([n // 3, n - n // 3])]),
}
"""Masks by name, of a length."""

SCORES: dict[str, dict[str, Callable[[int], Tensor | float]]] = {
    "softcap": {"softcap": lambda heads: 2.0},
    "alibi": {"alibi_slopes": lambda heads: 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device="cpu"))},
    "sinks": {"sinks": lambda heads: torch.linspace(-1, 2, heads, dtype=torch.float32, device="cpu")},
}
SCORES |= {"": {}, "softcap alibi sinks": SCORES["softcap"] | SCORES["alibi"] | SCORES["sinks"]}
"""Arguments that change scores, of the number of query heads."""

_INPUTS: dict[str, tuple[object, ...]] = {
    "mask": tuple(MASKS),
    "length": ((LENGTH, LENGTH), (37, 37), (201, 77), (37, 110)),  # of the queries and of the keys
    "heads": ((Q_HEADS, KV_HEADS), (6, 6), (5, 1)),
    "widths": ((HEAD_DIM, HEAD_DIM), (24, 16), (16, 40)),  # of keys and of values
    "scores": ("", "softcap", "alibi", "sinks", "softcap alibi sinks"),
    "dtype": tuple(ALL_DTYPES),
}

Compute = Callable[..., list[Tensor]]  # of the inputs, and of the arguments that change scores


def attention_modes(comm: Comm, device: str, *, pairs: bool = True) -> Iterator[Mode]:
    """Yield the modes of dense attention; without `pairs`, few in which every value of every axis occurs."""
    yield from _one_device_modes(device, pairs)
    yield from _sharded_modes(comm, device, pairs)
    if pairs:
        yield from _merge_modes()
        yield from _query_distributed_modes(comm)


def schedule_modes(comm: Comm, layout: Layout, mask: Mask, ranks_per_node: int, length: int = LENGTH) -> list[Mode]:
    """Return a mode in float32 for every schedule that supports this layout, mask and number of ranks per node."""
    supported = [
        name for name in SCHEDULES if why_not(name, shards(mask, layout, length, comm.world), ranks_per_node) is None
    ]
    kinds = f"{type(layout).__name__} {'+'.join(type(part).__name__ for part in getattr(mask, 'parts', [mask]))}"
    return [
        _mode(f"{name} {kinds.lower()}", _sharded(comm, mask, layout, None, schedule=name,
              ranks_per_node=ranks_per_node if "+" in name else None), mask, "fp32", length, comm=comm)
        for name in supported
    ]  # fmt: skip


def _mode(
    name: str, compute: Compute, mask: Mask, dtype: str, length: int, key_length: int | None = None,
    comm: Comm | None = None, q_offset: int = 0, heads: tuple[int, int] = (Q_HEADS, KV_HEADS),
    widths: tuple[int, int] = (HEAD_DIM, HEAD_DIM), scores: Mapping[str, Any] | None = None,
) -> Mode:  # fmt: skip
    """Return a mode. `compute` maps the inputs to the whole out, lse, dq, dk, dv, dsinks on every rank of `comm`.

    Without a backward it returns out and lse. `q_offset` is the position of the first query, `scores` is a value of
    SCORES.
    """
    key_length = length if key_length is None else key_length

    def run(seed: int, device: str) -> list[Comparison]:
        inputs = random_inputs(
            length, key_length, heads=heads, dtype=ALL_DTYPES[dtype], batch=BATCH, head_dim=widths[0],
            value_dim=widths[1], seed=seed, device=device,
        )  # fmt: skip
        made = {name: make(heads[0]) for name, make in (scores or {}).items()}
        wide = torch.promote_types(ALL_DTYPES[dtype], torch.float32)
        options: dict[str, Any] = {name: x.to(device, wide) if isinstance(x, Tensor) else x for name, x in made.items()}
        actual = compute(inputs, **options)
        if comm is not None and comm.rank > 0:
            return []
        positions = torch.arange(q_offset, q_offset + length, device=device)
        if len(actual) >= len(NAMES):
            return compare(actual, inputs, mask, q_positions=positions, **options)
        exact, plain = (reference_results(inputs, mask, q_positions=positions, plain=plain) for plain in (False, True))
        return [Comparison(*each) for each in zip(NAMES, actual, exact, plain, strict=False)]

    lengths, dims = (f"{a}" if a == b else between.join((f"{a}", f"{b}"))
                     for (a, b), between in (((length, key_length), ":"), (widths, "/")))  # fmt: skip
    return Mode(name, f"{BATCH}x{heads[0]}/{heads[1]}x{lengths}x{dims} {dtype}", run, collective=comm is not None)


def _table_mode(name: str, compute: Compute, mask: Mask, row: Mapping[str, Any], comm: Comm | None = None) -> Mode:
    """Return the mode of a row of the table."""
    return _mode(
        " ".join(filter(None, (name, row["mask"], row["scores"]))), compute, mask, row["dtype"], row["length"][0],
        row["length"][1], comm, heads=row["heads"], widths=row["widths"], scores=SCORES[row["scores"]],
    )  # fmt: skip


def _unserved(device: str) -> list[Pair]:
    """Pairs of values that the fused kernels of a device do not serve."""
    if device == "cpu":
        return [(("backend", "aten"), ("scores", name)) for name in SCORES if name not in ("", "sinks")]
    return [(("backend", "triton"), ("dtype", "fp64"))]


def _one_device_modes(device: str, pairs: bool) -> Iterator[Mode]:
    axes = {"backend": ("auto", "reference", _fused(device)), **_INPUTS}
    common = _first_values(axes, "backend")

    def compute(
        mask: Mask, backend: Any, inputs: list[Tensor], sinks: Tensor | None = None, **how: Any
    ) -> list[Tensor]:
        attend = partial(attention, mask=mask, return_lse=True, backend=backend, **how)
        return forward_backward(lambda q, k, v, sinks=None: attend(q, k, v, sinks=sinks), inputs, sinks)

    for row in covering_rows(axes, _unserved(device), pairs=pairs, start=common if pairs else ()):
        mask = MASKS[row["mask"]](row["length"][1])
        yield _table_mode(f"attention {row['backend']}", partial(compute, mask, row["backend"]), mask, row)


def _sharded_modes(comm: Comm, device: str, pairs: bool) -> Iterator[Mode]:
    """Yield the schedules; those with two levels only where the number of ranks has two factors."""
    ranks_per_node = next((n for n in range(2, comm.world) if comm.world % n == 0), None)
    names = [name for name in (*SCHEDULES, "auto") if ranks_per_node or "+" not in name]
    axes = {"schedule": names, "layout": tuple(LAYOUTS), "backend": ("auto", _fused(device)), **_INPUTS}
    interleaved = [(("schedule", name), ("layout", "striped")) for name in names if name.startswith("ulysses+")]
    common = _first_values(axes, "schedule")
    for row in covering_rows(axes, [*_unserved(device), *interleaved], pairs=pairs, start=common if pairs else ()):
        length, key_length = row["length"]
        mask, layout = MASKS[row["mask"]](key_length), LAYOUTS[row["layout"]](MASKS[row["mask"]](length), length)
        compute = _sharded(
            comm, mask, layout, None if length == key_length else Contiguous(), schedule=row["schedule"],
            backend=row["backend"], ranks_per_node=ranks_per_node if "+" in row["schedule"] else None,
        )  # fmt: skip
        yield _table_mode(f"{row['schedule']} {row['backend']} {row['layout']}", compute, mask, row, comm)


def _first_values(axes: Mapping[str, Sequence[Any]], name: str) -> list[dict[str, Any]]:
    """Return every value of one axis with the first values of the others, in two precisions."""
    first = {axis: values[0] for axis, values in axes.items()}
    return [first | {name: value, "dtype": dtype} for value, dtype in product(axes[name], DTYPES)]


def _sharded(comm: Comm, mask: Mask, layout: Layout, key_layout: Layout | None, **how: Any) -> Compute:
    def compute(inputs: list[Tensor], **options: Any) -> list[Tensor]:
        own = shard_results(comm, inputs, mask, layout, key_layout=key_layout, **how, **options)
        return gather_results(comm, own, inputs, layout, key_layout)

    return compute


def _fused(device: str) -> str:
    return "aten" if device == "cpu" else "triton"


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

    for name in ("full", "causal", "window"):
        mask = MASKS[name](LENGTH)
        yield _mode(f"merge {name}", partial(forward_backward, partial(attend, mask)), mask, "fp32", LENGTH)


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
    for dtype, mask_name in product(DTYPES, ("causal", "causal+window")):
        name, mask = f"query-distributed prefix {mask_name}", MASKS[mask_name](LENGTH)
        for kind, run in (("", partial(compute, 1, mask)), (" paged", partial(compute_cached, mask))):
            yield _mode(name + kind, run, mask, dtype, LENGTH, LENGTH + PREFIX, comm, q_offset=PREFIX)


def _documents(length: int) -> Documents:
    """Documents of one token, a third, none, and the rest."""
    return Documents([1, length // 3, 0, length - length // 3 - 1])
