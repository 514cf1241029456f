"""The front of the simulator: what it refuses and what it hands back."""

import pytest

from attnmesh.planner.program import Program
from attnmesh.planner.simulator import Slowdown, simulate
from helpers.clusters import (
    long_ring_program,
    make_program,
    ring_program,
    simulated_cluster,
)

WIRED = simulated_cluster(8, 8, intra_node=(1e-6, 4e11), inter_node=(5e-6, 5e10), message=5e-7)


def test_what_comes_back():
    found = simulate(ring_program([[1.0, 2.0]], [[300, 300]]), simulated_cluster(), keep=[1])
    assert found.seconds == 3.0
    assert found.computed.tolist() == [1.0, 2.0]
    assert found.waited.tolist() == [2.0, 1.0]
    assert {(s.rank, s.track, s.begin, s.end) for s in found.spans} == {
        (1, "compute", 0.0, 2.0),
        (1, "receive", 0.0, 3.0),
        (1, "send", 0.0, 3.0),
        (1, "wait", 2.0, 3.0),
    }
    assert [s.begin for s in found.spans] == sorted(s.begin for s in found.spans)


def test_a_slow_rank_makes_a_ring_slower():
    slow = simulate(long_ring_program(16, 20), WIRED, slow=Slowdown({3: 2.0}))
    assert slow.seconds > simulate(long_ring_program(16, 20), WIRED).seconds


def test_rounds_are_made_once():
    made = []

    def make():
        for round_ in long_ring_program(1024, 3).rounds():
            made.append(round_.name)
            yield round_

    simulate(Program("ring", 1024, make), WIRED)
    assert made == [f"round {s}" for s in range(3)]


def test_a_program_without_rounds_takes_no_time():
    assert simulate(make_program(3), simulated_cluster()).seconds == 0.0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="world must be a positive integer, got 0"):
        simulate(make_program(0), simulated_cluster())
    with pytest.raises(ValueError, match=r"ranks must be ranks within 0\.\.2, got 3"):
        simulate(make_program(3), simulated_cluster(), slow=Slowdown({3: 2.0}))
    with pytest.raises(ValueError, match=r"keep must name ranks within 0\.\.2, got 5"):
        simulate(make_program(3), simulated_cluster(), keep=[5])
