"""The indexer's kernels on a GPU: real sizes, bf16, the bits of scores, the memory that the top-k takes."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnmesh import SparseMask, indexer_topk
from attnmesh.ops.sparse import gluon_paged_scores, gluon_topk, triton_topk
from attnmesh.ops.sparse.arguments import TopKIndices
from attnmesh.ops.sparse.indexer_tiles import LONG_ROW, IndexerTiles
from attnmesh.ops.sparse.paged import PagedKeys
from attnmesh.sparse import unpack_index_keys
from helpers import sparse_kernels
from helpers.cases import else_sweep
from helpers.sparse_kernels import dense_scores_backward, paged_topk, scores_at, scores_at_backward

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
topk = partial(sparse_kernels.topk, triton_topk)
HOW = {"scale": (64 * 128) ** -0.5, "relu": True}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(s_q: int, s_kv: int, heads: int = 64, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    iq, ik = (torch.randn(*n, dim, device="cuda").to(dtype) for n in ((s_q, heads), (s_kv,)))
    return [iq, ik, torch.randn(s_q, heads, device="cuda")]


def seen(s_q: int, s_kv: int, causal: bool) -> tuple[Tensor, Tensor]:
    lo = torch.zeros(s_q, dtype=torch.int32, device="cuda")
    return lo, torch.arange(s_kv - s_q + 1, s_kv + 1, dtype=torch.int32, device="cuda") if causal else lo + s_kv


def scores_of_all(iq: Tensor, ik: Tensor, w: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """The kernel's own scores of every key, by its other launcher."""
    s_q, s_kv = iq.shape[0], ik.shape[0]
    every = torch.arange(s_kv, dtype=torch.int32, device="cuda").expand(s_q, s_kv)
    return scores_at(iq, ik, w, every, lo, hi, torch.full_like(lo, s_kv), k_offset=0, **HOW)


def definition(scores: Tensor, k: int) -> TopKIndices:
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    chosen = scores.gather(1, order) > -torch.inf
    indices, back = order.masked_fill(~chosen, 2**31 - 1).sort(1)
    chosen = chosen.gather(1, back)
    return TopKIndices(
        indices.masked_fill(~chosen, -1).int(), scores.gather(1, order).gather(1, back), chosen.sum(1).int()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("s_q", "s_kv", "k", "causal", "weights"),
    [(300, 32768, 2048, False, 1.0), (300, 20001, 2048, True, 1.0), (100, 131072, 2048, True, 1.0),
     (200, 30000, 2048, True, 0.02), (3000, 3000, 2048, True, 1.0), (5, 9000, 100, True, 1.0)],
)  # fmt: skip
def test_the_topk_is_that_of_the_scores_bit_for_bit(dtype, s_q, s_kv, k, causal, weights):
    if dtype == torch.float32:
        s_q = min(s_q, 20) if s_kv > s_q else s_q
    iq, ik, w = drawn(s_q, s_kv, dtype=dtype)
    w *= torch.rand_like(w) < weights  # with few weights many scores are exactly zero
    lo, hi = seen(s_q, s_kv, causal)
    found = topk(iq, ik, w, k, lo, hi, **HOW)
    some = torch.randperm(s_q, device="cuda")[:32]
    scores = scores_of_all(iq[some], ik, w[some], lo[some], hi[some])
    expected = definition(scores, k)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine[some], theirs)
    again = topk(iq, ik, w, k, lo, hi, **HOW)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = torch.stack([
        ((iq[i].double() @ ik.double().T).relu() * w[i].double()[:, None]).sum(0) for i in some[:4].tolist()
    ]) * HOW["scale"]  # fmt: skip
    visible = scores[:4] > -torch.inf
    assert (scores[:4].double() - exact)[visible].norm() < 1e-5 * exact[visible].norm()


