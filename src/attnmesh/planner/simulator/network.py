"""Which ports a message takes, how fast they are, and who is slow.

Within a node a message leaves through the port of its source and comes in through the port of its target; if ranks of
a node share one port (as processes share a machine's memory) it takes that one only. Between nodes it takes one port of
each node, that of the rail that the rank uses; rails have a way out and a way in, unless the link is a shared one: then
a node has one port for everything.

A port's bandwidth is divided equally among the messages that are on it at a moment, and a message moves at the least of
the shares that its ports give it. What it leaves of its share on the wider port is not given to others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attnmesh.plan.program import Floats, Ints, Messages
from attnmesh.planner.hardware import Cluster


@dataclass(frozen=True)
class Slow:
    """Who is slower than the others, and how many times: ranks as they compute, and the ports that ranks use.

    A factor below 1 is faster. Of several factors for one port the largest counts.
    """

    ranks: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranks", "links"):
            for rank, factor in getattr(self, name).items():
                if not (math.isfinite(factor) and factor > 0):
                    raise ValueError(f"{name} of Slow must have factors above 0, got {factor} for rank {rank}")

    def check(self, world: int) -> None:
        """Refuse ranks that are not there."""
        for name in ("ranks", "links"):
            unknown = sorted(rank for rank in getattr(self, name) if not 0 <= rank < world)
            if unknown:
                raise ValueError(f"{name} of Slow must be within 0..{world - 1}, got {', '.join(map(str, unknown))}")

    def computing(self, world: int) -> Floats:
        """How many times as long every rank computes."""
        factors = np.ones(world)
        for rank, factor in self.ranks.items():
            factors[rank] = factor
        return factors


@dataclass(frozen=True)
class Routes:
    """How the messages of an exchange travel: entry i is the i-th message's."""

    source: Ints
    target: Ints
    intra_node: np.ndarray[tuple[int], np.dtype[np.bool_]]  # whether it stays within a node
    out: Ints  # the port that it leaves through
    into: Ints  # the port that it comes in through, or `Network.none`
    latency: Floats
    message: Floats  # seconds until its source can start the next


class Network:
    """The ports of a cluster of `world` ranks, numbered; `bandwidth` is by port, the other tables by rank."""

    def __init__(self, cluster: Cluster, world: int, slow: Slow) -> None:
        slow.check(world)
        self.cluster, self.world = cluster, world
        ranks = np.arange(world)
        self.node = ranks // cluster.ranks_per_node
        nodes = int(self.node[-1]) + 1 if world else 0
        rail = self.node * cluster.rails + (ranks % cluster.ranks_per_node) % cluster.rails
        rails = nodes * cluster.rails
        intra_node = nodes if cluster.intra_node.shared else 2 * world
        inter_node = nodes if cluster.inter_node.shared else 2 * rails
        self.none = intra_node + inter_node  # a port that is always there, for messages that take only one
        if cluster.intra_node.shared:
            self.intra_node_out, self.intra_node_in = self.node, np.full(world, self.none)
        else:
            self.intra_node_out, self.intra_node_in = ranks, world + ranks
        if cluster.inter_node.shared:
            self.inter_node_out = self.inter_node_in = intra_node + self.node
        else:
            self.inter_node_out, self.inter_node_in = intra_node + rail, intra_node + rails + rail
        slower = np.zeros(self.none + 1)
        for rank, factor in slow.links.items():
            for table in (self.intra_node_out, self.intra_node_in, self.inter_node_out, self.inter_node_in):
                slower[table[rank]] = max(slower[table[rank]], factor)
        slower[slower == 0] = 1.0
        base = np.full(self.none + 1, np.inf)
        base[:intra_node], base[intra_node : self.none] = cluster.intra_node.bandwidth, cluster.inter_node.bandwidth
        self.bandwidth: Floats = base / slower

    @property
    def ports(self) -> int:
        """How many ports there are, the one that is always there among them."""
        return self.none + 1

    def routes(self, messages: Messages) -> Routes:
        """How messages travel."""
        source, target = messages.source, messages.target
        if len(messages) and not (
            min(source.min(), target.min()) >= 0
            and max(source.max(), target.max()) < self.world
            and messages.nbytes.min() >= 0
        ):
            raise ValueError(f"messages must be between ranks 0..{self.world - 1} and of 0 bytes or more")
        if np.any(source == target):
            raise ValueError(f"messages must have two ends, got one of rank {source[source == target][0]} to itself")
        intra_node = self.node[source] == self.node[target]
        links = self.cluster.intra_node, self.cluster.inter_node
        return Routes(
            source,
            target,
            intra_node,
            np.where(intra_node, self.intra_node_out[source], self.inter_node_out[source]),
            np.where(intra_node, self.intra_node_in[target], self.inter_node_in[target]),
            np.where(intra_node, links[0].latency, links[1].latency),
            np.where(intra_node, links[0].message, links[1].message),
        )


