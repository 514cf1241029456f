"""Sparse decode over a paged cache of latents: out, lse and largest score against float64, in poisoned pools."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attnmesh import State, merge, quantize
from attnmesh.core.ranges import InterleavedShard
from attnmesh.decode import check_decode_errors
from attnmesh.ops import launch
from attnmesh.ops.sparse import reference
from attnmesh.ops.sparse.paged import PagedKeys, check_pool
from attnmesh.ops.storage import Quantized, Stored, dequantize, values_of
from attnmesh.sparse import TopKIndices, paged_sparse_decode_attention
from attnmesh.testing.decode import poison_cache
from helpers.cases import first, sweep
from helpers.sparse import CUDA, DTYPES, assert_sparse_close, device_of, embedded, normal

BLOCK = 4


@dataclass(frozen=True)
class Case:
    """A call with valid inputs on the CPU. `live` are the slots that some token reads."""

    q: Tensor
    pool: Stored
    table: Tensor | None
    indices: Tensor
    counts: Tensor | None
    sinks: Tensor | None
    d_v: int
    scale: float = 0.13

    def used(self) -> Tensor:
        """Which indices are read, [B, T, topk]."""
        counts = torch.full(self.q.shape[:2], self.indices.shape[2]) if self.counts is None else self.counts
        return (torch.arange(self.indices.shape[2]) < counts[..., None]) & (self.indices >= 0)

    def exact(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The results from the definition, in float64 or by the plain computation in another precision."""
        keys = dequantize(self.pool, dtype, head_axis=2)[:, :, 0]
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        return list(
            reference.paged_attend(
                self.q.to(dtype), keys, self.table, self.indices, self.scale, self.d_v, self.counts, sinks
            )
        )

    def run(self, backend: str, **how: object) -> list[Tensor]:
        """The results on the CPU for views, with poison in the pool and in queries of tokens that read nothing."""
        device = device_of(backend)
        q = self.q.masked_fill(~self.used().any(2)[..., None, None], torch.nan)
        tensors = {
            "q": embedded(q.to(device)), "pool": poisoned(self).to_device(device),
            "block_table": None if self.table is None else self.table.to(device), "indices": self.indices.to(device),
        }  # fmt: skip
        if self.counts is not None:
            tensors["indices"] = TopKIndices(tensors["indices"], None, self.counts.to(device))
        sinks = None if self.sinks is None else self.sinks.to(device)
        results = paged_sparse_decode_attention(
            **tensors, sinks=sinks, scale=self.scale, d_v=self.d_v, backend=backend, return_max_logits=True, **how
        )
        return [x.cpu() for x in results]

    def check(self, backend: str, **how: object) -> None:
        """Assert the error rule."""
        actual = self.run(backend, **how)
        assert actual[0].dtype == how.get("out_dtype", self.q.dtype)
        exact, plain = self.exact(), self.exact(self.q.dtype)
        flat = [[x.flatten(0, 1) for x in each] for each in (actual, plain, exact)]
        empty = exact[2] == -torch.inf
        assert torch.equal(actual[2] == -torch.inf, empty)
        if self.sinks is None:
            assert (actual[0][empty] == 0).all()
        assert_sparse_close(("out", "lse", "max_logits"), *flat)


@dataclass
class Movable:
    pool: Stored

    def to_device(self, device: torch.device) -> Stored:
        if isinstance(self.pool, Tensor):
            return self.pool.to(device)
        assert self.pool.rope is not None
        return Quantized(*(x.to(device) for x in (self.pool.values, self.pool.scales, self.pool.rope)))