def test_no_cut_of_the_work_shows_in_the_bits():
    iq, ik, w = drawn(500, 20000)
    lo, hi = seen(500, 20000, True)
    first = topk(iq, ik, w, 512, lo, hi, **HOW)
    for how in (
        {"tiles": IndexerTiles(128, 2, 4, 2)}, {"tiles": IndexerTiles(64, 1, 4, 3), "span": 512},
        {"tiles": IndexerTiles(128, 4, 8, 3)},
        {"workspace": 1}, {"programs": 1}, {"programs": 40, "span": 256}, {"block": 512}, {"block": 8192},
    ):  # fmt: skip
        other = topk(iq, ik, w, 512, lo, hi, **HOW, **how)
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), how


def test_a_key_has_the_same_scores_wherever_it_lies():
    iq, ik, w = drawn(40, 5000)
    lo, hi = seen(40, 5000, False)
    scores = scores_of_all(iq, ik, w, lo, hi)
    for shift in (1, 37, 64, 1000):
        assert torch.equal(scores_of_all(iq, ik.roll(shift, 0), w, lo, hi), scores.roll(shift, 1))
    assert torch.equal(scores_of_all(iq, ik[1234:], w, lo, hi - 1234), scores[:, 1234:])


HOPPER_SIZES = [  # queries, keys, heads, dim, k, causal
    (301, 20001, 64, 128, 2048, True), (300, 32768, 64, 128, 2048, False), (1030, 3000, 64, 128, 2048, True),
    (5, 9000, 64, 64, 100, True), (64, 40000, 128, 128, 2048, True), (64, 40000, 40, 96, 2048, False),
    (64, 9000, 32, 128, 512, False), (7, 1, 64, 128, 4, False),
]  # fmt: skip


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    else_sweep(  # fp16 changes the type of the products
        product(HOPPER_SIZES, DTYPES[:2]),
        lambda sizes, dtype: dtype == torch.bfloat16 or sizes == HOPPER_SIZES[0],
    ),
    ids=str,
)
def test_the_hopper_kernel_has_the_same_bits(sizes, dtype):
    s_q, s_kv, heads, dim, k, causal = sizes
    iq, ik, w = drawn(s_q, s_kv, heads, dim, dtype)
    ik[5::97] = torch.nan
    w *= torch.rand_like(w) < 0.05  # many scores are exactly zero
    lo, hi = seen(s_q, s_kv, causal)
    lo[::3] += 100
    assert gluon_topk.supports(iq, ik, k)
    assert not gluon_topk.supports(iq, ik, 2049)
    expected = topk(iq, ik, w, k, lo, hi, **HOW)
    for how in ({}, {"workspace": 1}, {"programs": 7}, {"unit_tiles": 3}):
        found = sparse_kernels.topk(gluon_topk, iq, ik, w, k, lo, hi, **HOW, **how)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_many_queries_over_long_rows_take_128_mib():
    iq, ik, w = drawn(1100, 70000)
    lo, hi = seen(1100, 70000, True)
    assert gluon_topk.is_faster(iq, ik, 2048)
    expected = topk(iq, ik, w, 2048, lo, hi, **HOW)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = indexer_topk(iq, ik, w, 2048, scale=HOW["scale"], mask=SparseMask(causal=True, q_start=70000 - 1100))
    out = sum(x.numel() * x.element_size() for x in found)
    assert torch.cuda.max_memory_allocated() - before - out <= 129 << 20
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("batch", "tokens", "length", "block_size", "heads"),
    [(3, 1, 8000, 64, 64), (2, 2, 70000, 64, 64), (2, 4, 30001, 64, 64), (2, 1, 40000, 128, 128), (1, 4, 9000, 64, 40)],
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_scores_of_a_decode_step_for_hopper_have_the_same_bits(batch, tokens, length, block_size, heads, dtype):
    blocks = -(-length // block_size)
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    raw = torch.randint(0, 256, (batch * blocks, block_size * 132), dtype=torch.uint8, device="cuda")
    pool = unpack_index_keys(raw, block_size)
    pool.scales.copy_(torch.rand_like(pool.scales) / 64)
    pool.scales[torch.rand_like(pool.scales) < 0.1] = torch.nan
    iq = torch.randn(batch, tokens, heads, 128, device="cuda").to(dtype)
    w = torch.randn(batch, tokens, heads, device="cuda")
    end = length - torch.arange(tokens, device="cuda").flip(0).repeat(batch, 1)
    first = torch.full_like(end, 77)
    assert gluon_paged_scores.supports(iq, pool)
    found = [
        paged_topk(iq, PagedKeys(pool, table), w, 2048, first, end, **HOW, gluon=gluon)
        for gluon in (gluon_paged_scores, None)
    ]
    assert (found[0].lengths > 0).all()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def ragged_step(lengths: list[int], ties: bool) -> tuple[Tensor, PagedKeys, Tensor]:
    """Queries, keys and weights of a decode step; NaN where nothing is to be read."""
    batch, blocks = len(lengths), max(lengths) // 64 + 1
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    pool = unpack_index_keys(torch.full((batch * blocks, 64 * 132), 127, dtype=torch.uint8, device="cuda"), 64)
    pool.scales.fill_(torch.nan)
    for row, length in zip(table.long(), lengths, strict=True):
        used = row[: -(-length // 64)]
        keys = torch.randn(len(used), 64, 1, 128, device="cuda")
        as_fp8 = (keys.sign() if ties else keys).to(torch.float8_e4m3fn)
        pool.values.view(torch.uint8)[used] = as_fp8.view(torch.uint8)
        pool.scales[used] = 1.0 if ties else torch.rand_like(pool.scales[used])
    iq = torch.randn(batch, 1, 64, 128, device="cuda").bfloat16()
    w = torch.rand(batch, 1, 64, device="cuda")
    if ties:
        iq, w = iq.sign() * (torch.arange(128, device="cuda") < 2), torch.ones_like(w)
    return iq, PagedKeys(pool, table), w


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("parts", [0, 4, 16])
@pytest.mark.parametrize(("batch", "ties"), [(5, False), (5, True), (40, False)])
def test_rows_of_any_length_are_selected_from_in_a_decode_step_for_hopper(batch, ties, parts):
    """Against the Triton kernels: long and short rows, an empty one, ties, and NaN where nothing is to be read."""
    lengths = [70000, 9000, 3000, 100, 0] * (batch // 5)
    step = ragged_step(lengths, ties)
    end, first = torch.tensor(lengths, device="cuda")[:, None], torch.full((batch, 1), 5, device="cuda")
    expected = paged_topk(*step, 2048, first, end, **HOW)
    for how in ({}, {}, {"span": 128}, {"span": 1024}, {"block": 8192}, {"workspace": 1}):
        found = paged_topk(*step, 2048, first, end, **HOW, gluon=gluon_paged_scores, parts=parts, **how)
        assert found.lengths[:, 0].tolist() == [min(max(n - 5, 0), 2048) for n in lengths]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("parts", [0, 4, 16])
def test_a_graph_of_a_decode_step_serves_all_lengths(parts):
    step = ragged_step([131072, 131072, 131072], ties=False)
    first, end = (torch.zeros(3, 1, dtype=torch.int64, device="cuda") for _ in range(2))
    how = HOW | {"gluon": gluon_paged_scores, "parts": parts}
    paged_topk(*step, 2048, first, end, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_topk(*step, 2048, first, end, **how)
    for begins, ends in (
        ([0, 0, 0], [131072, 131072, 131072]), ([7, 100, 0], [4103, 4196, 5000]), ([0, 0, 9], [1, 0, 131072]),
        ([5000, 0, 130000], [60000, 20000, 131072]), ([0, 0, 0], [131072, 131072, 131072]),
    ):  # fmt: skip
        first.copy_(torch.tensor(begins)[:, None])
        end.copy_(torch.tensor(ends)[:, None])
        for x in found:
            x.fill_(99)
        graph.replay()
        expected = paged_topk(*step, 2048, first, end, **HOW)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (begins, ends)


@pytest.mark.parametrize("s_kv", [32768, 131072])
def test_the_topk_takes_a_tenth_of_its_inputs_and_outputs_or_64_mib_for_long_rows(s_kv):
    iq, ik, w = drawn(4096, s_kv)
    lo, hi = seen(4096, s_kv, False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = topk(iq, ik, w, 2048, lo, hi, **HOW)
    out = sum(x.numel() * x.element_size() for x in found)
    extra = torch.cuda.max_memory_allocated() - before - out
    tenth = 0.1 * (out + sum(x.numel() * x.element_size() for x in (iq, ik, w, lo, hi)))
    counters = 64 << 10
    assert extra <= (max(tenth, (64 << 20) + counters) if s_kv > LONG_ROW else tenth)


def test_the_topk_in_a_graph_and_beside_another():
    """Two at a time on two streams: neither may wait for what the other keeps from running."""
    problems = [(*drawn(600, 16384), *seen(600, 16384, True)) for _ in range(2)]
    alone = [topk(iq, ik, w, 1024, lo, hi, **HOW) for iq, ik, w, lo, hi in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(5):
        beside = []
        for (iq, ik, w, lo, hi), stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                beside.append(topk(iq, ik, w, 1024, lo, hi, **HOW))
        torch.cuda.synchronize()
        for a, b in zip(alone, beside, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    iq, ik, w, lo, hi = problems[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = topk(iq, ik, w, 1024, lo, hi, **HOW)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, alone[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (8, 64), (64, 256), (130, 80)])
def test_gradients_against_float64(dtype, heads, dim):
    s_q, s_kv, k = 50, 3000, 200
    iq, ik, w = drawn(s_q, s_kv, heads, dim, dtype)
    indices = torch.rand(s_q, s_kv, device="cuda").topk(k, dim=1).indices.int()
    grad = torch.randn(s_q, k, device="cuda")
    lo, hi = seen(s_q, s_kv, False)
    leaves = [x.double().requires_grad_() for x in (iq, ik, w)]
    products = torch.einsum("qhd,qkd->qhk", leaves[0], leaves[1][indices.long()])
    grad.masked_fill_((products.abs() < 1e-4).any(1), 0.0)  # relu has no derivative at 0: rounding decides there
    scores = (products.relu() * leaves[2][..., None]).sum(1)
    truth = torch.autograd.grad(scores * HOW["scale"], leaves, grad.double())
    within = 1e-5 if dtype == torch.float32 else 1e-2
    how = HOW | {"d_iq_dtype": torch.float32}
    found = []
    for deterministic, workspace in ((False, 1), (True, 1 << 28), (True, 7 * 4 * k * dim)):
        found.append(scores_at_backward(
            iq, ik, w, indices, lo, hi, lo + k, grad, deterministic=deterministic, workspace=workspace, **how
        ))  # fmt: skip
        for mine, exact in zip(found[-1], truth, strict=True):
            assert (mine.double() - exact).norm() < within * exact.norm()
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_chunk_are_those_at_its_slots(dtype):
    s_q, n = 200, 700
    iq, ik, w = drawn(s_q, n, dtype=dtype)
    lo, hi = seen(s_q, n, True)
    grad = torch.randn(s_q, n, device="cuda")
    every = torch.arange(n, dtype=torch.int32, device="cuda").expand(s_q, n)
    how = HOW | {"d_iq_dtype": torch.float32}
    at_slots = scores_at_backward(iq, ik, w, every, lo, hi, lo + n, grad, k_offset=0, deterministic=True, **how)
    dense = dense_scores_backward(iq, ik, w, 5000, lo + 5000, hi + 5000, grad, **how)
    again = dense_scores_backward(iq, ik, w, 5000, lo + 5000, hi + 5000, grad, **how)
    assert all(torch.equal(a, b) for a, b in zip(dense, again, strict=True))
    for mine, theirs in zip(dense, at_slots, strict=True):
        assert (mine - theirs).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * theirs.norm()
