"""`serve`: the work of every rank. Rank 0 has the HTTP server, on a separate thread; all ranks compute."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from attnmesh.comm import Comm, CommError, SoloComm, comm_from
from attnmesh.generation.agreement import check_same_weights
from attnmesh.generation.generator import Generator
from attnmesh.models.loading import load_model
from attnmesh.plan.decode import DecodeSharding
from attnmesh.serving.app import AppSettings, Service, create_app
from attnmesh.serving.fields import ApiError
from attnmesh.serving.handover import DecodeLoop, PrefillLoop, connect
from attnmesh.serving.loop import RequestQueue, ServingLoop
from attnmesh.serving.metrics import Status, memory_of_ranks

# Limits on connections: how many wait, how many have a request in progress, and for how long. The access log.


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


_CLOSE_SECONDS = 5  # in which connections must end after the last answer
_LAST_SECONDS = 10.0  # that rank 0 has to answer after another rank has failed
_BACKLOG = 128
_MORE_CONNECTIONS = 32  # than requests: each may have a body in memory

_log = logging.getLogger("attnmesh.serving")


@dataclass(frozen=True)
class Certificate:
    """The files of a TLS certificate; without `key_file`, `file` also has the key."""

    file: Path
    key_file: Path | None = None

    def check(self) -> None:
        """Raise ValueError unless both can be read, and belong together."""
        files = f"--ssl-certfile {self.file}" + ("" if self.key_file is None else f" and --ssl-keyfile {self.key_file}")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.file, self.key_file, password=lambda: b"")  # an empty one is never right
        except (OSError, ValueError) as error:  # SSLError is an OSError
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(f"{files} must be a certificate and its key without a password, in PEM: {why}") from None


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server, on all ranks. Picklable, since ranks are processes.

    `folder` is a folder of this run on every machine: the file `serving` in it exists once the ranks are ready, and
    they end once the file `stop` does, or `failed`. Signals reach the process that started them.
    """

    model: Path
    device: str
    dtype: torch.dtype
    folder: Path
    app: AppSettings
    host: str
    port: int
    cache_tokens: int
    max_sequences: int
    max_queue: int
    grace: float
    sharding: DecodeSharding | None = None  # of the decode ranks, if there are others that prefill
    prefill_ranks: int = 0  # the first ranks, which compute prompts only; with 0 all ranks compute everything
    shard_weights: bool = False  # whether it divides the weights, too; otherwise every rank has all of them
    step_tokens: int | None = None
    storage: str | None = None
    reproducible: bool = False
    max_per_address: int | None = None  # connections of another machine; by default half of all
    access_log: bool = True
    certificate: Certificate | None = None  # with it, HTTPS
    announce: Callable[[str], None] = field(default=print)

    @property
    def is_serving(self) -> bool:
        """Whether the ranks serve."""
        return (self.folder / "serving").exists()

    def stop(self) -> None:
        """Tell rank 0 to end."""
        (self.folder / "stop").touch()

    def fail(self) -> float:
        """Tell rank 0 that a rank has failed; the seconds that it has to answer."""
        (self.folder / "failed").touch()
        return _LAST_SECONDS

    @property
    def connection_limits(self) -> ConnectionLimits:
        """How many connections there may be."""
        most = self.max_queue + _MORE_CONNECTIONS
        return ConnectionLimits(most, self.max_per_address or most // 2)

    def should_stop(self) -> bool:
        """Whether rank 0 is to end; raises CommError if another rank has failed."""
        if (self.folder / "failed").exists():
            raise CommError("another rank has failed")
        return (self.folder / "stop").exists()


def serve(comm: Comm, *, settings: ServerSettings, shared_model: tuple[Any, Any] | None = None) -> None:
    """Serve until the file `stop` exists. `shared_model` is the whole model of virtual ranks, and its tokenizer."""
    listening = _listen(settings.host, settings.port) if comm.rank == 0 else None
    model, tokenizer = shared_model or _load(settings, comm)
    prefills = comm.rank < settings.prefill_ranks
    generator = Generator(
        model, tokenizer, _own_side(comm, settings.prefill_ranks), cache_tokens=settings.cache_tokens,
        max_sequences=settings.max_sequences, step_tokens=settings.step_tokens, storage=settings.storage,
        reproducible=settings.reproducible,
        sharding=DecodeSharding(cp=settings.prefill_ranks) if prefills else settings.sharding,
    )  # fmt: skip
    channel = None
    if settings.prefill_ranks:
        generator.check_moves()
        check_same_weights(comm, model, generator.engine.device)
        channel = connect(comm, settings.prefill_ranks, generator.engine.device)
    memory = memory_of_ranks(comm, generator)
    if threading.current_thread() is threading.main_thread() and shared_model is None:
        _leave_signals_to_the_parent()
    (settings.folder / "serving").touch()
    if settings.prefill_ranks and not prefills:
        DecodeLoop(generator, comm, channel).run()
        return
    loop: Callable[..., ServingLoop] = ServingLoop
    if prefills:
        loop = partial(PrefillLoop, all_ranks=comm, channel=channel)
    if listening is None:
        loop(generator, None, should_stop=lambda: False, grace=0).run()
        return
    queue = RequestQueue(settings.max_queue)
    _log_to_stderr()
    status = Status(generator, memory, settings.sharding or DecodeSharding() if settings.prefill_ranks else None)
    service = Service(generator, queue, settings.app, status)
    http = HttpServer(
        service, listening, settings.connection_limits, access_log=settings.access_log,
        certificate=settings.certificate,
    )  # fmt: skip
    http.start()
    settings.announce(http.url)

    def should_stop() -> bool:
        return settings.should_stop() or not http.is_alive

    try:
        loop(generator, queue, should_stop=should_stop, grace=settings.grace).run()
    except Exception as error:
        _log.error("the server has failed: %s: %s", type(error).__name__, error)
        raise
    finally:
        http.stop()
        _log.info("the server has shut down: %d HTTP requests in %.0f s", http.answered, http.seconds)


class HttpServer:
    """uvicorn on a thread."""

    def __init__(
        self,
        service: Service,
        listening: socket.socket,
        limits: ConnectionLimits,
        *,
        access_log: bool,
        certificate: Certificate | None = None,
    ) -> None:
        self._gate = RequestGate(create_app(service), limits, access_log=access_log)
        protocol: Any = partial(LimitedProtocol, waiting=WaitingConnections(limits))
        # Without proxy headers, which would let a client choose the address that is logged.
        config = uvicorn.Config(
            self._gate, http=protocol, ws="none", log_level="error", access_log=False, lifespan="off",
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=_CLOSE_SECONDS,
            ssl_certfile=certificate and certificate.file, ssl_keyfile=certificate and certificate.key_file,
        )  # fmt: skip
        self._began = time.monotonic()
        self._server, self._listening = uvicorn.Server(config), listening
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="http", daemon=True)
        host, port = listening.getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def answered(self) -> int:
        """The number of requests so far."""
        return self._gate.answered

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    @property
    def is_alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End, after answers that are on their way."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_SECONDS + 2)
        self._listening.close()


