"""Limits on connections: how many wait, how many have a request in progress, and for how long. The access log."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

from attnmesh.serving.fields import ApiError

HEADER_SECONDS = 10.0
"""In which a client must have sent the headers of a request, after it has connected or after the last answer."""
WRITE_SECONDS = 60.0
"""Seconds in which a client must have read some of its answer."""
_MAX_SHOWN = 200  # characters of a path in the access log
_READ_SECONDS = 0.05  # in which the event loop reads what a new connection has sent already

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_access_log = logging.getLogger("attnmesh.serving.access")


@dataclass(frozen=True)
class ConnectionLimits:
    """At most `most` connections wait, and at most `most` have a request; `per_address` from one other machine."""

    most: int
    per_address: int

    def of(self, address: str) -> int:
        """The limit of an address. All clients of this machine, and of a proxy on it, have one limit together."""
        return self.most if _is_loopback(address) else min(self.most, self.per_address)


class Closable(Protocol):
    """A connection."""

    def close(self) -> None:
        """Close it."""


class WaitingConnections:
    """Connections without a request: idle, or with incomplete headers.

    No connection is refused, since its request is not known yet. Instead the oldest connection of an address that has
    too many is closed, or of the address with the most: a client that sends its headers at once is answered.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._by_address: dict[str, dict[Closable, None]] = {}  # oldest first

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))

    def add(self, address: str, connection: Closable) -> None:
        """Take a connection, and close another connection if there are too many."""
        own = self._by_address.setdefault(address, {})
        own[connection] = None
        if len(own) > self._limits.of(address):
            self._close_oldest(address)
        elif len(self) > self._limits.most:
            self._close_oldest(max(self._by_address, key=lambda each: len(self._by_address[each])))

    def discard(self, address: str, connection: Closable) -> None:
        """Forget a connection that waits no longer."""
        own = self._by_address.get(address, {})
        own.pop(connection, None)
        if not own:
            self._by_address.pop(address, None)

    def _close_oldest(self, address: str) -> None:
        oldest = next(iter(self._by_address[address]))
        self.discard(address, oldest)
        oldest.close()


class LimitedProtocol(H11Protocol):  # type: ignore[misc]
    """uvicorn's protocol with a limit for headers, and for clients that do not read; it has neither."""

    def __init__(self, *, waiting: WaitingConnections, **how: Any) -> None:
        super().__init__(**how)
        self._waiting = waiting
        self._address = ""
        self._header_timer: asyncio.TimerHandle | None = None
        self._waiting_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.discard(self._address, self)
        for timer in (self._header_timer, self._waiting_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def close(self) -> None:
        """Close a connection that waits, after its last bytes. `_header_timer` ends it if the client reads no more."""
        self.transport.close()

    def _update(self) -> None:
        """Begin to wait for headers, or end it: whatever else the client sends does not prolong it.

        A connection counts as waiting only after its headers could have been read: many that are accepted at once,
        after the event loop was busy, have sent theirs and must not displace one another.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._waiting.discard(self._address, self)
            if self._header_timer is not None and self._waiting_timer is not None:
                self._header_timer.cancel()
                self._waiting_timer.cancel()
                self._header_timer = None
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
            self._waiting_timer = self.loop.call_later(_READ_SECONDS, self._waiting.add, self._address, self)


class RequestGate:
    """An ASGI application that passes on at most the allowed number of requests at a time, and `/health` always.

    It writes the access log, a line per request, unless that is switched off.
    """

    def __init__(self, app: App, limits: ConnectionLimits, *, access_log: bool) -> None:
        self._app, self._limits, self._access_log = app, limits, access_log
        self._in_progress: Counter[str] = Counter()  # by address
        self.answered = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        host, port = scope.get("client") or ("", 0)
        began, status, is_complete = time.monotonic(), 499, False  # 499: the client has gone

        async def note(message: Message) -> None:
            nonlocal status, is_complete
            status = message.get("status", status)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        error = None if scope["path"] == "/health" else self._over_limit(host)
        self._in_progress[host] += 1
        try:
            if error is None:
                await self._app(scope, receive, note)
            else:
                await send_error(error, note)
        finally:
            self._in_progress[host] -= 1
            if not self._in_progress[host]:
                del self._in_progress[host]
            self.answered += 1
            if self._access_log:
                path = scope["raw_path"].decode("ascii", "replace")[:_MAX_SHOWN]  # as sent, without control characters
                end = "" if is_complete else ", not complete"
                seconds = time.monotonic() - began
                _access_log.info('%s:%d "%s %s" %d, %.3f s%s', host, port, scope["method"], path, status, seconds, end)

    def _over_limit(self, host: str) -> ApiError | None:
        """The error for one more request of this address; None within the limits."""
        total, own = self._in_progress.total(), self._in_progress.get(host, 0)
        if total >= self._limits.most:
            message = f"{total} connections have requests, and more are not taken"
            return ApiError(503, message, code="too_many_connections")
        if own >= self._limits.of(host):
            message = f"{own} connections of your address have requests, and more are not taken"
            return ApiError(429, message, code="too_many_connections")
        return None


async def send_error(error: ApiError, send: Send) -> None:
    """Answer with an error that goes away."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
