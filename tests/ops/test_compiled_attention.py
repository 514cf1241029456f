"""`torch.compile` of `attention` on one device: one graph, the same results and gradients."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnmesh import Causal, Documents, SlidingWindow, attention
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from helpers.cases import sweep


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def compiled(function, **how):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **how)


def test_attention_is_one_graph():
    inputs, sinks = random_inputs(19, value_dim=24), torch.linspace(-1, 1, 4)
    mask, more = Causal() & Documents([8, 11]), {"softcap": 2.0, "alibi_slopes": torch.linspace(0.1, 0.5, 4)}

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, **more)

    found = forward_backward(compiled(attend), inputs, sinks)
    assert_attention_close(found, inputs, mask, sinks=sinks, **more)


@pytest.mark.parametrize("order", ["a suffix", sweep("any")])
def test_positions_are_read_when_the_graph_runs(order):
    inputs = random_inputs(9, 23)
    q_at, k_at = torch.arange(14, 23), torch.arange(23)
    if order == "any":
        q_at, k_at = torch.randperm(23)[:9], torch.randperm(23)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask=SlidingWindow(5), q_positions=q_at, k_positions=k_at, return_lse=True)

    found = forward_backward(compiled(attend), inputs)
    assert_attention_close(found, inputs, SlidingWindow(5), q_positions=q_at, k_positions=k_at)


def test_one_graph_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(lambda x: attention(x, x, x, mask=Causal()), backend=counter, fullgraph=True, dynamic=True)
    for length in (9, 14):
        x = torch.randn(1, 2, length, 16)
        torch.testing.assert_close(attend(x), attention(x, x, x, mask=Causal()))
    assert counter.frame_count == 1


def test_wrong_arguments_raise_when_the_graph_runs():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="add up to the sequence length 8"):
        compiled(attention)(x, x, x, mask=Documents([3]))


@pytest.mark.sweep
def test_operators_pass_opcheck():
    q, k, v, sinks = (x.clone().requires_grad_() for x in (*random_inputs(18)[:3], torch.randn(4)))
    from attnmesh.core.mask_encoding import encode
    from attnmesh.ops.dense import operator  # noqa: F401

    call = (None, None, None, None, encode(Causal()), 0.3, None, "auto")
    torch.library.opcheck(torch.ops.attnmesh.attention, (q, k, v, sinks, *call), atol=1e-5, rtol=1e-5)
