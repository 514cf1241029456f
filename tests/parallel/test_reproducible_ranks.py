"""reproducible=True over ranks: the bits of one device, for any number of ranks, layout and schedule."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from torch import Tensor

from attnmesh import (
    BlockCausal,
    Causal,
    Chunked,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    Global,
    Layout,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    SlidingWindow,
    Striped,
    Zigzag,
    attention,
    run_virtual,
)
from attnmesh.comm import Comm
from attnmesh.core import ranges, tree
from attnmesh.core.layouts import Balanced
from attnmesh.core.state import accumulation_dtype
from attnmesh.parallel import reproducible
from attnmesh.plan.leaves import leaf_plan
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.schedules import loads, peak_bytes, steps
from attnmesh.testing.attention import forward_backward, random_inputs, shard_inputs, shard_results, virtual_results
from helpers.cases import sweep
from helpers.processes import run_processes

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 421  # three whole leaves and a part, which no layout divides evenly
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "full": Full(),
    "window": SlidingWindow(70, 3),
    "documents": Causal() & Documents([100, 0, 57, LENGTH - 157]),
    "union": SlidingWindow(40) | Global(5),
    "prefix": Prefix(150),
    "chunked": Chunked(90) & Causal(),
    "blocks": BlockCausal(33),
    "per sequence": PerSequence([Causal(), SlidingWindow(17)]),
    "padding": Padding([0, 61]) & Causal(),
}
LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag(), "striped": Striped(), "balanced": Balanced(Causal())}
MESHES = {"allgather": (None,), "ulysses": (None,), "ulysses+allgather": (2,)}


def one_device(inputs: list[Tensor], mask: Mask, sinks: Tensor | None, **terms: object) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, reproducible=True, **terms)

    return forward_backward(attend, inputs, sinks)


def assert_same_bits(actual: list[Tensor], expected: list[Tensor], at: object = "") -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=False):
        assert torch.equal(a, b), (name, at)
        assert torch.equal(a.signbit(), b.signbit()), (name, at)


def assert_same_over_ranks(
    name: str, dtype: torch.dtype, heads: tuple[int, int], cases: list[tuple], **terms: object
) -> None:
    """`cases` are world sizes, ranks per node, layouts and schedules."""
    mask = MASKS[name]
    inputs, sinks = random_inputs(LENGTH, heads=heads, dtype=dtype), torch.linspace(-1, 2, heads[0])
    whole = one_device(inputs, mask, sinks, **terms)
    for world, ranks_per_node, layout, schedule in cases:
        how = {"ranks_per_node": ranks_per_node, "schedule": schedule, "sinks": sinks, **terms}
        found = virtual_results(world, inputs, mask, LAYOUTS[layout], reproducible=True, **how)
        assert_same_bits(found, whole, (world, layout, schedule))


@pytest.mark.parametrize(
    ("name", "dtype", "heads", "cases", "terms"),
    [
        # Leaves that are divided, exchanged and not; fewer kv heads than ranks; a rank without queries.
        ("causal", torch.float32, (4, 2), [(3, None, "zigzag", "allgather"), (3, None, "zigzag", "ulysses")], {}),
        ("window", torch.bfloat16, (2, 1), [(4, None, "striped", "allgather"), (2, None, "contiguous", "ulysses")], {}),
        ("union", torch.float16, (4, 4), [(4, 2, "balanced", "ulysses+allgather")], {"softcap": 3.0}),
        ("per sequence", torch.float32, (2, 2), [(6, None, "contiguous", "allgather")], {}),
    ],
)
def test_any_ranks_have_the_bits_of_one_device(name, dtype, heads, cases, terms):
    assert_same_over_ranks(name, dtype, heads, cases, **terms)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_world_layout_and_schedule_has_the_bits_of_one_device(name, dtype):
    heads = random.Random(f"{name} {dtype}").choice([(4, 2), (3, 1), (6, 2), (2, 2)])
    cases = [
        (world, 2 if "+" in schedule else None, layout, schedule)
        for world, layout, schedule in itertools.product((1, 2, 3, 4, 6, 8), LAYOUTS, MESHES)
        if "+" not in schedule or (world in (4, 6, 8) and layout not in ("striped", "balanced"))
    ]
    assert_same_over_ranks(name, dtype, heads, cases)


@pytest.mark.parametrize("length", [1, 128, sweep(1024)])
def test_lengths_with_few_leaves_and_with_whole_leaves_on_every_rank(length):
    inputs = random_inputs(length)
    whole = one_device(inputs, Causal(), None)
    for world, layout in ((4, Zigzag()), (2, Contiguous())):
        found = virtual_results(world, inputs, Causal(), layout, schedule="allgather", reproducible=True)
        assert_same_bits(found, whole, (world, layout))


@pytest.mark.parametrize("schedule", ["allgather", "ulysses"])
def test_cross_attention_with_slopes_and_another_layout_of_keys(schedule):
    inputs, slopes = random_inputs(300, 170, heads=(4, 2)), torch.tensor([0.5, 0.1, 0.02, 0.3])
    whole = one_device(inputs, Full(), None, alibi_slopes=slopes)
    found = virtual_results(
        3, inputs, Full(), Striped(), key_layout=Contiguous(), schedule=schedule, reproducible=True, alibi_slopes=slopes
    )
    assert_same_bits(found, whole)


def test_shards_of_a_step_without_a_gradient_of_every_input():
    """Without lse, ranks exchange other messages; a gradient that is not needed leaves the others as they are."""
    inputs = random_inputs(LENGTH)
    whole = one_device(inputs, Causal(), None)

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, layout=Striped(), schedule="allgather", reproducible=True)
        q, k, v, grad_out, _ = (x.clone() for x in shard_inputs(inputs, comm, Striped()))
        out = cp.attention(q, k.requires_grad_(), v, length=LENGTH)
        (dk,) = torch.autograd.grad(out, k, grad_out)
        return [cp.unshard(x, 2, LENGTH) for x in (out.detach(), dk)]

    def alone(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (attention(q, k, v, mask=Causal(), reproducible=True),)

    out, _, dk, _ = forward_backward(alone, inputs[:4])
    assert torch.equal(out, whole[0])
    for found in run_virtual(3, rank):
        assert_same_bits(found, [out, dk])


def on_processes(comm: Comm) -> list[Tensor]:
    inputs, sinks = random_inputs(LENGTH, dtype=torch.bfloat16), torch.linspace(-1, 2, 4)
    found = []
    for schedule, layout in (("allgather", Zigzag()), ("ulysses", Striped())):
        how = {"schedule": schedule, "sinks": sinks, "reproducible": True}
        shard = shard_results(comm, inputs, Causal(), layout, **how)
        cp = ContextParallel(comm, layout=layout)
        found += [cp.unshard(x, 2, LENGTH) for x in shard[:5]] + [comm.all_reduce(shard[5])]
    return found


@pytest.mark.parametrize("world", [2, sweep(4)])
def test_processes_have_the_bits_of_one_device(world):
    inputs, sinks = random_inputs(LENGTH, dtype=torch.bfloat16), torch.linspace(-1, 2, 4)
    whole = one_device(inputs, Causal(), sinks)
    for found in run_processes(world, on_processes):
        assert_same_bits(found[:6], whole, "allgather")
        assert_same_bits(found[6:], whole, "ulysses")


def sent(
    schedule: str, world: int, ranks_per_node: int | None, inputs: list[Tensor], layout: Layout, lse: bool
) -> list:
    """Bytes that every rank sends in a forward and a backward."""

    def rank(comm: Comm) -> list[int]:
        cp = ContextParallel(
            comm, layout=layout, schedule=schedule, ranks_per_node=ranks_per_node, reproducible=True
        )  # fmt: skip
        *qkv, grad_out, grad_lse = (x.clone() for x in shard_inputs(inputs, comm, layout))
        comm.traffic.reset()
        out = cp.attention(*(x.requires_grad_() for x in qkv), length=inputs[0].shape[2], return_lse=lse)
        forward = comm.traffic.bytes
        torch.autograd.backward(out, [grad_out, grad_lse] if lse else [grad_out])
        return [forward, comm.traffic.bytes - forward]

    return run_virtual(world, rank)


@pytest.mark.parametrize(
    ("schedule", "world", "ranks_per_node", "length", "layout", "lse"),
    [
        ("allgather", 4, None, 421, Striped(), True),
        ("allgather", 3, None, 768, Contiguous(), False),
        ("ulysses", 3, None, 421, Zigzag(), False),
        ("ulysses+allgather", 4, 2, 421, Contiguous(), True),
    ],
)
def test_ranks_send_the_bytes_of_the_plan(schedule, world, ranks_per_node, length, layout, lse):
    inputs = random_inputs(length, heads=(6, 2), dtype=torch.bfloat16, head_dim=8, value_dim=12)
    q, k, v = inputs[:3]
    sizes = q.dtype.itemsize, accumulation_dtype(q.dtype).itemsize
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], *sizes, v.shape[3])
    workload = Workload(shards(Causal(), layout, length, world), shape, ranks_per_node or world, lse, "cpu", True)
    plan = zip(*(loads(schedule, workload, backward=way) for way in (False, True)), strict=True)
    expected = [[load.sent for load in each] for each in plan]
    assert sent(schedule, world, ranks_per_node, inputs, layout, lse) == expected
    assert steps(schedule, workload)
    with pytest.raises(ValueError, match="the memory of reproducible=True is not estimated"):
        peak_bytes(schedule, workload, backward=True)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()])
@pytest.mark.parametrize("length", [0, 1, 255, 1024])
def test_a_plan_has_every_query_once_in_whole_leaves(layout, length):
    for world in (1, 3, 4):
        plan = leaf_plan(shards(Causal(), layout, length, world), 128)
        held = [run for queries in plan.shards.queries for run in queries]
        assert sorted(position for run in held for position in run) == list(range(length))
        owners = [{position // 128 for run in queries for position in run} for queries in plan.shards.queries]
        assert sum(map(len, owners)) == -(-length // 128)  # no leaf is on two ranks
        nodes = [leaf for all_nodes in plan.all_nodes for node in all_nodes for leaf in node.leaves]
        assert sorted(nodes) == list(range(-(-length // 128)))
        if not plan.moves:
            assert plan.shards.queries == shards(Causal(), layout, length, world).queries
        for source in range(world):
            rows = sum(len(piece.rows) for target in range(world) for piece in plan.row_pieces(source, target))
            assert rows == ranges.size(plan.given.queries[source])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"schedule": "ring"}, 'schedule must be "auto" or one of allgather, ulysses, ulysses+allgather with'),
        ({"backend": "torch"}, 'backend must be "auto" with reproducible=True'),
        ({"reproducible": "yes"}, "reproducible must be True or False, got 'yes'"),
    ],
)
def test_what_cannot_be_reproducible_is_refused(argument, message):
    def rank(comm: Comm) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            ContextParallel(comm, **{"reproducible": True, **argument})

    run_virtual(2, rank)


def test_ranks_that_differ_in_it_are_refused_on_every_rank():
    def rank(comm: Comm) -> None:
        cp = ContextParallel(comm, schedule="allgather", reproducible=comm.rank == 0)
        with pytest.raises(ValueError, match="reproducible"):
            cp.attention(*torch.randn(3, 1, 2, 4, 8))

    run_virtual(2, rank)


def test_explain_has_the_version_and_why_a_ring_is_not_considered():
    def rank(comm: Comm) -> str:
        how = {"length": 4096, "q_heads": 4, "kv_heads": 2, "head_dim": 16}
        return str(ContextParallel(comm, reproducible=True).explain(**how))

    text = run_virtual(2, rank)[0]
    assert "reproducible=True, version 1 of its bits: sums over leaves of 2048 queries" in text
    assert "ring: with reproducible=True a rank visits keys in ascending order" in text


def test_nodes_that_are_added_in_another_order_are_noticed(monkeypatch):
    """A fault planted: the owner of keys adds what ranks sent in the order of positions, not in the tree."""
    inputs = random_inputs(1024, batch=1, heads=(1, 1))
    whole = one_device(inputs, Full(), None)
    assert_same_bits(virtual_results(8, inputs, Full(), Contiguous(), schedule="allgather", reproducible=True), whole)

    def in_turn(nodes: dict[tree.Node, Tensor]) -> Tensor:
        first, *others = (nodes[node] for node in sorted(nodes, key=lambda node: node.leaves.start))
        return sum(others, first)

    monkeypatch.setattr(reproducible, "total", in_turn)
    found = virtual_results(8, inputs, Full(), Contiguous(), schedule="allgather", reproducible=True)
    assert_same_bits(found[:3], whole)
    for a, b in zip(found[3:], whole[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert not torch.equal(a, b)
