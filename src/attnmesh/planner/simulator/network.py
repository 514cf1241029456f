"""The ports of a cluster, the routes of messages through them, and slowdowns.

Within a node a message leaves through the port of its source and enters through the port of its target; if the ranks of
a node share one port (as processes share the memory of a host) it uses only that one. Between nodes it uses one port of
each node, the port of the rank's rail; rails have separate ports for both directions, unless the link is shared: then a
node has one port for everything.

The bandwidth of a port is divided equally among its current messages, and the rate of a message is the smaller of the
shares of its ports. What it does not use of the larger share is not given to other messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Floats, Ints, Messages
from attnmesh.utils.validation import MAX_RANKS, check_count, check_type, shown

PORTS = ("intra_node_out", "intra_node_in", "inter_node_out", "inter_node_in")
"""The ports of a rank, by the names that `Network` and `MessageTotals` have for them."""

MAX_FACTOR = 1e6
"""The largest slowdown, and the inverse of the smallest."""


@dataclass(frozen=True)
class Slowdown:
    """Slowdown factors: of the compute of ranks, and of the ports that ranks use.

    A factor below 1 is a speedup. Of several factors for one port the largest counts.
    """

    ranks: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranks", "links"):
            check_type(name, getattr(self, name), Mapping, "a mapping of ranks to factors")
            for rank, factor in getattr(self, name).items():
                check_type(f"every key of {name}", rank, int, "a rank")
                if not isinstance(factor, int | float) or not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
                    allowed = f"above 0, from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}"
                    raise ValueError(f"{name} must have factors {allowed}, got {shown(factor)} for rank {rank}")

    def check(self, world: int) -> None:
        """Raise ValueError for ranks outside the world."""
        check_count("world", world, most=MAX_RANKS)
        for name in ("ranks", "links"):
            unknown = sorted(rank for rank in getattr(self, name) if not 0 <= rank < world)
            if unknown:
                raise ValueError(f"{name} must be ranks within 0..{world - 1}, got {', '.join(map(str, unknown))}")

    def computing(self, world: int) -> Floats:
        """The compute slowdown of every rank."""
        self.check(world)
        factors = np.ones(world)
        for rank, factor in self.ranks.items():
            factors[rank] = factor
        return factors


@dataclass(frozen=True)
class Routes:
    """The routes of the messages of an exchange: entry i is the i-th message's."""

    source: Ints
    target: Ints
    intra_node: np.ndarray[tuple[int], np.dtype[np.bool_]]  # whether both ends are on the same node
    out: Ints  # the port of the source
    into: Ints  # the port of the target, or `Network.none`
    latency: Floats
    message: Floats  # seconds until the source can start the next message


class Network:
    """The ports of a cluster of `world` ranks, numbered; `bandwidth` is by port, the other tables by rank."""

    def __init__(self, cluster: Cluster, world: int, slow: Slowdown) -> None:
        slow.check(world)
        self.cluster, self.world = cluster, world
        ranks = np.arange(world)
        self.node = ranks // cluster.ranks_per_node
        nodes = int(self.node[-1]) + 1 if world else 0
        rail = self.node * cluster.rails + (ranks % cluster.ranks_per_node) % cluster.rails
        rails = nodes * cluster.rails
        intra_node = nodes if cluster.intra_node.shared else 2 * world
        inter_node = nodes if cluster.inter_node.shared else 2 * rails
        self.none = intra_node + inter_node  # a port of infinite bandwidth, for messages that use only one
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
            for table in (getattr(self, port) for port in PORTS):
                slower[table[rank]] = max(slower[table[rank]], factor)
        slower[slower == 0] = 1.0
        base = np.full(self.none + 1, np.inf)
        base[:intra_node], base[intra_node : self.none] = cluster.intra_node.bandwidth, cluster.inter_node.bandwidth
        self.bandwidth: Floats = base / slower

    @property
    def ports(self) -> int:
        """The number of ports, `none` included."""
        return self.none + 1

    def routes(self, messages: Messages) -> Routes:
        """The routes of messages."""
        source, target = messages.source, messages.target
        if len(messages) and not (
            min(source.min(), target.min()) >= 0
            and max(source.max(), target.max()) < self.world
            and messages.nbytes.min() >= 0
        ):
            raise ValueError(f"messages must be between ranks 0..{self.world - 1} and of 0 bytes or more")
        if np.any(source == target):
            raise ValueError(
                f"messages must be between different ranks, got one of rank {source[source == target][0]} to itself"
            )
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
class InFlight:
    """Messages in flight by port: entry i until `left[i]` at `rate[i]`, on the clock of rank `ranks[i]`."""

    ports: Ints
    ranks: Ints
    left: Floats
    rate: Floats

    def still(self, now: Floats) -> InFlight | None:
        """Those that are still in flight, if any."""
        here = self.left > now[self.ranks]
        if not here.any():
            return None
        return InFlight(self.ports[here], self.ranks[here], self.left[here], self.rate[here])


