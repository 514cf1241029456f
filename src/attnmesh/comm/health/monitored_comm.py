"""A comm over a process group that notices failures: it fails as a whole, and tells the other ranks why."""

from __future__ import annotations

import json
import os
import re
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from attnmesh.comm.agreement import CAUSE_SEARCH, AgreementStore
from attnmesh.comm.base import Comm
from attnmesh.comm.health import caller_error
from attnmesh.comm.health.caller_error import Caller
from attnmesh.comm.health.group_store import CommError, StoreLostError, WaitStatus
from attnmesh.comm.health.liveness import tell_watchers
from attnmesh.comm.health.monitor import Monitor
from attnmesh.comm.in_flight import InFlightMessage, describe
from attnmesh.comm.nccl import NcclSide, QueuedOperation, abort_all
from attnmesh.utils.validation import MAX_TIMEOUT

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
