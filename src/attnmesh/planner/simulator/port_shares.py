"""How the ports are divided among all that a round starts, and what is still under way from earlier rounds.

Equal shares, fixed when the round begins. Where messages meet for part of their way only, equal shares for all of it
would be too slow: those that are left speed up. So a message has left at the latest when the fuller of its ports would
have passed all that it has to pass in this round, had it worked without a pause since the first came; but not before it
could have left with both ports to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnmesh.plan.program import Ints
from attnmesh.planner.hardware import Floats
from attnmesh.planner.simulator.network import Network, Routes


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
