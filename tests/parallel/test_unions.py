"""Unions and masks per sequence over virtual ranks: out, lse and all gradients, and the bytes of the program."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import Causal, ContextParallel, Striped, Zigzag, run_virtual
from attnmesh.comm import Comm
from attnmesh.core.layouts import Balanced, Contiguous
from attnmesh.core.masks import Chunked, Global, Mask, Padding, PerSequence, Prefix, SlidingWindow
from attnmesh.plan.shards import Shape, Workload, shards, why_not
from attnmesh.planner.schedules import loads
from attnmesh.testing.attention import assert_attention_close, random_inputs, virtual_results
from helpers.cases import first
from helpers.masks import batch_masks, checkered_slices, falling_slices

LENGTH = 37
SCHEDULES = [("ring", None), ("allgather", None), ("ring+ring", 2)]
MASKS = [
    Causal() & (Global(3) | SlidingWindow(4)),
    Global(2, both=True) | SlidingWindow(2, 3),
    PerSequence([Causal() & (Chunked(9) | Global(2)), Prefix(11)]),
    Causal() & Padding([29, 37], "left", LENGTH),
]


def check_values(mask: Mask, layout, world: int, schedule: str, ranks_per_node: int | None) -> None:
    inputs = random_inputs(LENGTH, heads=(2, 1), batch=2, head_dim=8, dtype=torch.float64)
    found = virtual_results(world, inputs, mask, layout, schedule=schedule, ranks_per_node=ranks_per_node)
    assert_attention_close(found, inputs, mask)


@pytest.mark.sweep
def test_masks_of_more_chains_than_a_launch_takes_are_exact_in_every_schedule():
    for mask, (schedule, ranks_per_node) in zip(
        (falling_slices(150), checkered_slices(34, 2), falling_slices(150)), SCHEDULES, strict=True
    ):
        inputs = random_inputs(mask.length, heads=(2, 1), batch=1, head_dim=8, dtype=torch.float64)
        how = {"schedule": schedule, "ranks_per_node": ranks_per_node}
        found = virtual_results(4 if ranks_per_node else 2, inputs, mask, Contiguous(), **how)
        assert_attention_close(found, inputs, mask)


@pytest.mark.sweep
@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]), st.sampled_from(SCHEDULES))
def test_random_masks_are_exact_on_any_number_of_ranks(data, world, schedule):
    name, ranks_per_node = schedule
    mask = data.draw(batch_masks(LENGTH, 2))
    layout = data.draw(st.sampled_from([Contiguous(), Zigzag(), Zigzag(2), Striped(), Balanced(mask)]))
    if ranks_per_node and (world % 2 or world == 2):
        world = 4
    check_values(mask, layout, world, name, ranks_per_node)


@pytest.mark.parametrize("mask", first(2, MASKS[:3]), ids=str)
def test_ranks_send_the_bytes_of_the_program(mask):
    inputs, shape = random_inputs(LENGTH, heads=(2, 1), batch=2, head_dim=8), Shape(2, 2, 1, 8, 4, 4)

    for schedule, ranks_per_node in SCHEDULES:

        def rank(comm: Comm, schedule=schedule, ranks_per_node=ranks_per_node) -> list[int]:
            cp = ContextParallel(comm, layout=Zigzag(), schedule=schedule, ranks_per_node=ranks_per_node)
            q, k, v = (cp.shard(x, 2).clone().requires_grad_() for x in inputs[:3])
            out = cp.attention(q, k, v, mask=mask, length=LENGTH)
            forward = comm.traffic.bytes
            out.sum().backward()
            return [forward, comm.traffic.bytes - forward]

        workload = Workload(shards(mask, Zigzag(), LENGTH, 4), shape, ranks_per_node or 4, device="cpu")
        assert why_not(schedule, workload.shards, workload.ranks_per_node) is None
        planned = [loads(schedule, workload, backward=backward) for backward in (False, True)]
        assert run_virtual(4, rank) == [[mine.sent for mine in both] for both in zip(*planned, strict=True)]
