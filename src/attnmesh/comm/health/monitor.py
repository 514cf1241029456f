"""A thread beside the comm of a process group, which asks the store so that the rank itself cannot be blocked by it.

It runs the comparisons of `agree`, and it watches the rank: while the rank waits for messages, or has queued operations
that NCCL carries, the digests of its calls are published and compared with the calls of the other ranks. When a rank
searches for the cause of a wait that took too long, the monitors of all ranks that wait publish what for.
"""

from __future__ import annotations

import atexit
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from attnmesh.comm.agreement import CAUSE_SEARCH, AgreementStore, CallLog, LoggedCall, Signature, out_of_step
from attnmesh.comm.base import COMPARED_CALLS
from attnmesh.comm.health.group_store import CommError, StoreLostError, WaitStatus
from attnmesh.comm.health.liveness import UNREACHABLE, Neighbors
from attnmesh.utils.text import alternatives

T = TypeVar("T")

GRACE = 5.0
"""Seconds that the store has to answer, beyond the time that an operation on it may take by itself."""

_INTERVAL = 0.2  # seconds between two checks of the rank
_ARRIVAL = 5.0  # seconds in which messages may still arrive from a process that has ended
_FEW = 8  # ranks that each rank compares its calls with
_MOST_WATCHERS = 256  # ranks that are connected to rank 0

Logs = Mapping[tuple[int, ...], CallLog]
"""The logs of a comm, of all its ranks and of its independent subgroups, by members."""


