"""A program run a round at a time, all ranks at once: what `plan.events` finds, for thousands of ranks.

Where events follow every change, this fixes a message's rate when its round begins: an equal share of each of its
ports among all messages that the round starts there, and those of earlier rounds that are still on their way then. A
message starts when both ends have posted it, sends of a rank one after another. Where no two messages meet on a port,
as in a ring, this is exact.

Where they meet for part of their way only, equal shares for all of it would be too slow: those that are left speed up.
So a message has left at the latest when the fuller of its ports would have passed all bytes of the exchange, had it
worked without a pause since the first of them came; but not before it could have, alone. On shared cores, the ranks of
a node divide them as if all of them began the round at once.

A bundle begins for a group when the last of its ranks has posted it, and is over for all of them at once: when the
busiest of their ports has passed its bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.hardware import Cluster, Floats
from attnmesh.plan.network import Network, Routes, Slow
from attnmesh.plan.program import Bundle, Ints, Messages, Program, Round
from attnmesh.plan.record import Record, beside_kernels, timed

NEVER = -np.inf
REMEMBERED = 4  # exchanges whose routes are kept, in case the next have the same ends: a ring's always do


@dataclass(frozen=True)
class _Paths:
    """The routes of an exchange, and what follows from them."""

    routes: Routes
    users: Ints  # by port
    place: Floats  # seconds after the rank's first send
    gaps: Floats  # by rank: seconds that it takes to start all of its sends
    once: tuple[bool, bool]  # whether no rank has two sends, and none two receives
    meets: bool  # whether some port has two messages

    @staticmethod
    def of(messages: Messages, network: Network) -> _Paths:
        routes = network.routes(messages)
        users = np.bincount(routes.out, minlength=network.ports) + np.bincount(routes.into, minlength=network.ports)
        sends, receives = (np.bincount(ranks, minlength=network.world) for ranks in (routes.source, routes.target))
        once = bool(sends.max(initial=0) <= 1), bool(receives.max(initial=0) <= 1)
        gaps = _sums(routes.source, routes.message, network.world)
        place = np.zeros(len(messages))
        if not once[0]:
            order = np.argsort(routes.source, kind="stable")
            before = np.cumsum(routes.message[order]) - routes.message[order]
            ranks = routes.source[order]
            first = np.flatnonzero(np.r_[True, ranks[1:] != ranks[:-1]])
            place[order] = before - np.repeat(before[first], np.diff(np.r_[first, len(ranks)]))
        return _Paths(routes, users, place, gaps, once, bool(users[: network.none].max(initial=0) > 1))

    def fits(self, messages: Messages) -> bool:
        """Whether these messages have the same ends."""
        return np.array_equal(self.routes.source, messages.source) and np.array_equal(
            self.routes.target, messages.target
        )


@dataclass(frozen=True)
class _UnderWay:
    """Who is on which port: entry i is there until `left[i]`, as seen by the clock of `ranks[i]`."""

    ports: Ints
    ranks: Ints
    left: Floats

    def users(self, now: Floats, ports: int) -> Ints:
        """How many are still on each port."""
        return np.bincount(self.ports[self.left > now[self.ranks]], minlength=ports)

    def over(self, now: Floats) -> bool:
        return not bool(np.any(self.left > now[self.ranks]))


class _Waves:
    def __init__(self, program: Program, cluster: Cluster, slow: Slow, keep: Collection[int]) -> None:
        world = program.world
        self.program, self.cluster, self.world = program, cluster, world
        self.network = Network(cluster, world, slow)
        self.slower = slow.computing(world)
        self.record = Record(world, keep)
        self.now = np.zeros(world)
        self.free = np.zeros(world)  # when a rank can start its next send
        self.done: dict[str, Floats] = {}  # by exchange: when a rank's messages are done, NEVER if it has none
        self.seen: set[str] = set()
        self.under_way: list[_UnderWay] = []
        self.recent: list[_Paths] = []

    def run(self) -> Record:
        record = self.record
        for round_ in self.program.rounds():
            self.start(round_)
            worked = self.work(round_)
            after = self.wait(worked, round_.waits, round_)
            record.waited += after - worked
            self.now = after
        end = self.wait(self.now, tuple(self.done), None)
        record.waited += end - self.now
        record.finish = end
        return record

    def work(self, round_: Round) -> Floats:
        """When every rank has computed."""
        work = timed(round_.work, self.cluster, self.slower)
        seconds: Floats = sum((part.seconds for part in work), np.zeros(self.world))
        seconds = seconds + beside_kernels(round_, seconds, self.cluster) * self.slower
        if not seconds.any():
            return self.now
        if self.cluster.device.cores is not None:
            seconds = self.on_shared_cores(seconds, self.cluster.device.cores)
        worked: Floats = self.now + seconds
        self.record.computed += seconds
        for rank in self.record.keep:
            if seconds[rank] > 0:
                self.record.computing(rank, round_.name, work, float(self.now[rank]), float(worked[rank]))
        return worked

    def on_shared_cores(self, seconds: Floats, cores: int) -> Floats:
        """What work takes, begun at once by the ranks of a node, that would take `seconds` on a core of its own."""
        node = self.network.node
        ranks = np.bincount(node)
        order = np.lexsort((seconds, node))  # the shortest of a node first; all that are left share the cores till then
        place = np.arange(self.world) - (np.cumsum(ranks) - ranks)[node]
        more = np.diff(seconds[order], prepend=0.0)
        more[place == 0] = seconds[order][place == 0]
        until = np.cumsum(more * np.maximum((ranks[node] - place) / cores, 1.0))
        before = np.r_[0.0, until[:-1]][place == 0]
        shared = np.empty(self.world)
        shared[order] = until - before[node]
        return shared

    def wait(self, since: Floats, names: tuple[str, ...], round_: Round | None) -> Floats:
        """When every rank has the exchanges of these names done."""
        until = since
        for name in names:
            if name not in self.seen:
                where = round_.name if round_ else "at the end"
                raise ValueError(f"round {where!r} waits for {name!r}, which no round has started")
            if name in self.done:  # otherwise it was waited for before
                until = np.maximum(until, self.done.pop(name))
        for rank in self.record.keep:
            shown = names if round_ else ("the rest",)
            self.record.waiting(rank, shown, float(since[rank]), float(until[rank]))
        return until

    def start(self, round_: Round) -> None:
        """Start a round's exchanges, all at once: they share ports with one another and with what is under way."""
        if not round_.starts:
            return
        self.under_way = [these for these in self.under_way if not these.over(self.now)]
        users = np.zeros(self.network.ports, dtype=np.int64)
        for these in self.under_way:
            users += these.users(self.now, len(users))
        paths: dict[str, _Paths] = {}
        loads: dict[str, Floats] = {}
        for name, exchange in round_.starts.items():
            if name in self.seen:
                raise ValueError(f"names of exchanges must be unique in a program, got {name!r} twice")
            self.seen.add(name)
            if isinstance(exchange, Bundle):
                loads[name] = self.load(exchange)
                users += loads[name] > 0  # a bundle shares with others as one
            else:
                paths[name] = self.paths(exchange)
                users += paths[name].users
        shares = self.network.bandwidth / np.maximum(users, 1)
        for name, exchange in round_.starts.items():
            if isinstance(exchange, Bundle):
                self.done[name] = self.bundle(name, exchange, loads[name], shares)
            else:
                self.done[name] = self.messages(name, exchange, paths[name], shares)

    def paths(self, messages: Messages) -> _Paths:
        for i, known in enumerate(self.recent):
            if known.fits(messages):
                self.recent.insert(0, self.recent.pop(i))
                return known
        self.recent = [_Paths.of(messages, self.network), *self.recent[: REMEMBERED - 1]]
        return self.recent[0]

    def messages(self, name: str, messages: Messages, paths: _Paths, shares: Floats) -> Floats:
        """When the messages of an exchange are done, by rank."""
        routes = paths.routes
        source, target = routes.source, routes.target
        posted = np.maximum(self.now, self.free)
        self.free = np.where(paths.gaps > 0, posted + paths.gaps, self.free)
        begin = np.maximum(posted[source] + paths.place, self.now[target])
        left = begin + messages.nbytes / np.minimum(shares[routes.out], shares[routes.into])
        if paths.meets:
            left = self.relieved(messages, paths, begin, left, shares)
        there = left + routes.latency
        done = np.full(self.world, NEVER)
        for ranks, at, once in ((source, left, paths.once[0]), (target, there, paths.once[1])):
            if once:
                done[ranks] = np.maximum(done[ranks], at)
            else:
                np.maximum.at(done, ranks, at)
        self.under_way += [_UnderWay(routes.out, source, left), _UnderWay(routes.into, target, left)]
        if self.record.keep:
            kept = self.record.kept
            for i in np.flatnonzero(kept[source] | kept[target]).tolist():
                link = self.cluster.near if routes.near[i] else self.cluster.far
                ends = int(source[i]), int(target[i])
                times = float(begin[i]), float(left[i]), float(there[i])
                self.record.message(name, *ends, int(messages.nbytes[i]), link.name, *times)
        return done

    def relieved(self, messages: Messages, paths: _Paths, begin: Floats, left: Floats, shares: Floats) -> Floats:
        """When messages have left that get the shares of those before them."""
        routes, bandwidth = paths.routes, self.network.bandwidth
        first, nbytes = np.full(len(bandwidth), np.inf), np.zeros(len(bandwidth))
        for ports in (routes.out, routes.into):
            np.minimum.at(first, ports, begin)
            nbytes += _sums(ports, messages.nbytes, len(bandwidth))
        passed = first + nbytes / (shares * np.maximum(paths.users, 1))  # its part of a port that others use as well
        alone = begin + messages.nbytes / np.minimum(bandwidth[routes.out], bandwidth[routes.into])
        relieved: Floats = np.maximum(alone, np.minimum(left, np.maximum(passed[routes.out], passed[routes.into])))
        return relieved

    def load(self, bundle: Bundle) -> Floats:
        """Bytes by port."""
        network = self.network
        near = ((network.near_out, bundle.near_out), (network.near_in, bundle.near_in))
        far = ((network.far_out, bundle.far_out), (network.far_in, bundle.far_in))
        return sum(
            (_sums(ports, nbytes, network.ports) for ports, nbytes in (*near, *far)),
            np.zeros(network.ports),
        )

    def bundle(self, name: str, bundle: Bundle, load: Floats, shares: Floats) -> Floats:
        """When a bundle is done, by rank."""
        network, near, far = self.network, self.cluster.near, self.cluster.far
        seconds = load / shares
        is_near = (bundle.near_out > 0) | (bundle.near_in > 0)
        is_far = (bundle.far_out > 0) | (bundle.far_in > 0)
        part = is_near | is_far
        passing = np.zeros(self.world)
        for ports, nbytes in (
            (network.near_out, bundle.near_out),
            (network.near_in, bundle.near_in),
            (network.far_out, bundle.far_out),
            (network.far_in, bundle.far_in),
        ):
            passing = np.maximum(passing, np.where(nbytes > 0, seconds[ports], 0.0))
        gap = np.maximum(np.where(is_near, near.message, 0.0), np.where(is_far, far.message, 0.0))
        latency = np.maximum(np.where(is_near, near.latency, 0.0), np.where(is_far, far.latency, 0.0))
        taking = passing + bundle.sends * gap + latency
        groups, group = np.unique(bundle.group, return_inverse=True)
        begin, longest = np.full(len(groups), NEVER), np.zeros(len(groups))
        np.maximum.at(begin, group[part], self.now[part])
        np.maximum.at(longest, group[part], taking[part])
        done = np.where(part, (begin + longest)[group], NEVER)
        for ports in (network.near_out, network.near_in, network.far_out, network.far_in):
            # One rank stands for all that use a port: a bundle counts once there.
            used, owner = np.unique(ports[part], return_index=True)
            busy = load[used] > 0
            ranks = np.flatnonzero(part)[owner[busy]]
            self.under_way.append(_UnderWay(used[busy], ranks, done[ranks]))
        for rank in self.record.keep:
            if part[rank]:
                self.record.bundle(name, rank, bundle, float(begin[group[rank]]), float(done[rank]))
        return done


def _sums(where: Ints, values: Floats | Ints, length: int) -> Floats:
    """The sum of the values that go to each place."""
    return np.bincount(where, weights=values, minlength=length).astype(np.float64, copy=False)


def run_waves(program: Program, cluster: Cluster, slow: Slow, keep: Collection[int] = ()) -> Record:
    """Run a program on a cluster, a round at a time."""
    return _Waves(program, cluster, slow, keep).run()
