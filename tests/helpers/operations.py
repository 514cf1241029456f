"""Every public operation on tensors as a function of named tensors, for tests that change how these are given.

An `Operation` makes small random inputs and computes named results of them, on one device or over virtual ranks. The
same function computes the results in float64, by the reference where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.state import State
from attnmesh.ops.storage import Quantized

Tensors = dict[str, Tensor]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Operation:
    """Results of `run(inputs, backend)` for the inputs of `make(random)`. `covers` are the public names it calls.

    `grads` are the inputs with a gradient. `exact` is the backend for float64, None where results do not approach those
    of float64 (they are quantized). `truth` computes float64 in another way. `rows` have a contiguous last dimension.
    """

    name: str
    covers: tuple[str, ...]
    make: Callable[[Random], Tensors]
    run: Callable[[Tensors, str], Tensors]
    grads: tuple[str, ...] = ()
    backend: str = "auto"
    exact: str | None = "auto"
    rows: tuple[str, ...] = ()
    truth: Callable[[Tensors], Tensors] | None = None

    def inputs(self, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensors:
        """Return random inputs, contiguous."""
        made = self.make(Random(seed))
        return {name: x.to(device, dtype if x.dtype == torch.float32 else None) for name, x in made.items()}

    def results(
        self, inputs: Tensors, *, exact: bool = False, vary: Callable[[str, Tensor], Tensor] | None = None
    ) -> Tensors:
        """Return all results and gradients. `vary` changes the gradients of the results."""
        if exact:
            inputs = {name: x.cpu().double() if x.dtype in FLOATS else x.cpu() for name, x in inputs.items()}
            if self.truth is not None:
                return self.truth(inputs)
        inputs = {name: x.detach().requires_grad_(name in self.grads) for name, x in inputs.items()}
        results = self.run(inputs, self.exact if exact else self.backend)
        sources = {name: x for name, x in results.items() if x.requires_grad}
        if sources:
            random = Random(7)
            given = []
            for name, x in sources.items():
                grad = random.normal(*x.shape).to(x.device)
                given.append((vary or _same)(name, grad).to(x.dtype))
            leaves = [inputs[name] for name in self.grads]
            found = torch.autograd.grad(list(sources.values()), leaves, given, allow_unused=True)
            results = results | {f"d{name}": x for name, x in zip(self.grads, found, strict=True) if x is not None}
        return {name: x.detach() for name, x in results.items()}


def _same(name: str, x: Tensor) -> Tensor:
    return x


class Random:
    """Random tensors on the CPU, the same for a seed whatever the default device and dtype are."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Return float32 numbers."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device="cpu")

    def order(self, count: int) -> Tensor:
        """Return a permutation."""
        return torch.randperm(count, generator=self._generator, device="cpu")

    def some(self, *shape: int, odds: float = 0.6) -> Tensor:
        """Return True with the given odds."""
        return torch.rand(*shape, generator=self._generator, dtype=torch.float32, device="cpu") < odds


def over_ranks(world: int, program: Callable[[am.comm.Comm], Tensors]) -> Tensors:
    """Run a program on virtual ranks, under the default device of the caller; results are named by rank."""
    device = torch.get_default_device()

    def on_device(comm: am.comm.Comm) -> Tensors:
        with device:
            return program(comm)

    results = am.run_virtual(world, on_device)
    return {f"{name} {rank}": x for rank, each in enumerate(results) for name, x in each.items()}


# Dense attention and merges.


def _qkv(random: Random, length: int = 9, keys: int | None = None, heads: int = 4, dim: int = 16) -> Tensors:
    shapes = {"q": (2, heads, length, dim), "k": (2, 2, keys or length, dim), "v": (2, 2, keys or length, dim)}
    return {name: random.normal(*shape) for name, shape in shapes.items()}


