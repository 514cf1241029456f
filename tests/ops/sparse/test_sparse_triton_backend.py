"""Every operation of the family once through the kernels, as the public functions call them."""

import pytest
import torch

import attnmesh as am
from helpers.sparse import device_of

pytest.importorskip("triton")

S_Q, S_KV, TOPK = 5, 40, 18


def tensors(device):
    """Attention and its indexer, and a mask that leaves the first row nothing."""
    torch.manual_seed(3)
    shapes = {"q": (S_Q, 6, 40), "kv": (S_KV, 40), "iq": (S_Q, 5, 16), "ik": (S_KV, 16), "w": (S_Q, 5)}
    leaves = {name: torch.randn(shape, device=device).requires_grad_() for name, shape in shapes.items()}
    mask = am.SparseMask(causal=True, q_positions=torch.tensor([0, 61, 33, 79, 20]), k_stride=2)
    return leaves, mask


def step(backend, device):
    """A training step: top-k, attention, both losses; the outputs and all gradients."""
    x, mask = tensors(device)
    topk = am.indexer_topk(x["iq"], x["ik"], x["w"], TOPK, mask=mask, backend=backend)
    out, lse, attn_sum = am.sparse_attention(
        x["q"], x["kv"], topk.indices, scale=0.2, d_v=32, mask=mask, return_attn_sum=True, deterministic=True,
        backend=backend,
    )  # fmt: skip
    target = am.sparse.AttentionTarget(x["q"].detach(), x["kv"].detach(), lse.detach(), 0.2)
    sparse, dense = (
        am.indexer_kl_loss(
            x["iq"], x["ik"], x["w"], indices, target, mask=mask, deterministic=True, backend=backend
        )
        for indices in (topk.indices, None)
    )  # fmt: skip
    (out.square().sum() + lse[1:].sum() + sparse + 2 * dense).backward()
    return [topk.indices, topk.lengths, out, lse, attn_sum, sparse, dense, *(leaf.grad for leaf in x.values())]


@pytest.mark.sweep
def test_triton_and_torch_backends_agree():
    device = device_of("triton")
    for actual, expected in zip(step("triton", device), step("torch", device), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
