"""Which processes have ended: each keeps a connection to its neighbors, which the kernel closes with the process.

A process that is slow, stopped or in a debugger keeps its connections, so that only an end is taken for one. The host
of a process that does not respond any more is noticed by TCP keepalive.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

State = Literal["connecting", "verifying", "verified"]

_LOG = logging.getLogger(__name__)
_RETRY = 0.5  # seconds between two attempts to connect
_ACCEPT_AGAIN = 0.05  # seconds
_WARN_AT = 10  # attempts
_CONNECT = 5.0  # seconds that an attempt may take
_TOKEN_BYTES = 16
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5}  # a host that is gone is noticed after 8 s
_BACKLOG = 1024
_LONGEST_LINE = 4096  # bytes that a process tells those who watch it

ENDED = "its process has ended"
UNREACHABLE = "its host does not respond"


class Watch:
    """A process that is watched through one connection. `verdict` tells how it ended, None while nothing is known.

    `last_words` is what it has told before it ended.
    """

    def __init__(self, address: str, machine: str) -> None:
        fields = json.loads(address)
        self.token, self._port = bytes.fromhex(fields["token"]), fields["port"]
        self.is_local = fields["machine"] == machine
        self._hosts = ["127.0.0.1"] if self.is_local else fields["hosts"]
        self.attempts = 0
        self.state: State = "connecting"
        self.received = self.words = b""
        self.socket: socket.socket | None = None
        self.next_attempt = 0.0  # by time.monotonic()
        self.verdict: str | None = None
        self.verdict_at = 0.0

    @property
    def last_words(self) -> str:
        """The latest line that the process has told."""
        return self.words.decode(errors="replace").rstrip("\n").rpartition("\n")[2]

    def connect(self) -> socket.socket | None:
        """Begin a connection to one of the addresses of the process, to another each time."""
        if not self._hosts:
            return None
        host = self._hosts[self.attempts % len(self._hosts)]
        self.attempts += 1
        self.state, self.received, self.words = "connecting", b"", b""
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket.connect_ex((host, self._port))
        return self.socket

    def end(self, verdict: str) -> None:
        """Note how the process ended."""
        self.verdict_at = time.monotonic()
        self.verdict = verdict


class Liveness:
    """The listening socket of this process, and the connections to the processes that it watches, on one thread."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        self._token, self._machine = secrets.token_bytes(_TOKEN_BYTES), _machine()
        self._visitors: set[socket.socket] = set()
        self._watches: set[Watch] = set()
        self._new: list[Watch] = []
        self._closed: list[Watch] = []
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        threading.Thread(target=self._run, name="attnmesh liveness", daemon=True).start()

    def address(self, store: Store) -> str:
        """How other processes of the group with this store find this one."""
        hosts = _hosts(store)
        port = self._listener.getsockname()[1]
        return json.dumps({"token": self._token.hex(), "port": port, "machine": self._machine, "hosts": hosts})

    def watch(self, address: str) -> Watch:
        """Begin to watch the process with this address."""
        watch = Watch(address, self._machine)
        self._new.append(watch)
        self._wake()
        return watch

    def close(self, watch: Watch) -> None:
        """Watch this process no more."""
        self._closed.append(watch)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it will wake up anyway, or this process was forked
            self._wake_up.send(b"w")

    def tell(self, line: str) -> None:
        """Tell those who watch this process why it may end. It needs no store, which may end with the process."""
        for visitor in list(self._visitors):
            with contextlib.suppress(OSError):
                visitor.send(line.encode()[: _LONGEST_LINE - 1] + b"\n")

    def close_sockets(self) -> None:
        """Close the sockets of this process's copy after a fork: the connections are those of the parent."""
        mine = (self._listener, self._wake_up, self._woken, *self._visitors, *(watch.socket for watch in self._watches))
        for each in mine:
            if each is not None:
                each.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            is_done = all(watch.state == "verified" or watch.verdict is not None for watch in self._watches)
            for key, _ in self._selector.select(None if is_done else _RETRY):
                key.data()
            while self._new:
                self._watches.add(self._new.pop())
            while self._closed:
                watch = self._closed.pop()
                self._disconnect(watch)
                self._watches.discard(watch)
            for watch in self._watches:
                if watch.verdict is not None or time.monotonic() < watch.next_attempt:
                    continue
                if watch.socket is None:
                    self._connect(watch)
                elif watch.state == "connecting":
                    self._lost(watch, errno.ETIMEDOUT)

    def _connect(self, watch: Watch) -> None:
        try:
            connection = watch.connect()
        except OSError:  # no more file descriptors, say
            watch.socket, watch.next_attempt = None, time.monotonic() + _RETRY
            return
        if connection is None:  # the process has told no address
            watch.next_attempt = float("inf")
            return
        watch.next_attempt = time.monotonic() + _CONNECT
        self._selector.register(connection, selectors.EVENT_WRITE, lambda: self._advance(watch))

    def _advance(self, watch: Watch) -> None:
        """Connect, receive the token that tells the process from any other, then wait for the connection to close."""
        assert watch.socket is not None
        try:
            if watch.state == "connecting":
                if code := watch.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                watch.state = "verifying"
                self._selector.modify(watch.socket, selectors.EVENT_READ, lambda: self._advance(watch))
                return
            data = watch.socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(watch, error.errno)
            return
        missing = _TOKEN_BYTES - len(watch.received)
        watch.received += data[:missing]
        watch.words = (watch.words + data[missing:])[-_LONGEST_LINE:]
        if not data or not watch.token.startswith(watch.received):
            self._lost(watch, None)
        elif watch.received == watch.token:
            watch.state = "verified"

    def _lost(self, watch: Watch, code: int | None) -> None:
        self._disconnect(watch)
        if watch.state == "verified":
            watch.end(ENDED if code in (None, errno.ECONNRESET) else UNREACHABLE)
        elif watch.is_local and code == errno.ECONNREFUSED:  # on this machine nothing but the end of it closes the port
            watch.end(ENDED)
        else:  # not reachable, or another process: nothing is known
            if watch.attempts == _WARN_AT:
                _LOG.warning("no connection to the process of another rank after %d attempts; trying on", _WARN_AT)
            watch.next_attempt = time.monotonic() + _RETRY

    def _disconnect(self, watch: Watch) -> None:
        if watch.socket is not None:
            self._selector.unregister(watch.socket)
            watch.socket.close()
            watch.socket = None

    def _accept(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no more file descriptors
            time.sleep(_ACCEPT_AGAIN)
            return
        visitor.setblocking(False)
        self._visitors.add(visitor)
        self._selector.register(visitor, selectors.EVENT_READ, lambda: self._read(visitor))
        with contextlib.suppress(OSError):
            visitor.send(self._token)

    def _read(self, visitor: socket.socket) -> None:
        """A visitor sends nothing: it has gone."""
        self._selector.unregister(visitor)
        self._visitors.discard(visitor)
        visitor.close()


_liveness: Liveness | None = None
_lock = threading.Lock()


def liveness() -> Liveness | None:
    """That of this process; None if it cannot open sockets."""
    global _liveness
    with _lock:
        if _liveness is None:
            try:
                _liveness = Liveness()
            except OSError:
                return None
        return _liveness


def tell_watchers(line: str) -> None:
    """`Liveness.tell`, if any process may watch this one."""
    if _liveness is not None:
        _liveness.tell(line)


def _forget_after_fork() -> None:
    global _liveness, _lock
    _lock = threading.Lock()
    if _liveness is not None:
        _liveness.close_sockets()
        _liveness = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _machine() -> str:
    """Equal in processes that reach one another over loopback, and in no others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return secrets.token_hex(_TOKEN_BYTES)


def _hosts(store: Store) -> list[str]:
    """Addresses at which other hosts may reach this one, the likeliest first."""
    found = [_source_address(host, port) for host, port in _servers(store)]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in _resolved(socket.gethostname(), None, socket.SOCK_STREAM)]
    return [host for host in dict.fromkeys(found) if host and not host.startswith(("127.", "::1", "fe80"))]


@functools.cache
def _resolved(host: str, port: int | None, kind: socket.SocketKind) -> list[Any]:
    """`socket.getaddrinfo`, once per process: a slow name server would delay every new group."""
    return socket.getaddrinfo(host, port, type=kind)


def _servers(store: Any) -> list[tuple[str, int]]:
    """Where the store is served, and an address that stands for any other host (nothing is sent to it)."""
    store = getattr(store, "_underlying_non_prefix_store", store)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    served = [(store.host, store.port)] if hasattr(store, "host") else []
    return [*served, ("192.0.2.1", 9)]


def _source_address(host: str, port: int) -> str | None:
    """The address of this host in connections to another one."""
    try:
        family, kind, _, _, target = _resolved(host, port, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


class Neighbors:
    """The two neighbors of a rank in its group, which it watches for all ranks; one that has ended is passed over.

    Every rank also watches `server`, which probably serves the store: its end must be known without the store.
    """

    def __init__(self, rank: int, world: int, server: int | None = None) -> None:
        self._rank, self._world, self._server = rank, world, server
        self._watches: dict[int, Watch] = {}
        self._reported: set[int] = set()

    def look(self, address_of: Callable[[int], str | None], report: Callable[[int, str], None]) -> None:
        """Watch the neighbors as soon as they have told an address, and report those that have ended."""
        own = liveness()
        if own is None:
            return
        for step in (1, -1):
            neighbor = (self._rank + step) % self._world
            while neighbor in self._watches and self._watches[neighbor].verdict is not None:
                neighbor = (neighbor + step) % self._world
            self._begin(neighbor, own, address_of)
        if self._server is not None:
            self._begin(self._server, own, address_of)
        for rank, watch in self._watches.items():
            if watch.verdict is not None and rank not in self._reported:
                report(rank, watch.verdict)
                self._reported.add(rank)

    def _begin(self, rank: int, own: Liveness, address_of: Callable[[int], str | None]) -> None:
        if rank != self._rank and rank not in self._watches and (address := address_of(rank)):
            self._watches[rank] = own.watch(address)

    def end_of_server(self, seconds: float) -> Watch | None:
        """The rank that probably serves the store, if it ends within some seconds."""
        watch = None if self._server is None else self._watches.get(self._server)
        deadline = time.monotonic() + seconds
        while watch is not None and watch.verdict is None and time.monotonic() < deadline:
            time.sleep(_ACCEPT_AGAIN)
        return None if watch is None or watch.verdict is None else watch

    def close(self) -> None:
        """Watch nobody."""
        if _liveness is not None:
            for watch in self._watches.values():
                _liveness.close(watch)
        self._watches.clear()
