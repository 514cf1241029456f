"""Any mask of the grammar over any layout, schedule and number of ranks: values and all gradients in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmesh as am
from helpers.masks import batch_masks

BATCH = 2
SCHEDULES = ["ring", "allgather", "ulysses", "ulysses+ring", "ulysses+allgather", "ring+ring"]


@st.composite
def layouts(draw, length: int, mask: am.Mask) -> am.Layout:
    cut = draw(st.integers(0, length))
    return draw(
        st.sampled_from(
            [
                am.Contiguous(), am.Zigzag(), am.Striped(), am.Balanced(mask), am.Zigzag(2),
                am.Joint((cut, am.Zigzag()), (length - cut, am.Contiguous())),
            ]
        )
    )  # fmt: skip


def results(attend, tensors, weights):
    """out, lse and the gradients of a loss of both."""
    inputs = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = attend(*inputs)
    seen = lse > -torch.inf
    loss = (out * weights[0]).sum() + (torch.where(seen, lse, 0.0) * weights[1]).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def check(data) -> None:
    length, world = data.draw(st.integers(1, 33)), data.draw(st.integers(1, 8))
    mask = data.draw(batch_masks(length, BATCH))
    layout = data.draw(layouts(length, mask))
    per_node = data.draw(st.sampled_from([n for n in (2, 3, 4) if world % n == 0 and n < world] or [None]))
    schedule = data.draw(st.sampled_from(SCHEDULES if per_node else SCHEDULES[:3]))
    if per_node and layout == am.Striped() and schedule.startswith("ulysses+"):
        layout = am.Zigzag()  # these need the positions of a node in a few ranges
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    shapes = [(BATCH, kv_heads * group, length, 5), (BATCH, kv_heads, length, 5), (BATCH, kv_heads, length, 3)]
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    sinks = torch.randn(kv_heads * group, generator=random, dtype=torch.float64)
    weights = [torch.randn(*q.shape[:3], 3, generator=random, dtype=torch.float64), torch.randn_like(q[..., 0])]

    def one_device(q, k, v, sinks):
        return am.attention(
            q, k, v, mask=mask, softcap=softcap, sinks=sinks, return_lse=True, backend="reference"
        )  # fmt: skip

    def rank(comm):
        cp = am.ContextParallel(comm, layout=layout, schedule=schedule, ranks_per_node=per_node)

        def attend(q, k, v, sinks):
            return cp.attention(q, k, v, mask=mask, softcap=softcap, sinks=sinks, length=length, return_lse=True)

        shards = [cp.shard(x, 2) for x in (q, k, v)]
        return results(attend, (*shards, sinks), [cp.shard(x, 2) for x in weights])

    expected = results(one_device, (q, k, v, sinks), weights)
    by_rank = am.run_virtual(world, rank)
    for name, truth, parts in zip(
        ("out", "lse", "dq", "dk", "dv", "dsinks"), expected, zip(*by_rank, strict=True), strict=True
    ):
        found = sum(parts) if name == "dsinks" else layout.unshard(parts, 2)
        torch.testing.assert_close(
            found, truth, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name} {schedule} {layout} {mask}: {text}"
        )  # fmt: skip


@settings(max_examples=7, deadline=None)
@given(st.data())
def test_any_mask_over_ranks_equals_one_device(data):
    check(data)


@pytest.mark.sweep
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_many_masks_over_ranks_equal_one_device(data):
    check(data)
