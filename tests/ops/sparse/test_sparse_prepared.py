"""Repeated sparse calls: what depends on a call's signature is decided once, and nothing else is taken for granted."""

import logging

import pytest
import torch
from torch.autograd import forward_ad

from attnmesh import SparseMask, attention_distribution, indexer_topk, sparse_attention
from helpers.sparse import device_of

BACKENDS = ["torch", "triton"]


def tensors(seed: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """q, two sets of rows for keys, and indices."""
    torch.manual_seed(seed)
    q, (k, v) = torch.randn(5, 4, 32, device=device), torch.randn(2, 40, 32, device=device)
    return q, k, v, torch.randint(-2, 42, (5, 12), dtype=torch.int32, device=device)


def check(q, k, v, indices, backend, **how):
    if backend == "triton":
        pytest.importorskip("triton")
    found = sparse_attention(q, k, indices, scale=0.2, v=v, backend=backend, **how)
    expected = sparse_attention(*(x.double() for x in (q, k)), indices, scale=0.2, v=v.double(), backend="torch", **how)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeat_reads_its_own_tensors(backend):
    """And its own mask; and values that are the keys in one call and are not in another."""
    for seed in range(2):
        q, k, v, indices = tensors(seed, device_of(backend))
        for values in (k, v):
            check(q, k, values, indices, backend)
            lengths = torch.tensor([12, seed, 0, 5, 40], device=q.device)
            check(q, k, values, indices, backend, mask=SparseMask(topk_length=lengths))
            check(q, k, values, indices, backend, mask=SparseMask(causal=True, q_start=seed))
            check(q, k, values, indices + 7, backend, mask=SparseMask(k_offset=7 - seed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_one_head_and_strided_rows(backend):
    q, k, _, indices = tensors(2, device_of(backend))
    for keys in (k, k[:, None], k.t().contiguous().t(), torch.cat([k, k], 1)[:, :32]):
        for slots in (indices, indices[:, None], indices.t().contiguous().t()):
            found = sparse_attention(q, keys, slots, scale=0.2, backend=backend)
            expected = sparse_attention(q, k, indices, scale=0.2, backend="torch")
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_gradients_after_without(backend):
    """Without gradients nothing is recorded; a repeat of the same signature has them again."""
    q, k, _, indices = tensors(3, device_of(backend))
    plain = sparse_attention(q, k, indices, scale=0.2, backend=backend)
    assert not any(x.requires_grad for x in plain)
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        assert not sparse_attention(leaf, k, indices, scale=0.2, backend=backend)[0].requires_grad
    out, _ = sparse_attention(leaf, k, indices, scale=0.2, backend=backend)
    assert torch.equal(out, plain[0])
    out.sum().backward()
    assert leaf.grad.abs().sum() > 0


def test_forward_gradients_are_refused_not_lost():
    q, k, _, indices = tensors(4)
    sparse_attention(q, k, indices, scale=0.2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError):
            sparse_attention(dual, k, indices, scale=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": True}, "scale must be"),
        ({"scale": "1"}, "scale must be"),
        ({"scale": [1.0]}, "scale must be"),
        ({"d_v": True}, "d_v must be"),
        ({"deterministic": 0}, "deterministic must be True or False, got 0"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"mask": None}, "mask must be a SparseMask"),
        ({"mask": SparseMask(topk_length=torch.ones(4, dtype=torch.int32))}, r"topk_length must be \[5\]"),
        ({"sinks": torch.ones(3)}, "sinks must be"),
        ({"q": torch.ones(5, 4, 32).to_sparse()}, "q must be a dense tensor"),
        ({"kv": [1.0]}, "kv must be a tensor"),
    ],
)
def test_what_equals_a_valid_argument_is_still_refused(change, message):
    """After a call that is right, of which it is a copy but for one argument: True equals 1, and 0 is False."""
    q, k, _, indices = tensors(5)
    given = {"q": q, "kv": k, "indices": indices, "scale": 1, "d_v": 1}
    sparse_attention(**given)
    with pytest.raises(ValueError, match=message):
        sparse_attention(**given | change)


def test_a_choice_is_logged_after_calls_that_logged_nothing(caplog):
    q, k, _, indices = tensors(6)
    q = torch.cat([q, q, q], 1)  # of a shape that no other test logs
    sparse_attention(q, k, indices, scale=0.2)
    with caplog.at_level(logging.INFO, "attnmesh"):
        sparse_attention(q, k, indices, scale=0.2)
    assert "sparse forward of q (5, 12, 32)" in caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_distributions_and_topk_of_repeats(backend):
    """Kernels that are launched once and repeated, on other tensors of the same shapes."""
    if backend == "triton":
        pytest.importorskip("triton")
    for seed in range(2):
        q, k, _, indices = tensors(7 + seed, device_of(backend))
        lse = sparse_attention(q, k, indices, scale=0.2, backend=backend)[1]
        found = attention_distribution(q, k, indices, lse, scale=0.2, backend=backend)
        expected = attention_distribution(q.double(), k.double(), indices, lse, scale=0.2, backend="torch")
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
        w = torch.rand(5, 4, device=q.device)
        top = indexer_topk(q, k, w, 6, mask=SparseMask(k_offset=seed), backend=backend)
        scores = torch.relu(q.double() @ k.double().t()).mul(w.double()[..., None]).sum(1)
        assert torch.equal(top.indices.long(), scores.topk(6).indices.sort().values + seed)