class Monitor:
    """Runs store operations on a thread of its own, with deadlines, and compares the calls of ranks.

    The thread calls `check`, a method of the comm, from time to time. It does not keep the comm alive.
    """

    def __init__(
        self, store: AgreementStore, rank: int, global_ranks: Sequence[int], logs: Logs, check: Callable[[], object]
    ) -> None:
        self._store, self._rank, self._world, self._logs = store, rank, len(global_ranks), logs
        self._global_ranks = global_ranks
        self._check = weakref.WeakMethod(check)
        self._missing: Collection[int] = ()  # ranks that this rank waits for
        self._turn = 0  # of the other ranks, in which this rank compares its calls with them
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._running: dict[Future[Any], float] = {}  # requests, and the seconds that each may take
        # The rank that usually serves the store. Each rank that watches it has a connection to it: not thousands.
        server = global_ranks.index(0) if 0 in global_ranks and len(global_ranks) <= _MOST_WATCHERS else None
        self._neighbors = Neighbors(rank, self._world, server)
        self._seen_ended: dict[int, float] = {}  # when this rank learned that others have ended, by time.monotonic()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._is_stuck = False
        self._store_lost: StoreLostError | None = None
        self._store_lost_at = 0.0  # by time.monotonic()

    def start(self, timeout: float) -> None:
        """Publish how to reach this process, and begin to watch the neighbors of the rank."""
        with suppress(CommError):  # the rank notices that the store is lost when it needs it
            self.call(self._store.publish_address, timeout)

    def call(self, fn: Callable[[], T], timeout: float = 0) -> T:
        """The result of `fn` on the monitor's thread; CommError if it takes longer than `timeout` and the grace."""
        future = Future[T]()
        self._running[future] = timeout + GRACE
        try:
            if not self._is_stuck:
                self._submit(fn, future)
                return future.result(sum(list(self._running.values())))  # requests of other threads may run before
        except TimeoutError:
            self._is_stuck = True
        finally:
            del self._running[future]
        raise StoreLostError(
            f"the group's store did not answer within {timeout + GRACE:g} s: its process, usually that of rank 0, is "
            "stopped or unreachable"
        )

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Begin to run `fn` on the monitor's thread."""
        future = Future[T]()
        self._submit(fn, future)
        return future

    def _submit(self, fn: Callable[[], T], future: Future[T]) -> None:
        with self._start_lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="attnmesh monitor", daemon=True)
                _monitors.add(self)
                self._thread.start()
        self._requests.put((fn, future))

    def compare(
        self, signature: Signature, timeout: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, Signature]:
        """`AgreementStore.compare`; CommError as soon as a missing rank is known to be in another call.

        `meanwhile` is called from time to time.
        """
        last_check = time.monotonic()

        def check_missing_ranks() -> None:
            nonlocal last_check
            if time.monotonic() - last_check > _INTERVAL:
                self._missing = self._store.missing
                self.watch_neighbors()
                meanwhile()
                problem = self.out_of_step() or self._is_behind(signature)
                if problem is not None:
                    raise self._store.error([problem], f"was about to start {signature.short}")
                last_check = time.monotonic()

        return self.call(lambda: self._store.compare(signature, timeout, check_missing_ranks), timeout)

    def end(self) -> None:
        """Let the thread end, without waiting for it."""
        if self._thread is not None:
            self._requests.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended, or a time by time.monotonic(): the store may block it."""
        if self._thread is not None and not self._is_stuck:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._neighbors.close()

    def _serve(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_INTERVAL)
            except queue.Empty:
                check = self._check()
                if check is None:
                    return
                check()
                del check  # it refers to the comm, which may be dropped while the thread waits
                continue
            if request is None:
                return
            fn, future = request
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)
            del fn, future, request  # as above

    def problems(self, is_watched: bool, missing: Collection[int], status: WaitStatus) -> list[str]:
        """Why a rank that is watched cannot go on; in a search for a cause, its status is published.

        `missing` are the ranks of the group that it waits for.
        """
        self._missing = missing
        try:
            if self._store_lost is not None:
                # Nobody knows any more which ranks are missing: fail, unless messages that are on their way arrive.
                is_late = time.monotonic() - self._store_lost_at > _ARRIVAL
                return self.causes_without_store(self._store_lost) if is_late and is_watched else []
            self.watch_neighbors()
            if is_watched and (causes := self._store.causes() or self._lost_peers() or self._differences()):
                return causes
            if status.ranks and self._store.is_searching():
                self._store.report_waiting(status)
        except StoreLostError as error:
            self._store_lost, self._store_lost_at = error, time.monotonic()
        except Exception:  # its group is being destroyed
            return []
        return []

    def watch_neighbors(self) -> None:
        """Report neighbors that have ended (on this thread)."""
        self._neighbors.report_ended(self._store.address, self._store.report_end)

    def _lost_peers(self) -> list[str]:
        """Which ranks that messages are missing from are dead. What a process has sent before it ended may arrive."""
        ended, now = self._store.ended(), time.monotonic()
        dead = [
            rank
            for rank in set(ended).intersection(self._missing)
            if ended[rank] == UNREACHABLE or now - self._seen_ended.setdefault(rank, now) > _ARRIVAL
        ]
        return self._store.causes_of_end(dead)

    def _differences(self) -> list[str]:
        """How the calls of ranks differ, if they do."""
        problem = self.out_of_step() or self._is_ahead()
        return [problem] if problem else []

    def out_of_step(self) -> str | None:
        """Publish the calls of this rank, and compare them with the calls that other ranks have published."""
        self._turn += 1
        self._store.publish(_to_json(self._logs, self._store.round))
        own = {members: log.digests() for members, log in self._logs.items()}
        for rank, text in self._store.published(self._compared_ranks()).items():
            for members, (digests, calls) in _from_json(text).logs.items():
                known = own.get(members, {})
                if any(known.get(number, digest) != digest for number, digest in digests.items()):
                    both = {self._rank: self._logs[members].latest(COMPARED_CALLS), rank: calls}
                    names = self._store.names([self._rank, rank])
                    return out_of_step(both, self._global_ranks) or f"{names} are out of step since earlier calls"
        return None

    def _compared_ranks(self) -> list[int]:
        """The ranks that this rank compares its calls with: all; if there are many, the next rank, ranks that it waits
        for, and each other rank in turn. The store could not answer if all ranks read the calls of all ranks."""
        if self._world <= _FEW:
            return [rank for rank in range(self._world) if rank != self._rank]
        missing = sorted(self._missing)[: _FEW // 2]
        others = {*missing, *((self._rank + step) % self._world for step in (1, self._turn))}
        return sorted(others - {self._rank})

    def find_causes(self, peers: Collection[int], call: str, how: str, otherwise: str, seconds: float) -> list[str]:
        """Why a call did not complete: failures that ranks report, else the absent ranks with `how`, else `otherwise`.

        The call needs `peers`. Without `how` this rank itself failed, unless a peer has ended. Other ranks have some
        seconds to publish what they know, and what they wait for.
        """
        self._missing, deadline = peers, time.monotonic() + seconds
        while True:
            self.watch_neighbors()
            if causes := self._store.causes() or self._differences() or self._errors_of_others():
                return causes
            if ended := self._store.ended().keys() & set(peers):
                return self._store.causes_of_end(ended)
            self._store.begin_search(WaitStatus(self._store.globally(peers if how else ()), call))
            if time.monotonic() > deadline:
                absent = self._store.causes_of_absence(how) if how else []
                return absent or self._waiting_to_agree() or [otherwise]
            time.sleep(_INTERVAL)

    def _errors_of_others(self) -> list[str]:
        """The errors that others report in an agreement that this rank has not entered."""
        waiting = self._store.waiting(self._compared_ranks())
        return [
            f"{self._store.names([rank])} failed in {signature.operation}: {signature.error}"
            for rank, signature in waiting.items()
            if signature.error is not None
        ]

    def _waiting_to_agree(self) -> list[str]:
        return [
            f"{self._store.names([rank])} is about to start {signature.short}"
            for rank, signature in self._store.waiting(self._compared_ranks()).items()
        ]

    def causes_without_store(self, error: StoreLostError) -> list[str]:
        """Why the store is lost, by the connection to the rank that probably serves it."""
        server = None if self._is_stuck else self._neighbors.end_of_server(CAUSE_SEARCH)
        if server is None:
            return [str(error)]
        with suppress(ValueError):  # it has sent nothing
            return list(map(str, json.loads(server.last_error)))
        return [f"rank 0 is dead: {server.verdict}"]

    def _is_behind(self, signature: Signature) -> str | None:
        """Whether another rank, which did not compare, is already in the call that this rank wants to compare."""
        number = _next_number(signature)
        for rank, text in self._store.published(self._compared_ranks()).items():
            published = _from_json(text)
            calls = {call.number: call for _, latest in list(published.logs.values())[:1] for call in latest}
            if published.rounds < self._store.round and max(calls, default=0) >= number:
                text = calls[number].text if number in calls else "another call"
                return self._both_sides(number, {self._rank: str(signature), rank: text})
        return None

    def _is_ahead(self) -> str | None:
        """Whether another rank waits to compare a call that this rank is already in."""
        log = next(iter(self._logs.values()))
        for rank, signature in self._store.waiting(self._compared_ranks()).items():
            number = _next_number(signature)
            if log.count >= number:
                own = {call.number: call.text for call in log.latest(COMPARED_CALLS)}
                text = f"{signature} with error: {signature.error}" if signature.error else str(signature)
                return self._both_sides(number, {self._rank: own.get(number, "another call"), rank: text})
        return None

    def _both_sides(self, number: int, by_rank: dict[int, str]) -> str:
        sides = alternatives(dict(sorted(by_rank.items())), self._global_ranks)
        return f"ranks are out of step at call {number}: {sides}"


def _next_number(signature: Signature) -> int:
    return signature.calls[-1].number + 1 if signature.calls else 1


class _Published(NamedTuple):
    """What a rank publishes: the number of its agreements, and digests and latest calls of its logs, by members."""

    rounds: int
    logs: dict[tuple[int, ...], tuple[dict[int, int], list[LoggedCall]]]


def _to_json(logs: Logs, rounds: int) -> str:
    calls = [
        (members, list(log.sampled_digests().items()), log.latest(COMPARED_CALLS)) for members, log in logs.items()
    ]
    return json.dumps([rounds, calls])


def _from_json(text: str) -> _Published:
    rounds, published = json.loads(text)
    logs = {
        tuple(members): (dict(digests), [LoggedCall(*call) for call in calls]) for members, digests, calls in published
    }
    return _Published(rounds, logs)


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that returns from the store while the interpreter shuts down would abort the process."""
    monitors = list(_monitors)
    for monitor in monitors:
        monitor.end()
    deadline = time.monotonic() + 1
    for monitor in monitors:
        monitor.join(deadline)
