"""What groups of ranks have of a node that they share."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.planner.catalog import cluster
from attnmesh.planner.hardware import group_cluster, group_ranks_per_node

H200 = cluster("h200")


@given(ranks=st.integers(1, 40), ranks_per_node=st.integers(1, 16), groups=st.integers(1, 8))
def test_ranks_together_never_lie_across_nodes(ranks, ranks_per_node, groups):
    together = group_ranks_per_node(ranks, ranks_per_node, ranks * groups)
    assert ranks % together == 0
    for first in range(0, ranks * groups, together):
        assert first // ranks_per_node == (first + together - 1) // ranks_per_node


@pytest.mark.parametrize(
    ("ranks", "devices", "together"),
    [(8, 64, 8), (4, 64, 4), (16, 64, 8), (6, 12, 2), (12, 24, 4), (6, 6, 6), (3, 6, 3), (7, 7, 7), (7, 14, 1)],
)
def test_groups_in_nodes_of_eight(ranks, devices, together):
    assert group_ranks_per_node(ranks, 8, devices) == together


@pytest.mark.parametrize(
    ("rails", "ranks", "ports", "bandwidth"),
    [(8, 8, 8, 1), (8, 1, 1, 1), (4, 4, 2, 1), (4, 1, 1, 1 / 2), (1, 8, 1, 1), (1, 1, 1, 1 / 8), (16, 4, 4, 1)],
)
def test_groups_share_the_ports_of_a_node(rails, ranks, ports, bandwidth):
    found = group_cluster(replace(H200, rails=rails), ranks, 64)
    assert (found.ranks_per_node, found.rails) == (ranks, ports)
    assert found.inter_node.bandwidth == pytest.approx(bandwidth * H200.inter_node.bandwidth)
    assert found.intra_node == H200.intra_node


def test_groups_share_what_a_node_has_one_of():
    machine = cluster("cpu", ranks_per_node=8)
    assert group_cluster(machine, 2, 64).intra_node.bandwidth == machine.intra_node.bandwidth / 4
    assert group_cluster(machine, 2, 2).intra_node.bandwidth == machine.intra_node.bandwidth  # nobody else is there
    one_way = replace(H200, inter_node=replace(H200.inter_node, shared=True))
    assert group_cluster(one_way, 2, 64).inter_node.bandwidth == H200.inter_node.bandwidth / 4


def test_ranks_that_do_the_same_take_the_same_time_as_one_by_one():
    device = cluster("h200").device
    rng = np.random.default_rng(0)
    sizes, calls = (np.repeat(rng.integers(0, 4, 40) * unit, 10).astype(float) for unit in (10**9, 1))
    together = device.seconds("attention", sizes, calls)
    apart = [float(device.seconds("attention", size, number)) for size, number in zip(sizes, calls, strict=True)]
    assert together.tolist() == apart
