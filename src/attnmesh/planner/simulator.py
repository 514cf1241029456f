"""`simulate`: the time of a program on a cluster, round by round for all ranks at once.

The rate of a message is fixed when its round begins (see `PortShares`). A message starts when both ends have posted it,
the sends of a rank one after another. Where no two messages share a port, as in a ring, this is exact; where they do,
the times of schedules are within 2% of a simulation message by message, which the tests have as a reference. Shared
cores are divided as if all ranks of a node began the round at the same time.

An exchange known by its totals starts for a group when the last of its ranks has posted it, and ends for all of them
when the busiest of their ports has passed its bytes.

`Record` has the seconds of every rank, and the timeline of selected ranks.

Within a node a message leaves through the port of its source and enters through the port of its target; if the ranks of
a node share one port (as processes share the memory of a host) it uses only that one. Between nodes it uses one port of
each node, the port of the rank's rail; rails have separate ports for both directions, unless the link is shared: then a
node has one port for everything.

The bandwidth of a port is divided equally among its current messages, and the rate of a message is the smaller of the
shares of its ports. What it does not use of the larger share is not given to other messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import SIZED_IN_BYTES, Floats, Ints, Kernels, Messages, MessageTotals, Program, Round
from attnmesh.trace.timeline import Span
from attnmesh.utils.sizes import check_sizes
from attnmesh.utils.validation import MAX_RANKS, check_count, check_list, check_type, shown

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


@dataclass(frozen=True)
class Timed:
    """Kernels of one kind in a round, with their seconds by rank on cores of their own."""

    kernels: Kernels
    seconds: Floats


def timed(work: Sequence[Kernels], cluster: Cluster, slower: Floats) -> list[Timed]:
    """Seconds of every rank for the kernels of a round; `slower` is the slowdown of each rank.

    On a GPU, overlapped kernels only take the time by which they are longer than the rest.
    """
    each = [cluster.device.kernel_seconds(k) * slower for k in work]
    if cluster.device.cores is None and any(k.overlapped for k in work):
        overlapped: Floats = sum((s for k, s in zip(work, each, strict=True) if k.overlapped), np.zeros(1))
        rest: Floats = sum((s for k, s in zip(work, each, strict=True) if not k.overlapped), np.zeros(1))
        exposed = np.maximum(overlapped - rest, 0.0) / np.where(overlapped > 0, overlapped, 1.0)
        each = [s * exposed if k.overlapped else s for k, s in zip(work, each, strict=True)]
    return [Timed(k, s) for k, s in zip(work, each, strict=True)]


def host_seconds(round_: Round, seconds: Floats, cluster: Cluster) -> Floats:
    """Seconds of a round on every rank's core besides its kernels, which take `seconds`; 0 on a GPU.

    The program of a rank runs on its core too, and so do the threads that send and receive its messages. (On a GPU all
    of this runs on the host, ahead of the device.)
    """
    if cluster.device.cores is None:
        return np.zeros_like(seconds)
    link, world = cluster.intra_node, len(seconds)
    taken = np.where(seconds > 0, cluster.device.round, 0.0)
    for exchange in round_.starts.values():
        if isinstance(exchange, MessageTotals):
            nbytes = exchange.intra_node_out + exchange.intra_node_in + exchange.inter_node_out + exchange.inter_node_in
            taken = taken + exchange.sends * link.message + nbytes / link.bandwidth
        else:
            taken = taken + np.bincount(exchange.source, minlength=world) * link.message
            for ends in (exchange.source, exchange.target):
                taken = taken + np.bincount(ends, exchange.nbytes, world) / link.bandwidth
    return taken


class Record:
    """Seconds by rank, and the timeline spans of the ranks in `keep`."""

    def __init__(self, world: int, keep: Collection[int]) -> None:
        unknown = sorted(rank for rank in keep if not 0 <= rank < world)
        if unknown:
            raise ValueError(f"keep must name ranks within 0..{world - 1}, got {', '.join(map(str, unknown))}")
        self.finish: Floats = np.zeros(world)
        self.computed: Floats = np.zeros(world)
        self.waited: Floats = np.zeros(world)
        self.spans: list[Span] = []
        self.keep = sorted(set(keep))
        self.kept = np.zeros(world, dtype=bool)
        self.kept[self.keep] = True

    def computing(self, rank: int, round_name: str, work: Sequence[Timed], begin: float, end: float) -> None:
        """Record the kernels of a round in order; on shared cores each is stretched as the whole round was."""
        parts = [(part.kernels, float(np.broadcast_to(part.seconds, self.kept.shape)[rank])) for part in work]
        whole = sum(seconds for _, seconds in parts)
        if not whole:
            return
        at = begin
        for kernels, seconds in parts:
            if seconds > 0:
                until = at + (end - begin) * seconds / whole
                facts: dict[str, object] = {"round": round_name, **_size(kernels, rank, self.kept.shape)}
                self.spans.append(Span(rank, "compute", kernels.kind, at, until, facts))
                at = until

    def message(
        self, name: str, source: int, target: int, nbytes: int, link: str, begin: float, left: float, there: float
    ) -> None:
        """Record a message on the ranks kept: sent when its last byte has left, received when it has arrived."""
        if self.kept[source]:
            facts: dict[str, object] = {"bytes": nbytes, "to": target, "link": link}
            self.spans.append(Span(source, "send", name, begin, left, facts))
        if self.kept[target]:
            facts = {"bytes": nbytes, "from": source, "link": link}
            self.spans.append(Span(target, "receive", name, begin, there, facts))

    def totals(self, name: str, rank: int, exchange: MessageTotals, begin: float, end: float) -> None:
        """Record a rank's part of an exchange known by its totals."""
        out, into = (
            int(exchange.intra_node_out[rank] + exchange.inter_node_out[rank]),
            int(exchange.intra_node_in[rank] + exchange.inter_node_in[rank]),
        )
        sent: dict[str, object] = {"bytes": out, "messages": int(exchange.sends[rank])}
        self.spans.append(Span(rank, "send", name, begin, end, sent))
        self.spans.append(Span(rank, "receive", name, begin, end, {"bytes": into}))

    def waiting(self, rank: int, names: Sequence[str], begin: float, end: float) -> None:
        """Record that a rank waited for these exchanges."""
        if end > begin:
            self.spans.append(Span(rank, "wait", ", ".join(names), begin, end))


