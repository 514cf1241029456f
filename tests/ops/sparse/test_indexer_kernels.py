"""The indexer's kernels against float64, in Triton's interpreter or on the GPU where there is one.

Small integers make every sum exact: what the top-k must be is then known to the last bit, ties included.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnmesh import indexer_topk
from attnmesh.ops.sparse import triton_topk
from attnmesh.ops.sparse.arguments import TopKIndices
from attnmesh.ops.sparse.indexer_tiles import IndexerTiles
from attnmesh.ops.sparse.triton_indexer import Grads
from helpers import sparse_kernels
from helpers.cases import first, sweep
from helpers.sparse_kernels import dense_scores_backward, scores_at, scores_at_backward

CUDA = torch.cuda.is_available()
# The interpreter's bf16 dot is wrong, and each of its tiles takes milliseconds: small shapes.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * CUDA
SMALL = IndexerTiles(keys=16, rows=1, warps=4, stages=1)
PAIRS = IndexerTiles(keys=32, rows=2, warps=4, stages=1)
WHOLE = IndexerTiles(keys=64, rows=2, warps=4, stages=1)  # few programs, where only the selection matters
SCALE = 0.25
topk = partial(sparse_kernels.topk, triton_topk)


def with_each_dtype(*shapes: tuple) -> list:
    """Every shape with the next dtype."""
    return [(DTYPES[i % len(DTYPES)], *shape) for i, shape in enumerate(shapes)]


def dense_scores(iq: Tensor, ik: Tensor, w: Tensor, relu: bool = True) -> Tensor:
    """The definition, in float64: [s_q, s_kv]."""
    s = torch.einsum("qhd,kd->qhk", iq.double(), ik.double())
    return ((s.relu() if relu else s) * w.double()[..., None]).sum(1) * SCALE


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


class Named:
    """Slots of all sorts: valid, out of a row's bounds, past its slots, far out; and NaN in keys that nobody names."""

    def __init__(self, device, dtype, heads=8, dim=16, slots=40, s_q=5, s_kv=60, k_offset=1000, w_dtype=torch.float32):
        self.iq, self.ik = (torch.randn(*n, dim, device=device).to(dtype) for n in ((s_q, heads), (s_kv,)))
        self.w = torch.randn(s_q, heads, device=device).to(w_dtype)
        self.k_offset = k_offset
        ends = torch.tensor([-(2**31), 2**31 - 1, -1], device=device)
        indices = torch.randint(k_offset - 9, k_offset + s_kv + 9, (s_q, slots), device=device)
        strange = torch.rand(s_q, slots, device=device) < 0.1
        self.indices = torch.where(strange, ends[torch.randint(0, 3, (s_q, slots), device=device)], indices).int()
        self.lo = torch.randint(k_offset, k_offset + s_kv // 4, (s_q,), device=device).int()
        self.hi = torch.randint(k_offset + s_kv // 2, k_offset + s_kv + 1, (s_q,), device=device).int()
        self.slots = torch.randint(slots // 2, slots + 1, (s_q,), device=device).int()
        self.hi[1], self.slots[2] = self.lo[1], 0  # rows without a valid slot
        self.valid = (self.indices >= self.lo[:, None]) & (self.indices < self.hi[:, None])
        self.valid &= torch.arange(slots, device=device) < self.slots[:, None]
        self.at = torch.where(self.valid, self.indices - k_offset, 0).long()
        unnamed = torch.ones(s_kv, dtype=torch.bool, device=device)
        unnamed[self.at[self.valid]] = False
        assert unnamed.any()
        self.clean = self.ik.masked_fill(unnamed[:, None], 0.0)
        self.ik = self.ik.masked_fill(unnamed[:, None], torch.nan)
        self.grad = torch.randn(s_q, slots, device=device).masked_fill(~self.valid, torch.nan)

    @property
    def where(self) -> tuple[Tensor, ...]:
        return self.indices, self.lo, self.hi, self.slots

    def truth(self, relu: bool = True) -> Tensor:
        return dense_scores(self.iq, self.clean, self.w, relu).gather(1, self.at)

    def true_grads(self, relu: bool = True) -> tuple[Tensor, ...]:
        leaves = [x.double().requires_grad_() for x in (self.iq, self.clean, self.w)]
        scores = dense_scores(*leaves, relu).gather(1, self.at)
        return torch.autograd.grad(scores, leaves, self.grad.masked_fill(~self.valid, 0.0).double())

    def backward(self, relu: bool = True, **how) -> Grads:
        how = {"deterministic": False, "tiles": SMALL, "d_iq_dtype": torch.float32} | how
        return scores_at_backward(
            self.iq, self.ik, self.w, *self.where, self.grad, k_offset=self.k_offset, scale=SCALE, relu=relu, **how
        )


def assert_grads(found: Grads, truth: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    within = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for mine, exact in zip(found, truth, strict=True):
        assert relative(mine, exact) < within


# Scores at slots.


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "slots", "relu", "w_dtype"),
    first(4, with_each_dtype(
        (1, 16, 1, True, torch.float32), (8, 64, 100, True, None), (130, 24, 20, True, None),
        (64, 128, 128, True, torch.float32), (3, 40, 33, False, torch.float32),
    )),
)  # fmt: skip
def test_scores_at_slots(device, dtype, heads, dim, slots, relu, w_dtype):
    named = Named(device, dtype, heads, dim, slots, w_dtype=w_dtype or dtype)
    scores = scores_at(
        named.iq, named.ik, named.w, *named.where, k_offset=named.k_offset, scale=SCALE, relu=relu, tiles=SMALL
    )
    assert scores.dtype == torch.float32
    assert torch.equal(scores.isneginf(), ~named.valid)
    assert torch.allclose(scores[named.valid].double(), named.truth(relu)[named.valid], rtol=1e-4, atol=1e-4)


def test_indices_of_all_rows_at_once_take_no_memory(device):
    """Indices whose rows are one row: every key of a chunk."""
    iq, ik, w = (torch.randn(*shape, device=device) for shape in ((3, 4, 16), (50, 16), (3, 4)))
    lo, hi = (torch.full((3,), n, dtype=torch.int32, device=device) for n in (107, 140))
    chunk = torch.arange(110, 150, dtype=torch.int32, device=device).expand(3, 40)
    scores = scores_at(
        iq, ik, w, chunk, lo, hi, lo * 0 + 40, k_offset=100, scale=SCALE, relu=True, tiles=SMALL
    )  # fmt: skip
    assert torch.allclose(scores[:, :30].double(), dense_scores(iq, ik, w)[:, 10:40], atol=1e-5)
    assert scores[:, 30:].isneginf().all()


def test_strided_inputs(device):
    iq = torch.randn(4, 2, 3, 32, device=device)[:, 1, :, :16]
    ik = torch.randn(40, 48, device=device)[:, 16:32]
    w = torch.randn(3, 4, device=device).T
    lo, hi = (torch.full((4,), n, dtype=torch.int32, device=device) for n in (0, 40))
    every = torch.arange(40, dtype=torch.int32, device=device).expand(4, 40)
    how = {"scale": SCALE, "relu": True, "tiles": SMALL}
    scores = scores_at(iq, ik, w, every, lo, hi, hi, k_offset=0, **how)
    assert torch.allclose(scores.double(), dense_scores(iq, ik, w), atol=1e-4)
    best = topk(iq, ik, w, 7, lo, hi, block=64, **how)
    assert torch.equal(best.scores, scores.gather(1, best.indices.long()))


# Top-k.


def definition(scores: Tensor, k: int, lo: Tensor, hi: Tensor) -> TopKIndices:
    """The best of scores [s_q, s_kv] by a stable sort."""
    keys = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill((keys < lo[:, None]) | (keys >= hi[:, None]), -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, max(0, k - scores.shape[1])), value=-torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    chosen = scores.gather(1, order) > -torch.inf
    indices, back = order.masked_fill(~chosen, 2**31 - 1).sort(1)
    chosen = chosen.gather(1, back)
    return TopKIndices(
        indices.masked_fill(~chosen, -1).int(), scores.gather(1, order).gather(1, back).float(), chosen.sum(1).int()
    )


def assert_same(found: TopKIndices, expected: TopKIndices) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def whole(device, dtype, heads, dim, s_q, s_kv, sparse=1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers; the fewer weights are not zero, the more scores are exactly zero."""
    iq, ik = (torch.randint(-2, 3, (*n, dim), device=device).to(dtype) for n in ((s_q, heads), (s_kv,)))
    w = torch.randint(-2, 3, (s_q, heads), device=device).float()
    return iq, ik, w * (torch.rand_like(w) < sparse)


def bounds(device, s_q, s_kv) -> tuple[Tensor, Tensor]:
    """An interval a row: of all lengths, one empty, one of a few keys; the first and the last keys nobody sees."""
    lo = torch.randint(5, s_kv // 3, (s_q,), device=device).int()
    hi = torch.randint(s_kv // 2, s_kv - 5, (s_q,), device=device).int()
    hi[1], hi[2] = lo[1], lo[2] + 3
    return lo, hi


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "k", "s_kv", "sparse"),
    first(
        1, with_each_dtype((1, 16, 1, 150, 1.0), (8, 64, 20, 200, 0.2), (64, 32, 60, 90, 1.0), (130, 16, 30, 90, 1.0))
    ),
)
def test_the_topk_is_exact(device, dtype, heads, dim, k, s_kv, sparse):
    iq, ik, w = whole(device, dtype, heads, dim, 5, s_kv, sparse)
    lo, hi = bounds(device, 5, s_kv)
    expected = definition(dense_scores(iq, ik, w), k, lo, hi)
    ik[: int(lo.min())] = ik[int(hi.max()) :] = torch.nan
    how = {"scale": SCALE, "relu": True}
    found = topk(iq, ik, w, k, lo, hi, tiles=PAIRS, span=64, block=64, **how)
    assert_same(found, expected)
    at_slots = scores_at(iq, ik, w, found.indices, lo, hi, found.lengths, k_offset=0, tiles=SMALL, **how)
    assert torch.equal(found.scores, at_slots)


def test_no_cut_of_the_work_shows_in_the_result(device):
    """Other tiles, spans and blocks; a workspace that wraps around; more and fewer programs."""
    iq, ik, w = whole(device, torch.float16, 4, 16, 5, 100)
    lo, hi = bounds(device, 5, 100)
    results = [
        topk(iq, ik, w, 20, lo, hi, scale=SCALE, relu=True, tiles=tiles, span=span, block=block, workspace=room,
             programs=programs)
        for tiles, span, block, room, programs in [
            (SMALL, 32, 32, 1, 1), (PAIRS, 150, 64, None, 3), (IndexerTiles(64, 4, 4, 1), 64, 256, 1, 2),
        ]
    ]  # fmt: skip
    for result in results[1:]:
        assert_same(result, results[0])


def test_zeros_of_both_signs_are_equal(device):
    """One head that multiplies by 1 (or -1): scores are what the keys say. A scale of -1 makes zeros of either sign."""
    ik = torch.zeros(100, 16, device=device)
    ik[::2, 0] = -0.0
    iq = torch.zeros(2, 16, 16, device=device)
    iq[:, 0, 0] = 1.0
    w = torch.tensor([[-1.0], [1.0]], device=device).repeat(1, 16)
    lo, hi = (torch.full((2,), n, dtype=torch.int32, device=device) for n in (3, 100))
    found = topk(iq, ik, w, 12, lo, hi, scale=-1.0, relu=False, tiles=WHOLE, span=64, block=128)
    assert_same(found, definition(torch.zeros(2, 100, device=device).double(), 12, lo, hi))
    assert not found.scores.signbit().any()


def test_keys_without_a_score_are_not_chosen(device):
    """NaN in what a row sees is the caller's fault; it must not hang, nor write elsewhere."""
    iq, ik, w = whole(device, torch.float32, 2, 16, 1, 100)
    lo, hi = torch.zeros(1, dtype=torch.int32, device=device), torch.full((1,), 100, dtype=torch.int32, device=device)
    scores = dense_scores(iq, ik, w)
    scores[:, :60] = -torch.inf
    expected = definition(scores, 50, lo, hi)
    ik[:60] = torch.nan
    found = topk(iq, ik, w, 50, lo, hi, scale=SCALE, relu=True, tiles=WHOLE, span=64, block=32)
    assert_same(found, expected)


def test_no_rows_and_no_keys(device):
    iq, ik, w = whole(device, torch.float32, 2, 16, 3, 0)
    none = torch.zeros(3, dtype=torch.int32, device=device)
    found = topk(iq, ik, w, 4, none, none, scale=SCALE, relu=True, tiles=SMALL, block=32)
    assert_same(found, definition(torch.zeros(3, 0, device=device), 4, none, none))
    assert topk(iq[:0], ik, w[:0], 4, none[:0], none[:0], scale=SCALE, relu=True).indices.shape == (0, 4)


# Gradients.


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "slots", "relu"),
    with_each_dtype((8, 16, 40, True), (70, 40, 20, True), (3, 24, 33, False)),
)
def test_gradients(device, dtype, heads, dim, slots, relu):
    named = Named(device, dtype, heads, dim, slots)
    assert_grads(named.backward(relu), named.true_grads(relu), dtype)


@pytest.mark.parametrize("heads", [4, sweep(70)])
def test_deterministic_gradients_do_not_depend_on_the_workspace(device, heads):
    named = Named(device, torch.float32, heads, 16, 30, s_q=4, s_kv=20)
    at_once = named.backward(deterministic=True)
    assert_grads(at_once, named.true_grads(), torch.float32)
    in_parts = named.backward(deterministic=True, workspace=3 * 4 * 30 * 16)  # three rows, then one
    assert all(torch.equal(a, b) for a, b in zip(in_parts, at_once, strict=True))


def test_gradients_of_a_wide_head(device):
    named = Named(device, torch.float32, 2, 136, 10)
    assert_grads(named.backward(), named.true_grads(), torch.float32)


def test_no_gradient_where_the_product_is_zero(device):
    """relu'(0) is 0, and a row of zeros in iq makes all its products 0."""
    named = Named(device, torch.float32, 2, 16, 10)
    named.iq[0] = 0.0
    found = named.backward()
    assert not found.iq[0].any()
    assert not found.w[0].any()


def test_gradients_too_small_for_float16_are_kept(device):
    named = Named(device, torch.float16, 4, 16, 20)
    named.grad *= 1e-9
    assert_grads(named.backward(), named.true_grads(), torch.float16)


@pytest.mark.parametrize(("dtype", "heads", "dim", "relu"), first(1, with_each_dtype((8, 16, True), (70, 24, False))))
def test_gradients_of_a_chunk_of_keys(device, dtype, heads, dim, relu):
    """Against float64, with NaN in keys that no row sees, and in gradients of what a row does not see."""
    iq, ik = (torch.randn(*n, dim, device=device).to(dtype) for n in ((5, heads), (40,)))
    w = torch.randn(5, heads, device=device)
    lo = torch.tensor([1003, 1010, 1000, 1020, 1004], dtype=torch.int32, device=device)
    hi = torch.tensor([1030, 1010, 1012, 1061, 1005], dtype=torch.int32, device=device)
    keys = torch.arange(1003, 1043, device=device)
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])
    seen[:, 38:] = False
    hi.clamp_(max=1041)  # the last two keys nobody sees
    grad = torch.randn(5, 40, device=device) * (1e-8 if dtype == torch.float16 else 1.0)
    leaves = [x.double().requires_grad_() for x in (iq, ik, w)]
    truth = torch.autograd.grad(dense_scores(*leaves, relu), leaves, grad.masked_fill(~seen, 0.0).double())
    ik[38:] = torch.nan
    found = dense_scores_backward(
        iq, ik, w, 1003, lo, hi, grad.masked_fill(~seen, torch.nan), scale=SCALE, relu=relu, tiles=SMALL,
        d_iq_dtype=torch.float32,
    )  # fmt: skip
    assert_grads(found, truth, dtype)


def test_heads_that_are_too_wide_are_refused(device):
    iq, ik = torch.zeros(3, 2, 300, device=device), torch.zeros(10, 300, device=device)
    with pytest.raises(ValueError, match=r"backend=.triton. cannot .* its head dim is at most 256, got 300"):
        indexer_topk(iq, ik, torch.zeros(3, 2, device=device), 4, backend="triton")
