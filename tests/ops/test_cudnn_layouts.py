"""torch keeps cuDNN's plans by the strides of q, k and v alone: how out lies in memory must not matter to us."""

import pytest
import torch

from attnmesh import Causal, attention
from attnmesh.core.visibility import Patch
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, aligned
from attnmesh.ops.merge import GradAccumulator
from attnmesh.testing.errors import relative_error
from helpers.cases import first


def laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers, with heads first, with rows first, or as a part of something larger."""
    if how == "heads first":
        return x.contiguous()
    if how == "rows first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    larger = x.new_full((x.shape[0], x.shape[1], x.shape[2] + 64, x.shape[3]), torch.nan)
    larger[:, :, 32:-32] = x
    return larger[:, :, 32:-32]


LAYOUTS = ("heads first", "rows first", "a part")


@pytest.mark.parametrize("q_layout", first(1, LAYOUTS))
def test_gradients_are_right_however_out_lies(device, q_layout):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, grad = (torch.randn(2, heads, 192, 64, device=device).to(dtype) for heads in (4, 2, 2, 4))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact_out, lse = attention(*wide, mask=Causal(), return_lse=True, backend="reference")
    exact = torch.autograd.grad(exact_out, wide, grad.double())
    call = Call(laid(q, q_layout), k, v, Patch(Causal(), (range(192),), (range(192),)), Scores(64**-0.5))
    # All of them in one process, one after another: a plan that was kept for one must not serve the next.
    for out_layout in (*LAYOUTS, *reversed(LAYOUTS)):
        for grad_layout in LAYOUTS:
            out, grad_out = laid(exact_out.detach().to(dtype), out_layout), laid(grad, grad_layout)
            result = Result(out, lse.detach().float(), grad_out, None)
            sums = [GradAccumulator(x) for x in (q, k, v)]
            Aten().backward(call, result, Grads(*sums))
            for total, truth in zip(sums, exact, strict=True):
                assert relative_error(total.finish(), truth) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_out_is_copied_at_most_once_and_not_where_it_lies_well():
    q = torch.randn(1, 2, 8, 16)
    well = Result(torch.randn_like(q), torch.randn(1, 2, 8), torch.randn_like(q), None)
    out, grad_out = well.with_layout_of(q, range(8))
    assert out.data_ptr() == well.out.data_ptr()
    assert grad_out.data_ptr() == well.grad_out.data_ptr()
    part = q[:, :, 2:6]
    first, again = (well.with_layout_of(part, range(2, 6)) for _ in range(2))
    assert first[0].is_contiguous()
    assert first[0] is again[0]
    assert torch.equal(first[0], well.out[:, :, 2:6])
    assert torch.equal(first[1], well.grad_out[:, :, 2:6])


def test_rows_that_do_not_start_at_16_bytes_are_copied():
    memory = torch.randn(4096).half()
    in_order = memory[:1024].view(1, 2, 32, 16)
    for x in (in_order, in_order[:, :, 3:7], in_order.transpose(1, 2), in_order[:, :1].expand(1, 4, 32, 16)):
        assert aligned(x) is x
    odd_start, odd_stride = memory[1:1025].view(1, 2, 32, 16), memory[:2304].view(2, 2, 32, 18)[..., :16]
    for x in (odd_start, odd_stride, odd_stride.transpose(1, 2)):
        copy = aligned(x)
        assert copy.is_contiguous()
        assert torch.equal(copy, x)
    at_start = Result(in_order, torch.randn(1, 2, 32), odd_start, None)
    out, grad_out = at_start.with_layout_of(in_order, range(32))
    assert out.data_ptr() == in_order.data_ptr()
    assert grad_out.data_ptr() != odd_start.data_ptr()
    assert torch.equal(grad_out, odd_start)
