"""indexer_scores_at: the indexer's score of every slot, and its gradients, against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmesh import SparseMask
from attnmesh.ops.sparse import reference, torch_backend
from attnmesh.sparse import indexer_scores_at
from helpers.sparse import (
    BACKENDS,
    EVERY,
    HIGH,
    LOW,
    MASKS,
    IndexerCase,
    assert_sparse_close,
    device_of,
    embedded,
    mask_on,
    normal,
    random_indexer,
    random_indices,
    with_dtypes,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each = pytest.mark.parametrize(("backend", "dtype"), EVERY)
NAMES = ["scores", "d_iq", "d_ik", "d_w"]


def by_definition(case: IndexerCase, indices: Tensor, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Scores of slots and all gradients, in float64 or as simply as can be in another precision."""
    leaves = [x.to(dtype).requires_grad_() for x in case.leaves]
    valid = reference.valid_slots(indices, case.s_kv, case.mask)
    every = case.scores(leaves)
    if case.s_kv:
        every = every.gather(1, torch.where(valid, indices - case.mask.k_offset, 0).long())
    else:
        every = every.sum() + every.new_zeros(indices.shape)
    scores = torch.where(valid, every, -torch.inf)
    grads = torch.autograd.grad(scores, leaves, grad_of(indices).to(dtype), materialize_grads=True)
    return [scores.detach(), *grads]


def found(case: IndexerCase, indices: Tensor, backend: str, **how: object) -> list[Tensor]:
    """The same from `indexer_scores_at`, with NaN wherever it has no business."""
    device, valid = device_of(backend), reference.valid_slots(indices, case.s_kv, case.mask)
    unread = reference.key_counts(indices, valid, case.s_kv, case.mask.k_offset).eq(0).all(0)
    blind = ~valid.any(1)
    iq = case.iq.masked_fill(blind[:, None, None], torch.nan)
    ik, w = case.ik.masked_fill(unread[:, None], torch.nan), case.w.masked_fill(blind[:, None], torch.nan)
    leaves = [embedded(x.to(device)).detach().requires_grad_() for x in (iq, ik, w)]
    scores = indexer_scores_at(
        *leaves, indices.to(device), mask=mask_on(case.mask, device), backend=backend, **case.how, **how
    )
    assert scores.dtype == torch.promote_types(case.iq.dtype, torch.float32)
    grads = torch.autograd.grad(scores, leaves, grad_of(indices).to(scores))
    assert [x.dtype for x in grads] == [x.dtype for x in leaves]
    return [x.detach().cpu() for x in (scores, *grads)]


def grad_of(indices: Tensor) -> Tensor:
    return normal(*indices.shape, dtype=torch.float64, seed=77)


def check(case: IndexerCase, indices: Tensor, backend: str) -> None:
    results = found(case, indices, backend)
    assert_sparse_close(NAMES, results, by_definition(case, indices, case.iq.dtype), by_definition(case, indices))


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(MASKS))
def test_every_mask_in_every_dtype(name, backend, dtype):
    for relu in (True, False):
        case = random_indexer(mask=name, dtype=dtype, relu=relu)
        check(case, random_indices(13, 23, 11, k_offset=case.mask.k_offset), backend)


@each_backend
@pytest.mark.parametrize(
    ("s_q", "s_kv", "topk", "heads", "d"),
    [(0, 3, 2, 1, 8), (3, 0, 2, 5, 24), (1, 1, 1, 64, 128), (2, 9, 100, 5, 24), (40, 30, 1, 1, 8)],
)
def test_every_size(s_q, s_kv, topk, heads, d, backend):
    check(random_indexer(s_q, s_kv, heads=heads, d=d), random_indices(s_q, s_kv, topk), backend)


@each_backend
def test_slots_that_name_no_key_are_minus_infinity_and_send_nothing_back(backend):
    case = random_indexer(3, 5)
    indices = torch.tensor([[4, -1, 2], [5, HIGH, LOW], [0, 0, -9]]).int()
    scores, d_iq, d_ik, d_w = found(case, indices, backend)
    assert scores.isneginf().tolist() == [[False, True, False], [True] * 3, [False, False, True]]
    assert scores[2, 0] == scores[2, 1]
    assert d_iq[1].eq(0).all()
    assert d_w[1].eq(0).all()
    assert d_ik[[1, 3]].eq(0).all()


@each
def test_a_product_of_exactly_zero_sends_nothing_back(backend, dtype):
    """Small integers, which every dtype computes exactly: ReLU has no slope at 0."""
    case = random_indexer(dtype=dtype)
    iq, ik, w = (x.double().mul(1.5).round().clamp(-2, 2).to(dtype) for x in (case.iq, case.ik, case.w))
    case, indices = replace(case, iq=iq, ik=ik, w=w), random_indices(13, 23, 11)
    zero = torch.einsum("ihd,jd->ihj", iq.double(), ik.double()) == 0
    assert 0.02 < zero.float().mean() < 0.5
    check(case, indices, backend)


@each_backend
def test_weights_may_have_a_dtype_of_their_own(backend):
    case = replace(random_indexer(dtype=torch.float16), w=normal(13, 3, dtype=torch.float32))
    check(case, random_indices(13, 23, 11), backend)


@each_backend
def test_indices_that_all_rows_share(backend):
    for name in ("causal", "documents", "all"):
        case = random_indexer(mask=name)
        check(case, torch.arange(-1, 24, dtype=torch.int32).expand(13, 25), backend)


def test_a_few_rows_at_a_time_give_the_same(monkeypatch):
    case, indices = random_indexer(mask="causal"), random_indices(13, 23, 11)
    whole = found(case, indices, "torch")
    monkeypatch.setattr(torch_backend, "_MAX_GATHERED", 300)
    for a, b in zip(whole, found(case, indices, "torch"), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_those_of_finite_differences():
    case, indices = random_indexer(4, 6, dtype=torch.float64), torch.randint(0, 6, (4, 5), dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *x: indexer_scores_at(*x, indices, backend="torch", **case.how), case.leaves)


@each_backend
def test_deterministic_gives_the_same_bits_twice(backend):
    case, indices = random_indexer(40, 5), random_indices(40, 5, 30)
    once, again = (found(case, indices, backend, deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@each_backend
def test_no_second_derivative(backend):
    case = random_indexer(3, 5)
    iq, ik, w = (x.to(device_of(backend)).requires_grad_() for x in (case.iq, case.ik, case.w))
    indices = torch.tensor([[0, 1]] * 3, dtype=torch.int32, device=iq.device)
    scores = indexer_scores_at(iq, ik, w, indices, mask=SparseMask(), backend=backend)
    (d_w,) = torch.autograd.grad(scores.square().sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_w.sum().backward()
