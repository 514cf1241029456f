"""Sparse attention and its indexer, forward and backward, on one device and over a grid of ranks.

Keys that no row may read are poisoned. The best keys of whole numbers, whose scores are exact in any order of
summation, must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.ops.sparse import indexer
from attnmesh.ops.sparse.arguments import convert_lse
from attnmesh.ops.sparse.indexer_loss import AttentionTarget
from attnmesh.parallel.sparse.api import SparseParallel
from attnmesh.testing.errors import Comparison
from attnmesh.testing.sparse import (
    Functions,
    GridRank,
    OneDevice,
    Reference,
    Results,
    SparseProblem,
    random_sparse_problem,
)
from attnmesh.verify.mode import DTYPES, Mode

ROWS, KEYS, TOPK, WIDTH, D_V, INDEX_WIDTH = 37, 53, 19, 40, 24, 16
SCALE, INDEX_SCALE = WIDTH**-0.5, INDEX_WIDTH**-0.5
_HEADS, _HEAD_GROUP = 10, 4
_MASKS = ("no mask", "causal", "causal strided", "documents")
_LAYOUTS: tuple[Layout, ...] = (Zigzag(), Contiguous(), Striped())


@dataclass(frozen=True)
class _Operation:
    """One function of the sparse family and its gradients, by the library or by the reference functions."""

    name: str
    run: Callable[[Any, SparseProblem], Results]
    over_indices: bool = True  # or over all keys that the mask shows

    def poisoned_results(self, functions: Functions, problem: SparseProblem, device: str) -> Results:
        """Return the results for a problem with poison in the keys that must not be read."""
        return self.run(functions, problem.poisoned(self.over_indices).on(device))

    def compare(self, actual: dict[str, list[Tensor]], problem: SparseProblem) -> list[Comparison]:
        """Return a comparison for every copy of every result; keys must be equal."""
        exact, plain = (self.run(Reference(), each) for each in (problem.to(torch.float64), problem))
        return [
            Comparison(name, x.cpu(), exact[name], None if name == "best keys" else plain[name])
            for name, copies in actual.items()
            for x in copies
        ]


def sparse_modes() -> Iterator[Mode]:
    """Yield every operation under every mask, and in both precisions."""

    def compare(operation: _Operation, mask: str, dtype: str, seed: int, device: str) -> list[Comparison]:
        problem = _random(_HEADS, mask, dtype, seed)
        results = operation.poisoned_results(OneDevice(), problem, device)
        return operation.compare({name: [x] for name, x in results.items()}, problem)

    for operation in (*_OPERATIONS, *_ONE_DEVICE_OPERATIONS):
        for number, mask in enumerate(_MASKS):
            for dtype in DTYPES if number == 0 else (list(DTYPES)[number % 2],):
                run = partial(compare, operation, mask, dtype)
                yield Mode(f"sparse {operation.name} {mask}", _shape(_HEADS, dtype), run)
    yield Mode("sparse top-k same bits", _shape(_HEADS, "fp32"), _same_topk)


def sparse_parallel_modes(comm: Comm) -> Iterator[Mode]:
    """Yield every operation on every grid of ranks, under both schedules; layouts, masks, precisions in turn."""
    heads, number = comm.world + 9, 0
    for tp, operation in product((n for n in range(1, comm.world + 1) if comm.world % n == 0), _OPERATIONS):
        for schedule in ("allgather", "ring") if tp < comm.world else ("allgather",):
            layout, mask, dtype = _LAYOUTS[number % 3], _MASKS[number % 4], list(DTYPES)[number // 4 % 2]
            number += 1
            name = f"sparse {operation.name} {_grid_name(comm, tp, layout, schedule)} {mask}"
            run = partial(_compare_grid, comm, GridRank.of(comm, tp, layout), schedule, operation, mask, dtype)
            yield Mode(name, _shape(heads, dtype), run, collective=True)
    name = f"sparse {_grid_name(comm, 1, Zigzag(), 'allgather')} same bits"
    run = partial(_same_bits_as_one_device, comm, GridRank.of(comm, 1, Zigzag()))
    yield Mode(name, _shape(heads, "bf16"), run, collective=True)


def _shape(heads: int, dtype: str) -> str:
    return f"{heads}/1x{ROWS}:{KEYS}x{WIDTH}/{D_V} {dtype}"


def _grid_name(comm: Comm, tp: int, layout: Layout, schedule: str) -> str:
    cp = comm.world // tp
    sizes = "-".join(f"{name}{size}" for name, size in (("TP", tp), ("CP", cp)) if size > 1) or "TP1"
    return f"{sizes} {schedule} {type(layout).__name__.lower()}" if cp > 1 else sizes


def _random(heads: int, mask: str, dtype: str, seed: int) -> SparseProblem:
    """Return a problem. Each mask but the first hides some keys from all rows; the last two leave some rows empty."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (ROWS,), generator=generator, device="cpu")

    fields: dict[str, Any] = {}
    match mask:
        case "causal":
            fields = {"causal": True, "q_start": KEYS - ROWS - 3}
        case "causal strided":
            fields = {"causal": True, "k_stride": 3, "q_positions": integers(0, 3 * (KEYS - 4))}
            fields["topk_length"] = integers(0, TOPK + 5)
        case "documents":
            start = integers(0, KEYS - 4)
            fields = {"k_start": start, "k_end": (start + integers(0, 30)).clamp(max=KEYS - 3)}
    return random_sparse_problem(
        ROWS, KEYS, heads=heads, topk=TOPK, width=WIDTH, d_v=D_V, index_width=INDEX_WIDTH, dtype=DTYPES[dtype],
        seed=seed, **fields,
    )  # fmt: skip


