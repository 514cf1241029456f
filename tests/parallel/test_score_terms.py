"""Softcap, sinks and ALiBi slopes over ranks, and masks per sequence: exact in every schedule, and agreed on."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmesh import (
    Causal,
    ContextParallel,
    Full,
    SlidingWindow,
    Zigzag,
    attention,
    ring_distributed_attention,
    run_virtual,
)
from attnmesh.comm import Comm
from attnmesh.core.masks import Padding, PerSequence
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards
from attnmesh.planner.schedules import loads
from attnmesh.testing.attention import (
    assert_attention_close,
    forward_backward,
    random_inputs,
    reference_results,
    shard_inputs,
    virtual_results,
)
from helpers.cases import else_sweep, first, sweep

LENGTH, Q_HEADS = 29, 6
TERMS = ("sinks", "softcap", "slopes", "all")


pytestmark = pytest.mark.usefixtures("one_thread")


def terms(name: str | None, dtype: torch.dtype = torch.float32, heads: int = Q_HEADS) -> dict[str, Any]:
    """The score terms of a name. The slopes are those of the ALiBi paper."""
    every = {
        "sinks": torch.linspace(-1, 2, heads).to(dtype),
        "softcap": 1.5,
        "slopes": 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float32)),
    }
    chosen = every if name == "all" else {key: x for key, x in every.items() if key == name}
    return {{"slopes": "alibi_slopes"}.get(key, key): value for key, value in chosen.items()}


def ranks_of(schedule: str, world: int = 4) -> dict[str, Any]:
    return {"world": world, "schedule": schedule, "ranks_per_node": 2 if "+" in schedule else None}


def inputs_of(dtype: torch.dtype = torch.float32, q_len: int = LENGTH, **how: Any) -> list[Tensor]:
    return random_inputs(q_len, dtype=dtype, **{"heads": (Q_HEADS, 3), "head_dim": 8, "value_dim": 12, **how})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("schedule", "widths", "name"),
    else_sweep(  # every schedule with messages of one width and of two, and with no term and all; sinks with two
        product(SCHEDULES, [(64, 64), (128, 128), (192, 128)], [None, "sinks", "all"]),
        lambda schedule, widths, name: (
            (widths, name) in (((128, 128), None), ((192, 128), "all"))
            or ((widths, name) == ((64, 64), "sinks") and schedule in ("ring", "ulysses"))
        ),
    ),
)
def test_messages_and_score_terms_on_a_gpu(schedule, widths, name):
    head_dim, value_dim = widths
    inputs = inputs_of(torch.bfloat16, q_len=301, head_dim=head_dim, value_dim=value_dim, device="cuda")
    how = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in terms(name, torch.bfloat16).items()}
    found = virtual_results(inputs=inputs, mask=Causal(), layout=Zigzag(), **ranks_of(schedule), **how)
    assert_attention_close(found, inputs, Causal(), **how)


# Sinks.


@pytest.mark.parametrize("schedule", first(3, ["ring", "ulysses", "ring+ring", *SCHEDULES]))
def test_the_gradient_of_sinks_is_what_the_queries_of_the_rank_contribute(schedule):
    inputs, sinks, layout = inputs_of(), terms("sinks")["sinks"], Zigzag()

    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, layout=layout, schedule=schedule, ranks_per_node=2 if "+" in schedule else None)
        q, k, v, grad_out, _ = shard_inputs(inputs, comm, layout)
        leaf = sinks.clone().requires_grad_()  # alone, and so nothing is sent in the backward
        (d_sinks,) = torch.autograd.grad(cp.attention(q, k, v, sinks=leaf, length=LENGTH), leaf, grad_out)

        own = torch.zeros(LENGTH, dtype=torch.float64)
        own[cp.positions(LENGTH)] = 1.0
        masked = [*inputs[:3], inputs[3] * own[:, None], torch.zeros_like(inputs[4])]
        *_, expected = reference_results(masked, Causal(), sinks=sinks)
        torch.testing.assert_close(d_sinks.double(), expected, rtol=1e-4, atol=1e-5)

    run_virtual(4, rank)


@pytest.mark.parametrize(
    ("schedule", "mask"),
    first(
        1,
        [
            pytest.param(
                schedule, mask, marks=[pytest.mark.sweep] * (schedule != "ring")
            )  # Triton's interpreter is slow
            for schedule, mask in product(SCHEDULES, [Causal(), Padding([11]) & SlidingWindow(3)])
        ],
    ),
    ids=str,
)
def test_the_kernel_of_the_last_stage_adds_the_sinks(schedule, mask, device, monkeypatch):
    """Once, whatever that stage sees; there is no pass over the result for them."""
    pytest.importorskip("triton")
    monkeypatch.delattr("attnmesh.ops.merge.add_sinks")
    monkeypatch.setattr("attnmesh.ops.merge._use_triton", lambda x: False)
    inputs = random_inputs(13, heads=(2, 1), batch=1, dtype=torch.float16, device=device)
    sinks = torch.tensor([0.5, 20.0], device=device)
    ranks = ranks_of(schedule, 2 if "+" not in schedule else 4)
    found = virtual_results(inputs=inputs, mask=mask, layout=Zigzag(), backend="triton", sinks=sinks, **ranks)
    assert_attention_close(found, inputs, mask, sinks=sinks)


@pytest.mark.parametrize("schedule", ["ulysses+ring", *(sweep(name) for name in SCHEDULES if name != "ulysses+ring")])
def test_rows_without_keys_have_the_sink_and_unseen_rows_may_hold_nan(schedule):
    mask, how = Padding([LENGTH - 8, LENGTH]) & Causal(), terms("all")
    inputs = inputs_of()
    exact = virtual_results(inputs=inputs, mask=mask, layout=Zigzag(), **ranks_of(schedule), **how)
    assert_attention_close(exact, inputs, mask, **how)
    torch.testing.assert_close(exact[1][0, :, -8:], how["sinks"][:, None].expand(-1, 8))
    for x in inputs[:3]:
        x[0, :, -8:] = torch.nan
    found = virtual_results(inputs=inputs, mask=mask, layout=Zigzag(), **ranks_of(schedule), **how)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b)


def test_a_world_of_one_gives_the_bits_of_attention():
    inputs, how = inputs_of(), terms("all")
    sinks = how.pop("sinks")

    def alone(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return attention(q, k, v, mask=Causal(), sinks=sinks, return_lse=True, **how)

    expected = forward_backward(alone, inputs, sinks)
    found = virtual_results(1, inputs, Causal(), Zigzag(), schedule="ring", sinks=sinks, **how)
    assert all(map(torch.equal, found, expected))


# Query-distributed attention.


@pytest.mark.parametrize("name", TERMS)
def test_query_distributed_attention_takes_them(name):
    inputs, how, layout = inputs_of(), terms(name), Zigzag()
    sinks = how.pop("sinks", None)

    def rank(comm: Comm) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
            return ring_distributed_attention(q, k, v, group=comm, sinks=sinks, return_lse=True, **how)

        mine = [*inputs[:3], *(layout.shard(x, 2, comm.world, comm.rank) for x in inputs[3:])]
        return forward_backward(attend, mine, sinks)

    out, lse, dq, dk, dv, *d_sinks = zip(*run_virtual(3, rank), strict=True)
    whole = [layout.unshard(list(out), 2), layout.unshard(list(lse), 2), sum(dq), dk[0], dv[0], *map(sum, d_sinks)]
    assert_attention_close(whole, inputs, Causal(), sinks=sinks, **how)


def test_query_distributed_attention_over_a_cache_takes_them():
    q, k, v, how = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 16), terms("all", heads=4)
    rings = {"q_offset": 5, "ring_size": 1, "ring_id": 0, "return_lse": True}
    pools = [x.transpose(1, 2).reshape(6, 4, 2, -1) for x in (k, v)]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    found = ring_distributed_attention(q, *pools, block_table=table, **rings, **how)
    for a, b in zip(found, ring_distributed_attention(q, k, v, **rings, **how), strict=True):
        torch.testing.assert_close(a, b)
    how["sinks"].requires_grad_()
    with pytest.raises(ValueError, match="sinks must not require a gradient with block_table"):
        ring_distributed_attention(q, *pools, block_table=table, **rings, **how)


def test_a_cache_with_an_offset_and_a_mask_per_sequence():
    mask = PerSequence([Causal(), Causal() & SlidingWindow(3)])
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    pools = [x.transpose(1, 2).reshape(6, 4, 2, -1) for x in (k, v)]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    found = ring_distributed_attention(q, *pools, block_table=table, q_offset=[9, 6], mask=mask, ring_size=1, ring_id=0)
    for i, offset in enumerate((9, 6)):
        expected = attention(
            q[i : i + 1], k[i : i + 1], v[i : i + 1], mask=mask.masks[i], q_positions=torch.arange(offset, offset + 3)
        )
        torch.testing.assert_close(found[i : i + 1], expected)


# What the plan counts.


@pytest.mark.parametrize(
    ("schedule", "backward"),
    [
        ("ring", False),
        ("ulysses+ring", False),
        ("ulysses+allgather", False),
        ("allgather", True),
        ("ulysses", True),
        ("ring+ring", True),
    ],
)
def test_the_plan_counts_the_pairs_of_every_sequence_once(schedule, backward):
    shape = Shape(batch=2, q_heads=4, kv_heads=2, head_dim=8, itemsize=2, sum_itemsize=4, value_dim=12)
    masks = Causal(), PerSequence([Causal(), Causal()])
    one, two = (Workload(shards(mask, Zigzag(), 64, 4), shape, 2) for mask in masks)
    assert loads(schedule, one, backward=backward) == loads(schedule, two, backward=backward)


def test_the_plan_counts_products_over_the_width_of_keys_and_of_values():
    shape = Shape(1, 1, 1, head_dim=192, itemsize=2, sum_itemsize=4, value_dim=128)
    workload = Workload(shards(Full(), Zigzag(), 8, 1), shape, 1)
    forward, backward = (loads("ring", workload, backward=way)[0].flops for way in (False, True))
    assert forward == 2 * 64 * (192 + 128)
    assert backward == 2 * 64 * (3 * 192 + 2 * 128)


def test_explain_takes_the_width_of_values_and_the_sequences_of_a_mask():
    call = {"length": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 24, "device": "cpu"}
    cp = ContextParallel()
    assert str(cp.explain(**call)) == str(cp.explain(**call, value_dim=24)) != str(cp.explain(**call, value_dim=16))
    with pytest.raises(ValueError, match="value_dim must be an integer >= 1, got 0"):
        cp.explain(**call, value_dim=0)
    mask = Causal() & Padding([50, 64])
    cp.explain(**call, mask=mask, batch=2)
    with pytest.raises(ValueError, match="batch must be 2, the sequences of the mask, got 1"):
        cp.explain(**call, mask=mask)
