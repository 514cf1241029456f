"""attention() equals torch's FlexAttention with the same mask and scores, written as mask_mod and score_mod."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnmesh import attention
from attnmesh.core.masks import BlockCausal, Causal, Documents, Full, Global, Mask, Padding, Prefix, SlidingWindow
from attnmesh.testing.attention import random_inputs
from helpers.cases import sweep

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LENGTH = 70


def by_flex(inputs: list[Tensor], mask: Mask, softcap: float | None, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse of FlexAttention."""
    device = inputs[0].device
    at = torch.arange(LENGTH, device=device)
    visible = mask.visible(at[:, None], at).expand(2, -1, -1)

    def mask_mod(b, h, q, k):
        return visible[b, q, k]

    def score_mod(score, b, h, q, k):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[h] * (q - k).abs()

    blocks = create_block_mask(mask_mod, 2, None, LENGTH, LENGTH, device=device)
    return flex_attention(*inputs[:3], score_mod=score_mod, block_mask=blocks, enable_gqa=True, return_lse=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mask", "softcap", "slopes"),
    [
        (Full(), 2.0, None), sweep(Prefix(20), None, SLOPES), sweep(Causal() & Documents([30, 40]), 2.0, SLOPES),
        sweep(Causal() & (Global(4) | SlidingWindow(11)), None, None), sweep(BlockCausal(16), 1.0, SLOPES),
        sweep(Causal() & Padding([70, 33]), None, None),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_as_flex_attention(mask, softcap, slopes, device):
    torch.compiler.reset()  # a float that changed since the last call would be a symbol, which FlexAttention fails on
    inputs = random_inputs(LENGTH, dtype=torch.float64, device=device)
    slopes = None if slopes is None else slopes.to(device)
    wants_grad = device.type == "cuda"  # FlexAttention has no gradients on the CPU
    results = []
    for attend in (
        lambda *qkv: by_flex(qkv, mask, softcap, slopes),
        lambda *qkv: attention(*qkv, mask=mask, softcap=softcap, alibi_slopes=slopes, return_lse=True),
    ):
        leaves = [x.clone().requires_grad_(wants_grad) for x in inputs[:3]]
        out, lse = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, inputs[3]) if wants_grad else ()
        results.append([out.detach(), lse.detach().double(), *grads])
    for exact, result in zip(*results, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-6, atol=1e-6)  # FlexAttention's softmax is float32