def _log_to_stderr() -> None:
    """Write the server's log to stderr, unless the log of this process goes somewhere already."""
    above = (_log, logging.getLogger("attnmesh"), logging.root)
    if all(isinstance(handler, logging.NullHandler) for each in above for handler in each.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before time is spent on the model; raises ValueError if it cannot."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise ValueError(f"cannot listen on host {host} and port {port}: {error.strerror or error}") from None
    return listening


def _own_side(comm: Comm, prefill_ranks: int) -> Comm:
    """The ranks that this rank computes with: prefill ranks, decode ranks, or all ranks."""
    if not prefill_ranks:
        return comm
    own: Comm = SoloComm(comm.timeout)
    for side in (range(prefill_ranks), range(prefill_ranks, comm.world)):
        if len(side) > 1:  # all ranks make both groups
            group = dist.new_group(list(side), timeout=timedelta(seconds=comm.timeout))
            own = comm_from(group, timeout=comm.timeout) if comm.rank in side else own
    return own


def _load(settings: ServerSettings, comm: Comm) -> tuple[Any, Any]:
    device = f"cuda:{torch.cuda.current_device()}" if settings.device == "cuda" else settings.device
    if settings.shard_weights:
        return load_model(settings.model, device=device, dtype=settings.dtype, sharding=settings.sharding, comm=comm)
    return load_model(settings.model, device=device, dtype=settings.dtype)


def _leave_signals_to_the_parent() -> None:
    """A terminal and systemd signal all processes: the process that started the ranks decides how they end.

    If it ends without that, so do they (`launch`).
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under torchrun, where this process has other handlers
            signal.signal(number, signal.SIG_IGN)