class PortShares:
    """The shares of all ports in one round: first all messages are added, then times are read.

    Shares are equal and fixed when the round begins, for the messages of the round and those in flight. Where messages
    overlap for part of their time only, equal shares for all of it would be too slow. So a message has left at the
    latest when the busier of its ports could have passed all bytes of this round without a pause since the first
    message; but not earlier than with both ports to itself.
    """

    def __init__(self, network: Network, now: Floats, under_way: list[InFlight]) -> None:
        self.bandwidth, self.none = network.bandwidth, network.none
        self.users = np.zeros(network.ports, dtype=np.int64)
        self.others = np.zeros(network.ports)  # bytes other than of this round's messages
        self.messages: list[tuple[Routes, Floats, Ints]] = []
        for these in under_way:
            self.users += np.bincount(these.ports, minlength=network.ports)
            self.others += sums(these.ports, (these.left - now[these.ranks]) * these.rate, network.ports)

    def add(self, routes: Routes, users: Ints, begin: Floats, nbytes: Ints) -> None:
        """Add messages, each with its own share; `users` is their number by port."""
        self.users += users
        self.messages.append((routes, begin, nbytes))

    def add_totals(self, load: Floats) -> None:
        """Add an exchange known by its totals, which shares as one message; `load` is bytes by port."""
        self.users += load > 0
        self.others += load

    def left(self, routes: Routes, begin: Floats, nbytes: Ints) -> Floats:
        """When messages have left their ports."""
        shares = self.bandwidth / np.maximum(self.users, 1)
        left: Floats = begin + nbytes / np.minimum(shares[routes.out], shares[routes.into])
        if self.users[: self.none].max(initial=0) > 1:
            alone = begin + nbytes / np.minimum(self.bandwidth[routes.out], self.bandwidth[routes.into])
            first, taking = self._pass_all
            passed = first + taking
            left = np.maximum(alone, np.minimum(left, np.maximum(passed[routes.out], passed[routes.into])))
        return left

    def totals_seconds(self, load: Floats) -> Floats:
        """Seconds of every port for an exchange known by its totals."""
        taking: Floats = np.minimum(load / self.bandwidth * np.maximum(self.users, 1), self._pass_all[1])
        return taking

    @cached_property
    def _pass_all(self) -> tuple[Floats, Floats]:
        """By port: the start of the first message of the round, and the seconds to pass all bytes without a pause."""
        first, nbytes = np.full(len(self.users), np.inf), self.others.copy()
        for routes, begin, sizes in self.messages:
            for ports in (routes.out, routes.into):
                np.minimum.at(first, ports, begin)
                nbytes += sums(ports, sizes, len(nbytes))
        return first, nbytes / self.bandwidth


def sums(where: Ints, values: Floats | Ints, length: int) -> Floats:
    """The sum of the values at each index."""
    return np.bincount(where, weights=values, minlength=length).astype(np.float64, copy=False)
