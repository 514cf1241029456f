"""Rings of bytes in memory that processes of one host share: one process writes messages, another reads them in order.

Two POSIX semaphores in the memory itself are all that both ends of a ring change: the messages written, and the
messages read. Posting a semaphore makes the bytes written before it visible to the process that takes it, on every
processor, and takes no system call unless a process sleeps on it. Everything else (positions, free bytes) each end
counts for itself.

The memory has no name in any file system, so nothing is left when processes are killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import deque
from struct import Struct
from uuid import uuid4

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
