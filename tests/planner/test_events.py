"""Programs whose times are known by hand, event by event; the simple ones a round at a time too."""

import numpy as np
import pytest

from attnmesh.planner.program import Kernels, Messages, MessageTotals, Round
from attnmesh.planner.simulator import Slowdown, run_rounds
from helpers.clusters import attention_kernels, make_program, ring_program, simulated_cluster
from helpers.event_simulation import run_events

both = pytest.mark.parametrize("run", [run_events, run_rounds])


def send(*messages: tuple[int, int, int]) -> dict[str, Messages]:
    return {"rows": Messages.of(messages)}


@both
@pytest.mark.parametrize(("computes", "takes"), [(1.0, 5.0), (7.0, 7.0), (0.0, 5.0)])
def test_transfer_hides_behind_work_or_work_behind_transfer(run, computes, takes):
    found = run(
        make_program(2, Round("a", send((0, 1, 500)), attention_kernels(computes, computes), ("rows",))),
        simulated_cluster(),
        Slowdown(),
    )
    assert found.finish.tolist() == [takes, takes]
    assert found.computed.tolist() == [computes, computes]
    assert found.waited.tolist() == [takes - computes] * 2


@both
def test_the_sender_is_free_before_the_message_is_there(run):
    there = simulated_cluster(intra_node=(3.0, 100.0))
    found = run(make_program(2, Round("a", send((0, 1, 500)), (), ("rows",))), there, Slowdown())
    assert found.finish.tolist() == [5.0, 8.0]


@both
def test_small_messages_take_their_latency(run):
    there = simulated_cluster(intra_node=(2.0, 1e9), inter_node=(7.0, 1e9), ranks_per_node=2)
    rounds = [Round(f"{s}", {f"{s}": Messages.of([(0, 1, 1), (1, 2, 1)])}, (), (f"{s}",)) for s in range(4)]
    found = run(make_program(3, *rounds), there, Slowdown())
    # Rank 2 has a message every 7 seconds. Rank 1 sends the last as soon as rank 2 has the one before, and asked rank 0
    # for its last a round earlier than that.
    assert found.finish == pytest.approx([14.0, 21.0, 28.0], rel=1e-6)


@both
def test_a_rank_starts_its_sends_one_after_another(run):
    there = simulated_cluster(intra_node=(0.0, 1e9), message=0.5)
    found = run(make_program(4, Round("a", send((0, 1, 1), (0, 2, 1), (0, 3, 1)), (), ("rows",))), there, Slowdown())
    assert found.finish == pytest.approx([1.0, 0.0, 0.5, 1.0], abs=1e-6)


@both
def test_a_message_moves_when_both_ends_have_posted_it(run):
    late = Round("late", {}, attention_kernels(0.0, 4.0), ())
    found = run(make_program(2, late, Round("a", send((0, 1, 500)), (), ("rows",))), simulated_cluster(), Slowdown())
    assert found.finish.tolist() == [9.0, 9.0]
    assert found.waited.tolist() == [9.0, 5.0]


@both
def test_two_messages_on_a_rail_have_half_of_it(run):
    there = simulated_cluster(ranks_per_node=2, rails=1)
    found = run(make_program(4, Round("a", send((0, 2, 50), (1, 3, 50)), (), ("rows",))), there, Slowdown())
    assert found.finish.tolist() == [10.0] * 4
    alone = run(make_program(4, Round("a", send((0, 2, 50)), (), ("rows",))), there, Slowdown())
    assert alone.finish.tolist() == [5.0, 0.0, 5.0, 0.0]


def test_what_is_left_on_a_rail_speeds_up():
    there = simulated_cluster(ranks_per_node=2, rails=1)
    found = run_events(make_program(4, Round("a", send((0, 2, 100), (1, 3, 20)), (), ("rows",))), there, Slowdown())
    # 20 bytes each at 5 a second; then 80 at 10.
    assert found.finish.tolist() == [12.0, 4.0, 12.0, 4.0]


