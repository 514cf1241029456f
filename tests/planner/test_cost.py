"""The cost of programs small enough to follow by hand, on clusters with round figures."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards
from attnmesh.planner.auto import choose_schedule
from attnmesh.planner.cost import Cost, cost, schedule_cost
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Kernels, Messages, Program, Round
from helpers.clusters import cluster, device, link


def work(*flops: float) -> tuple[Kernels, ...]:
    return (Kernels("attention", np.array(flops), np.ones(len(flops))),)


def sends(*messages: tuple[int, int, int]) -> dict[str, Messages]:
    return {"keys": Messages.of(messages)}


def program(*rounds: Round, world: int = 2) -> Program:
    return Program("by hand", world, lambda: iter(rounds))


def wired(
    intra_node: float = inf, inter_node: float = inf, *, ranks_per_node: int = 2, rails: int = 2, **shared
) -> Cluster:
    near_link = replace(link(intra_node), name="near", shared=shared.get("near_shared", False))
    far_link = replace(link(inter_node), name="far", shared=shared.get("far_shared", False))
    return Cluster(device(), near_link, far_link, ranks_per_node, rails)


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(20, 6 + 5), (40, 6 + 5), (100, 10 + 5), (200, 20 + 5)],  # 10 bytes a second; rank 0 computes 6, then 5
)
def test_a_round_takes_the_longer_of_computing_and_waiting(nbytes, seconds):
    rounds = (Round("one", sends((1, 0, nbytes)), work(6, 4), ("keys",)), Round("two", work=work(5, 1)))
    found = cost(program(*rounds), wired(intra_node=10))
    assert (found.seconds, found.computed, found.rounds) == (seconds, 11, 2)
    assert found.exposed == pytest.approx(1 - 11 / seconds)


def test_overlap_is_that_of_the_round_and_no_more():
    """The same work and bytes in other rounds: what has nothing beside it is not hidden."""
    overlapped = program(Round("both", sends((1, 0, 100)), work(10, 10), ("keys",)))
    after = program(Round("first", sends((1, 0, 100)), (), ("keys",)), Round("then", work=work(10, 10)))
    assert [cost(one, wired(intra_node=10)).seconds for one in (overlapped, after)] == [10, 20]


def test_a_rank_waits_for_whoever_is_late():
    """Rank 1 can send only after it has computed for 30 seconds."""
    late = program(Round("one", work=work(1, 30)), Round("two", sends((1, 0, 10)), work(5, 0), ("keys",)))
    assert cost(late, wired(intra_node=10)).seconds == 31


def test_bytes_and_operations_are_those_of_the_rank_with_most():
    moves = sends((0, 1, 5), (0, 2, 7), (1, 0, 3), (2, 3, 50))
    found = cost(program(Round("all", moves, work(1, 2, 3, 4), ("keys",)), world=4), wired())
    assert (found.flops, found.intra_node, found.inter_node) == (4, 50, 7)
    assert found.sent == 57


def test_costs_add_up_and_the_longer_one_says_why():
    short, long = Cost(1.0, 0.5, 10, 1, 2, 3, "near"), Cost(4.0, 4.0, 20, 3, 4, 5, "compute")
    both = Cost(5.0, 4.5, 30, 4, 6, 8, "compute")
    assert short + long == long + short == both


# What holds it up.


@pytest.mark.parametrize(
    ("found", "flops", "words"),
    [
        (wired(intra_node=10), 100, "compute"),
        (wired(intra_node=10), 95, "compute"),  # a twentieth of waiting is none
        (wired(intra_node=0.5), 60, "near intra-node bandwidth"),
        (wired(intra_node=1), 10, "near intra-node bandwidth"),
        (wired(inter_node=1, ranks_per_node=1, rails=1), 10, "far inter-node bandwidth"),
    ],
)
def test_the_bottleneck_is_what_most_of_the_time_goes_to(found, flops, words):
    assert cost(program(Round("both", sends((1, 0, 100)), work(flops, flops), ("keys",))), found).bottleneck == words


def test_work_that_is_one_ranks_alone_makes_the_others_wait():
    found = cost(program(Round("alone", sends((0, 1, 1)), work(100, 1), ("keys",)), world=2), wired(intra_node=1))
    assert found.bottleneck == "compute"  # the rank in the middle of two is the mean of both
    lonely = Round("alone", work=work(100, 1, 1, 1))
    assert cost(program(lonely, world=4), wired()).bottleneck == "waiting for other ranks, then compute"


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        (wired(inter_node=10, ranks_per_node=2, rails=2), 10),
        (wired(inter_node=10, ranks_per_node=2, rails=1), 20),  # both ranks of a node through one port
        (wired(inter_node=10, ranks_per_node=2, rails=2, far_shared=True), 20),  # out and in share it
    ],
)
def test_ports_that_ranks_share_count_for_all_of_them(found, seconds):
    moves = sends((0, 2, 100), (1, 3, 100))
    ran = cost(program(Round("out", moves, work(6, 6, 6, 6), ("keys",)), world=4), found)
    assert (ran.seconds, ran.bottleneck) == (seconds, "far inter-node bandwidth")


def test_nothing_to_do_takes_no_time():
    found = cost(program(Round("idle")), wired())
    assert (found.seconds, found.exposed, found.bottleneck) == (0.0, 0.0, "none")


# Schedules.


def case_of(world: int, ranks_per_node: int, length: int = 4096) -> Workload:
    shape = Shape(batch=1, q_heads=8, kv_heads=8, head_dim=64, itemsize=2, sum_itemsize=4)
    return Workload(shards(Causal(), Zigzag(), length, world), shape, ranks_per_node)


def test_a_ring_of_two_is_what_its_two_rounds_are():
    """Zigzag over 2 ranks, 4 chunks of n = 1024: each computes on its own keys (2n^2 pairs and a bit), then on 2n^2."""
    workload, n = case_of(2, 2), 1024
    own, other = 4 * 64 * 8 * (2 * n * n + n), 4 * 64 * 8 * (2 * n * n)
    keys = 2 * 2 * n * 8 * 64 * 2
    fast, slow = (
        cluster(1e9, intra_node=1e12, ranks_per_node=2),
        cluster(1e9, intra_node=keys / 100.0, ranks_per_node=2),
    )
    assert schedule_cost("ring", workload, fast, backward=False).seconds == pytest.approx((own + other) / 1e9, rel=1e-6)
    assert schedule_cost("ring", workload, slow, backward=False).seconds == pytest.approx(100 + other / 1e9, rel=1e-6)


def test_a_choice_is_the_least_of_the_costs_there_and_back():
    for found in (
        cluster(1e12, intra_node=1e9, inter_node=1e8),
        cluster(1e12, intra_node=1e12, inter_node=1e6),
        cluster(1e6),
    ):
        workload = case_of(4, 2)
        choice = choose_schedule(workload, found)
        assert set(choice.costs) | set(choice.unsupported) == set(SCHEDULES)
        for name, both in choice.costs.items():
            there, back = (schedule_cost(name, workload, found, backward=way) for way in (False, True))
            assert both == there + back
        assert choice.seconds[choice.schedule] == min(choice.seconds.values())


def test_faster_links_never_cost_more():
    workload = case_of(8, 4)
    for name in SCHEDULES:
        seconds = [
            schedule_cost(name, workload, cluster(1e12, intra_node=rate, inter_node=rate / 10), backward=False).seconds
            for rate in (1e8, 1e9, 1e10, 1e11)
        ]
        assert seconds == sorted(seconds, reverse=True), name
