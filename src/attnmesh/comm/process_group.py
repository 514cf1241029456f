"""Ranks that are processes: a comm over a torch.distributed process group. `comm_from`: the comm of a group or mesh."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from threading import Lock, get_ident

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.base import (
    CallLog,
    Comm,
    Message,
    Pending,
    RecordedPending,
    Shape,
    Signature,
    SoloComm,
    disagreement,
    split_buffer,
    text_digest,
)
from attnmesh.comm.health.group_store import CommError
from attnmesh.comm.health.monitor import MonitoredComm, Waiting, comms, comms_lock, reason_of
from attnmesh.comm.in_flight import (
    InFlightMessage,
    LocalPeers,
    SharedWork,
    Waitable,
    connect,
    messages_of,
    record_on_stream,
    record_on_threads,
    stage,
)
from attnmesh.comm.nccl import QueuedOperation
from attnmesh.trace.timeline import Recorder
from attnmesh.utils.validation import check_timeout

_TAGS, _SIZE_FACTOR = (1 << 31) - 1, 0x9E3779B1  # tags are 31-bit integers


class GroupComm(MonitoredComm):
    """A comm over a process group with gloo, NCCL, or both.

    Over gloo, all operations are built from point-to-point messages: sums are taken in rank order, errors name the
    peer, and one deadline bounds each wait. CUDA tensors sent over gloo are staged through pinned host memory. From the
    first agreement on, small messages between processes of one host go through shared memory instead. Over NCCL,
    waiting orders streams and does not block the host: operations in flight are watched, and if one does not complete
    within the timeout, all are ended and CommError is raised in the thread that makes the calls.
    """

    is_own_group = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self._backend_of: dict[torch.device, str] = {}
        self._is_connected = False
        self._local_peers: LocalPeers | None = None  # ranks that small messages reach through shared memory
        if self.world > 1:
            self._monitor.start(self.timeout)

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
                causes = self._causes((), "did not arrive", f"{self._store.own_name}: {reason_of(error)}")
                raise self._failed(self._store.error(causes, "was about to connect over NCCL")) from error

    def _connect_local_peers(self) -> None:
        """Find the ranks that small messages reach through shared memory; other ranks are reached over gloo."""
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
        if self._local_peers is not None:
            self._local_peers.progress_unless_waiting()

    def _end_waits(self, reason: str) -> None:
        if self._local_peers is not None:
            self._local_peers.stop(reason)
            self._local_peers.leave()
        if self.world > 1 and "gloo" in self._backends.values():
            # A message that times out closes all connections of the group: the only way to end a wait of gloo. One that
            # fails at once, because its peer has closed the connection, does not close other connections.
            for peer in self._peers:
                with suppress(RuntimeError):
                    buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
                    work = dist.irecv(buffer, group=self.group, group_src=peer)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))

    def _leave(self) -> None:
        if self._local_peers is not None:
            self._local_peers.leave()

    @contextmanager
    def replaying(self, operation: str) -> Iterator[None]:
        """Around the replay of a CUDA graph: it is logged and watched. The communicators of a failed comm are gone."""
        self._check_usable()
        with super().replaying(operation), self._watched(operation) if self.nccl.has_begun else nullcontext():
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
        exchange_in_memory(self, peers, op, self.log.digest ^ text_digest(op), sends, recvs)

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
            with self.message_errors(op, messages):
                record_on_stream(works, messages, op, recorder, posted)
        return RecordedPending(Batch(self, op, messages, works, blocking=blocking), op, recorder, device)

    def _post(self, op: str, messages: Sequence[InFlightMessage]) -> list[Waitable]:
        with self.message_errors(op, messages):
            if messages[0].wire_buffer.is_cuda:
                return list(self.nccl.post(self._p2p_ops(messages), self.queued(op, messages)))
            if self._local_peers is None:
                return [self._post_to_backend(message) for message in messages]
            recvs, sends = ([(m.wire_buffer, m.peer) for m in messages if m.send is send] for send in (False, True))
            works = self._local_peers.post(messages[0].tag, recvs, sends)
            pairs = zip(works, messages, strict=True)
            return [self._post_to_backend(message) if work is None else work for work, message in pairs]

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
        # The name since torch 2.13, and the name in earlier versions.
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


class Batch(Pending):
    """Messages that were posted together. With `blocking`, waiting blocks the host; otherwise it orders streams."""

    def __init__(
        self, comm: GroupComm, op: str, messages: list[InFlightMessage], works: Sequence[Waitable], *, blocking: bool
    ) -> None:
        self._comm, self._op, self._messages, self._works = comm, op, messages, works
        self._blocking = blocking

    def wait(self) -> None:
        if self._blocking:
            self._wait_on_host()
        else:
            self._wait_on_stream()
        self._messages, self._works = [], []  # a second wait returns at once, and buffers are released

    def _wait_on_stream(self) -> None:
        comm = self._comm
        with comm.message_errors(self._op, self._messages):
            for work in self._works:
                work.wait()
        if self._works:
            comm.watch(comm.queued(self._op, self._messages))

    def _wait_on_host(self) -> None:
        with self._comm._waiting({message.peer for message in self._messages}) as waiting:
            self._wait_for_each(waiting, waiting.since + self._comm.timeout)

    def _wait_for_each(self, waiting: Waiting, deadline: float) -> None:
        for i, (message, work) in enumerate(zip(self._messages, self._works, strict=True)):
            waiting.peer = message.peer
            try:
                if isinstance(work, SharedWork):
                    work.wait_until(deadline)
                else:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._comm.message_error(self._op, self._messages[i:], error) from error
            if message.staged is not None:
                message.unstage()


def exchange_in_memory(
    comm: GroupComm, peers: LocalPeers, op: str, tag: int, sends: Sequence[Message], recvs: Sequence[Message]
) -> None:
    """Post messages that all go through shared memory, and wait: as a `Batch`, in half the time."""
    now, done = time.monotonic(), 0
    try:
        comm.waiting = waiting = Waiting({peer for _, peer in (*recvs, *sends)}, now, get_ident())
        for work in peers.post(tag, recvs, sends):
            assert work is not None
            waiting.peer = work.peer
            work.wait_until(now + comm.timeout)
            done += 1
    except RuntimeError as error:
        raise comm.message_error(op, messages_of(recvs, sends)[done:], error) from error
    finally:
        comm.waiting = None


_making = Lock()


def group_comm(group: dist.ProcessGroup) -> GroupComm:
    """The comm over a process group, made at the first call."""
    with _making:  # not the other lock, which monitors take: a new comm asks the store
        comm = comms.get(group)
        if not isinstance(comm, GroupComm):
            comm = GroupComm(group)
            with comms_lock:
                comms[group] = comm
        return comm


def comm_from(group: Comm | dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float | None = None) -> Comm:
    """The comm over `group`: a ProcessGroup, a one-dimensional DeviceMesh, or a comm, which is returned as is.

    None is the default process group, or a single rank if torch.distributed is not initialized. `timeout`, in seconds,
    is set on the comm for all its users. Without it, the comm has the timeout that the group was created with, or the
    default group's if that group was created without one.

    Examples:
        >>> comm = am.comm_from(None, timeout=60)  # torch.distributed is not initialized: a single rank
        >>> comm.rank, comm.world, comm.timeout
        (0, 1, 60.0)
        >>> am.comm_from(comm) is comm
        True
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
    return group_comm(group)


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
