"""Every operation of the family once through the kernels, as the public functions call them."""

import pytest
import torch

import attnmesh as am
from helpers.sparse import device_of

pytest.importorskip("triton")

S_Q, S_KV, TOPK = 5, 40, 24


def tensors(device):
    """Attention and its indexer, and a mask that leaves the first row nothing."""
    torch.manual_seed(3)
    shapes = {"q": (S_Q, 6, 40), "kv": (S_KV, 40), "iq": (S_Q, 5, 16), "ik": (S_KV, 16), "w": (S_Q, 5)}
    leaves = {name: torch.randn(shape, device=device).requires_grad_() for name, shape in shapes.items()}
    mask = am.SparseMask(causal=True, q_positions=torch.tensor([0, 61, 33, 79, 20]), k_stride=2)
    return leaves, mask


def step(backend, device, mode):
    """Choose keys, attend, learn: what comes out, and all gradients."""
    x, mask = tensors(device)
    chosen = am.indexer_topk(x["iq"], x["ik"], x["w"], TOPK, mask=mask, backend=backend)
    out, lse, attn_sum = am.sparse_attention(
        x["q"], x["kv"], chosen.indices, scale=0.2, d_v=32, mask=mask, return_attn_sum=True, deterministic=True,
        backend=backend,
    )  # fmt: skip
    attention = {"q": x["q"].detach(), "k": x["kv"].detach(), "lse": lse.detach(), "attn_scale": 0.2}
    loss = am.indexer_kl_loss(
        x["iq"], x["ik"], x["w"], chosen.indices if mode == "sparse" else None, **attention, mask=mask, mode=mode,
        deterministic=True, backend=backend,
    )  # fmt: skip
    (out.square().sum() + lse[1:].sum() + loss).backward()
    return [chosen.indices, chosen.lengths, out, lse, attn_sum, loss, *(leaf.grad for leaf in x.values())]


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_kernels_and_torch_agree_on_everything(mode):
    device = device_of("triton")
    for found, right in zip(step("triton", device, mode), step("torch", device, mode), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