def _attention(mask: am.Mask, dim: int = 16, **made: Callable[[Random], Tensor]) -> Any:
    def make(random: Random) -> Tensors:
        return _qkv(random, dim=dim) | {name: one(random) for name, one in made.items()}

    def run(x: Tensors, backend: str) -> Tensors:
        out, lse = am.attention(**x, mask=mask, return_lse=True, backend=backend)
        return {"out": out, "lse": lse}

    return make, run


def _merge(x: Tensors, backend: str) -> Tensors:
    return am.merge([State(x[f"out{i}"], x[f"lse{i}"]) for i in range(3)])._asdict()


def _merge_sinks(x: Tensors, backend: str) -> Tensors:
    return am.decode.merge_sinks(State(x["out"], x["lse"]), x["sinks"])._asdict()


def _states(random: Random) -> Tensors:
    return {f"out{i}": random.normal(2, 3, 5, 4) for i in range(3)} | {
        f"lse{i}": random.normal(2, 3, 5) for i in range(3)
    }


WINDOW = am.Causal() & am.SlidingWindow(2)
PER_HEAD = ("sinks", "alibi_slopes")
POSITIONS = {"q_positions": lambda random: random.order(9) * 2, "k_positions": lambda random: random.order(9) * 2}


def _per_head(random: Random) -> Tensor:
    return random.normal(4)


def dense_operations(backend: str, exact: str = "reference") -> list[Operation]:
    """Return `attention` with this backend."""
    cases = {
        "full": _attention(am.Full()),
        "causal": _attention(am.Causal(), 24),
        "window": _attention(WINDOW),
        "irregular": _attention(WINDOW, **POSITIONS),
    }
    operations = [
        Operation(f"attention {backend} {name}", ("attention",), *case, ("q", "k", "v"), backend, exact)
        for name, case in cases.items()
    ]
    if backend in ("torch", "auto"):  # values of another width, and a term of the scores for every head
        terms = {"v": lambda random: random.normal(2, 2, 9, 24), **dict.fromkeys(PER_HEAD, _per_head)}
        case = _attention(am.Causal(), **terms)
        operations.append(
            Operation(f"attention {backend} terms", ("attention",), *case, ("q", "k", "v", "sinks"), backend, exact)
        )
    return operations


# Decode.


def _caches(random: Random, heads: int = 2, tokens: int = 2, length: int = 21, dim: int = 16) -> Tensors:
    keys = {name: random.normal(3, 2, length, dim) for name in "kv"}
    return {"q": random.normal(3, heads, tokens, dim)} | keys


DECODE_OPTIONS: dict[str, Callable[[Random], Tensors]] = {
    "plain": lambda random: {},
    "one token": lambda random: _caches(random, tokens=1),
    "group": lambda random: _caches(random, heads=6, tokens=3),
    "odd": lambda random: _caches(random, dim=5),
    "value dim": lambda random: {"v": random.normal(3, 2, 21, 9)},
    "cur_pos": lambda random: {"cur_pos": random.integers(-1, 21, 3), "sinks": random.normal(2)},
    "mask": lambda random: {"mask": random.some(3, 2, 2, 21)},
    "bias": lambda random: {"mask": random.normal(3, 2, 2, 17)},
    "tree": lambda random: {"tree": random.some(3, 2, 2)},
    "key_range": lambda random: {
        "first": random.integers(0, 9, 3, 2).sort(1).values,
        "end": random.integers(9, 22, 3, 2).sort(1).values,
    },
}


def _decode_options(x: Tensors) -> dict[str, Any]:
    options: dict[str, Any] = {name: x[name] for name in ("cur_pos", "mask", "tree", "sinks") if name in x}
    if "first" in x:
        options["key_range"] = (x["first"], x["end"])
    return options


def _decode(x: Tensors, backend: str) -> Tensors:
    out, lse = am.decode_attention(x["q"], x["k"], x["v"], **_decode_options(x), return_lse=True, backend=backend)
    return {"out": out, "lse": lse}