@dataclass(frozen=True)
class UnderWay:
    """Who is on which port: entry i until `left[i]` at `rate[i]`, as seen by the clock of rank `ranks[i]`."""

    ports: Ints
    ranks: Ints
    left: Floats
    rate: Floats

    def still(self, now: Floats) -> UnderWay | None:
        """Those that have not left, if any."""
        here = self.left > now[self.ranks]
        if not here.any():
            return None
        return UnderWay(self.ports[here], self.ranks[here], self.left[here], self.rate[here])


class PortShares:
    """The ports in one round: first everything is put on them, then everything is asked for."""

    def __init__(self, network: Network, now: Floats, under_way: list[UnderWay]) -> None:
        self.bandwidth, self.none = network.bandwidth, network.none
        self.users = np.zeros(network.ports, dtype=np.int64)
        self.others = np.zeros(network.ports)  # bytes that are not of this round's messages
        self.messages: list[tuple[Routes, Floats, Ints]] = []
        for these in under_way:
            self.users += np.bincount(these.ports, minlength=network.ports)
            self.others += sums(these.ports, (these.left - now[these.ranks]) * these.rate, network.ports)

    def put(self, routes: Routes, users: Ints, begin: Floats, nbytes: Ints) -> None:
        """Messages, which have a share each; `users` is how many by port."""
        self.users += users
        self.messages.append((routes, begin, nbytes))

    def put_bundle(self, load: Floats) -> None:
        """A bundle, which shares with others as one; `load` is in bytes by port."""
        self.users += load > 0
        self.others += load

    def left(self, routes: Routes, begin: Floats, nbytes: Ints) -> Floats:
        """When messages have left."""
        shares = self.bandwidth / np.maximum(self.users, 1)
        left: Floats = begin + nbytes / np.minimum(shares[routes.out], shares[routes.into])
        if self.users[: self.none].max(initial=0) > 1:
            alone = begin + nbytes / np.minimum(self.bandwidth[routes.out], self.bandwidth[routes.into])
            first, taking = self._pass_all
            passed = first + taking
            left = np.maximum(alone, np.minimum(left, np.maximum(passed[routes.out], passed[routes.into])))
        return left

    def bundle_seconds(self, load: Floats) -> Floats:
        """What every port takes for a bundle."""
        taking: Floats = np.minimum(load / self.bandwidth * np.maximum(self.users, 1), self._pass_all[1])
        return taking

    @cached_property
    def _pass_all(self) -> tuple[Floats, Floats]:
        """By port: when the first message of the round comes, and the seconds to pass everything without a pause."""
        first, nbytes = np.full(len(self.users), np.inf), self.others.copy()
        for routes, begin, sizes in self.messages:
            for ports in (routes.out, routes.into):
                np.minimum.at(first, ports, begin)
                nbytes += sums(ports, sizes, len(nbytes))
        return first, nbytes / self.bandwidth


def sums(where: Ints, values: Floats | Ints, length: int) -> Floats:
    """The sum of the values that go to each place."""
    return np.bincount(where, weights=values, minlength=length).astype(np.float64, copy=False)
