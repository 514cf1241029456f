"""What kernels take where causal squares have a pace of their own, and what else takes time of cores."""

from dataclasses import replace

import numpy as np
import pytest

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal, Full
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.hardware import Cluster, Curve
from attnmesh.planner.program import Kernels, Messages, MessageTotals, Round
from attnmesh.planner.schedules import program as schedule_program
from attnmesh.planner.simulator import Slowdown, host_seconds, run_rounds
from helpers.clusters import attention_kernels, make_program, simulated_cluster, simulated_device
from helpers.event_simulation import run_events

SHAPE = Shape(batch=1, q_heads=4, kv_heads=2, head_dim=8, itemsize=4, sum_itemsize=4)
SLOW_SQUARES = replace(simulated_device(), causal=(("attention", Curve(((1.0, 3.0),))),))


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def test_squares_run_at_their_own_pace_and_the_rest_at_the_usual_one():
    kernels = Kernels("attention", floats(10, 10, 4), floats(4, 4, 1), causal=(floats(0, 4, 4), floats(0, 2, 1)))
    assert SLOW_SQUARES.kernel_seconds(kernels) == pytest.approx([10, 6 + 3 * 4, 3 * 4])
    assert simulated_device().kernel_seconds(kernels) == pytest.approx([10, 10, 4])  # no pace of their own
    assert SLOW_SQUARES.kernel_seconds(replace(kernels, causal=None)) == pytest.approx([10, 10, 4])  # nobody looked


def test_squares_shrink_with_their_kernels():
    kernels = Kernels("attention", floats(8), floats(4), causal=(floats(2), floats(2))).scaled(0.5)
    assert (kernels.size, kernels.calls) == (4, 4)
    assert kernels.causal == (1, 2)


@pytest.mark.parametrize(
    ("schedule", "backward"),
    [
        ("ring", False),
        ("allgather", True),
        ("ulysses", False),
        ("ring+ring", False),
        ("ulysses+ring", True),
        ("ulysses+allgather", True),
    ],
)
def test_squares_of_schedules_are_on_the_diagonal(schedule, backward):
    length, world = 64, 4
    for mask in (Causal(), Full()):
        workload = Workload(shards(mask, Zigzag(), length, world), SHAPE, 2)
        kernels = [
            part
            for round_ in schedule_program(schedule, workload, backward=backward).rounds()
            for part in round_.work
            if part.kind.startswith("attention")
        ]
        found = sum(part.causal[0].sum() for part in kernels)
        calls = sum(part.causal[1].sum() for part in kernels)
        if mask == Full():
            assert found == calls == 0
            continue
        products = 2 * (5 if backward else 2) * SHAPE.q_heads * SHAPE.head_dim
        if schedule == "ulysses":  # every rank has whole sequences of one head
            assert (found, calls) == (products * length * (length + 1) // 2, world)
        elif schedule == "ring":  # a rank's own rows, both runs of them, are one square
            side = length // world
            assert (found, calls) == (products * world * side * (side + 1) // 2, world)
        assert 0 < found <= products * length * (length + 1) // 2
        assert all(np.all(part.causal[0] <= part.size) and np.all(part.causal[1] <= part.calls) for part in kernels)


def on_cores(round_seconds: float) -> Cluster:
    plain = simulated_cluster(intra_node=(0.0, 100.0), message=0.5, shared=True, cores=8)
    return replace(plain, device=replace(plain.device, round=round_seconds))


def test_messages_take_time_of_cores_at_both_ends():
    exchange = Messages.of([(0, 1, 100), (0, 2, 200), (1, 2, 100)])
    found = host_seconds(Round("a", {"rows": exchange}), np.zeros(3), on_cores(0.0))
    assert found.tolist() == [3 + 2 * 0.5, 2 + 0.5, 3]
    sums = MessageTotals(*(np.array(column) for column in ([0, 0], [100, 0], [0, 100], [0, 0], [0, 0], [1, 0])))
    assert host_seconds(Round("a", {"rows": sums}), np.zeros(2), on_cores(0.0)).tolist() == [1.5, 1.0]


def test_rounds_take_time_of_ranks_that_have_work_in_them():
    assert host_seconds(Round("a"), floats(3, 0), on_cores(2.0)).tolist() == [2, 0]


def test_devices_of_their_own_leave_all_of_that_to_their_hosts():
    there = simulated_cluster(message=0.5)
    there = replace(there, device=replace(there.device, round=2.0))
    assert host_seconds(Round("a", {"rows": Messages.of([(0, 1, 100)])}), floats(3, 3), there).tolist() == [0, 0]


@pytest.mark.parametrize("run", [run_events, run_rounds])
def test_a_run_on_cores_takes_all_of_it(run):
    sent = {"rows": Messages.of([(0, 1, 100)])}
    found = run(make_program(2, Round("a", sent, attention_kernels(4.0, 1.0), ("rows",))), on_cores(2.0), Slowdown())
    assert found.computed.tolist() == [4 + 2 + 0.5 + 1, 1 + 2 + 1]
    assert found.finish.tolist() == [7.5, 4.0]