def poisoned(case: Case) -> Movable:
    """The pool with poison in every slot that no token reads."""
    live = torch.zeros(values_of(case.pool).shape[:2], dtype=torch.bool)
    for b, t, j in case.used().nonzero().tolist():
        index = int(case.indices[b, t, j])
        live[index // BLOCK if case.table is None else int(case.table[b, index // BLOCK]), index % BLOCK] = True
    if isinstance(case.pool, Tensor):
        return Movable(case.pool.masked_fill(~live[..., None, None], torch.nan))
    spoiled = Quantized(*(x.clone() for x in (case.pool.values, case.pool.scales, case.pool.rope)))
    poison_cache(spoiled)
    for name in ("values", "scales", "rope"):
        target, source = (getattr(pool, name) for pool in (spoiled, case.pool))
        if name == "values":
            target, source = target.view(torch.int8), source.view(torch.int8)
        target[live] = source[live]
    return Movable(spoiled)


def random_case(
    lengths: tuple[int, ...] = (9, 0, 23), *, tokens: int = 2, heads: int = 5, dim: int = 144, topk: int = 11,
    dtype: torch.dtype = torch.float32, storage: str = "plain", slots: bool = False, counts: bool = False,
    sinks: bool = False, d_v: int | None = None, seed: int = 0,
) -> Case:  # fmt: skip
    """Tokens that read random keys of their sequence, some twice; an empty sequence reads none. Blocks are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(lengths), max(1, -(-max(lengths) // BLOCK))
    num_blocks = batch * width + 3
    table = torch.randperm(num_blocks, generator=generator)[: batch * width].view(batch, width).int()
    indices = torch.full((batch, tokens, topk), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        if length:
            indices[b] = torch.randint(0, length, (tokens, topk), generator=generator)
        table[b, -(-length // BLOCK) :] = -1
    indices[torch.rand(indices.shape, generator=generator) < 0.2] = -1
    if slots:
        blocks = table.gather(1, (indices.clamp(min=0) // BLOCK).flatten(1).long()).view(indices.shape)
        indices = torch.where(indices < 0, indices, blocks * BLOCK + indices % BLOCK)
    x = normal(num_blocks, BLOCK, 1, dim, dtype=torch.float64, seed=seed + 1)
    pool = x.to(dtype) if storage == "plain" else quantize(x, storage)
    if isinstance(pool, Quantized) and seed % 2:
        pool.scales.mul_(1.7)  # other projects' scales are not powers of two
    given = torch.randint(-1, topk + 3, (batch, tokens), generator=generator)
    return Case(
        normal(batch, tokens, heads, dim, dtype=dtype, seed=seed + 2),
        pool,
        None if slots else table,
        indices,
        given if counts else None,
        normal(heads, dtype=torch.float32 if dtype != torch.float64 else dtype, seed=seed + 3) if sinks else None,
        d_v or dim // 128 * 128 or dim,
    )


CASES = {
    "plain": {},
    "plain, narrow": {"dim": 24, "d_v": 20, "tokens": 1, "counts": True},
    "plain, wide values": {"dim": 144, "d_v": 140, "heads": 17, "sinks": True},
    "latent": {"storage": "fp8_ds_mla"},
    "latent, slots": {"storage": "fp8_ds_mla", "slots": True, "counts": True, "sinks": True, "seed": 1},
    "latent, few values": {"storage": "fp8_ds_mla", "d_v": 96, "tokens": 3, "seed": 3},
    "many slots": {"storage": "fp8_ds_mla", "lengths": (300, 7), "topk": 150, "tokens": 1, "seed": 5},
    "one index": {"topk": 1, "lengths": (1,)},
    "three groups": {"storage": "fp8_ds_mla", "dim": 384 + 34, "lengths": (40,), "seed": 4},
    "V3.2": {"storage": "fp8_ds_mla", "dim": 576, "heads": 20, "lengths": (50, 90), "topk": 40, "tokens": 1},
}  # fmt: skip
SWEEP = (pytest.mark.sweep,)
RUNS = [
    pytest.param(
        name, backend, dtype,
        marks=() if i % len(DTYPES[backend]) == j and (backend == "torch" or CUDA or "latent" in name) else SWEEP,
    )
    for backend in ("torch", "triton")
    for i, name in enumerate(CASES)
    for j, dtype in enumerate(DTYPES[backend])
]  # fmt: skip


@pytest.mark.parametrize(("name", "backend", "dtype"), first(8, RUNS))
def test_results_are_those_of_float64(name, backend, dtype):
    case = random_case(dtype=dtype, **CASES[name])
    case.check(backend)


@pytest.mark.parametrize("backend", ["torch", sweep("triton")])
def test_splits_and_unrounded_results(backend):
    case = random_case(
        (60, 0, 40), topk=70, dtype=torch.float16, storage="fp8_ds_mla", sinks=True, counts=True, tokens=1
    )
    for how in ({"split_size": 33}, {"split_size": 1000}, {"out_dtype": torch.float32}):
        case.check(backend, **how)


@pytest.mark.parametrize("storage", ["plain", "fp8_ds_mla"])
def test_the_prefill_kernel_attends(storage, monkeypatch):
    """Over the pool, or over a workspace of dequantized keys that holds two tokens at a time."""
    kernels = pytest.importorskip("attnmesh.ops.sparse.decode_kernels")
    case = random_case((40, 0, 30), topk=21, dtype=torch.float16, storage=storage, sinks=True, counts=True, seed=7)
    monkeypatch.setattr(kernels, "_WORKSPACE", 2 * 21 * 144 * 2)
    monkeypatch.setattr(kernels, "fastest_way", lambda call, backend: kernels.Way.AS_PREFILL)
    case.check("triton")
    broken = replace(case, table=torch.where(case.table < 0, case.table, 10**6))
    out, lse, top = run_unpoisoned(broken, "triton")
    with pytest.raises(ValueError, match="is 1000000, outside the pool"):
        check_decode_errors()
    for x in (out, lse, top):
        assert x[[0, 2]].isnan().all()


def test_the_prefill_kernel_attends_over_a_pool_with_gaps():
    """Blocks of a plain pool that do not follow one another are copied to a workspace, whole keys each."""
    kernels = pytest.importorskip("attnmesh.ops.sparse.triton_decode")
    pool = normal(3, 2 * BLOCK, 1, 144, dtype=torch.float16)[:, :BLOCK]
    slots, lengths = torch.tensor([[9, 0, 5]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    target = torch.full((4, 144), -7.0, dtype=torch.float16)
    kernels.gather(PagedKeys(pool, None), slots, lengths, target[:3])
    assert torch.equal(target[:2], torch.stack([pool[2, 1, 0], pool[0, 0, 0]]))
    assert (target[2:] == -7).all()


def test_bits_of_a_token_do_not_depend_on_the_batch():
    case = random_case((60, 30, 40), topk=70, dtype=torch.float16, storage="fp8_ds_mla")
    whole = case.run("triton", split_size=32)
    alone = replace(case, q=case.q[1:2], table=case.table[1:2], indices=case.indices[1:2]).run("triton", split_size=32)
    assert all(torch.equal(x[1:2], y) for x, y in zip(whole, alone, strict=True))


@pytest.mark.parametrize(
    ("backend", "interleave"),
    first(1, [("torch", 3), ("triton", 1), *(pytest.param(*x, marks=SWEEP) for x in (("torch", 1), ("triton", 3)))]),
)
def test_ranks_hold_parts_of_the_positions(backend, interleave):
    """The states over the positions of each rank merge to the state over all; sinks are added once."""
    ranks, lengths = 3, (19, 2, 13)
    whole = random_case(lengths, topk=9, sinks=True, dtype=torch.float32, storage="fp8_ds_mla")
    keys = dequantize(whole.pool, torch.float32, head_axis=2)
    states = []
    for rank in range(ranks):
        shard = InterleavedShard(ranks, rank, interleave)
        counts = [int(shard.length(n)) for n in lengths]
        width = max(1, -(-max(counts) // BLOCK))
        local = torch.full((3 * width, BLOCK, 1, keys.shape[-1]), 0.0)
        table = torch.arange(3 * width, dtype=torch.int32).view(3, width)
        for b, count in enumerate(counts):
            for i in range(count):
                p = int(shard.position(i))
                local[table[b, i // BLOCK], i % BLOCK] = keys[whole.table[b, p // BLOCK], p % BLOCK]
        device = device_of(backend)
        pool = quantize(local, "fp8_ds_mla")
        out, lse = paged_sparse_decode_attention(
            whole.q.to(device), Movable(pool).to_device(device), table.to(device), whole.indices.to(device),
            scale=whole.scale, sinks=whole.sinks.to(device) if rank == 1 else None, shard=shard,
            out_dtype=torch.float32, backend=backend,
        )  # fmt: skip
        states.append(State(out.cpu(), lse.cpu()))
    out, lse = merge(states)
    exact = whole.exact()
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)


# Faults.


@pytest.fixture
def no_fault_left_over():
    check_decode_errors()
    yield
    check_decode_errors()


WRONG = {
    "a block past the pool": ("table", (0, 1), 99, r"block_table\[0, 1\] is 99"),
    "no block": ("table", (0, 0), -1, r"block_table\[0, 0\] is -1"),
    "a block far before the pool": ("table", (0, 2), -(2**31), r"block_table\[0, 2\] is -2147483648"),
    "a position past the table": ("indices", (0, 1, 3), 1000, r"indices\[0(, 1, 3)?\] (is|contain) 1000"),
    "the last position": ("indices", (0, 0, 0), 2**31 - 1, r"indices\[0(, 0, 0)?\] (is|contain) 2147483647"),
}


@pytest.mark.usefixtures("no_fault_left_over")
@pytest.mark.parametrize(
    ("wrong", "backend"),
    [
        pytest.param(wrong, backend, marks=SWEEP if backend == "triton" and i % 3 and not CUDA else ())
        for i, wrong in enumerate(WRONG)
        for backend in ("torch", "triton")
    ],
)
def test_faults_are_reported_and_never_read(wrong, backend):
    case = random_case((12, 23), topk=40, tokens=2, dtype=torch.float32, storage="fp8_ds_mla")
    name, at, value, said = WRONG[wrong]
    spoiled = getattr(case, name).clone()
    spoiled[at] = value
    broken = replace(case, **{name: spoiled})
    if backend == "torch":
        with pytest.raises(ValueError, match=said):
            run_unpoisoned(broken, "torch")
        return
    for how in ({}, {"split_size": 16}):
        out, lse, top = run_unpoisoned(broken, "triton", **how)
        with pytest.raises(ValueError, match=said):
            check_decode_errors()
        spoiled_tokens = [0, 1] if name == "table" else [at[1]]
        for x in (out, lse, top):
            assert x[0, spoiled_tokens].isnan().all()
        torch.testing.assert_close(out[1].double(), case.exact()[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_fault_left_over")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_slot_past_the_pool(backend):
    case = random_case(slots=True, dtype=torch.float32, storage="fp8_ds_mla")
    case.indices[2, 1, 4] = slot = values_of(case.pool).shape[0] * BLOCK
    said = rf"indices\[2(, 1, 4)?\] (is|contain) {slot}"
    if backend == "torch":
        with pytest.raises(ValueError, match=said):
            run_unpoisoned(case, "torch")
        return
    out, *_ = run_unpoisoned(case, "triton")
    with pytest.raises(ValueError, match=said):
        check_decode_errors()
    assert out[2, 1].isnan().all()
    assert out[0].isfinite().all()


def run_unpoisoned(case: Case, backend: str, **how: object) -> list[Tensor]:
    device = device_of(backend)
    table = None if case.table is None else case.table.to(device)
    results = paged_sparse_decode_attention(
        case.q.to(device), Movable(case.pool).to_device(device), table, case.indices.to(device), scale=case.scale,
        backend=backend, return_max_logits=True, **how,
    )  # fmt: skip
    return [x.cpu() for x in results]


def test_a_fault_past_the_count_is_no_fault():
    case = random_case((12, 23), topk=5, dtype=torch.float32)
    case.indices[0, 0, 4] = 10**6
    counts = torch.full((2, 2), 4)
    replace(case, counts=counts).check("torch")
    replace(case, counts=counts).check("triton")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": torch.ones(3, 5, 144)}, r"q must be \[batch, tokens, heads, head_dim\]"),
        ({"q": torch.ones(3, 2, 5, 100)}, "pool must have 100 features per key"),
        ({"pool": torch.ones(8, 4, 2, 144)}, r"pool must be \[num_blocks, block_size, 1, 144\]"),
        ({"pool": torch.ones(8, 4, 1, 144).half()}, "pool must be torch.float32 like q, or fp8_ds_mla"),
        ({"pool": quantize(torch.ones(8, 4, 1, 144), "int8")}, "pool must be one of bf16, .*fp8_ds_mla, got int8"),
        ({"block_table": torch.zeros(2, 6, dtype=torch.int32)}, "block_table must have one row per sequence, 3"),
        ({"block_table": torch.zeros(3, 6)}, "block_table must be int32"),
        ({"indices": torch.zeros(3, 2, 4, dtype=torch.int64)}, "indices must be int32 .* got int64"),
        ({"indices": torch.zeros(3, 1, 4, dtype=torch.int32)}, r"indices must be int32 \[3, 2, topk\]"),
        (
            {"indices": TopKIndices(torch.zeros(3, 2, 4, dtype=torch.int32), None, torch.zeros(3, dtype=torch.int32))},
            r"indices.lengths must be int32 or int64 \[3, 2\]",
        ),
        ({"sinks": torch.zeros(4)}, r"sinks must be floating point \[5\]"),
        ({"d_v": 145}, "d_v must be at most 144"),
        ({"scale": float("nan")}, "scale must be"),
        ({"split_size": 0}, "split_size must be a positive integer"),
        ({"out_dtype": torch.float16}, "out_dtype must be None"),
        ({"backend": "cuda"}, "backend must be"),
        ({"block_table": None, "shard": InterleavedShard(2, 0)}, "shard must be None where indices are slots"),
        ({"q": torch.ones(3, 2, 5, 144, requires_grad=True)}, "q must not require a gradient"),
    ],
)
def test_what_is_refused(change, said):
    case = random_case()
    given = {"q": case.q, "pool": case.pool, "block_table": case.table, "indices": case.indices, "scale": 0.1}
    with pytest.raises(ValueError, match=said):
        paged_sparse_decode_attention(**{**given, **change})


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("storage", ["plain", "fp8_ds_mla"])
def test_the_shapes_of_a_model_on_a_gpu(storage):
    for dtype, heads in ((torch.bfloat16, 128), (torch.bfloat16, 16), (torch.float16, 64)):
        for batch, tokens in ((1, 1), (70, 2)):
            case = random_case(
                tuple(300 + 7 * i for i in range(batch)), tokens=tokens, heads=heads, dim=576, topk=128, dtype=dtype,
                storage=storage, sinks=heads == 64, counts=heads == 16,
            )  # fmt: skip
            case.check("triton")


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("batch", "heads"), [(1, 16), (70, 128)])
@pytest.mark.parametrize("storage", ["plain", "fp8_ds_mla"])
def test_a_captured_graph_reads_what_is_there_at_its_replay(storage, batch, heads):
    """Select and attend in one graph; indices, lengths and the block table change between replays."""
    lengths = tuple(200 + 3 * i for i in range(batch))
    case = random_case(lengths, tokens=1, heads=heads, dim=576, topk=64, dtype=torch.bfloat16, storage=storage)
    other = random_case(lengths, tokens=1, heads=heads, dim=576, topk=64, dtype=torch.bfloat16, storage=storage, seed=8)
    pool = Movable(case.pool).to_device(torch.device("cuda"))
    q, table, indices = (x.cuda() for x in (case.q, case.table, case.indices))

    def run() -> Tensor:
        return paged_sparse_decode_attention(q, pool, table, indices, scale=case.scale)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for x in (case, other):
        indices.copy_(x.indices)
        table.copy_(x.table)
        graph.replay()
        torch.testing.assert_close(out, run(), rtol=0, atol=0)
    assert not torch.equal(case.indices, other.indices)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_bits_are_the_same_again_and_again():
    for storage, batch, heads in (("plain", 70, 128), ("fp8_ds_mla", 70, 128), ("fp8_ds_mla", 3, 16)):
        case = random_case((300,) * batch, heads=heads, dim=576, topk=128, dtype=torch.bfloat16, storage=storage)
        first = run_unpoisoned(case, "triton")
        for _ in range(5):
            assert all(torch.equal(x, y) for x, y in zip(run_unpoisoned(case, "triton"), first, strict=True))


def test_gpus_without_fp8_are_served_by_torch(monkeypatch):
    monkeypatch.setattr(launch, "WITHOUT_GPU", launch.GPU(80, 163 * 1024))
    with pytest.raises(ValueError, match=r"backend=.triton. cannot serve this call: .* capability 8\.9"):
        random_case(dtype=torch.float16, storage="fp8_ds_mla").run("triton")
    random_case(dtype=torch.float16, storage="fp8_ds_mla").check("torch")


@pytest.mark.parametrize(
    "shape", [(4, 16, 24), (4, 16, 2, 24), (4, 0, 1, 24)], ids=["no head", "two heads", "no slots"]
)
def test_pools_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"kv must be \[num_blocks, block_size, 1, 24\], got \["):
        check_pool("kv", torch.zeros(shape), torch.zeros(2, 1, 3, 24), "fp8_ds_mla")
    check_pool("kv", torch.zeros(4, 16, 1, 24), torch.zeros(2, 1, 3, 24), "fp8_ds_mla")
