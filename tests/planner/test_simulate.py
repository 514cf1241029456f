"""The front of the simulator: which way it goes and why, and what it hands back."""

import numpy as np
import pytest

from attnmesh.planner.program import MessageTotals, Program, Round
from attnmesh.planner.simulator.network import Slowdown
from attnmesh.planner.simulator.simulate import MAX_MESSAGES, simulate
from helpers.clusters import (
    all_to_all_program,
    attention_kernels,
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


def test_few_messages_are_followed_one_by_one():
    assert simulate(ring_program([[1.0, 2.0]], [[300, 300]]), simulated_cluster()).method == "event by event"


def test_many_messages_are_not():
    found = simulate(long_ring_program(1024, MAX_MESSAGES // 1024 + 1), WIRED)
    assert found.method.startswith("round by round (more than 50,000 messages)")


def test_messages_that_crowd_a_port_are_not():
    crowd = all_to_all_program(np.full((100, 100), 10))
    assert "more than 1,000,000 pairs of messages" in simulate(crowd, simulated_cluster(100, 1)).method


def test_no_messages_but_many_rounds_are_not():
    rounds = [Round(f"{s}", {}, attention_kernels(*[1.0] * 1000)) for s in range(201)]
    found = simulate(make_program(1000, *rounds), simulated_cluster())
    assert "more than 200,000 rounds" in found.method
    assert found.seconds == 201.0


def test_bundles_go_a_round_at_a_time():
    some, nothing = np.array([100, 100]), np.zeros(2, dtype=np.int64)
    bundle = make_program(
        2, Round("a", {"rows": MessageTotals(nothing, some, some, nothing, nothing, some)}, (), ("rows",))
    )
    assert "'rows' only has totals" in simulate(bundle, simulated_cluster()).method
    with pytest.raises(ValueError, match="'rows' only has totals"):
        simulate(bundle, simulated_cluster(), exact=True)


@pytest.mark.parametrize("exact", [None, True, False])
def test_either_way_by_argument_and_the_same(exact):
    found = simulate(long_ring_program(16, 20), WIRED, slow=Slowdown({3: 2.0}), exact=exact)
    assert found.method.startswith("round by round (exact=False)" if exact is False else "event by event")
    assert found.seconds == pytest.approx(simulate(long_ring_program(16, 20), WIRED, slow=Slowdown({3: 2.0})).seconds)
    assert found.seconds > simulate(long_ring_program(16, 20), WIRED, exact=exact).seconds


@pytest.mark.parametrize("rounds", [3, MAX_MESSAGES // 1024 + 5])
def test_rounds_are_made_once(rounds):
    made = []

    def make():
        for round_ in long_ring_program(1024, rounds).rounds():
            made.append(round_.name)
            yield round_

    found = simulate(Program("ring", 1024, make), WIRED)
    assert made == [f"round {s}" for s in range(rounds)]
    assert found.seconds == pytest.approx(simulate(long_ring_program(1024, rounds), WIRED, exact=False).seconds)


def test_a_program_without_rounds_takes_no_time():
    assert simulate(make_program(3), simulated_cluster()).seconds == 0.0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="world must be a positive integer, got 0"):
        simulate(make_program(0), simulated_cluster())
    with pytest.raises(ValueError, match=r"ranks must be ranks within 0\.\.2, got 3"):
        simulate(make_program(3), simulated_cluster(), slow=Slowdown({3: 2.0}))
    with pytest.raises(ValueError, match=r"keep must name ranks within 0\.\.2, got 5"):
        simulate(make_program(3), simulated_cluster(), keep=[5])