def _size(kernels: Kernels, rank: int, shape: tuple[int, ...]) -> dict[str, object]:
    unit = "bytes" if kernels.kind in SIZED_IN_BYTES else "operations"
    size, calls = (np.broadcast_to(values, shape)[rank] for values in (kernels.size, kernels.calls))
    return {unit: float(size), "calls": float(calls)}


NEVER = -np.inf
TINY = 1e-300  # seconds, to avoid a division by 0
CACHED_ROUTES = 4  # exchanges whose routes are cached: the next often have the same ends, as in a ring


class TooLongError(Exception):
    """A program takes longer than the limit."""


@dataclass(frozen=True)
class _Paths:
    """The routes of an exchange, and what follows from them."""

    routes: Routes
    users: Ints  # by port
    place: Floats  # seconds after the rank's first send
    gaps: Floats  # by rank: seconds that it takes to start all of its sends
    once: tuple[bool, bool]  # whether every rank has at most one send, and one receive

    @staticmethod
    def of(messages: Messages, network: Network) -> _Paths:
        routes = network.routes(messages)
        users = np.bincount(routes.out, minlength=network.ports) + np.bincount(routes.into, minlength=network.ports)
        sends, receives = (np.bincount(ranks, minlength=network.world) for ranks in (routes.source, routes.target))
        once = bool(sends.max(initial=0) <= 1), bool(receives.max(initial=0) <= 1)
        gaps = sums(routes.source, routes.message, network.world)
        place = np.zeros(len(messages))
        if not once[0]:
            order = np.argsort(routes.source, kind="stable")
            before = np.cumsum(routes.message[order]) - routes.message[order]
            ranks = routes.source[order]
            first = np.flatnonzero(np.r_[True, ranks[1:] != ranks[:-1]])
            place[order] = before - np.repeat(before[first], np.diff(np.r_[first, len(ranks)]))
        return _Paths(routes, users, place, gaps, once)

    def fits(self, messages: Messages) -> bool:
        """Whether these messages have the same ends."""
        return np.array_equal(self.routes.source, messages.source) and np.array_equal(
            self.routes.target, messages.target
        )


