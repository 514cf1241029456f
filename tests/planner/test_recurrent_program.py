"""Programs of recurrent layers: bytes of the plan, operations, memory, and what is explained."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnmesh import Balanced, Causal, ContextParallel, Contiguous, Striped, Zigzag, recurrent, run_virtual
from attnmesh.comm.base import Comm, Finished
from attnmesh.ops.recurrent.layer import Recurrence
from attnmesh.parallel import recurrent as executor
from attnmesh.planner import program
from attnmesh.planner.catalog import cluster
from attnmesh.planner.recurrent import (
    KINDS,
    RecurrentShape,
    RecurrentWorkload,
    recurrent_cost,
    recurrent_loads,
    recurrent_memory,
    recurrent_program,
)
from attnmesh.testing.recurrent import random_layer, to_dtype
from attnmesh.utils.optional import installed
from helpers.memory import peak_bytes

DELTA = RecurrentShape(recurrent.GatedDeltaRule, 1, 32, 16, 128, 128)
LAYOUTS = {"zigzag": Zigzag(), "contiguous": Contiguous(), "balanced": Balanced(Causal())}


@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize(
    ("kind", "world", "layout", "final"),
    [
        ("gated_delta_rule", 2, "zigzag", False),  # gathered
        ("gated_delta_rule", 5, "balanced", True),
        ("mamba2", 6, "contiguous", False),
        ("mamba1", 4, "zigzag", True),
        ("lightning_attention", 48, "zigzag", False),  # columns in parts
        ("short_convolution", 6, "zigzag", True),
    ],
)
def test_a_program_sends_the_bytes_of_the_plan(kind, world, layout, final, totals, monkeypatch):
    """Those of the plan are compared with what ranks send in tests/parallel/test_recurrent.py."""
    if totals:
        monkeypatch.setattr(program, "MAX_LISTED_MESSAGES", 0)
    channels = kind in ("mamba1", "short_convolution")
    heads, dims = (4096, (16, 1)) if channels else (24, (128, 64))
    shape = RecurrentShape(KINDS[kind], 2, heads, 1 if channels else 8, *dims)
    workload = RecurrentWorkload(shape, 5000, world, 2 if world % 2 == 0 else world, LAYOUTS[layout], final)
    for backward in (False, True):
        loads = recurrent_loads(workload, backward=backward)
        if kind == "short_convolution":
            row = 2 * heads * (4 if backward else 2)
            planned = [workload.halos.bytes_sent(rank, row, backward=backward) for rank in range(world)]
        else:
            planned = [workload.scan.bytes_sent(rank, backward=backward) for rank in range(world)]
        assert [load.sent for load in loads] == planned
        assert max(planned) > 0
        assert recurrent_cost(workload, cluster("h200"), backward=backward).sent >= max(planned)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "short_convolution"])
def test_operations_grow_with_positions_heads_and_sequences(kind):
    """A rank that holds more positions computes more; segments are computed only where they are sent."""
    channels = kind == "mamba1"
    shape = RecurrentShape(KINDS[kind], 1, 64, 1 if channels else 64, 32, 1 if channels else 16)
    one = recurrent_loads(RecurrentWorkload(shape, 4096, 1, 1), backward=False)[0].flops
    assert one == 4096 * shape.operations
    several = RecurrentWorkload(shape, 4096, 4, 4, Contiguous())
    first, *others, last = (load.flops for load in recurrent_loads(several, backward=False))
    assert sum((first, *others, last)) > one
    assert one // 4 <= first == last <= 1.01 * one / 4  # with the scan
    assert min(others) == max(others) > first
    twice = recurrent_loads(RecurrentWorkload(replace(shape, batch=2), 4096, 1, 1), backward=False)[0].flops
    assert twice == 2 * one


def test_rounds():
    names = {}
    for way in (False, True):
        for world in (1, 2, 8):
            whole = recurrent_program(RecurrentWorkload(DELTA, 4096, world, world), backward=way)
            names[way, world] = [each.name for each in whole.rounds()]
    assert names[False, 8] == ["segments", "exchange of segments", "scan", "exchange of states", "outputs"]
    assert names[True, 8][1::2] == ["exchange of gradients of incoming states", "exchange of gradients of states"]
    assert names[False, 2] == ["segments", "exchange of segments", "scan", "outputs"]  # gathered
    assert names[False, 1] == names[True, 1] == ["outputs"]


class Alone(Comm):
    """One rank of a world whose others agree with everything and send nothing: its memory is that of a real one."""

    def _exchange(self, op, sends, recvs):
        return Finished()

    def _compare(self, signature):
        return {self.rank: signature}


@pytest.mark.parametrize("world", [2, 6])
def test_memory_of_the_exchange_is_that_of_a_real_rank(world):
    """What chunks use for themselves is not counted, so that functions of the exchange run alone."""
    layer = to_dtype(random_layer("gated delta rule", 8 * world, heads=12, key_dim=64, value_dim=64), torch.float32)
    workload = RecurrentWorkload(RecurrentShape.of(layer), 8 * world, world, world)
    plan, rank = workload.scan, world // 2
    assert isinstance(layer, Recurrence)
    counts = len(plan.out(rank)), sum(number > 0 for number in plan.out(rank))
    update, transition = torch.zeros(counts[0], 1, 12, 64, 64), torch.zeros(counts[1], 1, 12, 64, 64)
    anchor = torch.zeros(0)

    def forward(*inputs):
        state = tuple(update.shape[1:])
        exchange = executor._Exchange(plan, Alone(rank, world, 10), tuple(transition.shape[1:]), state)
        return executor._Take.apply(executor._Give.apply(*inputs, anchor, exchange), exchange)[0]

    leaves = [x.requires_grad_() for x in (transition, update)]
    grad = torch.ones_like(forward(*leaves))
    found = (
        peak_bytes(lambda: forward(*leaves)),
        peak_bytes(lambda: torch.autograd.grad(forward(*leaves), leaves, grad)),
    )
    rows = workload.rows[rank]
    given = transition.nbytes + update.nbytes  # inputs here, and results of `recurrent_memory`
    results = rows * workload.shape.output_row, rows * workload.shape.input_row
    for backward, measured in enumerate(found):
        predicted = recurrent_memory(workload, backward=bool(backward))[rank] - results[backward] - given
        assert 0.7 * measured <= predicted <= 1.4 * measured


def test_an_explanation_has_the_bytes_the_exchanges_and_the_kernel():
    def rank(comm):
        cp = ContextParallel(comm, layout=Zigzag())
        x = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16, device="meta")
        dt, keys = x[..., 0], torch.empty(2, 1, 8, 1, 128, dtype=torch.bfloat16, device="meta")
        layer = recurrent.Mamba2(x, dt, x[0, :, 0, 0], *keys)
        channels = recurrent.Mamba1(dt, dt, x[0, :, 0], *keys[..., :64])
        return cp.explain_recurrent(layer, length=2**18), cp.explain_recurrent(channels, length=2**18)

    plan, other = run_virtual(8, rank)[3]
    assert str(other).startswith("Mamba1 over 8 ranks, chunks in PyTorch (a Mamba1 has no kernels)\n")
    workload = plan.workload
    assert [load.sent for load in plan.forward] == [workload.scan.bytes_sent(rank) for rank in range(8)]
    lines = str(plan).splitlines()
    assert lines[0].startswith(
        "Mamba2 over 8 ranks, " + ("GPU kernels" if installed("triton") else "chunks in PyTorch (")
    )
    assert lines[2].split()[:3] == ["0", "0..16383,", "245760..262143"]
    assert lines[10] == "two all-to-alls in each direction: ranks divide the heads for the scan; a state is 2.097 MB"
    assert lines[11].startswith("estimated for h200: ")
    assert np.all(plan.memory[1] > plan.memory[0])


def test_layouts_without_ranges_are_refused():
    layer = to_dtype(random_layer("mamba2", 8), torch.float32)

    def rank(comm):
        with pytest.raises(ValueError, match="layout must give ranks ranges of consecutive positions"):
            ContextParallel(comm, layout=Striped()).explain_recurrent(layer, length=8)

    run_virtual(2, rank)
