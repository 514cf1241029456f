"""Messages in flight between processes: staging for gloo, and recording of when they complete.

Small messages between processes of one host, through shared memory instead of sockets.

A message has a tag and a size; a receive takes the first message of its peer that has both. Sending copies the message
into the ring of its pair of ranks. Receiving copies it out: when a rank waits for any message, it reads the rings until
that message has arrived, and keeps messages that no receive has been posted for yet.

A rank that goes on has either received something of the same exchange from each rank that it sent to, or it waits for a
receipt: a rank that sends what its peer does not receive, because they make different calls, must not go on.

Messages are written to rings of bytes, each with one writer and one reader. Two POSIX semaphores in the memory itself
are all that both ends of a ring change: the messages written, and the messages read. Posting a semaphore makes the
bytes written before it visible to the process that takes it, on every processor, and takes no system call unless a
process sleeps on it. Everything else (positions, free bytes) each end counts for itself.

The memory has no name in any file system, so nothing is left when processes are killed.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ctypes import addressof, create_string_buffer, memmove
from dataclasses import dataclass
from datetime import timedelta
from struct import Struct
from threading import Lock
from typing import Protocol
from uuid import uuid4

import torch
from torch import Tensor

from attnmesh.comm.base import Message, detached
from attnmesh.comm.health.liveness import machine
from attnmesh.trace.timeline import MessageRecord, Recorder, Timestamp

# Small messages between processes of one host, through shared memory instead of sockets.


_HEADER = Struct("=QQdQ")  # tag, bytes, time of sending, kind
_HEADER_SIZE, _LINE = 64, 64  # bytes; messages start at cache lines
_SEMAPHORES = 2 * 2 * _LINE  # bytes at the start of a ring: two semaphores, each on lines of its own
_write_header, _read_header = _HEADER.pack_into, _HEADER.unpack_from


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


try:
    # The first one keeps the interpreter lock, which costs less where a call cannot block.
    _fast, _blocking = ctypes.PyDLL(None), ctypes.CDLL(None)
    _post, _take, _initialize = _fast.sem_post, _fast.sem_trywait, _fast.sem_init
    _copy = _fast.memmove
    _post.argtypes = _take.argtypes = [ctypes.c_void_p]
    _initialize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    _copy.argtypes, _copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    _sleep = _blocking.sem_clockwait
    _sleep.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
    IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and ctypes.sizeof(ctypes.c_void_p) == 8
except (AttributeError, OSError, TypeError):  # not Linux, or a C library without these functions
    IS_AVAILABLE = False


def _take_within(semaphore: int, seconds: float) -> bool:
    """Take a semaphore, asleep for so long at most. A signal ends the sleep early."""
    until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
    limit = _Timespec(*divmod(until, 1_000_000_000))
    return bool(_sleep(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(limit)) == 0)


class Segment:
    """A piece of memory that several processes map. It is released when the last one of them ends or drops it."""

    _descriptor: int | None = None  # in the process that created it

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._exported = ctypes.c_char.from_buffer(self.memory)  # keeps the memory mapped
        self.address = ctypes.addressof(self._exported)

    @classmethod
    def create(cls, nbytes: int) -> tuple[Segment, str]:
        """A new segment filled with zeros, and the name by which other processes open it until `forget_name`."""
        label = f"attnmesh-{uuid4().hex}"
        descriptor = os.memfd_create(label)
        # Now, because memory that cannot be provided at the first access would kill the process.
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            segment = cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        segment._descriptor = descriptor
        return segment, f"{os.getpid()}/fd/{descriptor} {label}"

    def forget_name(self) -> None:
        """Let no further process open the segment."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @classmethod
    def open(cls, name: str) -> Segment:
        """The segment that a process of this host has created; OSError if it cannot be reached."""
        path, _, label = name.partition(" ")
        link = os.readlink(f"/proc/{path}")
        if label not in link:  # a process of another host, or of another container, with the same number
            raise FileNotFoundError(f"/proc/{path} is {link}, not {label}")
        descriptor = os.open(f"/proc/{path}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)


class _Ring:
    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self._segment, self._memory = segment, segment.memory
        self._written = segment.address + offset
        self._read = self._written + 2 * _LINE
        self._start = offset + _SEMAPHORES
        self._address = segment.address + self._start
        self._capacity = nbytes - _SEMAPHORES
        self._position = 0
        self._last = self._capacity - _HEADER_SIZE - largest_message(nbytes)  # position of the last message

    def initialize(self) -> None:
        """Set both semaphores to zero, before any process uses the ring."""
        for semaphore in (self._written, self._read):
            _initialize(semaphore, 1, 0)

    def _advanced(self, nbytes: int) -> tuple[int, int]:
        """The position after a message, and the bytes up to it: a message never wraps around the end."""
        size = _HEADER_SIZE + (nbytes + _LINE - 1) // _LINE * _LINE
        position = self._position + size
        return (0, self._capacity - self._position) if position > self._last else (position, size)


def largest_message(ring_bytes: int) -> int:
    """The bytes of the largest message that a ring of this size carries: at least three fit into it."""
    return ((ring_bytes - _SEMAPHORES) // 4 - _HEADER_SIZE) // _LINE * _LINE


class RingWriter(_Ring):
    """The end of a ring that writes messages."""

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        super().__init__(segment, offset, nbytes)
        self._sizes: deque[int] = deque()  # of messages that have not been read yet, as far as this end knows
        self._free = self._capacity

    def write(self, tag: int, address: int, nbytes: int, kind: int) -> float:
        """Copy a message into the ring and return the time; 0 if there is no room for it now."""
        position, size = self._advanced(nbytes)
        while size > self._free:
            if _take(self._read):
                return 0.0
            self._free += self._sizes.popleft()
        now = time.perf_counter()
        _write_header(self._memory, self._start + self._position, tag, nbytes, now, kind)
        _copy(self._address + self._position + _HEADER_SIZE, address, nbytes)
        self._position = position
        self._free -= size
        self._sizes.append(size)
        _post(self._written)
        return now

    def sleep(self, seconds: float) -> bool:
        """Sleep until a message has been read, for so long at most. If True, `freed` must be called."""
        return _take_within(self._read, seconds)

    def freed(self) -> None:
        """Count the message that `sleep` has waited for."""
        self._free += self._sizes.popleft()


class RingReader(_Ring):
    """The end of a ring that reads messages.

    `has_message` or `sleep` returns True once for each message, which must then be read: `header`, then `read`.
    """

    def has_message(self) -> bool:
        """Take a message if one has been written."""
        return not _take(self._written)

    def sleep(self, seconds: float) -> bool:
        """Take a message; sleep until one has been written, for so long at most."""
        return _take_within(self._written, seconds)

    def header(self) -> tuple[int, int, float, int]:
        """The tag, the bytes, the time of sending and the kind of the next message."""
        tag, nbytes, sent, kind = _read_header(self._memory, self._start + self._position)
        return tag, nbytes, sent, kind

    def read(self, address: int, nbytes: int) -> None:
        """Copy the next message out of the ring."""
        _copy(address, self._address + self._position + _HEADER_SIZE, nbytes)
        self._position, _ = self._advanced(nbytes)
        _post(self._read)


VARIABLE = "ATTNMESH_SHARED_MEMORY"
"""The environment variable that is set to 0 to send all messages over the network."""

_RING, _SMALLEST_RING = 516 << 10, 8 << 10  # bytes; messages of up to 128 KiB, and of 1.9 KiB
_MAX_SEGMENT = 32 << 20  # bytes for all rings of a process group on one host: with more ranks, rings are smaller
_STATES = 4096  # bytes at the start of a segment, in which each rank says that it has left

_SPIN = 300  # polls of a ring, about 0.4 us each, before a rank sleeps
_YIELDS = 8  # polls between which a rank lets other processes run, where ranks outnumber processor cores
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.0005, 0.02  # seconds between checks of everything else

_NO_LIMIT = timedelta(days=1)
_Key = tuple[int, int]  # tag and bytes; of a receipt, the bytes of the message as a negative number
_PLAIN, _WITH_RECEIPT, _RECEIPT = 0, 1, 2  # kinds of messages; a receipt adds the bytes of the message


class SharedWork:
    """A message of a peer of this host, to be waited for like a `torch.distributed.Work`."""

    __slots__ = ("_peers", "address", "buffer", "completed", "nbytes", "peer", "tag", "waits_for_room")

    def __init__(self, peers: LocalPeers, peer: int, tag: int, buffer: Tensor, nbytes: int) -> None:
        self._peers, self.buffer = peers, buffer
        self.address, self.nbytes = buffer.data_ptr(), nbytes
        self.peer, self.tag = peer, tag
        self.waits_for_room = False  # in the ring to the peer, rather than for a message or a receipt from it
        self.completed = 0.0
        """When the message or its receipt was sent, by `time.perf_counter`, which all processes of a host share."""

    def wait(self, timeout: timedelta = _NO_LIMIT, /) -> bool:
        """Return when the message has been received, or its buffer may be reused."""
        self.wait_until(time.monotonic() + timeout.total_seconds())
        return True

    def wait_until(self, deadline: float) -> None:
        """`wait` until a time by `time.monotonic`."""
        if not self.completed:
            self._peers.wait_for(self, deadline)


class _Peer:
    """Another rank of this host: a ring in each direction, and the messages that have not found their counterpart."""

    def __init__(self, writer: RingWriter, reader: RingReader, process: int, state: int) -> None:
        self.writer, self.reader = writer, reader
        self.state = state  # where its state is in the segment
        self.unsent: deque[tuple[SharedWork, int]] = deque()  # with the kind of the message
        self.posted: dict[_Key, deque[SharedWork]] = {}
        self.unexpected: dict[_Key, deque[tuple[bytes, float, int]]] = {}
        self._process = select.poll()
        self._process.register(process, select.POLLIN)

    def has_ended(self) -> bool:
        return bool(self._process.poll(0))

    # Called with the lock of `LocalPeers`.

    def post_send(self, work: SharedWork, kind: int) -> None:
        if kind == _WITH_RECEIPT:
            self.posted.setdefault((work.tag, -work.nbytes), deque()).append(work)
        elif not self.unsent and (sent := self.writer.write(work.tag, work.address, work.nbytes, kind)):
            work.completed = sent
            return
        else:
            work.waits_for_room = True
        self.unsent.append((work, kind))
        self.send_unsent()

    def send_unsent(self) -> None:
        """Send messages as far as there is room in the ring."""
        while self.unsent:
            work, kind = self.unsent[0]
            sent = self.writer.write(work.tag, work.address, work.nbytes if kind < _RECEIPT else 0, kind)
            if not sent:
                return
            if kind == _PLAIN:
                work.completed = sent
            self.unsent.popleft()

    def complete(self, work: SharedWork, sent: float, kind: int) -> None:
        """Note that a message has been received, and send its receipt."""
        work.completed = sent
        if kind == _WITH_RECEIPT:
            self.unsent.append((work, _RECEIPT + work.nbytes))
            self.send_unsent()

    def receive_all(self) -> None:
        """Read what has arrived, as long as receives are posted."""
        while self.posted and self.reader.has_message():
            self.receive_one()

    def receive_one(self) -> None:
        """Read a message that the reader has taken."""
        tag, nbytes, sent, kind = self.reader.header()
        key = tag, nbytes if kind < _RECEIPT else _RECEIPT - kind
        works = self.posted.get(key)
        if works is None:
            kept = create_string_buffer(nbytes)
            self.reader.read(addressof(kept), nbytes)
            self.unexpected.setdefault(key, deque()).append((kept.raw, sent, kind))
            return
        work = works.popleft()
        if not works:
            del self.posted[key]
        self.reader.read(work.address, nbytes)
        self.complete(work, sent, kind)

    def post_receive(self, work: SharedWork) -> None:
        key = work.tag, work.nbytes
        kept = self.unexpected.get(key)
        if kept is None:
            self.posted.setdefault(key, deque()).append(work)
            return
        message, sent, kind = kept.popleft()
        if not kept:
            del self.unexpected[key]
        memmove(work.address, message, work.nbytes)
        self.complete(work, sent, kind)


class LocalPeers:
    """The messages between this rank and the other ranks of its host.

    `processes` holds a file descriptor of the process of each rank of this host, in rank order, and `process_ids` their
    numbers.
    """

    def __init__(self, rank: int, processes: Mapping[int, int], process_ids: Collection[int], segment: Segment) -> None:
        for descriptor in processes.values():
            weakref.finalize(self, os.close, descriptor)
        members = list(processes)
        self._own = members.index(rank)
        self._segment, self._process = segment, os.getpid()
        self._peers = {
            peer: _Peer(*_rings(segment, len(members), self._own, i), processes[peer], i)
            for i, peer in enumerate(members)
            if peer != rank
        }
        self.largest = largest_message(_ring_bytes(len(members)))
        """The bytes of the largest message that is sent through shared memory."""
        self._is_crowded = False
        self._lock = Lock()
        self._unusable: str | None = None
        self._sleepers: set[SharedWork] = set()  # messages that threads wait for
        self._processes = set(process_ids)
        _all_peers.add(self)
        _count_processes()

    @property
    def ranks(self) -> int:
        """The number of ranks on this host that share memory, this one included."""
        return len(self._peers) + 1

    def carries(self, world: int, messages: Sequence[Message]) -> bool:
        """Whether all messages of a comm of `world` ranks go through shared memory."""
        largest = self.largest
        return self.ranks == world and all(x.nbytes <= largest and x.is_cpu for x, _ in messages)

    def post(self, tag: int, recvs: Sequence[Message], sends: Sequence[Message]) -> list[SharedWork | None]:
        """Post the messages that go through shared memory, and return None for each other message.

        The rule is the same at both ends. Buffers are contiguous and on the host.
        """
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        works: list[SharedWork | None] = []
        answering = {rank for _, rank in recvs}
        with self._lock:
            for messages in (recvs, sends):
                for buffer, rank in messages:
                    peer, nbytes = self._peers.get(rank), buffer.nbytes
                    if peer is None or nbytes > self.largest:
                        works.append(None)
                        continue
                    work = SharedWork(self, rank, tag, buffer, nbytes)
                    if messages is recvs:
                        peer.post_receive(work)
                    else:
                        peer.post_send(work, _PLAIN if rank in answering else _WITH_RECEIPT)
                    works.append(work)
        return works

    def wait_for(self, work: SharedWork, deadline: float) -> None:
        """Return when a message has been completed; RuntimeError if it cannot be, or not in time."""
        try:
            peer = self._peers[work.peer]
            if work.waits_for_room or not self._poll(peer, work):
                self._sleepers.add(work)
                try:
                    self._sleep_until_completed(peer, work, deadline)
                finally:
                    self._sleepers.discard(work)
        except RuntimeError:
            raise
        except BaseException:  # KeyboardInterrupt may have come between taking a message and reading it
            self._unusable = "an earlier wait for a message was interrupted (by Ctrl-C, say): make a new process group"
            raise

    def _poll(self, peer: _Peer, work: SharedWork) -> bool:
        """Whether a message arrives so soon that sleeping would take longer."""
        has_message, crowded = peer.reader.has_message, self._is_crowded
        for _ in range(_YIELDS if crowded else _SPIN):
            if has_message():
                with self._lock:
                    peer.receive_one()
                if work.completed:
                    return True
            elif crowded:
                os.sched_yield()
        return False

    def _sleep_until_completed(self, peer: _Peer, work: SharedWork, deadline: float) -> None:
        seconds, is_lost = _SHORTEST_SLEEP, False
        while True:
            self.progress()
            if work.completed:
                return
            if peer.writer.sleep(seconds) if work.waits_for_room else peer.reader.sleep(seconds):
                with self._lock:
                    peer.writer.freed() if work.waits_for_room else peer.receive_one()
                continue
            if self._unusable is not None:
                raise RuntimeError(self._unusable)
            if is_lost:
                raise RuntimeError("Connection closed by peer")
            if time.monotonic() > deadline:
                raise RuntimeError("Timed out")
            is_lost = peer.has_ended() or self._segment.memory[peer.state] != 0  # and polls once more
            if not any(other.unsent for other in self._peers.values()):
                seconds = min(2 * seconds, _LONGEST_SLEEP)

    def progress(self) -> None:
        """Send and receive what can be now, without waiting. May be called on another thread."""
        if self._unusable is None:
            with self._lock:
                for peer in self._peers.values():
                    peer.send_unsent()
                    peer.receive_all()

    def progress_unless_waiting(self) -> None:
        """`progress`, unless a thread does so while it waits for a message: it would have to wait longer."""
        if not self._sleepers:
            self.progress()

    def stop(self, reason: str) -> None:
        """End all waits of this rank. May be called on another thread."""
        self._unusable = reason

    def leave(self) -> None:
        """Tell the peers that this rank will send no more messages. A forked child has none, and changes nothing."""
        if os.getpid() == self._process:
            self._segment.memory[self._own] = 1

    def _forked(self) -> None:
        """Leave the messages to the parent."""
        self._unusable = "this process was forked from the one that owns the process group"


_all_peers: weakref.WeakSet[LocalPeers] = weakref.WeakSet()


def _count_processes() -> None:
    """Note whether ranks outnumber processor cores: the ranks in groups of this process, or the ranks of torchrun."""
    known = set[int]().union(*(peers._processes for peers in _all_peers))
    started = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(len(known), int(started) if started.isdecimal() else 0)
    for peers in _all_peers:
        peers._is_crowded = ranks > len(os.sched_getaffinity(0))


def _after_fork() -> None:
    for peers in _all_peers:
        peers._forked()


if IS_AVAILABLE:
    os.register_at_fork(after_in_child=_after_fork)


# How ranks find other ranks of their host.


def _ring_bytes(members: int) -> int:
    """The size of each ring between `members` ranks; 0 if there are too many ranks."""
    nbytes = min(_RING, _MAX_SEGMENT // (members * (members - 1)) & ~4095)
    return nbytes if nbytes >= _SMALLEST_RING else 0


def _rings(segment: Segment, members: int, own: int, other: int) -> tuple[RingWriter, RingReader]:
    nbytes = _ring_bytes(members)

    def offset(sender: int, receiver: int) -> int:
        return _STATES + (sender * (members - 1) + receiver - (receiver > sender)) * nbytes

    return RingWriter(segment, offset(own, other), nbytes), RingReader(segment, offset(other, own), nbytes)


def _host() -> str:
    """What processes have in common that share memory and a network; empty if this one is not to share memory."""
    if not IS_AVAILABLE or os.environ.get(VARIABLE) == "0":
        return ""
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _created(members: int) -> tuple[Segment | None, str]:
    """A segment with rings for `members` ranks, and its name; no segment if there is not enough memory."""
    try:
        segment, name = Segment.create(_STATES + members * (members - 1) * _ring_bytes(members))
    except OSError:
        return None, ""
    for own in range(members):
        for other in range(members):
            if own != other:
                _rings(segment, members, own, other)[0].initialize()
    return segment, name


def connect(rank: int, world: int, share: Callable[[str, str, Sequence[int]], dict[int, str]]) -> LocalPeers | None:
    """Connect this rank with the ranks of its host; None if there are none, or if one of them cannot share memory.

    All ranks of the group call it together. `share(name, value, ranks)` publishes the value of this rank and returns
    the values of `ranks`.
    """
    hosts = {other: text.split("|") for other, text in share("host", f"{_host()}|{os.getpid()}", range(world)).items()}
    members = [other for other in range(world) if hosts[other][0] == hosts[rank][0]]
    if not hosts[rank][0] or len(members) < 2 or not _ring_bytes(len(members)):
        return None
    ids = {other: int(hosts[other][1]) for other in members}
    created, name = _created(len(members)) if rank == members[0] else (None, "")
    processes: dict[int, int] = {}
    peers = None
    try:
        name = share("segment", name, members[:1])[members[0]]
        try:
            segment = Segment.open(name) if name and created is None else created
            for other in members if segment is not None else ():
                processes[other] = os.pidfd_open(ids[other])
        except (OSError, ValueError):
            segment = None
        answers = share("shared", "no" if segment is None else "yes", members)
        if segment is not None and "no" not in answers.values():
            peers = LocalPeers(rank, processes, ids.values(), segment)
        return peers
    finally:
        if created is not None:
            created.forget_name()
        for descriptor in processes.values() if peers is None else ():
            os.close(descriptor)


class Waitable(Protocol):
    """The part of `torch.distributed.Work` that is used here."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return when the work has completed."""


@dataclass(slots=True)
class InFlightMessage:
    """A message in flight and the buffer that the backend uses: the tensor itself, or a pinned copy."""

    tensor: Tensor
    peer: int
    send: bool
    tag: int = 0
    staged: Tensor | None = None

    @property
    def wire_buffer(self) -> Tensor:
        """The buffer that the backend reads or writes."""
        return self.tensor if self.staged is None else self.staged

    def unstage(self) -> None:
        """Copy a received message from its staging buffer to the tensor."""
        if self.staged is not None and not self.send:
            self.tensor.copy_(self.staged, non_blocking=True)


def messages_of(recvs: Sequence[Message], sends: Sequence[Message], tag: int = 0) -> list[InFlightMessage]:
    """The messages of an exchange, in the order in which they are posted."""
    received = [InFlightMessage(detached(tensor), peer, False, tag) for tensor, peer in recvs]
    return received + [InFlightMessage(detached(tensor), peer, True, tag) for tensor, peer in sends]


def describe(messages: Sequence[InFlightMessage], names: Callable[[Iterable[int]], str]) -> str:
    """`, receiving 8 bytes from ranks 1, 2 and sending 16 bytes to rank 0`, or nothing."""
    peers: dict[tuple[str, int, str], set[int]] = {}
    for message in messages:
        action, preposition = ("sending", "to") if message.send else ("receiving", "from")
        peers.setdefault((action, message.tensor.nbytes, preposition), set()).add(message.peer)
    parts = (f"{action} {nbytes} bytes {word} {names(ranks)}" for (action, nbytes, word), ranks in peers.items())
    return f", {' and '.join(parts)}" if peers else ""


def stage(messages: Sequence[InFlightMessage]) -> None:
    """Give CUDA tensors pinned host buffers; buffers of messages to be sent are filled."""
    if not messages[0].tensor.is_cuda:  # all are on one device
        return
    for message in messages:
        message.staged = torch.empty_like(message.tensor, device="cpu", pin_memory=True)
        if message.send:
            message.staged.copy_(message.tensor, non_blocking=True)
    for device in {message.tensor.device for message in messages if message.send}:
        torch.cuda.current_stream(device).synchronize()  # gloo reads host memory without regard to streams


# Recording when messages complete while the rank does something else. gloo's works have no future and are not
# `is_completed` before a wait, so during a recording a thread waits for each message. NCCL's works order streams: a
# stream of its own waits for them.


class RecordedWork:
    """A work that a thread waits for and records. Others wait for the thread: a gloo work supports a single wait."""

    def __init__(self, work: Waitable, timeout: float, record: MessageRecord, posted: Timestamp) -> None:
        self._completed = threading.Event()
        self._error: RuntimeError | None = None
        # Not a threading.Thread: its start() blocks until the thread has been scheduled for the first time.
        _thread.start_new_thread(self._wait_and_record, (work, timeout, record, posted))

    def _wait_and_record(self, work: Waitable, timeout: float, record: MessageRecord, posted: Timestamp) -> None:
        try:
            work.wait(timedelta(seconds=timeout))
            record.done(posted, record.recorder.now())
        except RuntimeError as error:
            self._error = error
        finally:
            self._completed.set()

    def wait(self, timeout: timedelta = _NO_LIMIT, /) -> bool:
        """Wait as for the work itself."""
        if not self._completed.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out after {timeout.total_seconds():.1f} s")
        if self._error is not None:
            raise self._error
        return True


class RecordedSharedWork:
    """A work of shared memory, which is recorded when it is waited for: it knows when its message was sent."""

    def __init__(self, work: SharedWork, record: MessageRecord, posted: Timestamp) -> None:
        self._work, self._record, self._posted = work, record, posted

    def wait(self, timeout: timedelta = _NO_LIMIT, /) -> bool:
        """Wait as for the work itself."""
        self._work.wait(timeout)
        assert isinstance(self._posted, float)
        self._record.done(self._posted, max(self._posted, self._work.completed))
        return True


def record_on_threads(
    works: Sequence[Waitable], messages: Sequence[InFlightMessage], op: str, recorder: Recorder, timeout: float,
    posted: Timestamp,
) -> list[Waitable]:  # fmt: skip
    """Record each message when it completes; wait for the returned works instead."""
    return [
        RecordedSharedWork(work, record, posted)
        if isinstance(work, SharedWork)
        else RecordedWork(work, timeout, record, posted)
        for work, record in zip(works, _message_records(messages, op, recorder), strict=True)
    ]


def record_on_stream(
    works: Sequence[Waitable], messages: Sequence[InFlightMessage], op: str, recorder: Recorder, posted: Timestamp
) -> None:
    """Record messages that NCCL carries as one batch, which complete together."""
    device = messages[0].tensor.device
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for work in works:
            work.wait()
        end = recorder.now(device)
    for record in _message_records(messages, op, recorder):
        record.done(posted, end)


def _message_records(messages: Sequence[InFlightMessage], op: str, recorder: Recorder) -> list[MessageRecord]:
    return [recorder.message("send" if m.send else "receive", op, m.peer, m.tensor.nbytes) for m in messages]