class _RoundSimulation:
    def __init__(self, program: Program, cluster: Cluster, slow: Slowdown, keep: Collection[int]) -> None:
        world = program.world
        self.program, self.cluster, self.world = program, cluster, world
        self.network = Network(cluster, world, slow)
        self.slower = slow.computing(world)
        self.record = Record(world, keep)
        self.now = np.zeros(world)
        self.free = np.zeros(world)  # when a rank can start its next send
        self.done: dict[str, Floats] = {}  # by exchange: when a rank's messages are done, NEVER if it has none
        self.seen: set[str] = set()
        self.in_flight: list[InFlight] = []
        self.recent: list[_Paths] = []

    def run(self, limit: float) -> Record:
        record = self.record
        for round_ in self.program.rounds():
            self.start(round_)
            worked = self.work(round_)
            after = self.wait(worked, round_.waits, round_)
            record.waited += after - worked
            self.now = after
            if after.max(initial=0.0) > limit:
                raise TooLongError
        end = self.wait(self.now, tuple(self.done), None)
        record.waited += end - self.now
        record.finish = end
        return record

    def work(self, round_: Round) -> Floats:
        """When every rank has finished computing."""
        work = timed(round_.work, self.cluster, self.slower)
        seconds: Floats = sum((part.seconds for part in work), np.zeros(self.world))
        seconds = seconds + host_seconds(round_, seconds, self.cluster) * self.slower
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
        """Seconds of work on the shared cores of a node that takes `seconds` on a core of its own."""
        node = self.network.node
        ranks = np.bincount(node)
        order = np.lexsort((seconds, node))  # shortest first; those left share the cores until then
        place = np.arange(self.world) - (np.cumsum(ranks) - ranks)[node]
        more = np.diff(seconds[order], prepend=0.0)
        more[place == 0] = seconds[order][place == 0]
        until = np.cumsum(more * np.maximum((ranks[node] - place) / cores, 1.0))
        before = np.r_[0.0, until[:-1]][place == 0]
        shared = np.empty(self.world)
        shared[order] = until - before[node]
        return shared

    def wait(self, since: Floats, names: tuple[str, ...], round_: Round | None) -> Floats:
        """When the exchanges of these names are finished on every rank."""
        until = since
        for name in names:
            if name not in self.seen:
                where = round_.name if round_ else "at the end"
                raise ValueError(f"round {where!r} waits for {name!r}, which no round has started")
            if name in self.done:  # otherwise it has been waited for already
                until = np.maximum(until, self.done.pop(name))
        for rank in self.record.keep:
            shown = names if round_ else ("the rest",)
            self.record.waiting(rank, shown, float(since[rank]), float(until[rank]))
        return until

    def start(self, round_: Round) -> None:
        """Start the exchanges of a round: they share ports with one another and with those in flight."""
        if not round_.starts:
            return
        self.in_flight = [still for these in self.in_flight if (still := these.still(self.now))]
        ports = PortShares(self.network, self.now, self.in_flight)
        paths: dict[str, _Paths] = {}
        begins: dict[str, Floats] = {}
        loads: dict[str, Floats] = {}
        for name, exchange in round_.starts.items():
            if name in self.seen:
                raise ValueError(f"names of exchanges must be unique in a program, got {name!r} twice")
            self.seen.add(name)
            if isinstance(exchange, MessageTotals):
                loads[name] = self.load(exchange)
                ports.add_totals(loads[name])
            else:
                paths[name] = self.paths(exchange)
                begins[name] = self.begins(paths[name])
                ports.add(paths[name].routes, paths[name].users, begins[name], exchange.nbytes)
        for name, exchange in round_.starts.items():
            if isinstance(exchange, MessageTotals):
                self.done[name] = self.totals(name, exchange, loads[name], ports)
            else:
                self.done[name] = self.messages(name, exchange, paths[name], begins[name], ports)

    def paths(self, messages: Messages) -> _Paths:
        for i, known in enumerate(self.recent):
            if known.fits(messages):
                self.recent.insert(0, self.recent.pop(i))
                return known
        self.recent = [_Paths.of(messages, self.network), *self.recent[: CACHED_ROUTES - 1]]
        return self.recent[0]

    def begins(self, paths: _Paths) -> Floats:
        """When the messages of an exchange start."""
        posted = np.maximum(self.now, self.free)
        self.free = np.where(paths.gaps > 0, posted + paths.gaps, self.free)
        return np.maximum(posted[paths.routes.source] + paths.place, self.now[paths.routes.target])

    def messages(self, name: str, messages: Messages, paths: _Paths, begin: Floats, ports: PortShares) -> Floats:
        """When the messages of an exchange are finished, by rank."""
        routes = paths.routes
        source, target = routes.source, routes.target
        left = ports.left(routes, begin, messages.nbytes)
        there = left + routes.latency
        done = np.full(self.world, NEVER)
        for ranks, at, once in ((source, left, paths.once[0]), (target, there, paths.once[1])):
            if once:
                done[ranks] = np.maximum(done[ranks], at)
            else:
                np.maximum.at(done, ranks, at)
        rate = messages.nbytes / np.maximum(left - begin, TINY)
        self.in_flight += [InFlight(routes.out, source, left, rate), InFlight(routes.into, target, left, rate)]
        if self.record.keep:
            kept = self.record.kept
            for i in np.flatnonzero(kept[source] | kept[target]).tolist():
                link = self.cluster.intra_node if routes.intra_node[i] else self.cluster.inter_node
                ends = int(source[i]), int(target[i])
                times = float(begin[i]), float(left[i]), float(there[i])
                self.record.message(name, *ends, int(messages.nbytes[i]), link.name, *times)
        return done

    def load(self, exchange: MessageTotals) -> Floats:
        """Bytes by port."""
        network = self.network
        tables = (sums(getattr(network, port), getattr(exchange, port), network.ports) for port in PORTS)
        return sum(tables, np.zeros(network.ports))

    def totals(self, name: str, exchange: MessageTotals, load: Floats, ports: PortShares) -> Floats:
        """When an exchange known by its totals is finished, by rank."""
        network, intra_node, inter_node = self.network, self.cluster.intra_node, self.cluster.inter_node
        seconds = ports.totals_seconds(load)
        is_near = (exchange.intra_node_out > 0) | (exchange.intra_node_in > 0)
        is_far = (exchange.inter_node_out > 0) | (exchange.inter_node_in > 0)
        part = is_near | is_far
        passing = np.zeros(self.world)
        for port in PORTS:
            passing = np.maximum(passing, np.where(getattr(exchange, port) > 0, seconds[getattr(network, port)], 0.0))
        gap = np.maximum(np.where(is_near, intra_node.message, 0.0), np.where(is_far, inter_node.message, 0.0))
        latency = np.maximum(np.where(is_near, intra_node.latency, 0.0), np.where(is_far, inter_node.latency, 0.0))
        taking = passing + exchange.sends * gap + latency
        groups, group = np.unique(exchange.group, return_inverse=True)
        begin, longest = np.full(len(groups), NEVER), np.zeros(len(groups))
        np.maximum.at(begin, group[part], self.now[part])
        np.maximum.at(longest, group[part], taking[part])
        done = np.where(part, (begin + longest)[group], NEVER)
        for port in PORTS:
            # One rank represents all that use a port: the exchange counts once there.
            found, owner = np.unique(getattr(network, port)[part], return_index=True)
            busy = load[found] > 0
            found, ranks = found[busy], np.flatnonzero(part)[owner[busy]]
            rate = load[found] / np.maximum(longest[group[ranks]], TINY)
            self.in_flight.append(InFlight(found, ranks, done[ranks], rate))
        for rank in self.record.keep:
            if part[rank]:
                self.record.totals(name, rank, exchange, float(begin[group[rank]]), float(done[rank]))
        return done


