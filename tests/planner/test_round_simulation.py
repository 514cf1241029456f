"""A round at a time against event by event: the same where no messages meet on a port, close where they do."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards
from attnmesh.planner.catalog import cluster
from attnmesh.planner.program import Messages, MessageTotals, Program, Round
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Slowdown, run_rounds
from helpers.clusters import all_to_all_program, attention_kernels, long_ring_program, make_program, simulated_cluster
from helpers.event_simulation import run_events


def same(make_program: Program, there, slow: Slowdown) -> None:
    keep = range(make_program.world)
    truth, found = run_events(make_program, there, slow, keep), run_rounds(make_program, there, slow, keep)
    for name in ("finish", "computed", "waited"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-9, abs=1e-9)
    told, expected = (
        sorted((s.rank, s.track, s.name, s.begin, s.end, repr(s.args)) for s in spans if s.end > s.begin + 1e-9)
        for spans in (found.spans, truth.spans)
    )
    assert [span[:3] for span in told] == [span[:3] for span in expected]
    assert [span[5] for span in told] == [span[5] for span in expected]
    for at in (3, 4):
        assert [span[at] for span in told] == pytest.approx([span[at] for span in expected], rel=1e-9, abs=1e-9)


@st.composite
def rings(draw):
    """Rings and other rounds in which a rank sends and receives at most once: work, sizes and wires by chance."""
    world, rounds = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for s in range(rounds):
        targets = rng.permutation(world) if draw(st.booleans()) else np.roll(np.arange(world), -1)
        ends = [(r, int(t), int(rng.integers(0, 300))) for r, t in enumerate(targets) if r != t]
        waits = (f"keys {s}",)
        made.append(
            Round(f"round {s}", {f"keys {s}": Messages.of(ends)}, attention_kernels(*rng.uniform(0, 5, world)), waits)
        )
    node = draw(st.integers(1, 5))
    there = simulated_cluster(
        node, node, intra_node=(0.25, 100.0), inter_node=(1.5, 30.0), message=draw(st.sampled_from([0.0, 0.5, 20.0]))
    )
    factors = st.dictionaries(st.integers(0, world - 1), st.floats(0.5, 4.0), max_size=2)
    return make_program(world, *made), there, Slowdown(draw(factors), draw(factors))


@settings(deadline=None, max_examples=30)
@given(rings())
def test_rings_are_the_same_as_event_by_event(workload):
    same(*workload)


def test_a_long_ring_with_a_straggler_is_the_same_as_event_by_event():
    wired = simulated_cluster(8, 8, intra_node=(1e-6, 4e11), inter_node=(5e-6, 5e10), message=5e-7)
    same(long_ring_program(24, 60), wired, Slowdown({3: 1.5}, {7: 4.0}))


def close(make_program: Program, there, slow: Slowdown, *, whole: float, each: float) -> None:
    truth, found = run_events(make_program, there, slow), run_rounds(make_program, there, slow)
    assert found.finish.max() == pytest.approx(truth.finish.max(), rel=whole)
    assert found.finish == pytest.approx(truth.finish, rel=each)


@pytest.mark.parametrize(
    ("ranks_per_node", "rails", "shared"), [(8, 8, False), (4, 2, False), (4, 1, False), (4, 4, True), (1, 1, True)]
)
def test_all_to_alls_of_equal_messages_are_close(ranks_per_node, rails, shared):
    there = simulated_cluster(
        ranks_per_node, rails, intra_node=(0.1, 100.0), inter_node=(0.5, 10.0), message=0.01, shared=shared
    )
    close(all_to_all_program(np.full((12, 12), 1000)), there, Slowdown(), whole=0.02, each=0.02)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 10), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_uneven_all_to_alls_among_ranks_that_come_at_different_times_are_close(
    world, ranks_per_node, rails, shared, late, seed
):
    rng = np.random.default_rng(seed)
    (exchange,) = (
        round_.starts["rows"] for round_ in all_to_all_program(rng.integers(100, 1000, (world, world))).rounds()
    )
    rounds = [
        Round(f"{s}", {f"{s}": exchange}, attention_kernels(*rng.uniform(0, 100, world)), (f"{s}",)) for s in range(3)
    ]
    there = simulated_cluster(
        ranks_per_node, rails, intra_node=(0.1, 100.0), inter_node=(0.5, 10.0), message=0.01, shared=shared
    )
    slow = Slowdown({world - 1: 2.0}, {0: 2.0}) if late else Slowdown()
    close(make_program(world, *rounds), there, slow, whole=0.2, each=0.3)


@pytest.mark.parametrize(
    ("gradients", "lag", "computing"),
    [(50, 0, 0.2), (200, 1, 0.2), (100, 1, 1.0), (50, 2, 1.0), (100, 0, 3.0), (200, 2, 3.0)],
)
def test_two_exchanges_under_way_are_close(gradients, lag, computing):
    ranks, rng = np.arange(8), np.random.default_rng(0)

    def ring(nbytes):
        return Messages(ranks, (ranks + 1) % 8, np.full(8, nbytes))

    rounds = [
        Round(
            f"{s}",
            {f"keys {s}": ring(100), f"gradients {s}": ring(gradients)},
            attention_kernels(*rng.uniform(0.8 * computing, 1.2 * computing, 8)),
            (f"keys {s}", *([f"gradients {s - lag}"] if s >= lag else [])),
        )
        for s in range(20)
    ]
    close(make_program(8, *rounds), simulated_cluster(), Slowdown(), whole=0.1, each=0.1)


@pytest.mark.parametrize("world", [4, 8])
def test_a_ring_on_shared_cores_is_close(world):
    rng = np.random.default_rng(0)
    ranks = np.arange(world)
    rounds = [
        Round(
            f"{s}",
            {f"{s}": Messages(ranks, (ranks + 1) % world, np.full(world, 10))},
            attention_kernels(*spent),
            (f"{s}",),
        )
        for s, spent in enumerate(rng.uniform(1, 2, (20, world)))
    ]
    close(make_program(world, *rounds), simulated_cluster(4, 1, cores=2), Slowdown({1: 2.0}), whole=0.05, each=0.05)


@pytest.mark.parametrize("device", ["h200", "h100", "cpu"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_within_2_percent(schedule, device):
    where = cluster(device, ranks_per_node=4)
    shape = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)
    workload = Workload(shards(Causal(), Zigzag(), 65536, 16), shape, ranks_per_node=4)
    for backward in (False, True):
        close(program(schedule, workload, backward=backward), where, Slowdown(), whole=0.02, each=0.02)


def bundled(nbytes: np.ndarray, ranks_per_node: int, groups: np.ndarray | None = None) -> MessageTotals:
    """What `all_to_all` sends, as sums."""
    world = len(nbytes)
    at = np.arange(world) // ranks_per_node
    intra_node = (at[:, None] == at) & ~np.eye(world, dtype=bool)
    inter_node = at[:, None] != at
    sums = [
        (nbytes * intra_node).sum(1),
        (nbytes * intra_node).sum(0),
        (nbytes * inter_node).sum(1),
        (nbytes * inter_node).sum(0),
    ]
    group = np.zeros(world, dtype=np.int64) if groups is None else groups
    return MessageTotals(group, *sums, sends=((intra_node | inter_node) & (nbytes > 0)).sum(1))


@pytest.mark.parametrize(
    ("ranks_per_node", "rails", "shared"), [(8, 8, False), (1, 1, False), (4, 4, True), (4, 1, True)]
)
def test_a_bundle_takes_what_its_messages_take(ranks_per_node, rails, shared):
    nbytes = np.full((8, 8), 1000)
    there = simulated_cluster(
        ranks_per_node, rails, intra_node=(0.1, 100.0), inter_node=(0.5, 10.0), message=0.01, shared=shared
    )
    truth = run_events(all_to_all_program(nbytes), there, Slowdown(links={3: 2.0}))
    bundle = make_program(8, Round("a", {"rows": bundled(nbytes, ranks_per_node)}, (), ("rows",)))
    found = run_rounds(bundle, there, Slowdown(links={3: 2.0}))
    assert found.finish.max() == pytest.approx(truth.finish.max(), rel=0.03)


def test_a_bundle_by_hand():
    group = np.array([0, 0, 7, 7])
    bundle = MessageTotals(
        group,
        intra_node_out=np.array([200, 0, 0, 0]),
        intra_node_in=np.array([0, 200, 0, 0]),
        inter_node_out=np.array([0, 0, 30, 10]),
        inter_node_in=np.array([0, 0, 0, 20]),
        sends=np.array([2, 0, 1, 1]),
    )
    late = Round("late", {}, attention_kernels(0.0, 4.0, 1.0, 0.0))
    there = simulated_cluster(2, 1, intra_node=(0.5, 100.0), inter_node=(3.0, 10.0), message=0.25)
    found = run_rounds(
        make_program(4, late, Round("a", {"rows": bundle}, (), ("rows",))), there, Slowdown(), keep=[0, 3]
    )
    # Begun at 4, 2 seconds of bytes, half a second of sends, half a second of latency. And from 1 on: one rail passes
    # 40 bytes, one message, a latency of 3.
    assert found.finish.tolist() == [7.0, 7.0, 8.25, 8.25]
    assert [(s.rank, s.track, s.begin, s.end, s.args.get("bytes")) for s in found.spans] == [
        (0, "send", 4.0, 7.0, 200),
        (0, "receive", 4.0, 7.0, 0),
        (3, "send", 1.0, 8.25, 10),
        (3, "receive", 1.0, 8.25, 20),
        (0, "wait", 0.0, 7.0, None),
        (3, "wait", 0.0, 8.25, None),
    ]


def test_who_has_no_part_in_a_bundle_does_not_wait_for_it():
    nothing, some = np.zeros(3, dtype=np.int64), np.array([100, 100, 0])
    bundle = MessageTotals(nothing, some, some, nothing, nothing, np.array([1, 1, 0]))
    rounds = Round("late", {}, attention_kernels(0.0, 0.0, 9.0)), Round("a", {"rows": bundle}, (), ("rows",))
    assert run_rounds(make_program(3, *rounds), simulated_cluster(), Slowdown()).finish.tolist() == [1.0, 1.0, 9.0]


def test_two_bundles_at_once_share_the_ports():
    nbytes = np.full((4, 4), 100)
    one, two = bundled(nbytes, 4), bundled(nbytes // 2, 4)
    rounds = Round("a", {"keys": one, "values": two}, (), ("keys", "values"))
    assert run_rounds(make_program(4, rounds), simulated_cluster(), Slowdown()).finish.tolist() == [4.5] * 4


WIRED = simulated_cluster(8, 8, intra_node=(1e-6, 4e11), inter_node=(5e-6, 5e10), message=5e-7)


def test_a_round_of_thousands_of_ranks_is_quick():
    began = time.perf_counter()
    found = run_rounds(long_ring_program(4096, 50), WIRED, Slowdown({5: 1.5}), keep=[5])
    took = time.perf_counter() - began
    assert took < 50 * 0.02  # a fiftieth of a second a round, ten times what it takes
    assert found.finish.argmax() == 5


@pytest.mark.sweep
def test_a_ring_of_4096_ranks_all_the_way_round_within_40_seconds():
    began = time.perf_counter()
    found = run_rounds(long_ring_program(4096, 4096), WIRED, Slowdown({5: 1.5}), keep=[5])
    took = time.perf_counter() - began
    print(f"{took:.1f} s")
    assert took < 40
    # The straggler waits for nobody in the end: what it computes, and what it cannot hide.
    assert found.computed[5] + found.waited[5] == pytest.approx(found.finish[5])
    assert found.finish.max() == found.finish[5]
