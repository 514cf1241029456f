"""Ports: which of them a message takes, how fast they are, and which are slow."""

import numpy as np
import pytest

from attnmesh.planner.program import Messages
from attnmesh.planner.simulator import Network, Slowdown
from helpers.clusters import simulated_cluster


def ports(network: Network, source: int, target: int) -> tuple[int, int]:
    routes = network.routes(Messages.of([(source, target, 1)]))
    return int(routes.out[0]), int(routes.into[0])


def test_every_rank_has_ports_of_its_own_within_a_node():
    network = Network(simulated_cluster(ranks_per_node=4, rails=2), 8, Slowdown())
    assert ports(network, 0, 1)[0] == ports(network, 0, 2)[0] != ports(network, 1, 2)[0]
    assert ports(network, 0, 2)[1] == ports(network, 1, 2)[1] != ports(network, 1, 3)[1]
    assert not {ports(network, s, 3)[0] for s in range(3)} & {ports(network, 3, t)[1] for t in range(3)}
    assert [network.bandwidth[port] for port in ports(network, 0, 1)] == [100.0, 100.0]


def test_ranks_share_rails_between_nodes():
    network = Network(simulated_cluster(ranks_per_node=4, rails=2), 8, Slowdown())
    assert ports(network, 0, 4)[0] == ports(network, 2, 5)[0] != ports(network, 1, 4)[0]
    assert ports(network, 0, 4)[1] == ports(network, 1, 6)[1] != ports(network, 1, 5)[1]
    assert [network.bandwidth[port] for port in ports(network, 0, 4)] == [10.0, 10.0]


def test_one_port_of_a_node_is_taken_once():
    network = Network(simulated_cluster(ranks_per_node=2, rails=1, shared=True), 4, Slowdown())
    assert ports(network, 0, 1) == (ports(network, 1, 0)[0], network.none)
    assert ports(network, 2, 3)[0] != ports(network, 0, 1)[0]
    assert np.isinf(network.bandwidth[network.none])


def test_a_slow_link_slows_the_ports_that_the_rank_uses():
    network = Network(simulated_cluster(ranks_per_node=4, rails=2), 8, Slowdown(links={1: 4.0, 3: 2.0}))
    assert [network.bandwidth[port] for port in ports(network, 1, 3)] == [25.0, 50.0]
    assert [network.bandwidth[port] for port in ports(network, 0, 2)] == [100.0, 100.0]
    assert [network.bandwidth[port] for port in ports(network, 3, 7)] == [2.5, 10.0]  # the rail is rank 1's too
    assert [network.bandwidth[port] for port in ports(network, 0, 4)] == [10.0, 10.0]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("what", ["ranks", "links"])
def test_a_factor_that_is_none_is_refused(what, factor):
    with pytest.raises(ValueError, match=f"{what} must have factors above 0, from 1e-06 to 1e\\+06, got .* for rank 3"):
        Slowdown(**{what: {3: factor}})


@pytest.mark.parametrize("what", ["ranks", "links"])
def test_a_slow_rank_that_is_not_there_is_refused(what):
    with pytest.raises(ValueError, match=f"{what} must be ranks within 0..3, got -1, 4"):
        Network(simulated_cluster(), 4, Slowdown(**{what: {4: 2.0, 0: 2.0, -1: 2.0}}))


@pytest.mark.parametrize("ends", [(0, 4), (-1, 0), (2, 2)])
def test_messages_that_cannot_be_are_refused(ends):
    with pytest.raises(ValueError, match="messages must"):
        Network(simulated_cluster(), 4, Slowdown()).routes(Messages.of([(0, 1, 1), (*ends, 1)]))