def run_rounds(
    program: Program, cluster: Cluster, slow: Slowdown, keep: Collection[int] = (), limit: float = np.inf
) -> Record:
    """Simulate a program on a cluster, round by round. Raises TooLongError once a rank is later than `limit`."""
    return _RoundSimulation(program, cluster, slow, keep).run(limit)


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation, in seconds; `finish`, `computed` and `waited` are arrays by rank.

    Attributes:
        finish: when the rank has finished, its messages included.
        computed: time in kernels.
        waited: time for messages, with nothing to compute: exposed communication, and late ranks.
        spans: of the ranks in `keep`, sorted by start time.

    Examples:
        >>> result = simulate(program("ring", workload, backward=False), cluster("h200"))
        >>> result.seconds == max(result.finish.tolist()), result.spans
        (True, [])
    """

    finish: Floats
    computed: Floats
    waited: Floats
    spans: list[Span]

    @property
    def seconds(self) -> float:
        """The time of the slowest rank."""
        return float(self.finish.max(initial=0.0))


def simulate(
    program: Program, cluster: Cluster, *, slow: Slowdown | None = None, keep: Collection[int] = ()
) -> Simulated:
    """Simulate a program on a cluster of `program.world` ranks; record the spans of the ranks in `keep`.

    Examples:
        >>> result = simulate(program("ring", workload, backward=False), cluster("h200"), keep=[0])
        >>> {span.rank for span in result.spans}
        {0}
    """
    slow = Slowdown() if slow is None else slow
    check_type("program", program, Program)
    check_type("cluster", cluster, Cluster)
    check_type("slow", slow, Slowdown)
    keep = check_list("keep", keep, "ranks")
    for i, rank in enumerate(keep):
        check_count(f"keep[{i}]", rank)
    check_sizes(world=program.world)
    record = run_rounds(program, cluster, slow, keep)
    spans = sorted(record.spans, key=lambda span: (span.begin, span.rank))
    return Simulated(record.finish, record.computed, record.waited, spans)