def test_what_comes_later_onto_a_rail_slows_the_first_down():
    there = simulated_cluster(ranks_per_node=2, rails=1)
    later = Round("later", {}, attention_kernels(0.0, 2.0, 0.0, 0.0), ())
    rounds = later, Round("a", send((0, 2, 50), (1, 3, 50)), (), ("rows",))
    found = run_events(make_program(4, *rounds), there, Slowdown())
    # 20 bytes before the second comes, 30 at half speed until 8; the second has 30 by then, and 20 at full speed.
    assert found.finish.tolist() == [8.0, 10.0, 8.0, 10.0]


def test_what_a_message_leaves_of_a_port_is_not_given_to_others():
    # Rank 2 takes in two messages; the one of slow rank 1 uses 10 of its 50.
    found = run_events(
        make_program(3, Round("a", send((0, 2, 500), (1, 2, 100)), (), ("rows",))),
        simulated_cluster(),
        Slowdown(links={1: 10.0}),
    )
    assert found.finish.tolist() == [10.0, 10.0, 10.0]


@both
def test_ranks_that_share_one_port(run):
    there = simulated_cluster(shared=True)
    found = run(make_program(4, Round("a", send((0, 1, 500), (2, 3, 500)), (), ("rows",))), there, Slowdown())
    assert found.finish.tolist() == [10.0] * 4