def _grid_results(
    place: GridRank, schedule: Any, operation: _Operation, problem: SparseProblem, device: str
) -> dict[str, list[Tensor]]:
    parallel = SparseParallel(
        tp=place.tp, cp=place.cp, length=ROWS, key_length=KEYS, layout=place.layout, schedule=schedule
    )
    own = operation.run(parallel, problem.poisoned(operation.over_indices).shard(place).on(device))
    return {name: place.gather(name, x, problem) for name, x in own.items()}


def _compare_grid(
    comm: Comm, place: GridRank, schedule: str, operation: _Operation, mask: str, dtype: str, seed: int, device: str
) -> list[Comparison]:
    problem = _random(comm.world + 9, mask, dtype, seed)
    actual = _grid_results(place, schedule, operation, problem, device)
    return operation.compare(actual, problem) if comm.rank == 0 else []


def _same_bits_as_one_device(comm: Comm, place: GridRank, seed: int, device: str) -> list[Comparison]:
    """With all-gathered keys, every row is computed as on one device.

    The BLAS of a CPU may take another path for fewer rows: there only the chosen keys must be equal.
    """
    problem = _random(comm.world + 9, "causal", "bf16", seed)
    equal = {"best scores", "best keys"}
    if device != "cpu":
        equal |= {"out", "lse", "dq", "attn_sum", "sum", "normalized", "loss"}
    results = []
    for operation in _OPERATIONS:
        actual = _grid_results(place, "allgather", operation, problem, device)
        if comm.rank == 0:
            alone = operation.poisoned_results(OneDevice(), problem, device)
            names = sorted(equal & actual.keys())
            results += [Comparison(f"{name} bits", actual[name][0], alone[name]) for name in names]
    return results


def _same_topk(seed: int, device: str) -> list[Comparison]:
    """Top-k over blocks of keys of different sizes, bitwise."""
    problem = _random(_HEADS, "causal", "fp32", seed).on(device)
    inputs = problem.iq, problem.ik, problem.w
    one, other = (indexer.indexer_topk(*inputs, TOPK, mask=problem.mask, block_size=n) for n in (7, 4096))
    assert one.scores is not None
    assert other.scores is not None
    return [Comparison("indices bits", one.indices, other.indices), Comparison("scores bits", one.scores, other.scores)]


def _with_gradients(outputs: Results, inputs: Results, *grads: Tensor) -> Results:
    """Return outputs and the gradients of some inputs; an output of -inf has no gradient."""
    weights = [torch.where(torch.isfinite(x), g.to(x.dtype), 0.0) for x, g in zip(outputs.values(), grads, strict=True)]
    found = torch.autograd.grad(list(outputs.values()), list(inputs.values()), weights)
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(inputs, found, strict=True))


