"""What groups of ranks have of a node that they share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.planner.catalog import cluster
from attnmesh.planner.hardware import one_of_many, ranks_together

H200 = cluster("h200")


@given(ranks=st.integers(1, 40), node=st.integers(1, 16), groups=st.integers(1, 8))
def test_ranks_together_never_lie_across_nodes(ranks, node, groups):
    together = ranks_together(ranks, node, ranks * groups)
    assert ranks % together == 0
    for first in range(0, ranks * groups, together):
        assert first // node == (first + together - 1) // node


@pytest.mark.parametrize(
    ("ranks", "devices", "together"),
    [(8, 64, 8), (4, 64, 4), (16, 64, 8), (6, 12, 2), (12, 24, 4), (6, 6, 6), (3, 6, 3), (7, 7, 7), (7, 14, 1)],
)
def test_groups_in_nodes_of_eight(ranks, devices, together):
    assert ranks_together(ranks, 8, devices) == together


@pytest.mark.parametrize(
    ("rails", "ranks", "ports", "bandwidth"),
    [(8, 8, 8, 1), (8, 1, 1, 1), (4, 4, 2, 1), (4, 1, 1, 1 / 2), (1, 8, 1, 1), (1, 1, 1, 1 / 8), (16, 4, 4, 1)],
)
def test_groups_share_the_ports_of_a_node(rails, ranks, ports, bandwidth):
    found = one_of_many(replace(H200, rails=rails), ranks, 64)
    assert (found.node, found.rails) == (ranks, ports)
    assert found.far.bandwidth == pytest.approx(bandwidth * H200.far.bandwidth)
    assert found.near == H200.near


def test_groups_share_what_a_node_has_one_of():
    machine = cluster("cpu", node=8)
    assert one_of_many(machine, 2, 64).near.bandwidth == machine.near.bandwidth / 4
    assert one_of_many(machine, 2, 2).near.bandwidth == machine.near.bandwidth  # nobody else is there
    one_way = replace(H200, far=replace(H200.far, shared=True))
    assert one_of_many(one_way, 2, 64).far.bandwidth == H200.far.bandwidth / 4