@both
def test_a_straggler_delays_its_neighbours_hop_by_hop(run):
    world, rounds = 6, 4
    slow = run(
        ring_program([[1.0] * world] * rounds, [[50] * world] * rounds), simulated_cluster(), Slowdown(ranks={0: 3.0})
    )
    # A message moves when both ends are there: each round the delay of 2 seconds reaches one rank further, both ways.
    # Transfer, half a second, hides behind everybody's second of work but behind a neighbour that was waited for.
    first = run(ring_program([[1.0] * world], [[50] * world]), simulated_cluster(), Slowdown(ranks={0: 3.0}))
    assert first.finish.tolist() == [3.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    second = run(ring_program([[1.0] * world] * 2, [[50] * world] * 2), simulated_cluster(), Slowdown(ranks={0: 3.0}))
    assert second.finish.tolist() == [6.0, 3.5, 2.0, 2.0, 2.0, 3.5]
    third = run(ring_program([[1.0] * world] * 3, [[50] * world] * 3), simulated_cluster(), Slowdown(ranks={0: 3.0}))
    assert third.finish.tolist() == [9.0, 6.5, 4.0, 3.0, 4.0, 6.5]
    assert slow.finish[0] == 12.0


@both
def test_a_slow_link_is_waited_for(run):
    found = run(ring_program([[1.0] * 4], [[100] * 4]), simulated_cluster(), Slowdown(links={1: 4.0}))
    assert found.finish.tolist() == [4.0, 4.0, 4.0, 1.0]  # 0 sends to it, 2 hears from it


@both
def test_four_ranks_on_two_cores(run):
    four = make_program(4, Round("a", {}, attention_kernels(2.0, 2.0, 2.0, 2.0)))
    assert run(four, simulated_cluster(cores=2), Slowdown()).finish.tolist() == [4.0] * 4
    assert run(four, simulated_cluster(cores=4), Slowdown()).finish.tolist() == [2.0] * 4
    assert run(four, simulated_cluster(cores=2, ranks_per_node=2), Slowdown()).finish.tolist() == [2.0] * 4
    uneven = make_program(4, Round("a", {}, attention_kernels(0.0, 1.0, 2.0, 4.0)))
    # 1, 2 and 3 at two thirds of a core until 1.5, then each has one.
    assert run(uneven, simulated_cluster(cores=2), Slowdown()).finish == pytest.approx([0.0, 1.5, 2.5, 4.5])


def test_who_computes_later_takes_a_share_of_the_cores_then():
    rounds = (
        Round("a", send((0, 1, 100)), attention_kernels(3.0, 0.0), ("rows",)),
        Round("b", {}, attention_kernels(0.0, 2.0)),
    )
    found = run_events(make_program(2, *rounds), simulated_cluster(cores=1), Slowdown())
    # The message takes a second of the core at either end. Both at half speed until 6, when rank 1 is through.
    assert found.finish.tolist() == [7.0, 6.0]


@both
def test_who_has_no_message_in_an_exchange_does_not_wait_for_it(run):
    found = run(
        make_program(3, Round("a", send((0, 1, 500)), attention_kernels(1.0, 1.0, 1.0), ("rows",))),
        simulated_cluster(),
        Slowdown(),
    )
    assert found.finish.tolist() == [5.0, 5.0, 1.0]


@both
def test_exchanges_of_earlier_rounds_can_be_waited_for(run):
    rounds = (
        Round("a", send((0, 1, 500)), attention_kernels(1.0, 1.0)),
        Round("b", {}, attention_kernels(1.0, 1.0)),
        Round("c", {}, attention_kernels(1.0, 1.0), ("rows",)),
        Round("d", {}, attention_kernels(1.0, 1.0), ("rows",)),
    )
    found = run(make_program(2, *rounds), simulated_cluster(), Slowdown())
    assert found.finish.tolist() == [6.0, 6.0]
    assert found.waited.tolist() == [2.0, 2.0]


@both
def test_what_nobody_waits_for_is_finished_at_the_end(run):
    found = run(
        make_program(3, Round("a", send((0, 1, 500)), attention_kernels(1.0, 1.0, 2.0))),
        simulated_cluster(intra_node=(1.0, 100.0)),
        Slowdown(),
    )
    assert found.finish.tolist() == [5.0, 6.0, 2.0]
    assert found.waited.tolist() == [4.0, 5.0, 0.0]


@both
def test_spans_tell_what_a_watched_rank_did(run):
    kernels = (*attention_kernels(1.0, 2.0), Kernels("copy", np.array([0.5, 0.0]), np.ones(2)))
    found = run(
        make_program(2, Round("a", send((0, 1, 500)), kernels, ("rows",))),
        simulated_cluster(intra_node=(1.0, 100.0)),
        Slowdown(),
        keep=[0, 1],
    )
    told = {(s.rank, s.track, s.name, s.begin, s.end) for s in found.spans}
    assert told == {
        (0, "compute", "attention", 0.0, 1.0),
        (0, "compute", "copy", 1.0, 2.0),
        (0, "send", "rows", 0.0, 5.0),
        (0, "wait", "rows", 2.0, 5.0),
        (1, "compute", "attention", 0.0, 2.0),
        (1, "receive", "rows", 0.0, 6.0),
        (1, "wait", "rows", 2.0, 6.0),
    }
    facts = {(s.rank, s.track, s.name): s.args for s in found.spans}
    assert facts[0, "send", "rows"] == {"bytes": 500, "to": 1, "link": "near"}
    assert facts[1, "receive", "rows"] == {"bytes": 500, "from": 0, "link": "near"}
    assert facts[0, "compute", "copy"] == {"round": "a", "bytes": 0.5, "calls": 1.0}
    assert facts[1, "compute", "attention"] == {"round": "a", "operations": 2.0, "calls": 1.0}
    only = run(
        make_program(2, Round("a", send((0, 1, 500)), kernels, ("rows",))), simulated_cluster(), Slowdown(), keep=[1]
    )
    assert {s.rank for s in only.spans} == {1}


@both
def test_programs_that_make_no_sense_are_refused(run):
    with pytest.raises(ValueError, match="round 'a' waits for 'keys', which no round has started"):
        run(make_program(2, Round("a", send((0, 1, 1)), (), ("keys",))), simulated_cluster(), Slowdown())
    with pytest.raises(ValueError, match="must be unique in a program, got 'rows' twice"):
        run(make_program(2, Round("a", send((0, 1, 1))), Round("b", send((0, 1, 1)))), simulated_cluster(), Slowdown())
    with pytest.raises(ValueError, match=r"keep must name ranks within 0\.\.1, got 2"):
        run(make_program(2), simulated_cluster(), Slowdown(), keep=[2])


def test_bundles_are_refused_event_by_event():
    nothing = np.zeros(2, dtype=np.int64)
    bundle = MessageTotals(nothing, nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(ValueError, match="'rows' only has totals"):
        run_events(make_program(2, Round("a", {"rows": bundle})), simulated_cluster(), Slowdown())