def _pages(random: Random) -> Tensors:
    """A pool of 8 blocks of 4, in a random order, for three sequences."""
    pools = {"k": random.normal(8, 4, 2, 16), "v": random.normal(8, 4, 2, 16)}
    table = random.integers(0, 8, 3, 6)
    return {"q": random.normal(3, 2, 2, 16), **pools, "table": table, "cur_pos": random.integers(-1, 24, 3)}


def _paged(x: Tensors, backend: str) -> Tensors:
    options = _decode_options(x) | {"return_lse": True, "backend": backend}
    out, lse = am.paged_decode_attention(x["q"], x["k"], x["v"], x["table"], **options)
    into = State(x["q"].new_empty(3, 2, 2, 17)[..., :16], x["q"].new_empty(3, 2, 2, 2, dtype=lse.dtype)[..., 0])
    am.paged_decode_attention(x["q"], x["k"], x["v"], x["table"], into=into, **options)
    return {"out": out, "lse": lse, "into.out": into.out, "into.lse": into.lse}


def _prefill_pages(random: Random) -> Tensors:
    return _pages(random) | {"q": random.normal(3, 2, 11, 16)}


def _paged_prefill(x: Tensors, backend: str) -> Tensors:
    out, lse = am.decode.paged_prefill_attention(
        x["q"], x["k"], x["v"], x["table"], cur_pos=x["cur_pos"], return_lse=True, backend=backend
    )
    return {"out": out, "lse": lse}


def _quantized(storage: str) -> Any:
    """Decode over quantized caches, whose values and scales have strides of their own."""

    def make(random: Random) -> Tensors:
        x = _caches(random)
        for name in "kv":
            stored = am.quantize(x.pop(name), storage)
            x |= {f"{name}.values": stored.values, f"{name}.scales": stored.scales}
        return x

    def run(x: Tensors, backend: str) -> Tensors:
        q = x["q"]
        scales = {name: x[f"{name}.scales"] for name in "kv"}
        if storage == "int8" or scales["k"].is_floating_point():
            scales = {name: scale.float() for name, scale in scales.items()}
        k, v = (Quantized(x[f"{name}.values"], scales[name]) for name in "kv")
        out, lse = am.decode_attention(q, k, v, return_lse=True, backend=backend)
        return {"out": out, "lse": lse}

    return make, run


def decode_operations(backend: str, exact: str = "reference") -> list[Operation]:
    """Return decode over caches and pools with this backend. The kernels take contiguous rows."""
    rows = ("k", "v", "k.values", "v.values", "k.scales", "v.scales") if backend == "triton" else ()
    found = [
        Operation(
            f"decode {backend} {name}",
            ("decode_attention",),
            lambda random, made=made: _caches(random) | made(random),
            _decode,
            (),
            backend,
            exact,
            rows,
        )
        for name, made in DECODE_OPTIONS.items()
        if backend != "triton" or name != "odd"
    ]
    found += [
        Operation(
            f"decode {backend} {storage}",
            ("decode_attention", "Quantized"),
            *_quantized(storage),
            (),
            backend,
            exact,
            rows,
        )
        for storage in ("fp8", "int8", "bfp8")
    ]
    return [
        *found,
        Operation(f"paged decode {backend}", ("paged_decode_attention",), _pages, _paged, (), backend, exact, rows),
    ]


# Sparse attention and the indexer.


def _sparse(random: Random, rows: int = 8, keys: int = 12) -> Tensors:
    return {
        "q": random.normal(rows, 2, 16), "kv": random.normal(keys, 16), "v": random.normal(keys, 5),
        "indices": random.integers(-1, keys + 1, rows, 6), "sinks": random.normal(2), "lse": random.normal(rows, 2) + 3,
        "iq": random.normal(rows, 3, 8), "ik": random.normal(keys, 8), "w": random.normal(rows, 3),
        "topk_length": random.integers(0, 7, rows), "q_positions": random.integers(0, keys, rows),
        "k_start": random.integers(0, 4, rows), "k_end": random.integers(6, keys + 1, rows),
        "target": random.normal(rows, 6).abs(), "row_mask": random.some(rows),
    }  # fmt: skip


