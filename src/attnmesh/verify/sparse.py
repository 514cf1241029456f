"""Sparse attention and its indexer, forward and backward, and sparse decode, on one device and over ranks.

Keys that no row may read, and unused slots of a cache, are poisoned. The best keys of whole numbers, whose scores are
exact in any order of summation, must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, SoloComm
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.ops.sparse import indexer, reference
from attnmesh.ops.sparse.arguments import convert_lse
from attnmesh.ops.sparse.indexer_loss import AttentionTarget
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.parallel.sparse.api import SparseParallel
from attnmesh.parallel.sparse.decode import SparseDecode
from attnmesh.testing.decode import poison_cache
from attnmesh.testing.errors import ROUNDING, Comparison
from attnmesh.testing.sparse import (
    Functions,
    GridRank,
    OneDevice,
    Reference,
    Results,
    SparseProblem,
    random_sparse_problem,
)
from attnmesh.verify.mode import ALL_DTYPES, DTYPES, Mode, covering_rows

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
        rounding = min(ROUNDING[problem.q.dtype], ROUNDING[torch.float32])
        return [
            Comparison(name, x.cpu(), exact[name], None if name == "best keys" else plain[name], rounding)
            for name, copies in actual.items()
            for x in copies
        ]


def sparse_modes(device: str) -> Iterator[Mode]:
    """Yield every two of operation, mask and precision together."""

    def compare(operation: _Operation, mask: str, dtype: str, seed: int, device: str) -> list[Comparison]:
        problem = _random(_HEADS, mask, dtype, seed)
        results = operation.poisoned_results(OneDevice(), problem, device)
        return operation.compare({name: [x] for name, x in results.items()}, problem)

    operations = (*_OPERATIONS, *_ONE_DEVICE_OPERATIONS)
    for row in covering_rows({"operation": operations, "mask": _MASKS, "dtype": _dtypes(device)}):
        name = f"sparse {row['operation'].name} {row['mask']}"
        yield Mode(name, _shape(_HEADS, row["dtype"]), partial(compare, *row.values()))
    yield Mode("sparse top-k same bits", _shape(_HEADS, "fp32"), _same_topk)


def sparse_parallel_modes(comm: Comm, device: str) -> Iterator[Mode]:
    """Yield every two of operation, mask, grid of ranks, schedule, layout and precision together."""
    heads, several = comm.world + 9, comm.world > 1
    axes: dict[str, Sequence[Any]] = {
        "operation": _OPERATIONS, "mask": _MASKS, "tp": [n for n in range(1, comm.world + 1) if comm.world % n == 0],
        "schedule": ("allgather", "ring") if several else ("allgather",),
        "layout": _LAYOUTS if several else _LAYOUTS[:1], "dtype": _dtypes(device),
    }  # fmt: skip
    alone = "tp", comm.world  # whole sequences: one schedule, one layout
    same = [(alone, ("schedule", "ring")), *((alone, ("layout", layout)) for layout in _LAYOUTS[1:])]
    for row in covering_rows(axes, same):
        operation, mask, tp, schedule, layout, dtype = row.values()
        name = f"sparse {operation.name} {_grid_name(comm, tp, layout, schedule)} {mask}"
        run = partial(_compare_grid, comm, GridRank.of(comm, tp, layout), schedule, operation, mask, dtype)
        yield Mode(name, _shape(heads, dtype), run, collective=True)
    name = f"sparse {_grid_name(comm, 1, Zigzag(), 'allgather')} same bits"
    run = partial(_same_bits_as_one_device, comm, GridRank.of(comm, 1, Zigzag()))
    yield Mode(name, _shape(heads, "bf16"), run, collective=True)


def _dtypes(device: str) -> tuple[str, ...]:
    """Precisions; float64, which no GPU kernel takes, on the CPU only."""
    return (*DTYPES, "fp64") if device == "cpu" else tuple(DTYPES)


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
        ROWS, KEYS, heads=heads, topk=TOPK, width=WIDTH, d_v=D_V, index_width=INDEX_WIDTH, dtype=ALL_DTYPES[dtype],
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


_DIM, _VALUES, _INDEX_DIM, _INDEX_HEADS, _BLOCK, _TOPK, _TOKENS, _SCALE = 144, 128, 16, 3, 4, 9, 2, 0.1
_LENGTHS = (37, 2, 21)


def sparse_decode_modes(comm: Comm) -> Iterator[Mode]:
    """Yield sparse decode from plain and fp8 latents, on one rank and over all, with heads replicated and sharded."""
    for dtype in DTYPES:
        for storage in (dtype, "fp8_ds_mla"):
            shape = f"{comm.world + 3}/1x{_DIM}/{_VALUES} {dtype}"
            name = f"sparse decode {'plain' if storage == dtype else storage}"
            yield Mode(f"{name} one rank", shape, partial(_compare, SoloComm(), storage, dtype, 1, False))
            for interleave, sharded in ((1, False), (3, True)) if comm.world > 1 else ():
                heads = "heads sharded" if sharded else "heads replicated"
                run = partial(_compare, comm, storage, dtype, interleave, sharded)
                yield Mode(f"{name} CP{comm.world} interleave {interleave} {heads}", shape, run, collective=True)


def _compare(
    comm: Comm, storage: str, dtype: str, interleave: int, sharded: bool, seed: int, device: str
) -> list[Comparison]:
    heads = comm.world + 3
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(DTYPES[dtype])

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device="cpu").to(DTYPES[dtype])

    latents, index_keys = [normal(n, _DIM) for n in _LENGTHS], [whole(n, _INDEX_DIM) for n in _LENGTHS]
    batch = len(_LENGTHS), _TOKENS
    q, sinks = normal(*batch, heads, _DIM), normal(heads).float()
    iq, w = whole(*batch, _INDEX_HEADS, _INDEX_DIM), whole(*batch, _INDEX_HEADS)
    by_rank = [heads // comm.world + (rank < heads % comm.world) for rank in range(comm.world)]
    own = slice(sum(by_rank[: comm.rank]), sum(by_rank[: comm.rank + 1])) if sharded else slice(heads)
    decode = SparseDecode(comm, interleave=interleave, heads=by_rank if sharded else None)
    cache = _written_cache(decode, storage, latents, index_keys, device)
    top = decode.indexer_topk(
        iq.to(device), cache.index_keys(0), cache.block_table, w.to(device), _TOPK, cur_pos=[n - 1 for n in _LENGTHS]
    )
    out, lse = decode.attention(
        q[:, :, own].to(device), cache.keys(0), cache.block_table, top.indices, scale=_SCALE, d_v=_VALUES,
        sinks=sinks[own].to(device),
    )  # fmt: skip
    if comm.rank:
        return []
    index_storage = storage if storage in PLAIN else "fp8_token"
    keys = _best_keys([_stored(x, index_storage) for x in index_keys], iq, w)
    exact, plain = (
        _paged_attention([_stored(x, storage) for x in latents], q[:, :, own], sinks[own], keys, precision)
        for precision in (torch.float64, DTYPES[dtype])
    )
    return [
        Comparison("indices", top.indices.cpu(), keys),
        Comparison("out", out.cpu(), exact[0], plain[0]),
        Comparison("lse", lse.cpu(), exact[1], plain[1]),
    ]


def _written_cache(
    decode: SparseDecode, storage: str, latents: list[Tensor], index_keys: list[Tensor], device: str
) -> BlockCache:
    cache = BlockCache(
        CacheSpec(
            layers=1, kv_heads=1, head_dim=_DIM, value_dim=_VALUES, index_dim=_INDEX_DIM, storage=storage, latent=True
        ),
        num_blocks=32, block_size=_BLOCK, max_sequences=len(_LENGTHS), max_length=64, device=device,
        shard=decode.shard,
    )  # fmt: skip
    poison_cache(cache.keys(0))
    poison_cache(cache.index_keys(0))
    for latent, index in zip(latents, index_keys, strict=True):
        new = cache.append([cache.allocate(len(latent))], len(latent))
        cache.write(0, new, latent.to(device)[None, None], index_k=index.to(device)[None, None])
    return cache


def _stored(x: Tensor, storage: str) -> Tensor:
    """Keys [n, D] in float64, as they come back from a cache."""
    return dequantize(quantize(x[:, None, None], storage), torch.float64, head_axis=2)[:, 0, 0]


def _best_keys(index_keys: list[Tensor], iq: Tensor, w: Tensor) -> Tensor:
    """The top-k of every token, ascending, then -1: int32 [B, T, topk]."""
    found = torch.full((*iq.shape[:2], _TOPK), -1, dtype=torch.int32, device="cpu")
    for b, keys in enumerate(index_keys):
        scores = reference.index_scores(iq[b].double(), keys, w[b].double())
        at = torch.arange(len(keys), device="cpu")
        visible = at <= at[-_TOKENS:, None]
        for t, row in enumerate(reference.topk_keys(scores, visible, _TOPK)):
            found[b, t, : len(row)] = torch.tensor(row, dtype=torch.int32, device="cpu")
    return found


def _paged_attention(
    latents: list[Tensor], q: Tensor, sinks: Tensor, keys: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Out and lse by the plain computation in a precision, from one block per sequence."""
    pool = torch.zeros(len(latents), max(map(len, latents)), _DIM, dtype=dtype, device="cpu")
    for b, latent in enumerate(latents):
        pool[b, : len(latent)] = latent.to(dtype)
    table = torch.arange(len(latents), device="cpu")[:, None]
    out, lse, _ = reference.paged_attend(q.to(dtype), pool, table, keys, _SCALE, _VALUES, None, sinks.to(dtype))
    return out, lse
