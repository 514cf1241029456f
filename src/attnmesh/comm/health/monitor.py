"""A thread beside the comm of a process group, which asks the store so that the rank itself cannot be blocked by it.

It runs the comparisons of `agree`, and it watches the rank: while the rank waits for messages, or has queued operations
that NCCL carries, the digests of its calls are published and compared with the calls of the other ranks. When a rank
searches for the cause of a wait that took too long, the monitors of all ranks that wait publish what for.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from attnmesh.comm.agreement import CAUSE_SEARCH, AgreementStore
from attnmesh.comm.base import COMPARED_CALLS, CallLog, Comm, LoggedCall, Signature, out_of_step
from attnmesh.comm.health import caller_error
from attnmesh.comm.health.caller_error import Caller
from attnmesh.comm.health.group_store import CommError, StoreLostError, WaitStatus
from attnmesh.comm.health.liveness import UNREACHABLE, Neighbors, tell_watchers
from attnmesh.comm.in_flight import InFlightMessage, describe
from attnmesh.comm.nccl import NcclSide, QueuedOperation, abort_all
from attnmesh.utils.text import alternatives
from attnmesh.utils.validation import MAX_TIMEOUT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


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


# A comm over a process group that notices failures: it fails as a whole, and tells the other ranks why.

_DEFAULT_TIMEOUT = 300.0  # seconds, for a backend without a timeout
_PATIENCE = 0.2  # seconds that a rank waits for messages before it compares its calls with other ranks
_PAUSE = 1.0  # seconds between two operations of NCCL, after which other ranks may have failed
_LONGEST_CAUSE = 1000  # characters
_TELL = 1.0  # seconds to tell ranks of other groups why this rank fails


@dataclass(slots=True)
class Waiting:
    """A thread waits on the host for messages of `ranks`, at the moment of `peer`, since a time of time.monotonic()."""

    ranks: Collection[int]
    since: float
    thread: int
    peer: int | None = None


class MonitoredComm(Comm):
    """The part of a comm over a process group that detects and reports failures; a transport sends the messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), _timeout_of(group))
        self.created_timeout = _created_timeout(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self._store = AgreementStore(_store_of(group), self.rank, self.world, self.global_ranks)
        self._monitor = Monitor(self._store, self.rank, self.global_ranks, self._logs, self._check_rank)
        # Weak, or a destroyed group would keep its sockets open for as long as a comm refers to it.
        end_monitor = self._monitor.end
        self._group_ref = weakref.ref(group, lambda _: end_monitor())
        self.waiting: Waiting | None = None  # for other ranks, on the host
        self._calls_watched = 0  # that NCCL carries
        self._used_at = time.monotonic()
        self._broken: str | None = None
        self._unread: str | None = None  # a disagreement that not all ranks have read yet
        self.nccl = NcclSide(group, self._overdue)
        self._caller = Caller()
        self._process = os.getpid()

    @property
    def group(self) -> dist.ProcessGroup:
        """The underlying process group."""
        group = self._group_ref()
        if group is None:
            raise CommError("the process group of this comm has been destroyed")
        return group

    @property
    def _peers(self) -> set[int]:
        return set(range(self.world)) - {self.rank}

    # What a transport overrides.

    def _make_progress(self) -> None:
        """Send and receive while this rank waits for something else (on the monitor's thread)."""

    def _end_waits(self, reason: str) -> None:
        """End the waits of this rank for messages (on the monitor's thread)."""

    def _leave(self) -> None:
        """Tell the ranks that wait for this rank that it sends no more messages."""

    # Whether the comm can be used.

    def _check_one_thread(self, operation: str) -> None:
        waiting = self.waiting
        if waiting is not None and waiting.thread != get_ident():
            raise RuntimeError(
                f"two threads use one comm at the same time: one calls {operation} while another waits for other ranks "
                f"in {self._operation}. Ranks must make the same calls in the same order: make all calls in one thread "
                "at a time, or give each thread a process group of its own"
            )

    def _check_usable(self) -> None:
        """Raise after a failure, or if other ranks did not read the disagreement that this rank raised before."""
        if self._broken is not None or os.getpid() != self._process:
            self._raise_if_broken()
        if self._group_ref() is None:
            _ = self.group  # raises
        self._check_after_pause()
        if self._unread is not None:
            problem, self._unread = self._unread, None
            watch = self._monitor.watch_neighbors
            if not self._monitor.call(lambda: self._store.all_arrived(self.timeout, watch), self.timeout):
                raise self._failed(CommError(f"not all ranks arrived to learn that {problem}"))

    def _check_after_pause(self) -> None:
        """Raise if other ranks have failed while this rank was away: NCCL would send to nobody, and complete."""
        used, self._used_at = self._used_at, time.monotonic()
        if self._used_at - used <= _PAUSE or not self.nccl.has_begun:
            return
        causes = list[str]()
        with suppress(StoreLostError):  # the monitor notices that too
            causes = self._monitor.call(self._store.causes)
        self._raise_if_broken()  # the monitor may have noticed it first
        if causes:
            raise self._failed(self._store.error(causes, f"was in {self._operation}"))

    def _raise_if_broken(self) -> None:
        if os.getpid() != self._process:
            raise CommError("this process was forked from the one that owns the process group: make a group of its own")
        if self._broken is not None:
            self._caller.withdraw()
            raise CommError(f"this comm has failed before: {self._broken}")

    # What this rank waits for.

    @contextmanager
    def _waiting(self, ranks: Collection[int] = ()) -> Iterator[Waiting]:
        """This rank waits on the host for other ranks, and for messages of `ranks`."""
        try:
            self.waiting = waiting = Waiting(ranks, time.monotonic(), get_ident())
            yield waiting
        finally:
            self.waiting = None

    def _missing_ranks(self) -> Collection[int]:
        """The ranks that this rank waits for, on the host or in the oldest operation of NCCL."""
        waiting = self.waiting
        if waiting is not None and waiting.ranks:
            return waiting.ranks
        oldest = self.nccl.oldest(_PATIENCE)
        return () if oldest is None else oldest.peers

    def _status(self) -> WaitStatus:
        """What this process waits for, in any of its groups, on the host or on the device.

        On the device it waits for the oldest operation of all groups: later ones may be queued behind it.
        """
        found, calls = set[int](), []
        oldest = _oldest_operation()
        for comm in _all_comms():
            waiting = comm.waiting
            peer = None if waiting is None else waiting.peer
            ranks = [peer] if peer is not None else comm._store.missing
            if not ranks and (comm.nccl.oldest(_PATIENCE) in (None, oldest) or (waiting and waiting.ranks)):
                ranks = comm._missing_ranks()
            found |= comm._store.globally(ranks)
            if ranks:
                calls.append(comm._operation)
        return WaitStatus(found, ", ".join(calls), self.waiting is not None or self.nccl.oldest() is not None)

    def _is_watched(self, status: WaitStatus) -> bool:
        """Whether to compare calls with other ranks now: this rank waits for long, or makes calls over NCCL."""
        waiting = self.waiting
        if waiting is not None and time.monotonic() - waiting.since > _PATIENCE:
            return True
        calls, self._calls_watched = self._calls_watched, self.log.count
        return self.nccl.has_begun and (calls != self.log.count or bool(status.ranks))

    # Failures that this rank notices beside its calls.

    def _check_rank(self) -> None:
        """Fail if the monitor knows why this rank cannot go on (on the monitor's thread, five times per second)."""
        if self._broken is None:
            self._make_progress()
            status = self._status()
            if causes := self._monitor.problems(self._is_watched(status), self._missing_ranks(), status):
                self._interrupt(causes)

    def _interrupt(self, causes: Sequence[str]) -> None:
        """Fail, and release this rank if it waits for messages (on the monitor's thread)."""
        self._store.report_causes(causes)
        self._end_all(causes, f"was in {self._operation}")
        self._tell_others(causes)
        self._end_waits(self._broken or "; ".join(causes))

    def _overdue(self, operation: QueuedOperation) -> None:
        """Fail, because NCCL did not complete an operation in time (on a thread of its own)."""
        oldest = _oldest_operation()
        if oldest is not None and oldest.posted < operation.posted and oldest.is_overdue:
            return  # the group of that operation reports it, and this one may be queued behind it
        how = "did not arrive"
        causes = self._causes(operation.peers, how, f"{self._one_of(operation.peers)} {how}", 2 * CAUSE_SEARCH)
        if self._broken is not None:
            return
        if operation.has_completed:
            self._monitor.submit(self._store.end_search)
            return
        wait([self._monitor.submit(partial(self._store.report_causes, causes))], _TELL)
        self._end_all(causes, f"was in {operation.name}, which did not complete within {operation.timeout:g} s")

    def _end_all(self, causes: Sequence[str], doing: str) -> None:
        """Fail in this group and in all others with operations in flight, which may wait for the same rank.

        The thread that makes the calls may wait for the device, or use what was not received: it raises the error.
        """
        error = self._store.error(causes, doing)
        with caller_error.lock:
            if self._broken is not None:  # the rank itself has noticed
                return
            blocked = [comm for comm in _all_comms() if comm is not self and comm.nccl.oldest() is not None]
            for comm in (self, *blocked):
                if comm.nccl.oldest() is not None:
                    comm._caller.send(error)
                comm._broken = comm._broken or str(error)
        # Before the abort, which may take seconds.
        wait([comm._monitor.submit(partial(comm._store.report_causes, causes)) for comm in blocked], _TELL)
        abort_all(comm.nccl for comm in (self, *blocked))

    # Failures in a call of this rank.

    def fail(self, message: str) -> None:
        """Report to the other ranks that this rank has failed; their errors quote the message.

        They end their operations, so this rank ends its own: nothing is left that could block its device.
        """
        if os.getpid() == self._process:  # else forked: the group is the parent's, which has not failed
            self._report_failure(message, [f"{self._store.own_name} failed: {message}"])

    @contextmanager
    def message_errors(self, op: str, messages: Sequence[InFlightMessage]) -> Iterator[None]:
        """Errors of the backend as CommError. NCCL refuses operations once a rank has left."""
        try:
            yield
        except RuntimeError as error:
            raise self.message_error(op, messages, error) from error

    def message_error(self, op: str, messages: Sequence[InFlightMessage], error: Exception) -> CommError:
        """Mark this comm as failed because of undelivered messages, and return the error to raise."""
        if self._broken is not None:  # the monitor ended the wait
            self._caller.withdraw()
            return CommError(self._broken)
        if isinstance(error, CommError):  # sent to this thread by another comm
            return self._failed(CommError(str(error), error.causes))
        abort_all([self.nccl])
        reason, how, seconds = reason_of(error), "", CAUSE_SEARCH
        is_nccl = reason.startswith("NCCL error")  # which names no peer
        peers = {message.peer for message in (messages if is_nccl else messages[:1])} or self._peers
        if "Timed out" in reason:
            how = f"did not arrive within {self.timeout:g} s"
        elif "by peer" in reason or "remote process exited" in reason:  # closed, reset
            how = "has closed its connection: its process has ended, or it has given up or destroyed the group"
            seconds = 2 * CAUSE_SEARCH  # other ranks will probably report the cause at once
        otherwise = f"{self._one_of(peers)} {how}" if how else f"{self._store.own_name} failed in {op}: {reason}"
        doing = f"was in {op} ({self._operation}){describe(messages, self._store.names)}: {reason}"
        return self._failed(self._store.error(self._causes(peers, how, otherwise, seconds), doing))

    def _one_of(self, ranks: Collection[int]) -> str:
        return f"{'one of ' if len(ranks) > 1 else ''}{self._store.names(ranks)}"

    def _causes(self, peers: Collection[int], how: str, otherwise: str, seconds: float = CAUSE_SEARCH) -> list[str]:
        """`Monitor.find_causes` of the latest call, or what is known without the store."""
        call = self._operation
        try:
            return self._monitor.call(lambda: self._monitor.find_causes(peers, call, how, otherwise, seconds), seconds)
        except StoreLostError as error:
            causes = self._monitor.causes_without_store(error)
            is_server = 0 in self._store.globally(peers)  # usually
            return [otherwise, *causes] if is_server and causes == [str(error)] else causes

    def _failed(self, error: CommError, doing: str = "") -> CommError:
        """Mark this comm as failed, tell the other ranks, and return the error to raise."""
        if isinstance(error, StoreLostError):
            error = self._store.error(self._monitor.causes_without_store(error), doing)
        with caller_error.lock:
            self._broken = str(error)
            self._caller.withdraw()  # what the monitor has sent at the same time
        self._report_failure(str(error), error.causes)
        self._leave()  # after the reason is known: ranks that wait for this rank ask for it
        return error

    def _report_failure(self, message: str, causes: Sequence[str]) -> None:
        with caller_error.lock:
            self._broken = self._broken or message
        with suppress(CommError):  # before an abort, which may take seconds: other ranks would search for the cause
            self._monitor.call(lambda: self._store.report_causes(causes))
        self._tell_others(causes)
        abort_all([self.nccl])

    def _tell_others(self, causes: Sequence[str]) -> None:
        """Give the causes to ranks that wait for this rank elsewhere: without the store, and in its other groups."""
        tell_watchers(json.dumps([cause[:_LONGEST_CAUSE] for cause in causes[:2]]))
        others = [comm for comm in _all_comms() if comm is not self and comm.world > 1]
        reports = [comm._monitor.submit(partial(comm._store.report_elsewhere, causes)) for comm in others]
        wait(reports, _TELL)


def reason_of(error: Exception) -> str:
    """The message of a backend's error without its source line and general advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", text).partition(". This is typically")[0]


comms: weakref.WeakKeyDictionary[dist.ProcessGroup, MonitoredComm] = weakref.WeakKeyDictionary()
"""One comm per process group, because it counts the group's agreements. Removed when the group is destroyed."""
comms_lock = Lock()


def _all_comms() -> list[MonitoredComm]:
    with comms_lock:
        return list(comms.values())


def _oldest_operation() -> QueuedOperation | None:
    """The oldest operation of NCCL in all groups of this process, if it was not posted just now."""
    queued = (comm.nccl.oldest(_PATIENCE) for comm in _all_comms())
    return min((each for each in queued if each is not None), key=lambda each: each.posted, default=None)


def _store_of(group: dist.ProcessGroup) -> Store:
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a group that was created without setting its store
        return dist.distributed_c10d._get_process_group_store(group)


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that `group` was created with; if that is torch's default, the seconds of the default group."""
    timeout = _created_timeout(group)
    if timeout in (default_pg_timeout, default_pg_nccl_timeout) and dist.group.WORLD is not None:
        timeout = _created_timeout(dist.group.WORLD)
    return _DEFAULT_TIMEOUT if timeout is None else min(timeout.total_seconds(), MAX_TIMEOUT)


def _created_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The shortest timeout that a group's backends were created with; None if they have none."""
    if group in comms:  # torch's watchdog may have a longer one now
        return comms[group].created_timeout
    try:
        return min(group._get_backend(device).options._timeout for device in group._device_types)
    except (AttributeError, RuntimeError, ValueError):  # a backend without options, or without backends
        return None