def _some(*names: str) -> Callable[[Random], Tensors]:
    return lambda random: {name: x for name, x in _sparse(random).items() if name in names}


def _sparse_mask(x: Tensors, *names: str) -> am.SparseMask:
    return am.SparseMask(causal="q_positions" in names, **{name: x[name] for name in names})


def _sparse_attention(x: Tensors, backend: str) -> Tensors:
    mask = _sparse_mask(x, "topk_length", "q_positions", "k_start", "k_end")
    more = {"mask": mask, "v": x["v"], "sinks": x["sinks"], "return_attn_sum": True, "backend": backend}
    out, lse, total = am.sparse_attention(x["q"], x["kv"], x["indices"], scale=0.3, **more)
    return {"out": out, "lse": lse, "attn_sum": total}


def _latent_attention(x: Tensors, backend: str) -> Tensors:
    out, lse = am.sparse_attention(x["q"], x["kv"], x["indices"], scale=0.3, d_v=7, backend=backend)
    return {"out": out, "lse": lse}


def _distribution(x: Tensors, backend: str) -> Tensors:
    return {"p": am.attention_distribution(x["q"], x["kv"], x["indices"], x["lse"], scale=0.3, backend=backend)}


def _scores(x: Tensors, backend: str) -> Tensors:
    return {"scores": am.sparse.indexer_scores_at(x["iq"], x["ik"], x["w"], x["indices"], backend=backend)}


def _topk(x: Tensors, backend: str) -> Tensors:
    return am.indexer_topk(x["iq"], x["ik"], x["w"], 4, mask=_sparse_mask(x, "q_positions"), backend=backend)._asdict()


def _sparse_loss(x: Tensors, backend: str) -> Tensors:
    target = {"target": x["target"], "row_mask": x["row_mask"], "reduction": "none", "backend": backend}
    return {"loss": am.indexer_kl_loss(x["iq"], x["ik"], x["w"], x["indices"], **target)}


def _dense_loss(x: Tensors, backend: str) -> Tensors:
    target = am.sparse.AttentionTarget(x["q"], x["kv"], x["lse"], 0.3)
    return {"loss": am.indexer_kl_loss(x["iq"], x["ik"], x["w"], None, target, reduction="none", backend=backend)}


INDEXER = ("iq", "ik", "w")
SPARSE: dict[str, tuple[tuple[str, ...], Callable[[Tensors, str], Tensors], tuple[str, ...], tuple[str, ...]]] = {
    "sparse_attention": (
        ("q", "kv", "v", "indices", "sinks", "topk_length", "q_positions", "k_start", "k_end"),
        _sparse_attention, ("q", "kv", "v", "sinks"), ("sparse_attention", "SparseMask"),
    ),
    "latent attention": (("q", "kv", "indices"), _latent_attention, ("q", "kv"), ("sparse_attention",)),
    "distribution": (("q", "kv", "indices", "lse"), _distribution, (), ("attention_distribution",)),
    "scores": ((*INDEXER, "indices"), _scores, INDEXER, ("indexer_scores_at",)),
    "topk": ((*INDEXER, "q_positions"), _topk, (), ("indexer_topk",)),
    "sparse loss": ((*INDEXER, "indices", "target", "row_mask"), _sparse_loss, INDEXER, ("indexer_kl_loss",)),
    "dense loss": ((*INDEXER, "q", "kv", "lse"), _dense_loss, INDEXER, ("indexer_kl_loss",)),
}  # fmt: skip


def _paged_latents(random: Random) -> Tensors:
    return {
        "q": random.normal(2, 2, 3, 24), "pool": random.normal(7, 4, 1, 24), "w": random.normal(2, 2, 3),
        "table": torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=torch.int32), "counts": random.integers(0, 10, 2, 2),
        "sinks": random.normal(3), "indices": random.integers(-1, 12, 2, 2, 9),
    }  # fmt: skip