def _attention(functions: Functions, problem: SparseProblem) -> Results:
    """Values in the keys, and sinks."""
    q, kv, sinks = problem.leaves("q", "kv", "sinks")
    out, lse, attn_sum = functions.sparse_attention(
        q, kv, problem.indices, scale=SCALE, d_v=D_V, mask=problem.mask, sinks=sinks, return_attn_sum=True
    )
    inputs = {"dq": q, "dkv": kv, "dsinks": sinks}
    results = _with_gradients({"out": out, "lse": lse}, inputs, problem.grad_out, problem.grad_lse)
    return results | {"attn_sum": attn_sum}


def _attention_own_values(functions: Functions, problem: SparseProblem) -> Results:
    """Separate values and no sinks: rows without a key are empty."""
    q, k, v = problem.leaves("q", "kv", "v")
    out, lse = functions.sparse_attention(
        q, k, problem.indices, scale=SCALE, v=v, mask=problem.mask, deterministic=True
    )
    inputs = {"dq": q, "dk": k, "dv": v}
    return _with_gradients({"out": out, "lse": lse}, inputs, problem.grad_out, problem.grad_lse)


def _distribution(functions: Functions, problem: SparseProblem) -> Results:
    run = partial(
        functions.attention_distribution, problem.q, problem.kv, problem.indices, scale=SCALE, mask=problem.mask
    )
    binary = convert_lse(problem.lse, "e", "2")
    return {"sum": run(problem.lse), "normalized": run(binary, lse_base="2", normalize=True)}


def _distribution_groups(functions: Functions, problem: SparseProblem) -> Results:
    groups = functions.attention_distribution(
        problem.q, problem.kv, problem.indices, problem.lse, scale=SCALE, mask=problem.mask, head_group=_HEAD_GROUP
    )
    return {"groups": groups}


def _index_scores(functions: Functions, problem: SparseProblem) -> Results:
    iq, ik, w = problem.leaves("iq", "ik", "w")
    scores = functions.indexer_scores_at(iq, ik, w, problem.indices, scale=INDEX_SCALE, mask=problem.mask)
    return _with_gradients({"scores": scores}, {"d_iq": iq, "d_ik": ik, "d_w": w}, problem.grad_scores)


def _topk(functions: Functions, problem: SparseProblem) -> Results:
    inputs, mask = (problem.iq, problem.ik, problem.w), problem.all_keys_mask
    scores = functions.indexer_topk(*inputs, TOPK, scale=INDEX_SCALE, mask=mask).scores
    assert scores is not None
    iq, ik, w = (x.round() for x in inputs)
    keys = functions.indexer_topk(iq, ik, w, TOPK, mask=mask).indices
    return {"best scores": scores.sort(descending=True).values, "best keys": keys}


def _loss(functions: Functions, problem: SparseProblem) -> Results:
    """The loss of every row, over the keys its indices name."""
    iq, ik, w = problem.leaves("iq", "ik", "w")
    rows = functions.indexer_kl_loss(
        iq, ik, w, problem.indices, AttentionTarget(problem.q, problem.kv, problem.lse, SCALE), mask=problem.mask,
        scale=INDEX_SCALE, reduction="none",
    )  # fmt: skip
    return _with_gradients({"loss": rows}, {"d_iq": iq, "d_ik": ik, "d_w": w}, problem.grad_loss)


def _dense_loss(functions: Functions, problem: SparseProblem) -> Results:
    """The mean loss over some of the rows, over all keys."""
    iq, ik, w = problem.leaves("iq", "ik", "w")
    mean = functions.indexer_kl_loss(
        iq, ik, w, None, AttentionTarget(problem.q, problem.kv, problem.lse, SCALE), mask=problem.all_keys_mask,
        scale=INDEX_SCALE, reduction="mean_rows", row_mask=problem.grad_loss > -1,
    )  # fmt: skip
    return _with_gradients({"mean": mean}, {"d_iq": iq, "d_ik": ik, "d_w": w}, torch.ones_like(mean))


_OPERATIONS = (
    _Operation("attention", _attention),
    _Operation("distribution", _distribution),
    _Operation("top-k", _topk, over_indices=False),
    _Operation("loss", _loss),
    _Operation("dense loss", _dense_loss, over_indices=False),
)
_ONE_DEVICE_OPERATIONS = (
    _Operation("attention own values", _attention_own_values),
    _Operation("distribution head_group", _distribution_groups),
    _Operation("index scores", _index_scores),
)
