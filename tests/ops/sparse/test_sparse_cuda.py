"""The sparse family on a GPU: outputs past 2^31 elements, real sizes, the same bits in every run."""

import pytest
import torch

from attnmesh import SparseMask, attention_distribution, indexer_topk, sparse_attention
from helpers.sparse import CUDA

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="needs a GPU")]


@pytest.mark.gpu_memory(gib=40)
def test_an_output_past_two_to_the_31_elements():
    """2.25e9 probabilities (9 GB): what a 32-bit address would write to the beginning again belongs at the end."""
    s_q, s_kv, topk = 1_100_000, 4096, 2048
    assert s_q * topk > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(s_q, 1, 16, device="cuda", dtype=torch.bfloat16, generator=generator)
    k = torch.randn(s_kv, 16, device="cuda", dtype=torch.bfloat16, generator=generator)
    indices = torch.randint(-1, s_kv, (s_q, topk), device="cuda", dtype=torch.int32, generator=generator)
    _, lse = sparse_attention(q, k, indices, scale=0.25)
    dist = attention_distribution(q, k, indices, lse, scale=0.25)
    for rows in (slice(0, 3), slice(2**31 // topk - 2, 2**31 // topk + 2), slice(s_q - 3, s_q)):
        named = indices[rows]
        keys = k[named.clamp(min=0)].double()
        p = torch.exp(torch.einsum("id,ijd->ij", q[rows, 0].double(), keys) * 0.25 - lse[rows].double())
        torch.testing.assert_close(dist[rows].double(), p.masked_fill(named < 0, 0.0), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(dist[rows].sum(1), torch.ones(named.shape[0], device="cuda"), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_sizes_of_a_real_model(deterministic):
    """128 heads of 576 with values of 512 over 2048 keys; a few rows against float64, and every gradient finite."""
    s_q, s_kv, topk, mask = 256, 8192, 2048, SparseMask(causal=True, q_start=7936)
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(s_q, 128, 576, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    kv = torch.randn(s_kv, 576, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    indices = torch.rand(s_q, s_kv, device="cuda", generator=generator).argsort(1)[:, :topk].int()
    results = []
    for _ in range(2):
        out, lse, dist = sparse_attention(
            q, kv, indices, scale=0.05, d_v=512, mask=mask, return_attn_sum=True, deterministic=deterministic
        )
        grads = torch.autograd.grad([out, lse], [q, kv], [torch.ones_like(out), torch.ones_like(lse)])
        results.append([out, lse, dist, *grads])
    if deterministic:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for i in (0, 100, 255):
        seen = indices[i].long()
        keys = kv[seen].detach().double()
        s = (q[i].detach().double() @ keys.T * 0.05).masked_fill(seen > 7936 + i, -torch.inf)
        torch.testing.assert_close(lse[i].double(), s.logsumexp(1), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(out[i].double(), s.softmax(1) @ keys[:, :512], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(dist[i].double(), s.softmax(1).sum(0), rtol=1e-2, atol=1e-4)
    assert all(x.isfinite().all() for x in results[0])


def test_the_top_k_of_a_long_sequence_has_the_same_bits_in_every_run():
    s_q, s_kv = 64, 32_768
    generator = torch.Generator("cuda").manual_seed(0)
    iq = torch.randn(s_q, 64, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    ik = torch.randn(s_kv, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    w = torch.randn(s_q, 64, device="cuda", generator=generator)
    first, again = (indexer_topk(iq, ik, w, 2048) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    scores = torch.einsum("ih,ihj->ij", w.double(), torch.einsum("ihd,jd->ihj", iq.double(), ik.double()).relu())
    kept = scores.gather(1, first.indices.long())
    torch.testing.assert_close(first.scores.double(), kept, rtol=1e-3, atol=1e-2)
    left = scores.scatter(1, first.indices.long(), -torch.inf).amax(1)
    assert (kept.amin(1) >= left - 1e-2).all()
    assert (first.indices.diff(dim=1) > 0).all()