def _paged_sparse(x: Tensors, backend: str) -> Tensors:
    out, lse, largest = am.sparse.paged_sparse_decode_attention(
        x["q"], x["pool"], x["table"], am.sparse.TopKIndices(x["indices"], None, x["counts"]), scale=0.3, d_v=20,
        sinks=x["sinks"], return_max_logits=True, backend=backend,
    )  # fmt: skip
    return {"out": out, "lse": lse, "largest": largest}


def _paged_topk(x: Tensors, backend: str) -> Tensors:
    top = am.sparse.paged_indexer_topk(x["q"], x["pool"], x["table"], x["w"], 4, cur_pos=[10, 6], backend=backend)
    return {"indices": top.indices, "scores": top.scores, "lengths": top.lengths}


def _sparse_decode(x: Tensors, backend: str) -> Tensors:
    """Select and attend as a group of one rank does."""
    decode = am.sparse.SparseDecode()
    pool, table = x["pool"], x["table"]
    top = decode.indexer_topk(x["q"], pool, table, x["w"], 4, cur_pos=[10, 6], backend=backend)
    indices = am.sparse.TopKIndices(x["indices"], None, x["counts"])
    out, lse = decode.attention(x["q"], pool, table, indices, scale=0.3, sinks=x["sinks"], backend=backend)
    return {"indices": top.indices, "out": out, "lse": lse}


def sparse_operations(backend: str) -> list[Operation]:
    """Return the sparse operations with this backend."""
    paged = {
        "paged sparse decode": (("paged_sparse_decode_attention",), _paged_sparse),
        "paged top-k": (("paged_indexer_topk",), _paged_topk),
        "sparse decode": (("SparseDecode.indexer_topk", "SparseDecode.attention"), _sparse_decode),
    }
    return [
        *(
            Operation(f"{name} {backend}", covers, _some(*inputs), run, grads, backend, "torch")
            for name, (inputs, run, grads, covers) in SPARSE.items()
        ),
        *(
            Operation(f"{name} {backend}", covers, _paged_latents, run, (), backend, "torch", ("pool",))
            for name, (covers, run) in paged.items()
        ),
    ]


def state_operations() -> list[Operation]:
    """Return the merges of states."""
    one = {"out": (2, 3, 5, 4), "lse": (2, 3, 5), "sinks": (2, 1, 5)}
    return [
        Operation("merge", ("merge",), _states, _merge, tuple(f"{x}{i}" for i in range(3) for x in ("out", "lse"))),
        Operation(
            "merge sinks", ("merge_sinks",), lambda random: {name: random.normal(*n) for name, n in one.items()},
            _merge_sinks, tuple(one),
        ),
    ]  # fmt: skip


LONG = ("ring+ring", "ulysses+", "sparse allgather", "block TP2", "reference irregular", "sdpa")


def each_operation(device: str = "cpu") -> pytest.MarkDecorator:
    """Parametrize a test with every public operation; without a GPU some long ones are slow tests."""
    cases = []
    for operation in public_operations(device):
        long = device == "cpu" and any(name in operation.name for name in LONG)
        cases.append(pytest.param(operation, marks=pytest.mark.sweep if long else (), id=operation.name))
    return pytest.mark.parametrize("operation", cases)


def public_operations(device: str = "cpu") -> list[Operation]:
    """Return every public operation, with the backends that serve it on this device."""
    from helpers.rank_operations import rank_operations  # they import this module
    from helpers.recurrent_operations import recurrent_operations

    names = ("aten", "torch", "reference") if device == "cpu" else ("auto", "reference")
    decode = ("cpu", "reference") if device == "cpu" else ("auto",)
    return [
        *(operation for name in names for operation in dense_operations(name)),
        *(operation for name in decode for operation in decode_operations(name)),
        Operation("paged prefill", ("paged_prefill_attention",), _prefill_pages, _paged_prefill, (), "auto", "torch"),
        *sparse_operations("torch" if device == "cpu" else "auto"),
        *state_operations(),
        *rank_operations(),
        *recurrent_operations(),
    ]
