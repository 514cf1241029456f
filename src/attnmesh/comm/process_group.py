"""Ranks that are processes: a comm over a torch.distributed process group."""

from __future__ import annotations

import json
import os
import re
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from threading import Lock, get_ident

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm import in_flight
from attnmesh.comm.agreement import CAUSE_SEARCH, AgreementStore, Signature, disagreement
from attnmesh.comm.base import Comm, Message, Pending, RecordedPending, Shape, split_buffer
from attnmesh.comm.call_log import CallLog, text_digest
from attnmesh.comm.group_settings import store_of, timeout_of
from attnmesh.comm.health import caller_error
from attnmesh.comm.health.caller_error import Caller
from attnmesh.comm.health.group_store import CommError, StoreLostError, WaitStatus
from attnmesh.comm.health.liveness import tell_watchers
from attnmesh.comm.health.monitor import Monitor
from attnmesh.comm.health.stream_watch import QueuedOperation
from attnmesh.comm.in_flight import Batch, InFlightMessage, Waitable, Waiting, describe, messages_of, stage
from attnmesh.comm.local_peers import LocalPeers, connect
from attnmesh.comm.nccl import NcclSide, abort_all
from attnmesh.trace.recorder import Recorder
from attnmesh.utils.validation import check_type

_PATIENCE = 0.2  # seconds that a rank waits for messages before its calls are compared with those of other ranks
_PAUSE = 1.0  # seconds between two operations of NCCL, after which others may have given up
_LONGEST_CAUSE, _TELL = 1000, 1.0  # characters, and seconds, to tell those in other groups why this rank gives up
_TAGS, _SIZE_FACTOR = (1 << 31) - 1, 0x9E3779B1  # tags are 31-bit integers


