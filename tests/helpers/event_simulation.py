"""The reference of the simulator: every rank, port and message of a program, event by event in order of time.

A message starts when both ends have posted it. A rank starts its own sends one after another. Whenever a message enters
or leaves a port, the bandwidth of the port is divided anew among its messages (see `network` for the rates). The sender
is free when the last byte has left, the receiver a latency later, when it has arrived. Compute is modelled the same
way: seconds that pass through the cores of a node, if its ranks share some, at most one second per second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Literal

import numpy as np

from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Floats, Messages, MessageTotals, Program, Round
from attnmesh.planner.simulator import Network, Record, Slowdown, Timed, host_seconds, timed

Step = Literal["start", "end", "there"]


class _Flow:
    """Something that passes through ports: a message, or the compute of a rank in a round."""

    __slots__ = ("at", "begin", "due", "end", "exchange", "ports", "rank", "rate", "ready", "rest", "route", "top")

    def __init__(self, rank: int, amount: float, ports: tuple[int, ...], top: float) -> None:
        self.rank = rank  # that computes or sends
        self.rest = amount  # bytes or seconds left, at the time `at`
        self.ports = ports
        self.top = top  # maximum rate
        self.rate = 0.0
        self.at = self.begin = 0.0
        self.end = self.due = np.inf  # when it ends at this rate; when it is due in the heap
        self.ready = -1.0  # when the first of its ends has posted it
        self.exchange: _Exchange | None = None  # of a message
        self.route: tuple[int, int, bool, float, float] = (0, 0, True, 0.0, 0.0)  # target, bytes, near, latency, gap


class _Exchange:
    """The messages of an exchange, by rank."""

    __slots__ = ("name", "pending", "receives", "sends")

    def __init__(self, name: str, messages: Messages, network: Network) -> None:
        self.name = name
        self.sends: dict[int, list[_Flow]] = {}
        self.receives: dict[int, list[_Flow]] = {}
        self.pending: dict[int, int] = {}  # unfinished messages by rank
        routes = network.routes(messages)
        columns = (messages.source, messages.target, messages.nbytes, routes.intra_node, routes.out, routes.into)
        for source, target, nbytes, intra_node, out, into, latency, gap in zip(
            *(column.tolist() for column in (*columns, routes.latency, routes.message)), strict=True
        ):
            flow = _Flow(source, float(nbytes), (out,) if into == network.none else (out, into), np.inf)
            flow.exchange, flow.route = self, (target, nbytes, intra_node, latency, gap)
            self.sends.setdefault(source, []).append(flow)
            self.receives.setdefault(target, []).append(flow)
            self.pending[source] = self.pending.get(source, 0) + 1
            self.pending[target] = self.pending.get(target, 0) + 1


class _Loaded:
    """A round that some rank has reached."""

    __slots__ = ("exchanges", "left", "name", "seconds", "waits", "work")

    def __init__(
        self, round_: Round, exchanges: list[_Exchange], work: list[Timed], seconds: Floats, world: int
    ) -> None:
        self.name, self.waits, self.exchanges, self.work = round_.name, round_.waits, exchanges, work
        self.seconds: list[float] = seconds.tolist()
        self.left = world  # ranks that have not passed it


class _Events:
    def __init__(self, program: Program, cluster: Cluster, slow: Slowdown, keep: Collection[int]) -> None:
        world = program.world
        self.cluster, self.world = cluster, world
        self.network = Network(cluster, world, slow)
        self.slower = slow.computing(world)
        self.record = Record(world, keep)
        self.kept: list[bool] = self.record.kept.tolist()
        self.rounds: Iterator[Round] = program.rounds()
        self.loaded: list[_Loaded | None] = []  # None: all ranks have passed it
        self.exchanges: dict[str, _Exchange] = {}
        self.ended = False  # whether all rounds are loaded
        # The ports of the network, followed by the cores of each node as a port.
        self.bandwidth: list[float] = self.network.bandwidth.tolist()
        self.cores: list[tuple[int, ...]] = [()] * world
        if cluster.device.cores is not None:
            self.cores = [(len(self.bandwidth) + node,) for node in self.network.node.tolist()]
            self.bandwidth += [float(cluster.device.cores)] * (int(self.network.node[-1]) + 1)
        self.users: list[dict[_Flow, None]] = [{} for _ in self.bandwidth]
        self.changed: set[int] = set()  # ports whose users changed at this time
        self.heap: list[tuple[float, int, Step, _Flow]] = []
        self.order = count()
        # By rank: the next round, when it can start a send, its unfinished messages, what it waits for.
        self.position = [0] * world
        self.free = [0.0] * world
        self.open = [0] * world
        self.waits: list[tuple[str, ...] | None] = [()] * world  # None: all exchanges, at the end of the program
        self.missing = [0] * world  # unfinished messages of these
        self.since = [0.0] * world
        self.computed, self.waited, self.finish = [0.0] * world, [0.0] * world, [0.0] * world

    def run(self) -> Record:
        for rank in range(self.world):
            self.advance(rank, 0.0)
        self.share(0.0)
        heap = self.heap
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] == now:
                _, _, step, flow = heappop(heap)
                if step == "start":
                    self.join(flow, now)
                elif step == "there":
                    self.arrive(flow, now)
                elif flow.due == now:  # otherwise it became faster and has ended
                    if flow.end > now:  # it became slower
                        flow.due = flow.end
                        heappush(heap, (flow.end, next(self.order), "end", flow))
                    else:
                        self.leave(flow, now)
            self.share(now)
        record = self.record
        record.finish, record.computed, record.waited = map(np.array, (self.finish, self.computed, self.waited))
        return record

    def share(self, now: float) -> None:
        """Update the rates of everything on the ports that changed."""
        if not self.changed:
            return
        bandwidth, users = self.bandwidth, self.users
        shares = {port: bandwidth[port] / max(len(users[port]), 1) for port in self.changed}
        for port in self.changed:
            for flow in users[port]:
                rate = flow.top
                for other in flow.ports:
                    share = shares.get(other) or bandwidth[other] / len(users[other])
                    if share < rate:
                        rate = share
                if rate != flow.rate:
                    flow.rest = max(flow.rest - flow.rate * (now - flow.at), 0.0)
                    flow.at, flow.rate = now, rate
                    flow.end = now + flow.rest / rate
                    if flow.end < flow.due:
                        flow.due = flow.end
                        heappush(self.heap, (flow.end, next(self.order), "end", flow))
        self.changed.clear()

    def join(self, flow: _Flow, now: float) -> None:
        flow.begin = flow.at = now
        for port in flow.ports:
            self.users[port][flow] = None
        self.changed.update(flow.ports)
        if not flow.ports:
            flow.end = flow.due = now + flow.rest / flow.top
            heappush(self.heap, (flow.end, next(self.order), "end", flow))

    def leave(self, flow: _Flow, now: float) -> None:
        flow.due = -np.inf
        for port in flow.ports:
            del self.users[port][flow]
        self.changed.update(flow.ports)
        if flow.exchange is None:
            self.after_work(flow.rank, flow.begin, now)
        else:
            flow.at = now
            heappush(self.heap, (now + flow.route[3], next(self.order), "there", flow))
            self.done(flow.rank, flow.exchange, now)

    def arrive(self, flow: _Flow, now: float) -> None:
        target, nbytes, intra_node, _, _ = flow.route
        assert flow.exchange is not None
        if self.kept[flow.rank] or self.kept[target]:
            link = self.cluster.intra_node if intra_node else self.cluster.inter_node
            self.record.message(flow.exchange.name, flow.rank, target, nbytes, link.name, flow.begin, flow.at, now)
        self.done(target, flow.exchange, now)

    def done(self, rank: int, exchange: _Exchange, now: float) -> None:
        """Finish a message of a rank, which may have been waiting for it."""
        exchange.pending[rank] -= 1
        self.open[rank] -= 1
        if not self.missing[rank]:
            return
        waits = self.waits[rank]
        if waits is None or exchange.name in waits:
            self.missing[rank] -= 1
            if not self.missing[rank]:
                self.waited[rank] += now - self.since[rank]
                if self.kept[rank]:
                    self.record.waiting(rank, ["the rest"] if waits is None else waits, self.since[rank], now)
                if waits is None:
                    self.finish[rank] = now
                else:
                    self.advance(rank, now)

    def advance(self, rank: int, now: float) -> None:
        """Pass rounds until there is something to compute or to wait for."""
        while True:
            loaded = self.load(self.position[rank])
            if loaded is None:
                self.finish[rank] = self.since[rank] = now
                self.waits[rank], self.missing[rank] = None, self.open[rank]
                return
            self.position[rank] += 1
            for exchange in loaded.exchanges:
                self.post(rank, exchange, now)
            if loaded.seconds[rank] > 0:
                self.join(_Flow(rank, loaded.seconds[rank], self.cores[rank], 1.0), now)
                return
            if self.wait(rank, now):
                return

    def post(self, rank: int, exchange: _Exchange, now: float) -> None:
        for flow in exchange.sends.get(rank, ()):
            at = max(now, self.free[rank])
            self.free[rank] = at + flow.route[4]
            self.post_end(flow, at)
        for flow in exchange.receives.get(rank, ()):
            self.post_end(flow, now)
        self.open[rank] += exchange.pending.get(rank, 0)

    def post_end(self, flow: _Flow, at: float) -> None:
        if flow.ready < 0:
            flow.ready = at
        else:
            heappush(self.heap, (max(flow.ready, at), next(self.order), "start", flow))

    def after_work(self, rank: int, begin: float, now: float) -> None:
        self.computed[rank] += now - begin
        if self.kept[rank]:
            loaded = self.loaded[self.position[rank] - 1]
            assert loaded is not None
            self.record.computing(rank, loaded.name, loaded.work, begin, now)
        if not self.wait(rank, now):
            self.advance(rank, now)

    def wait(self, rank: int, now: float) -> bool:
        """Leave the round; return whether the rank has to wait before the next."""
        at = self.position[rank] - 1
        loaded = self.loaded[at]
        assert loaded is not None
        loaded.left -= 1
        if not loaded.left:
            self.loaded[at] = None
        self.since[rank], self.waits[rank] = now, loaded.waits
        self.missing[rank] = sum(self.exchanges[name].pending.get(rank, 0) for name in set(loaded.waits))
        return self.missing[rank] > 0

    def load(self, at: int) -> _Loaded | None:
        """A round of the program, or None after the last."""
        if at < len(self.loaded):
            return self.loaded[at]
        round_ = None if self.ended else next(self.rounds, None)
        if round_ is None:
            self.ended = True
            return None
        for name, messages in round_.starts.items():
            if isinstance(messages, MessageTotals):
                raise ValueError(f"the exchange {name!r} only has totals, which cannot be simulated message by message")
            if name in self.exchanges:
                raise ValueError(f"names of exchanges must be unique in a program, got {name!r} twice")
            self.exchanges[name] = _Exchange(name, messages, self.network)
        unknown = [name for name in round_.waits if name not in self.exchanges]
        if unknown:
            raise ValueError(f"round {round_.name!r} waits for {unknown[0]!r}, which no round has started")
        exchanges = [self.exchanges[name] for name in round_.starts]
        work = timed(round_.work, self.cluster, self.slower)
        seconds: Floats = sum((part.seconds for part in work), np.zeros(self.world))
        seconds = seconds + host_seconds(round_, seconds, self.cluster) * self.slower
        self.loaded.append(_Loaded(round_, exchanges, work, seconds, self.world))
        return self.loaded[at]


def run_events(program: Program, cluster: Cluster, slow: Slowdown, keep: Collection[int] = ()) -> Record:
    """Simulate a program on a cluster, event by event. `MessageTotals` are not supported."""
    return _Events(program, cluster, slow, keep).run()
