"""Small messages between processes of one host, through shared memory instead of sockets.

A message has a tag and a size; a receive takes the first message of its peer that has both. Sending copies the message
into the ring of its pair of ranks. Receiving copies it out: when a rank waits for any message, it reads the rings until
that message has arrived, and keeps messages that no receive has been posted for yet.

A rank that goes on has either received something of the same exchange from each rank that it sent to, or it waits for a
receipt: a rank that sends what its peer does not receive, because they make different calls, must not go on.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import addressof, create_string_buffer, memmove
from datetime import timedelta
from threading import Lock

from torch import Tensor

from attnmesh.comm.base import Message
from attnmesh.comm.health.liveness import machine
from attnmesh.comm.shared_memory import IS_AVAILABLE, RingReader, RingWriter, Segment, largest_message

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
