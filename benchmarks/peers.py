"""Peers: torch's attention over the whole sequence on one device, bf16, 32/8 heads, D=128."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def random_inputs(length: int, backward: bool) -> Inputs:
    """Return q, k, v and, for a backward, the gradient of out."""

    def drawn(heads: int, grad: bool) -> Tensor:
        return torch.randn(1, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    q, k, v = drawn(HEADS, backward), drawn(KV_HEADS, backward), drawn(KV_HEADS, backward)
    return q, k, v, drawn(HEADS, False) if backward else None


def one_device(peer: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Tensor:
    """Run causal attention on one device with a peer."""
    with sdpa_kernel(PEERS[peer]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return run_backward(out, (q, k, v), grad)


def run_backward(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor | None) -> Tensor:
    """Run the backward if there is a gradient; returns a tensor that depends on all of it."""
    if grad is None:
        return out
    return torch.autograd.grad(out, inputs, grad)[0]


def compile_flex(mask_mod: Callable[[Any, Any, Any, Any], Any], length: int) -> Callable[..., Tensor]:
    """FlexAttention of q, k, v under a mask, compiled, with a block mask that is made here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # slow to import

    torch.compiler.reset()  # a graph for each mask; a function has eight at most
    flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    blocks = torch.compile(create_block_mask)(mask_mod, None, None, length, length, device="cuda")
    return partial(flex, block_mask=blocks, enable_gqa=True)
