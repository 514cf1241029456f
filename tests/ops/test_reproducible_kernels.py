"""The kernels of reproducible=True in Triton's interpreter, at small sizes; `test_reproducible_cuda` has real ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmesh import Causal, Documents, Full, Global, Mask, PerSequence, SlidingWindow
from attnmesh.core.tree import Node
from attnmesh.ops.dense import reproducible_kernels, triton_forward
from attnmesh.ops.dense.call import Result
from attnmesh.ops.dense.dispatch import prepared
from attnmesh.plan.leaves import leaf_size
from attnmesh.testing.attention import assert_attention_close, random_inputs
from helpers.cases import sweep

pytestmark = pytest.mark.usefixtures("one_thread")

LEAF = leaf_size("cpu")
LENGTH = LEAF + 45
NAMES = ("out", "lse", "dq", "dk", "dv")


def results(
    inputs: list[Tensor], mask: Mask, at: Tensor | None = None, *, nodes: tuple[Node | None, ...] = (None,), **terms
) -> list[Tensor]:
    """out, lse, dq, and dk and dv for each node; rows and keys at these positions."""
    q, k, v, grad_out, grad_lse = inputs
    k_at = at if k.shape[2] == q.shape[2] else None
    found = prepared(q, k, v, mask, None, terms.get("softcap"), None, terms.get("alibi_slopes"), at, k_at)
    assert reproducible_kernels.why_not(found.call) is None
    order, back = slice(None), slice(None)
    if found.order is not None:
        order, back = found.order, found.order.argsort()
    state = reproducible_kernels.forward(found.call, None)
    result = Result.of(*state, grad_out[:, :, order], grad_lse[:, :, order])
    grads = reproducible_kernels.gradients(found.call, result, (True, True, True), nodes)
    both = [x.to(q.dtype)[:, :, back if x.shape[2] == q.shape[2] else slice(None)] for x in (*grads.k, *grads.v)]
    return [state.out[:, :, back], state.lse[:, :, back], grads.q.to(q.dtype)[:, :, back], *both]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        assert torch.equal(a, b), name
        assert torch.equal(a.signbit(), b.signbit()), name


@pytest.mark.parametrize(
    ("mask", "dtype", "heads", "terms"),
    [
        # A union has several parts; slopes need positions; keys of a chunk are cut within a tile.
        (SlidingWindow(20) | Global(5), torch.float32, (2, 1), {"alibi_slopes": torch.tensor([0.3, 0.02])}),
        (SlidingWindow(50, 3), torch.float16, (1, 1), {"softcap": 3.0}),
        sweep(Causal() & Documents([60, 0, LENGTH - 60]), torch.float32, (4, 2), {}),
        sweep(PerSequence([Causal(), SlidingWindow(17)]), torch.float16, (2, 2), {"softcap": 2.0}),
        sweep(Full(), torch.float32, (3, 1), {}),
    ],
)
def test_results_are_right_and_depend_neither_on_the_order_nor_on_the_rows_of_a_call(mask, dtype, heads, terms):
    inputs = random_inputs(LENGTH, heads=heads, dtype=dtype, batch=mask.sequences or 1)
    whole = results(inputs, mask, **terms)
    assert_attention_close(whole, inputs, mask, **terms)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    assert_same_bits(results([x[:, :, order] for x in inputs], mask, order, **terms), [x[:, :, order] for x in whole])
    at = torch.arange(LEAF - 9, LEAF + 30)
    chunk = [x[:, :, at] if x is not inputs[1] and x is not inputs[2] else x for x in inputs]
    assert_same_bits(results(chunk, mask, at, **terms)[:3], [x[:, :, at] for x in whole[:3]])


def test_nodes_of_the_tree_are_sums_of_the_leaves_of_a_call():
    """The rows are the first and the third leaf: two nodes, of which the first sees fewer keys."""
    inputs = random_inputs(2 * LEAF + 20, heads=(1, 1), batch=1)
    at = torch.cat([torch.arange(LEAF), torch.arange(2 * LEAF, 2 * LEAF + 20)])
    rows = [inputs[0][:, :, at], *inputs[1:3], *(x[:, :, at] for x in inputs[3:])]
    dk, dv = results(rows, Causal(), at)[3:]
    first_dk, third_dk, first_dv, third_dv = results(rows, Causal(), at, nodes=(Node(0, 0), Node(0, 2)))[3:]
    assert torch.equal(dk, first_dk + third_dk)
    assert torch.equal(dv, first_dv + third_dv)
    assert not first_dk[:, :, LEAF:].any()
    assert third_dk[:, :, LEAF:].any()


def test_a_kernel_without_the_order_is_noticed(monkeypatch):
    """A fault planted: tiles that need no mask come first, so that the order depends on the rows of a call."""
    inputs, mask = random_inputs(LENGTH, heads=(1, 1), batch=1), SlidingWindow(70)
    whole = results(inputs, mask)[:1]
    at = torch.arange(100, LENGTH)
    chunk = [inputs[0][:, :, at], *inputs[1:3], *(x[:, :, at] for x in inputs[3:])]
    assert_same_bits(results(chunk, mask, at)[:1], [x[:, :, at] for x in whole])
    plain = triton_forward.forward
    monkeypatch.setattr(triton_forward, "forward", lambda *args, ordered, **how: plain(*args, **how))
    whole = results(inputs, mask)[:1]
    with pytest.raises(AssertionError, match="out"):
        assert_same_bits(results(chunk, mask, at)[:1], [x[:, :, at] for x in whole])


def test_keys_with_gaps_within_an_interval_are_refused():
    q, k, v, *_ = random_inputs(40, heads=(1, 1), batch=1)
    at = torch.cat([torch.arange(20), torch.arange(60, 80)])
    call = prepared(q, k, v, Full(), None, None, None, None, None, at).call
    assert "k_positions must have every key" in reproducible_kernels.why_not(call)
    causal = prepared(q, k, v, SlidingWindow(15), None, None, None, None, at, at).call
    assert reproducible_kernels.why_not(causal) is None  # no row attends to keys on both sides