class GroupComm(Comm):
    """A comm over a process group with gloo, NCCL, or both.

    Over gloo, all operations are built from point-to-point messages: sums are taken in rank order, errors name the
    peer, and one deadline bounds each wait. CUDA tensors sent over gloo are staged through pinned host memory. From the
    first agreement on, small messages between processes of one host go through shared memory instead. Over NCCL,
    waiting orders streams and does not block the host: operations in flight are watched, and if one does not complete
    within the timeout, all are ended and CommError is raised in the thread that makes the calls.
    """

    is_own_group = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout_of(group))
        self._backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self._backend_of: dict[torch.device, str] = {}
        self.global_ranks = dist.get_process_group_ranks(group)
        self._store = AgreementStore(store_of(group), self.rank, self.world, self.global_ranks)
        self._monitor = Monitor(self._store, self.rank, self.global_ranks, self._logs, self)
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
        self._is_connected = False
        self._local_peers: LocalPeers | None = None  # ranks that small messages reach through shared memory
        if self.world > 1:
            self._monitor.start(self.timeout)

    @property
    def group(self) -> dist.ProcessGroup:
        """The underlying process group."""
        group = self._group_ref()
        if group is None:
            raise CommError("the process group of this comm has been destroyed")
        return group

    def fail(self, message: str) -> None:
        """Report to the other ranks that this rank has failed; their errors quote the message.

        They end their operations, so this rank ends its own: nothing is left that could block its device.
        """
        if os.getpid() != self._process:  # forked: the group is the parent's, which has not failed
            return
        self._report_failure(message, [f"{self._store.own_name} failed: {message}"])

    def _report_failure(self, message: str, causes: Sequence[str]) -> None:
        with caller_error.lock:
            self._broken = self._broken or message
        with suppress(CommError):  # before an abort, which may take seconds: others would search for the rank to blame
            self._monitor.call(lambda: self._store.report_causes(causes))
        self._tell_others(causes)
        abort_all([self.nccl])

    def _tell_others(self, causes: Sequence[str]) -> None:
        """Give the causes to those who will miss this rank elsewhere: without the store, and in its other groups."""
        tell_watchers(json.dumps([cause[:_LONGEST_CAUSE] for cause in causes[:2]]))
        others = [comm for comm in _all_comms() if comm is not self and comm.world > 1]
        told = [comm._monitor.submit(partial(comm._store.report_elsewhere, causes)) for comm in others]
        wait(told, _TELL)

    # Agreement.

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        self._check_usable()
        if self.world == 1:
            return {0: signature}
        try:
            with self._waiting():
                signatures = self._monitor.compare(signature, self.timeout, self._make_progress)
        except CommError as error:
            raise self._failed(error, f"was about to start {signature.short}") from error
        if len(signatures) < self.world:
            self._unread = disagreement(signatures, self.global_ranks)
        elif disagreement(signatures) is None:
            if self._will_use_nccl(signature):
                self._initialize_nccl()
            elif not self._is_connected:
                self._connect_local_peers()
        return signatures

    def _will_use_nccl(self, signature: Signature) -> bool:
        """A group that has gloo beside NCCL may never move a CUDA tensor, or have no GPU for every rank."""
        on_cuda = "cpu" not in self._backends or signature.values.get("device", "").startswith("cuda")
        return on_cuda and self._backends.get("cuda") == "nccl"

    def _initialize_nccl(self) -> None:
        if not self.nccl.is_initialized:
            try:
                with self._waiting(self._peers):
                    self.nccl.initialize(self.timeout, lambda: self._broken is not None)
            except (TimeoutError, RuntimeError) as error:
                self._raise_if_broken()
                if isinstance(error, CommError):  # sent to this thread by another comm
                    self._failed(error)
                    raise
                causes = self._causes((), "did not arrive", f"{self._store.own_name}: {_reason(error)}")
                raise self._failed(self._store.error(causes, "was about to connect over NCCL")) from error

    @property
    def _peers(self) -> set[int]:
        return set(range(self.world)) - {self.rank}

    @contextmanager
    def _waiting(self, ranks: Collection[int] = ()) -> Iterator[None]:
        """This rank waits on the host for other ranks, and for messages of some of them."""
        try:
            self.waiting = Waiting(ranks, time.monotonic(), get_ident())
            yield
        finally:
            self.waiting = None

    def _connect_local_peers(self) -> None:
        """Find the ranks that small messages reach through shared memory; the others are reached over gloo."""
        self._is_connected = True
        if self._backends.get("cpu") != "gloo":
            return

        def share(name: str, value: str, ranks: Sequence[int]) -> dict[int, str]:
            return self._store.share(name, value, ranks, self.timeout, self._monitor.watch_neighbors)

        try:
            peers = self._monitor.call(lambda: connect(self.rank, self.world, share), self.timeout)
        except CommError as error:
            raise self._failed(error, "was about to connect with other ranks") from error
        if peers is not None:
            self._local_peers = peers
            weakref.finalize(self.group, peers.leave)

    @property
    def shares_memory(self) -> bool:
        """Whether small messages to all other ranks go through the memory of this host."""
        return self._local_peers is not None and self._local_peers.ranks == self.world

    def _make_progress(self) -> None:
        """Send and receive through shared memory while this rank waits for something else (on the monitor's thread)."""
        if self._local_peers is not None:
            self._local_peers.progress_unless_waiting()

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
        """Raise if others have given up while this rank was away: NCCL would send to nobody, and complete."""
        used, self._used_at = self._used_at, time.monotonic()
        if self._used_at - used <= _PAUSE:
            return
        causes = list[str]()
        if self.nccl.has_begun:
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

    # Ranks that are out of step, or do not arrive.

    @property
    def has_failed(self) -> bool:
        """Whether this comm has raised, and is of no more use."""
        return self._broken is not None

    def is_watched(self) -> bool:
        """Whether to compare calls with those of other ranks now (on the monitor's thread)."""
        if self._broken is not None:
            return False
        self._make_progress()
        waiting = self.waiting
        if waiting is not None and time.monotonic() - waiting.since > _PATIENCE:
            return True
        calls, self._calls_watched = self._calls_watched, self.log.count
        return self.nccl.has_begun and (calls != self.log.count or bool(self.status().ranks))

    def missing_ranks(self) -> Collection[int]:
        """The ranks that it waits for, on the host or in the oldest operation of NCCL."""
        waiting = self.waiting
        if waiting is not None and waiting.ranks:
            return waiting.ranks
        oldest = self.nccl.oldest(_PATIENCE)
        return () if oldest is None else oldest.peers

    def status(self) -> WaitStatus:
        """What this process waits for, in any of its groups, on the host or on the device."""
        found, calls = set[int](), []
        for comm in _all_comms():
            waiting = comm.waiting
            peer = None if waiting is None else waiting.peer
            ranks = [peer] if peer is not None else comm._store.missing or comm.missing_ranks()
            found |= comm._store.globally(ranks)
            if ranks:
                calls.append(comm._operation)
        return WaitStatus(found, ", ".join(calls), self.waiting is not None or self.nccl.oldest() is not None)

    def interrupt(self, causes: Sequence[str]) -> None:
        """Fail, and release this rank if it waits for messages (on the monitor's thread)."""
        self._store.report_causes(causes)
        self._end_all(causes, f"was in {self._operation}")
        self._tell_others(causes)
        if self._local_peers is not None:
            self._local_peers.stop(self._broken or "; ".join(causes))
            self._local_peers.leave()
        if self.world > 1 and "gloo" in self._backends.values():
            # A message that times out closes all connections of the group: the only way to end a wait of gloo. One that
            # fails at once, because its peer has closed the connection, does not close the others.
            for peer in range(self.world):
                with suppress(RuntimeError):
                    if peer != self.rank:
                        buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
                        work = dist.irecv(buffer, group=self.group, group_src=peer)
                        assert work is not None
                        work.wait(timedelta(milliseconds=1))

    def _overdue(self, operation: QueuedOperation) -> None:
        """Fail, because NCCL did not complete an operation in time (on a thread of its own)."""
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

    @contextmanager
    def replaying(self, operation: str) -> Iterator[None]:
        """Around the replay of a CUDA graph: it is logged and watched. The communicators of a failed comm are gone."""
        check_type("operation", operation, str, "a string")
        self._check_usable()
        self.note(operation)
        if self.nccl.has_begun:
            with self._watched(operation):
                yield
        else:
            yield

    def queued(self, op: str, messages: Sequence[InFlightMessage] = ()) -> QueuedOperation:
        """An operation of NCCL that this rank posts now: messages, or a collective of all ranks."""
        self._caller.remember_thread()
        name = op if op == self._operation else f"{op} ({self._operation})"
        peers = {message.peer for message in messages} or self._peers
        return QueuedOperation(name, peers, time.monotonic(), self.timeout)

    @contextmanager
    def _watched(self, op: str) -> Iterator[None]:
        """Around a collective of all ranks that NCCL carries: it is watched until it has completed."""
        operation = self.queued(op)
        with self.nccl.posting(operation):
            yield
        self.watch(operation)

    def watch(self, operation: QueuedOperation) -> None:
        """Watch what an operation has queued; CommError if it was ended before: what it received is not to be used."""
        self.nccl.watch(operation)
        if self._broken is not None:
            self._caller.withdraw()
            raise CommError(self._broken)

    # Messages.

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self._exchange_with(self.log, op, sends, recvs)

    def _exchange_with(self, log: CallLog, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self._check_usable()
        backend = self._common_backend(sends, recvs)
        # gloo delivers a message only if the tags are equal: the calls so far, the operation and the size.
        tag = log.digest ^ text_digest(op)
        # Receives first: gloo announces them on the connection that also carries this rank's data to that peer. Behind
        # a large send the announcement would arrive late, and two ranks would send one after the other.
        messages = messages_of(recvs, sends, tag)
        if backend != "nccl":
            stage(messages)
        if self.recorder is not None:
            return self._recorded_exchange(op, messages, self.recorder, blocking=backend != "nccl")
        return Batch(self, op, messages, self._post(op, messages), blocking=backend != "nccl")

    def _exchange_now(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        peers = self._local_peers
        if peers is None or self.recorder is not None or not peers.carries(self.world, (*sends, *recvs)):
            super()._exchange_now(op, sends, recvs)
            return
        self._check_usable()
        in_flight.exchange_in_memory(self, peers, op, self.log.digest ^ text_digest(op), sends, recvs)

    def _recorded_exchange(
        self, op: str, messages: list[InFlightMessage], recorder: Recorder, *, blocking: bool
    ) -> Pending:
        """Post messages; record when each one completed and how long this rank waited."""
        device = None if blocking else messages[0].tensor.device
        posted = recorder.now(device)
        works: Sequence[Waitable] = self._post(op, messages)
        if blocking:
            works = in_flight.record_on_threads(works, messages, op, recorder, self.timeout, posted)
        else:
            with self.message_errors(op, messages):
                in_flight.record_on_stream(works, messages, op, recorder, posted)
        return RecordedPending(Batch(self, op, messages, works, blocking=blocking), op, recorder, device)

    def _post(self, op: str, messages: Sequence[InFlightMessage]) -> list[Waitable]:
        try:
            if messages[0].wire_buffer.is_cuda:
                return list(self.nccl.post(self._p2p_ops(messages), self.queued(op, messages)))
            if self._local_peers is None:
                return [self._post_to_backend(message) for message in messages]
            recvs, sends = ([(m.wire_buffer, m.peer) for m in messages if m.send is send] for send in (False, True))
            works = self._local_peers.post(messages[0].tag, recvs, sends)
            pairs = zip(works, messages, strict=True)
            return [self._post_to_backend(message) if work is None else work for work, message in pairs]
        except RuntimeError as error:
            raise self.message_error(op, messages, error) from error

    def _post_to_backend(self, message: InFlightMessage) -> Waitable:
        """Post a message over gloo."""
        post = self.group.send if message.send else self.group.recv
        return post([_bytes(message)], message.peer, (message.tag + message.tensor.nbytes * _SIZE_FACTOR) % _TAGS)

    def _p2p_ops(self, messages: Sequence[InFlightMessage]) -> list[dist.P2POp]:
        """Messages for NCCL, which has no tags."""
        return [
            dist.P2POp(dist.isend if m.send else dist.irecv, _bytes(m), group=self.group, group_peer=m.peer)
            for m in messages
        ]

    def _common_backend(self, sends: Sequence[Message], recvs: Sequence[Message]) -> str:
        devices = {tensor.device for tensor, _ in (*sends, *recvs)}
        if len(devices) > 1:
            raise ValueError(
                f"all buffers of an exchange must be on one device, got {', '.join(sorted(map(str, devices)))}"
            )
        return self._backend(devices.pop())

    def _backend(self, device: torch.device) -> str:
        """The backend that moves tensors of this device."""
        backend = self._backend_of.get(device)
        if backend is None:
            backend = self._backends.get(device.type)
            if backend is None:
                able = ", ".join(f"{kind} ({backend})" for kind, backend in self._backends.items())
                raise ValueError(f"this process group cannot carry {device.type} tensors, only {able}")
            self._backend_of[device] = backend
        return backend

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
        reason, how, seconds = _reason(error), "", CAUSE_SEARCH
        is_nccl = reason.startswith("NCCL error")  # which names no peer
        peers = {message.peer for message in (messages if is_nccl else messages[:1])} or self._peers
        if "Timed out" in reason:
            how = f"did not arrive within {self.timeout:g} s"
        elif "by peer" in reason or "remote process exited" in reason:  # closed, reset
            how = "has closed its connection: its process has ended, or it has given up or destroyed the group"
            seconds = 2 * CAUSE_SEARCH  # others will probably tell the cause at once
        if how:
            otherwise = f"{self._one_of(peers)} {how}"
        else:
            otherwise = f"{self._store.own_name} failed in {op}: {reason}"
        doing = f"was in {op} ({self._operation}){describe(messages, self._store.names)}: {reason}"
        return self._failed(self._store.error(self._causes(peers, how, otherwise, seconds), doing))

    def _one_of(self, ranks: Collection[int]) -> str:
        return f"{'one of ' if len(ranks) > 1 else ''}{self._store.names(ranks)}"

    def _causes(self, peers: Collection[int], how: str, otherwise: str, seconds: float = CAUSE_SEARCH) -> list[str]:
        call = self._operation
        try:
            return self._monitor.call(lambda: self._monitor.find_causes(peers, call, how, otherwise, seconds), seconds)
        except StoreLostError as error:
            causes = self._monitor.causes_without_store(error)
            is_server = 0 in self._store.globally(peers)  # usually
            return [otherwise, *causes] if is_server and causes == [str(error)] else causes

    def _failed(self, error: CommError, doing: str = "") -> CommError:
        if isinstance(error, StoreLostError):
            error = self._store.error(self._monitor.causes_without_store(error), doing)
        with caller_error.lock:
            self._broken = str(error)
            self._caller.withdraw()  # what the monitor has sent at the same time
        self._report_failure(str(error), error.causes)
        if self._local_peers is not None:
            self._local_peers.leave()  # after the reason is known: those who wait for this rank ask for it
        return error

    # Operations that NCCL does better than a batch of messages.

    @contextmanager
    def _native(self, op: str, x: Tensor) -> Iterator[None]:
        """Around a collective of the backend."""
        with self.message_errors(op, ()), self._watched(op) if x.is_cuda else nullcontext():
            yield

    def _all_gather(self, op: str, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None) -> list[Tensor]:
        if self._backend(x.device) != "nccl":
            return super()._all_gather(op, x, shapes, into)
        return self._padded_all_gather(op, x, shapes, into)

    def _padded_all_gather(
        self, op: str, x: Tensor, shapes: Sequence[Shape], into: Tensor | None = None
    ) -> list[Tensor]:
        """One native all-gather; parts of different sizes are padded to the largest."""
        self._check_usable()
        sizes = [torch.Size(shape).numel() for shape in shapes]
        largest = max(sizes)
        if largest == 0:
            return [x.new_empty(shape) for shape in shapes]
        own = x.detach().contiguous().view(-1)
        if own.numel() < largest:
            own = torch.cat([own, own.new_zeros(largest - own.numel())])
        in_place = into is not None and len(set(sizes)) == 1
        gathered = into.view(-1) if into is not None and in_place else own.new_empty(self.world * largest)
        # The name since torch 2.13, and the one before.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._native(op, x):
            all_gather(gathered.view(torch.uint8), own.view(torch.uint8), group=self.group)
        parts = [
            part[:size].view(shape)
            for part, size, shape in zip(gathered.view(self.world, largest), sizes, shapes, strict=True)
        ]
        if into is None or in_place:
            return parts
        targets = split_buffer(into, shapes)
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)
        return targets

    def _all_reduce(self, op: str, x: Tensor, reuse: bool = False) -> Tensor:
        if self._backend(x.device) != "nccl":
            return super()._all_reduce(op, x)
        self._check_usable()
        if x.dtype in (torch.float16, torch.bfloat16):  # NCCL would round at every rank; here sums are rounded once
            total = x.detach().float().contiguous()
        else:
            total = (
                x.detach() if reuse and x.is_contiguous() else x.detach().clone(memory_format=torch.contiguous_format)
            )
        with self._native(op, x):
            dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def _reduce_scatter(self, op: str, parts: Sequence[Tensor]) -> Tensor:
        own = parts[self.rank]
        if self._backend(own.device) != "nccl" or len({part.shape for part in parts}) > 1:
            return super()._reduce_scatter(op, parts)
        self._check_usable()
        total = torch.empty_like(own, memory_format=torch.contiguous_format)
        with self._native(op, own):
            dist.reduce_scatter(total, [part.detach().contiguous() for part in parts], group=self.group)
        return total

    def _barrier(self, op: str) -> None:
        if "cpu" in self._backends:
            super()._barrier(op)
        else:
            self._all_reduce(op, torch.zeros(1, dtype=torch.float32, device="cuda"))
            torch.cuda.current_stream().synchronize()


def _bytes(message: InFlightMessage) -> Tensor:
    """A message as bytes, so that every dtype can be sent, whether the backend knows it or not."""
    return message.wire_buffer.view(-1).view(torch.uint8)


def _reason(error: Exception) -> str:
    """The message of a backend's error without its source line and general advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", text).partition(". This is typically")[0]


_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupComm] = weakref.WeakKeyDictionary()
"""One comm per process group, because it counts the group's agreements. Removed when the group is destroyed."""
_comms_lock, _making = Lock(), Lock()


def _all_comms() -> list[GroupComm]:
    with _comms_lock:
        return list(_comms.values())


def group_comm(group: dist.ProcessGroup) -> GroupComm:
    """The comm over a process group, made at the first call."""
    with _making:  # not the other lock, which monitors take: a new comm asks the store
        if group not in _comms:
            comm = GroupComm(group)
            with _comms_lock:
                _comms[group] = comm
        return _comms[group]
