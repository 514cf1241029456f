"""Which processes have ended: each keeps a connection to its neighbors, which the kernel closes with the process.

A process that is slow, stopped or in a debugger keeps its connections, so that only an end is taken for one. The host
of a process that does not respond any more is noticed by TCP keepalive.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOG = logging.getLogger(__name__)
_RETRY = 0.5  # seconds between two attempts to connect
_ACCEPT_AGAIN = 0.05  # seconds
_WARN_AT = 10  # attempts
_CONNECT = 5.0  # seconds that an attempt may take
_TOKEN_BYTES = 16
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5}  # a host that is gone is noticed after 8 s
_BACKLOG = 1024
_LONGEST_LINE = 4096  # bytes that a process sends to the processes that watch it

ENDED = "its process has ended"
UNREACHABLE = "its host does not respond"


class Watch:
    """A process that is watched through a connection, on a thread of its own.

    `verdict` tells how the process ended, None while nothing is known. `last_error` is the latest line that it sent.
    """

    def __init__(self, address: str, machine: str) -> None:
        self.address, fields = address, json.loads(address)
        self._token, self._port = bytes.fromhex(fields["token"]), fields["port"]
        self._is_local = fields["machine"] == machine
        self._hosts = ["127.0.0.1"] if self._is_local else fields["hosts"]
        self.socket: socket.socket | None = None
        self.users = 0
        self.is_verified = self._is_closed = False
        self.last_error = ""
        self.verdict: str | None = None
        threading.Thread(target=self._run, name="attnmesh liveness", daemon=True).start()

    def close(self) -> None:
        """Watch no more, and let the thread end."""
        self._is_closed = True
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        """Connect, to another address of the process each time, until its end is known."""
        for attempt, host in enumerate(itertools.cycle(self._hosts), 1):
            code = self._connection(host)
            if self._is_closed:
                return
            if self.is_verified:
                self.verdict = ENDED if code in (None, errno.ECONNRESET) else UNREACHABLE
            elif self._is_local and code == errno.ECONNREFUSED:  # here only the end of a process closes its port
                self.verdict = ENDED
            if self.verdict is not None:
                return
            if attempt == _WARN_AT:
                _LOG.warning("no connection to the process of another rank after %d attempts; trying on", _WARN_AT)
            time.sleep(_RETRY)

    def _connection(self, host: str) -> int | None:
        """Connect, receive the token that identifies the process, then wait for the end: the number of its error."""
        received = b""
        try:
            with socket.create_connection((host, self._port), timeout=_CONNECT) as self.socket:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEPALIVE.items():
                    if hasattr(socket, name):  # not on every system
                        self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                self.socket.settimeout(None)
                while not self._is_closed and (data := self.socket.recv(_LONGEST_LINE)):
                    received += data
                    if not self.is_verified and received.startswith(self._token):
                        self.is_verified, received = True, received[_TOKEN_BYTES:]
                    if self.is_verified:
                        received = received[-_LONGEST_LINE:]
                        self.last_error = received.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
                    elif not self._token.startswith(received):  # another process
                        return None
        except OSError as error:
            return error.errno
        return None


class Liveness:
    """The listening socket of this process, and the processes that it watches."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        self._token, self._machine = secrets.token_bytes(_TOKEN_BYTES), machine()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._visitors: set[socket.socket] = set()
        self._watches: dict[str, Watch] = {}
        threading.Thread(target=self._accept, name="attnmesh liveness", daemon=True).start()

    def address(self, store: Store) -> str:
        """How other processes of the group with this store find this one."""
        hosts = _hosts(store)
        port = self._listener.getsockname()[1]
        return json.dumps({"token": self._token.hex(), "port": port, "machine": self._machine, "hosts": hosts})

    def watch(self, address: str) -> Watch:
        """Watch the process with this address, on one connection for all groups, until each has called `unwatch`."""
        with _lock:
            if address not in self._watches:
                self._watches[address] = Watch(address, self._machine)
            self._watches[address].users += 1
            return self._watches[address]

    def unwatch(self, watch: Watch) -> None:
        """Take back one call of `watch`."""
        with _lock:
            watch.users -= 1
            if not watch.users:
                self._watches.pop(watch.address).close()

    def tell(self, line: str) -> None:
        """Tell the processes that watch this one why it may end. It needs no store, which may end with the process."""
        for visitor in list(self._visitors):
            with contextlib.suppress(OSError):
                visitor.send(line.encode()[: _LONGEST_LINE - 1] + b"\n")

    def close_sockets(self) -> None:
        """Close this process's copies of the sockets after a fork: the parent keeps the connections."""
        for each in (self._listener, *self._visitors, *(watch.socket for watch in self._watches.values())):
            if each is not None:
                each.close()
        self._selector.close()

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._welcome()
                elif isinstance(key.fileobj, socket.socket):  # a visitor sends nothing: it has gone
                    self._selector.unregister(key.fileobj)
                    self._visitors.discard(key.fileobj)
                    key.fileobj.close()

    def _welcome(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no more file descriptors
            time.sleep(_ACCEPT_AGAIN)
            return
        visitor.setblocking(False)
        self._visitors.add(visitor)
        self._selector.register(visitor, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            visitor.send(self._token)


_liveness: Liveness | None = None
_lock = threading.Lock()


def liveness() -> Liveness | None:
    """The one of this process; None if it cannot open sockets."""
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


def machine() -> str:
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

    def report_ended(self, address_of: Callable[[int], str | None], report: Callable[[int, str], None]) -> None:
        """Watch the neighbors as soon as they have published an address, and report neighbors that have ended."""
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
        while _liveness is not None and self._watches:
            _liveness.unwatch(self._watches.popitem()[1])
