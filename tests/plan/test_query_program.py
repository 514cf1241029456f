"""Query-distributed attention as a program: work and bytes are those of real ranks."""

import numpy as np
import pytest
import torch

from attnmesh import run_virtual
from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.query_distributed import gather_ring_outputs, ring_distributed_attention
from attnmesh.plan.blocks import Patch
from attnmesh.plan.load import loads_of
from attnmesh.plan.query_program import queries_program
from attnmesh.plan.rounds.stages import causal_squares
from attnmesh.plan.workload import Shape
from attnmesh.planner.cost import cost
from attnmesh.testing.attention import random_inputs
from helpers.clusters import cluster

SHAPE = Shape(batch=2, q_heads=4, kv_heads=2, head_dim=16, itemsize=2, sum_itemsize=4)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("world", "length", "pairs"), [(1, 9, 1), (2, 40, 1), (3, 37, 2), (4, 3, 1), (4, 900, 1)])
def test_ranks_send_what_the_program_says(world, length, pairs, gather):
    inputs = random_inputs(length, dtype=torch.bfloat16)

    def rank(comm):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = ring_distributed_attention(*leaves, group=comm, pairs=pairs)
        if gather:
            out = gather_ring_outputs(out, length=length, group=comm, pairs=pairs)
        forward = comm.traffic.bytes
        out.sum().backward()
        return forward, comm.traffic.bytes - forward

    sent = run_virtual(world, rank)
    for backward in (False, True):
        program = queries_program(SHAPE, length, world, pairs=pairs, backward=backward, gather=gather)
        assert [load.sent for load in loads_of(program, world)] == [both[backward] for both in sent]


@pytest.mark.parametrize("pairs", [1, 3])
def test_the_work_is_that_of_the_calls(pairs):
    for world, length in ((1, 7), (3, 50), (4, 256), (5, 4)):
        for rank in range(world):
            patches = [Patch(Causal(), (c,), (range(c.stop),)) for c in Zigzag(pairs).ranges(length, world, rank)]
            for backward, products in ((False, 2), (True, 5)):
                whole = queries_program(SHAPE, length, world, pairs=pairs, backward=backward)
                assert loads_of(whole, world)[rank].flops == 2 * products * 2 * 4 * 16 * sum(p.pairs for p in patches)
                kernels = next(k for part in whole.rounds() for k in part.work if k.kind.startswith("attention"))
                assert kernels.calls[rank] == sum(len(p.blocks) for p in patches if p.pairs)
                squares = np.array([causal_squares(p) for p in patches]).reshape(-1, 2).sum(0)
                assert kernels.squares[0][rank] == 2 * products * 2 * 4 * 16 * squares[0]
                assert kernels.squares[1][rank] == squares[1]


def test_thousands_of_ranks_have_the_same_sums():
    small, large = (queries_program(SHAPE, 1 << 20, world, backward=True, node=8) for world in (8, 2048))
    grads = 2 * 2 * 16 * (1 << 20) * 2 * 4
    for whole, world in ((small, 8), (large, 2048)):
        each = loads_of(whole, 8)
        assert {load.sent for load in each} == {round(2 * (world - 1) / world * grads)}
        assert each[0].near == pytest.approx(each[0].sent * 7 / (world - 1), rel=1e-4)
    assert cost(large, cluster(flops=1e12, near=1e12, far=1e10, node=8)).seconds > 0


def test_devices_are_balanced_and_nothing_travels_forward():
    each = loads_of(queries_program(SHAPE, 1 << 16, 16, backward=False), 16)
    work = np.array([load.flops for load in each])
    assert work.max() == work.min()
    assert not any(load.sent for load in each)


@pytest.mark.parametrize("given", [{"length": -1}, {"world": 0}, {"node": 0}])
def test_numbers_that_make_no_sense_are_refused(given):
    where = {"length": 8, "world": 2, "node": 1} | given
    with pytest.raises(ValueError, match=f"{next(iter(given))} must be at least"):
        queries_program(SHAPE, where["length"], where["world"], backward=False, node=where["node"])
