"""Ranks that are processes: a comm over a torch.distributed process group."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.agreement import AgreementStore, CommError, Signature, disagreement
from attnmesh.comm.base import Comm, Message, Pending, RecordedPending, Shape, SoloComm, detached, split_buffer
from attnmesh.comm.caller_error import CallerError
from attnmesh.comm.in_flight import InFlightMessage, Waitable, record_on_stream, record_on_threads, stage
from attnmesh.comm.local_peers import LocalPeers, SharedWork, connect
from attnmesh.comm.monitor import SEARCH, Monitor
from attnmesh.comm.nccl import NcclSide, abort_all, own_timeout
from attnmesh.comm.stream_watch import QueuedOperation
from attnmesh.core.call_log import CallLog, text_digest
from attnmesh.core.validation import MAX_TIMEOUT, check_timeout, check_type
from attnmesh.trace.recorder import Recorder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_PATIENCE = 0.2  # seconds that a rank waits for messages before its calls are compared with those of other ranks
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
        super().__init__(dist.get_rank(group), dist.get_world_size(group), _timeout_of(group))
        self._backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self._backend_of: dict[torch.device, str] = {}
        self._store = AgreementStore(_store_of(group), self.rank, self.world)
        self._monitor = Monitor(self._store, self.rank, self.world, self._logs, self)
        # Weak, or a destroyed group would keep its sockets open for as long as a comm refers to it.
        end_monitor = self._monitor.end
        self._group_ref = weakref.ref(group, lambda _: end_monitor())
        self.waiting_since: float | None = None  # since when it waits for other ranks, by time.monotonic()
        self.missing_from: Collection[int] = ()
        self._calls_watched = 0  # that NCCL carries
        self._broken: str | None = None
        self._unread: str | None = None  # a disagreement that not all ranks have read yet
        self.nccl = NcclSide(group, self._overdue)
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
        with _caller_error.lock:
            self._broken = self._broken or message
        with suppress(CommError):  # before an abort, which may take seconds: others would search for the rank to blame
            self._monitor.call(lambda: self._store.report_failure(message))
        abort_all([self.nccl])

    # Agreement.

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        self._check_usable()
        if self.world == 1:
            return {0: signature}
        try:
            with self._waiting():
                signatures = self._monitor.compare(signature, self.timeout, self._make_progress)
        except CommError as error:
            raise self._failed(str(error)) from error
        if len(signatures) < self.world:
            self._unread = disagreement(signatures)
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
                with self._waiting():
                    self.nccl.initialize(self.timeout, lambda: self._broken is not None)
            except (TimeoutError, RuntimeError) as error:
                self._raise_if_broken()
                raise self._failed(f"rank {self.rank}: {_reason(error)}{self._explain()}") from error

    @contextmanager
    def _waiting(self, missing_from: Collection[int] = ()) -> Iterator[None]:
        """This rank waits on the host for other ranks, and for messages of some of them."""
        self.missing_from, self.waiting_since = missing_from, time.monotonic()
        try:
            yield
        finally:
            self.missing_from, self.waiting_since = (), None

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
            raise self._failed(str(error)) from error
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

    def _check_usable(self) -> None:
        """Raise after a failure, or if other ranks did not read the disagreement that this rank raised before."""
        self._raise_if_broken()
        _ = self.group  # raises if it has been destroyed
        if self._unread is not None:
            problem, self._unread = self._unread, None
            watch = self._monitor.watch_neighbors
            if not self._monitor.call(lambda: self._store.all_arrived(self.timeout, watch), self.timeout):
                raise self._failed(f"rank {self.rank}: not all ranks arrived to learn that {problem}")

    def _raise_if_broken(self) -> None:
        if os.getpid() != self._process:
            raise CommError("this process was forked from the one that owns the process group: make a group of its own")
        if self._broken is not None:
            _caller_error.withdraw()
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
        if self.waiting_since is not None and time.monotonic() - self.waiting_since > _PATIENCE:
            return True
        calls, self._calls_watched = self._calls_watched, self.log.count
        return self.nccl.is_initialized and (calls != self.log.count or self.is_waiting())

    def is_waiting(self) -> bool:
        """Whether this process waits for other ranks in any of its groups, on the host or on the device."""
        return any(comm.waiting_since is not None or comm.nccl.oldest(_PATIENCE) is not None for comm in _all_comms())

    def interrupt(self, problem: str) -> None:
        """Fail, and release this rank if it waits for messages (on the monitor's thread)."""
        self._store.report_failure(f"rank {self.rank}: {problem}")
        self._end_all(f"rank {self.rank}: {problem}")
        if self._local_peers is not None:
            self._local_peers.stop(problem)
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
        """Fail, because NCCL did not complete an operation in time (on the thread that watches streams)."""
        try:
            reason = self._monitor.call(self._monitor.find_absent, SEARCH)
        except CommError as error:
            reason = str(error)
        members = dist.get_process_group_ranks(self.group)
        where = "" if members == list(range(self.world)) else f" (in the group of ranks {members})"
        message = f"rank {self.rank}: {operation.name} did not complete within {operation.timeout:g} s: {reason}{where}"
        with suppress(CommError):
            self._monitor.call(lambda: self._store.report_failure(message))
        self._end_all(message)

    def _end_all(self, message: str) -> None:
        """Fail in this group and in all others with operations in flight, which may wait for the same rank.

        The thread that makes the calls may wait for the device, or use what was not received: it raises the error.
        """
        with _caller_error.lock:
            if self._broken is not None:  # the rank itself has noticed
                return
            blocked = [comm for comm in _all_comms() if comm is not self and comm.nccl.oldest() is not None]
            if blocked or self.nccl.oldest() is not None:
                _caller_error.send(message)
            for comm in (self, *blocked):
                comm._broken = message
        abort_all(comm.nccl for comm in (self, *blocked))
        for comm in blocked:
            comm.fail(message)

    @contextmanager
    def replaying(self, operation: str) -> Iterator[None]:
        """Around the replay of a CUDA graph: it is logged and watched. The communicators of a failed comm are gone."""
        check_type("operation", operation, str, "a string")
        self._check_usable()
        self.note(operation)
        yield
        if self.nccl.is_initialized:
            self._watch(operation)

    def _watch(self, op: str, posted: float | None = None) -> None:
        """Watch what NCCL has queued on the current stream."""
        _caller_error.remember_thread()
        name = op if op == self._operation else f"{op} ({self._operation})"
        self.nccl.watch(name, time.monotonic() if posted is None else posted, self.timeout)

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
        messages = _in_flight(recvs, sends, tag)
        if backend != "nccl":
            stage(messages)
        if self.recorder is not None:
            return self._recorded_exchange(op, messages, self.recorder, blocking=backend != "nccl")
        return _Batch(self, op, messages, self._post(op, messages), blocking=backend != "nccl")

    def _exchange_now(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        peers, messages = self._local_peers, (*recvs, *sends)
        if (
            peers is None or peers.ranks < self.world or self.recorder is not None
            or any(tensor.nbytes > peers.largest or not tensor.is_cpu for tensor, _ in messages)
        ):  # fmt: skip
            super()._exchange_now(op, sends, recvs)
            return
        # As `_exchange` and `wait`, without what only larger messages and other devices need.
        self._check_usable()
        now, done = time.monotonic(), 0
        self.missing_from, self.waiting_since = {rank for _, rank in messages}, now
        try:
            for work in peers.post(self.log.digest ^ text_digest(op), recvs, sends):
                assert work is not None
                work.wait_until(now + self.timeout)
                done += 1
        except RuntimeError as error:
            raise self.message_error(op, _in_flight(recvs, sends)[done:], error) from error
        finally:
            self.missing_from, self.waiting_since = (), None

    def _recorded_exchange(
        self, op: str, messages: list[InFlightMessage], recorder: Recorder, *, blocking: bool
    ) -> Pending:
        """Post messages; record when each one completed and how long this rank waited."""
        device = None if blocking else messages[0].tensor.device
        posted = recorder.now(device)
        works: Sequence[Waitable] = self._post(op, messages)
        if blocking:
            works = record_on_threads(works, messages, op, recorder, self.timeout, posted)
        else:
            record_on_stream(works, messages, op, recorder, posted)
        return RecordedPending(_Batch(self, op, messages, works, blocking=blocking), op, recorder, device)

    def _post(self, op: str, messages: Sequence[InFlightMessage]) -> list[Waitable]:
        try:
            if self._local_peers is None or messages[0].wire_buffer.is_cuda:
                return self._post_to_backend(messages)
            recvs, sends = ([(m.wire_buffer, m.peer) for m in messages if m.send is send] for send in (False, True))
            works = self._local_peers.post(messages[0].tag, recvs, sends)
            others = [message for message, work in zip(messages, works, strict=True) if work is None]
            posted = iter(self._post_to_backend(others) if others else ())
            return [work or next(posted) for work in works]
        except RuntimeError as error:
            raise self.message_error(op, messages, error) from error

    def _post_to_backend(self, messages: Sequence[InFlightMessage]) -> list[Waitable]:
        # As bytes, so that every dtype can be sent, whether the backend knows it or not.
        operations = [
            dist.P2POp(
                dist.isend if message.send else dist.irecv,
                message.wire_buffer.view(-1).view(torch.uint8),
                group=self.group,
                group_peer=message.peer,
                tag=(message.tag + message.tensor.nbytes * _SIZE_FACTOR) % _TAGS,
            )
            for message in messages
        ]
        return list(dist.batch_isend_irecv(operations))

    def _common_backend(self, sends: Sequence[Message], recvs: Sequence[Message]) -> str:
        devices = {tensor.device for tensor, _ in sends} | {tensor.device for tensor, _ in recvs}
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

    def message_error(self, op: str, messages: Sequence[InFlightMessage], error: Exception) -> CommError:
        """Mark this comm as failed because of undelivered messages, and return the error to raise."""
        if self._broken is not None:  # the monitor ended the wait
            _caller_error.withdraw()
            return CommError(self._broken)
        in_flight = f" while {' and '.join(map(str, messages))}" if messages else ""
        abort_all([self.nccl])
        message = f"rank {self.rank} failed in {op} ({self._operation}){in_flight}: {_reason(error)}"
        return self._failed(message + self._explain(message))

    def _explain(self, failure: str | None = None) -> str:
        try:
            return self._monitor.call(self._store.explain) or self._monitor.call(lambda: self._monitor.explain(failure))
        except CommError as error:
            return f"; {error}"

    def _failed(self, message: str) -> CommError:
        self._broken = message
        self.fail(message)
        if self._local_peers is not None:
            self._local_peers.leave()  # after the reason is known: those who wait for this rank ask for it
        return CommError(message)

    # Operations that NCCL does better than a batch of messages.

    @contextmanager
    def _native(self, op: str, x: Tensor) -> Iterator[None]:
        """Around a collective of the backend, which is watched. NCCL refuses it once a rank has left."""
        try:
            yield
        except RuntimeError as error:
            raise self.message_error(op, (), error) from error
        if x.is_cuda:
            self._watch(op)

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


class _Batch(Pending):
    def __init__(
        self, comm: GroupComm, op: str, messages: list[InFlightMessage], works: Sequence[Waitable], *, blocking: bool
    ) -> None:
        self._comm, self._op, self._messages, self._works = comm, op, messages, works
        self._blocking, self._posted = blocking, time.monotonic()

    def wait(self) -> None:
        if self._blocking:
            self._wait_on_host()
        else:
            for work in self._works:
                work.wait()
            if self._works:
                self._comm._watch(self._op, self._posted)
        self._messages, self._works = [], []  # a second wait returns at once, and buffers are released

    def _wait_on_host(self) -> None:
        comm, now = self._comm, time.monotonic()
        # As `_waiting`, which would take longer than some messages.
        comm.missing_from, comm.waiting_since = {message.peer for message in self._messages}, now
        try:
            self._wait_for_each(now + comm.timeout)
        finally:
            comm.missing_from, comm.waiting_since = (), None

    def _wait_for_each(self, deadline: float) -> None:
        for i, (message, work) in enumerate(zip(self._messages, self._works, strict=True)):
            try:
                if isinstance(work, SharedWork):
                    work.wait_until(deadline)
                else:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._comm.message_error(self._op, self._messages[i:], error) from error
            if message.staged is not None:
                message.unstage()


def _in_flight(recvs: Sequence[Message], sends: Sequence[Message], tag: int = 0) -> list[InFlightMessage]:
    received = [InFlightMessage(detached(tensor), peer, False, tag) for tensor, peer in recvs]
    return received + [InFlightMessage(detached(tensor), peer, True, tag) for tensor, peer in sends]


def _store_of(group: dist.ProcessGroup) -> Store:
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a group that was created without setting its store
        return dist.distributed_c10d._get_process_group_store(group)


_DEFAULT_TIMEOUT = 300.0  # seconds, for a backend that does not tell its own


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that `group` was created with; those of the default group if it was created with torch's default."""
    timeout = _own_timeout(group)
    if timeout in (default_pg_timeout, default_pg_nccl_timeout) and dist.group.WORLD is not None:
        timeout = _own_timeout(dist.group.WORLD)
    return _DEFAULT_TIMEOUT if timeout is None else min(timeout.total_seconds(), MAX_TIMEOUT)


def _own_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The shortest timeout of the group's backends; None if they do not tell."""
    try:
        backends = (group._get_backend(device).options._timeout for device in group._device_types)
        return own_timeout(group) or min(backends)
    except (AttributeError, RuntimeError, ValueError):  # a backend without options, or without backends
        return None


def _reason(error: Exception) -> str:
    """The message of a backend's error without its source line and general advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", text).partition(". This is typically")[0]


_caller_error = CallerError()
_comms: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupComm] = weakref.WeakKeyDictionary()
"""One comm per process group, because it counts the group's agreements. Removed when the group is destroyed."""
_comms_lock = threading.Lock()


def _all_comms() -> list[GroupComm]:
    with _comms_lock:
        return list(_comms.values())


def comm_from(group: Comm | dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> Comm:
    """The comm over `group`: a ProcessGroup, a one-dimensional DeviceMesh, or a comm, which is returned as is.

    None is the default process group, or a single rank if torch.distributed is not initialized. `timeout`, in seconds,
    is set on the comm for all its users. Without it, the comm has the timeout that the group was created with, or the
    default group's if that group was created without one.
    """
    seconds = None if timeout is None else check_timeout(timeout)
    comm = _comm_from(group)
    if seconds is not None:
        comm.timeout = seconds
    return comm


def _comm_from(group: Comm | dist.ProcessGroup | DeviceMesh | None) -> Comm:
    if isinstance(group, Comm):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SoloComm()
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        group = _group_of(group)
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group must contain this rank, which is not a member of it")
        raise ValueError(f"group must be a Comm, ProcessGroup, DeviceMesh or None, got {type(group).__name__}")
    if group not in _comms:
        comm = GroupComm(group)
        with _comms_lock:
            _comms.setdefault(group, comm)
    return _comms[group]


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        example = 'mesh["cp"], after naming its dimensions with mesh_dim_names'
        if names:
            example = f'mesh["{"cp" if "cp" in names else names[-1]}"]'
        raise ValueError(
            f"the mesh must be one-dimensional, got {mesh.ndim} dimensions {names or ''} of shape "
            f"{tuple(mesh.shape)}: slice it, for example {example}"
        )
    return mesh.get_group()
