"""Dense attention over latents in Gluon: emulated here, and on a Hopper GPU at real sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmesh import Causal, SlidingWindow, attention, explain_attention
from attnmesh.core.state import State
from attnmesh.testing.attention import assert_attention_close, forward_backward
from helpers.gluon import emulated

pytest.importorskip("triton")

from attnmesh.ops.dense import gluon_latent
from attnmesh.ops.dense.call import Scores


def inputs(batch: int, heads: int, rows: int, keys: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Queries, and keys whose first features are the values."""
    dice = torch.Generator().manual_seed(rows)
    q = torch.randn(batch, rows, heads, 576, generator=dice).to(device, dtype).transpose(1, 2)
    k = torch.randn(batch, 1, keys, 576, generator=dice).to(device, dtype)
    return [q, k, k[..., :512]]


def exact(q: Tensor, k: Tensor, v: Tensor, first: Tensor, end: Tensor, scale: float, sinks: Tensor | None) -> State:
    scores = scale * q.double() @ k.double().mT
    at = torch.arange(k.shape[2])
    visible = (first[0][..., None] <= at) & (at < end[0][..., None])  # [B or 1, rows, keys]
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return State(scores.softmax(-1).nan_to_num(0.0) @ v.double(), scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("batch", "heads", "spans", "sinks"),
    [
        # Two items of heads per row, ranges that differ per sequence, an empty row, ends within tiles.
        (2, 70, [[(0, 1), (0, 130), (7, 7)], [(60, 150), (0, 150), (149, 150)]], False),
        (1, 64, [[(0, 65), (3, 64)]], True),
    ],
)
def test_rows_attend_to_ranges_of_keys(batch, heads, spans, sinks):
    q, k, v = inputs(batch, heads, len(spans[0]), 150, torch.float16)
    bounds = torch.tensor(spans, dtype=torch.int32).unbind(-1)
    first, end = (x[None] for x in bounds)
    k_nan = k.clone()
    seen = torch.zeros(batch, 150, dtype=torch.bool)
    for sequence, rows in enumerate(spans):
        for start, stop in rows:
            seen[sequence, start:stop] = True
    k_nan[:, 0][~seen] = torch.nan
    weights = torch.linspace(-1, 1, heads) if sinks else None
    how = {"scale": 0.05, "causal": False, "bounds": (first, end), "out_dtype": torch.float16, "sinks": weights}
    result = emulated(gluon_latent).forward(q, k_nan, k_nan[..., :512], state=None, **how)
    expected = exact(q, k, v, first, end, 0.05, weights)
    torch.testing.assert_close(result.out.double(), expected.out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(result.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)


def test_the_state_of_earlier_keys_is_continued():
    q, k, v = inputs(1, 64, 3, 140, torch.float16)
    kernels, how = emulated(gluon_latent), {"scale": 0.05, "causal": False, "bounds": None}
    state = kernels.forward(q, k[:, :, :64], v[:, :, :64], state=None, out_dtype=torch.float32, **how)
    whole = kernels.forward(q, k[:, :, 64:], v[:, :, 64:], state=state, out_dtype=torch.float16, **how)
    ends = torch.zeros(1, 1, 3, dtype=torch.int32), torch.full((1, 1, 3), 140, dtype=torch.int32)
    expected = exact(q, k, v, *ends, 0.05, None)
    torch.testing.assert_close(whole.out.double(), expected.out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(whole.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)


def test_what_is_not_served_has_a_reason():
    q, k, v = inputs(1, 64, 3, 20, torch.float16)
    assert gluon_latent.why_not(q, k, v, Scores(1.0)) is None
    assert "v = k[..., :512]" in gluon_latent.why_not(q, k, v.clone(), Scores(1.0))
    assert "fill half of a tile" in gluon_latent.why_not(q[:, :16], k, v, Scores(1.0))
    assert "softcap" in gluon_latent.why_not(q, k, v, Scores(1.0, softcap=2.0))
    assert "alibi_slopes" in gluon_latent.why_not(q, k, v, Scores(1.0, alibi_slopes=torch.ones(q.shape[1])))
    assert "fp16 and bf16" in gluon_latent.why_not(q.float(), k.float(), v.float(), Scores(1.0))


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(300)])
def test_prefill_with_absorbed_weights_on_a_gpu(mask):
    """Unequal work items, a chunk of a prompt, and the backward, which Triton computes."""
    q, k, v = inputs(2, 128, 1500, 1500, torch.bfloat16, "cuda")
    grads = [torch.randn(*q.shape[:3], 512, device="cuda").bfloat16(), torch.randn(q.shape[:3], device="cuda")]
    assert explain_attention(q, k, v, mask=mask, scale=0.07).backend == "gluon"
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    results = attention(*leaves, leaves[1][..., :512], mask=mask, return_lse=True, scale=0.07)
    dq, dk = torch.autograd.grad(results, leaves, grads)
    out, lse = (x.detach() for x in results)

    first = [q[:1], k[:1], v[:1].clone(), *(x[:1] for x in grads)]  # values apart from the keys

    def apart(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*tensors, mask=mask, return_lse=True, scale=0.07, backend="triton")

    separate = forward_backward(apart, first)
    assert_attention_close([out[:1], lse[:1], dq[:1], *separate[3:]], first, mask, scale=0.07)
    both = separate[3].float()
    both[..., :512] += separate[4].float()
    torch.testing.assert_close(dk[:1].float(), both, rtol=2e-2, atol=1e-2 * float(both.abs().max()))
    at = torch.arange(700, 900)
    chunk = attention(q[:, :, at], k, v, mask=mask, scale=0.07, q_positions=at)
    assert torch.equal(chunk, out[:, :, at])
