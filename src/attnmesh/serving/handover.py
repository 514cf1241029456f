"""`PrefillLoop` and `DecodeLoop`: some ranks compute prompts and first tokens, others the rest of the answers.

Both sides step on their own. A request whose prompt is computed is held: it keeps its blocks on the prefill ranks until
the decode ranks have room for it. Then it moves (`move_requests`) between two steps of either side, with its tokens,
its options and its keys and values. The first ranks of both sides exchange messages (`Channel`):

    offered    to the decode side: the requests that are held, with their lengths
    room       to the prefill side: the requests that there is room for
    moved      to the decode side: the prefill ranks move these now, and wait for the decode ranks to end their step
    cancelled  to the decode side: requests that clients have given up
    stop       to the decode side: the end
    tokens     to the prefill side, which has the clients: new tokens and ends of answers
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from attnmesh.comm import Comm, CommError
from attnmesh.generation.generator import Generator
from attnmesh.generation.moving import move_requests
from attnmesh.generation.requests import Request, Token
from attnmesh.kv_cache.block_manager import CacheFull
from attnmesh.launch import under_torchrun
from attnmesh.parallel.reshard.api import broadcast_text
from attnmesh.parallel.reshard.goal import room_of
from attnmesh.serving.loop import POLL, Commands, RequestQueue, ServingLoop

_KEY_SECONDS = 5.0  # in which a connection must have sent its key


class Channel:
    """Messages, as JSON, between the first ranks of both sides. One thread may send while another thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        self._connection = Connection(connected.detach())

    def send(self, **message: Any) -> None:
        """Send a message; raises CommError if the other rank has ended."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise CommError(f"the rank at the other end of the channel has ended: {error}") from None

    def poll(self, seconds: float) -> bool:
        """Whether there is a message, or an end, within some seconds."""
        return self._connection.poll(seconds)

    def receive(self) -> dict[str, Any]:
        """The next message; raises CommError if the other rank has ended."""
        try:
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise CommError(f"the rank at the other end of the channel has ended: {error}") from None
        return message

    def close(self) -> None:
        """End it for both ranks."""
        self._connection.close()


def connect(comm: Comm, first_decode_rank: int, device: torch.device) -> Channel | None:
    """The channel between rank 0, which listens, and another rank; None on other ranks. All ranks call it.

    The ranks pass the address on, and a key, without which a connection is closed.
    """
    if comm.rank == 0:
        with socket.create_server((_address(), 0)) as listening:
            key = secrets.token_hex(32)
            where = {"address": listening.getsockname()[:2], "key": key}
            broadcast_text(comm, json.dumps(where).encode, [0], device)
            return _accept(listening, key.encode(), time.monotonic() + comm.timeout)
    where = json.loads(broadcast_text(comm, None, [0], device))
    if comm.rank != first_decode_rank:
        return None
    connected = socket.create_connection(tuple(where["address"]), comm.timeout)
    connected.sendall(where["key"].encode())
    return Channel(connected)


def _accept(listening: socket.socket, key: bytes, deadline: float) -> Channel:
    while True:
        listening.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            connected, _ = listening.accept()
        except OSError as error:
            raise CommError(f"the first decode rank did not connect to rank 0: {error}") from None
        connected.settimeout(_KEY_SECONDS)
        given = b""
        with suppress(OSError):
            while len(given) < len(key) and (part := connected.recv(len(key) - len(given))):
                given += part
        if hmac.compare_digest(given, key):
            return Channel(connected)
        connected.close()


def _address() -> str:
    """Where rank 0 listens: on this host, unless torchrun has started ranks on others."""
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if is_one_host or not under_torchrun() else os.environ["MASTER_ADDR"]


class PrefillLoop(ServingLoop):
    """The loop of the prefill ranks. `queue` and `channel` are None on all ranks but the first; `all_ranks` move."""

    def __init__(
        self,
        generator: Generator,
        queue: RequestQueue | None,
        *,
        should_stop: Callable[[], bool],
        grace: float,
        all_ranks: Comm,
        channel: Channel | None,
    ) -> None:
        def should_end() -> bool:
            if self._lost is not None:
                raise CommError(f"the decode ranks have ended: {self._lost}")
            return should_stop()

        super().__init__(generator, queue, should_stop=should_end, grace=grace)
        self._all_ranks, self._channel = all_ranks, channel
        self._offered: list[tuple[int, int]] = []  # what the decode side was told last
        self._computed = self._total = 0  # passes of the latest step, and of all before
        self._lost: Exception | None = None  # why the channel has ended

    def run(self) -> None:
        """Run until the end; all prefill ranks call it."""
        # Tokens do not wait for the end of a step, which may compute a long prompt.
        receiving = threading.Thread(target=self._receive, name="decode ranks", daemon=True)
        if self._channel is not None:
            receiving.start()
        super().run()
        if self._channel is not None:
            self._channel.send(stop=True)
            receiving.join(self._all_ranks.timeout)  # the decode side sends until it has read this

    def _receive(self) -> None:
        """Pass on the messages of the decode side."""
        queue, channel = self._queue, self._channel
        assert queue is not None
        assert channel is not None
        try:
            while True:
                message = channel.receive()
                for ticket, tokens, reason, error, cached in message.get("tokens", ()):
                    new = [_token(each) for each in tokens]
                    queue.report_tokens(ticket, new, reason, None if error is None else RuntimeError(error), cached)
                if "room" in message:
                    queue.move(message["room"])
        except Exception as error:
            self._lost = error

    @property
    def _is_busy(self) -> bool:
        return self._computed > 0  # or held requests leave no room for others, until one moves or ends

    def _next_commands(self) -> Commands:
        assert self._channel is not None
        commands = super()._next_commands()
        there = [ticket for ticket in commands.cancelled if ticket not in self._requests]
        if there:  # or they have ended
            self._channel.send(cancelled=there)
        moved = dict.fromkeys(commands.moved)  # requests of two offers may have found room twice
        commands.moved = [t for t in moved if t in self._requests and t not in commands.cancelled]
        return commands

    def _move(self, tickets: Sequence[int]) -> None:
        if self._channel is not None:
            self._channel.send(moved=tickets)
        try:
            move_requests(self._generator, None, self._all_ranks, requests=[self._requests[t] for t in tickets])
        except CacheFull:  # the decode side has less room than before: on all ranks
            self._offered = []
            return
        for ticket in tickets:
            del self._requests[ticket]

    def _report(self, tokens: Sequence[Token]) -> None:
        super()._report(tokens)
        total = self._generator.stats.prefill_tokens + self._generator.stats.decode_steps
        self._computed, self._total = total - self._total, total
        for request in self._requests.values():
            request.held = request.held or bool(request.tokens)
        offered = [(ticket, len(request.known)) for ticket, request in self._requests.items() if request.held]
        if self._channel is not None and offered and offered != self._offered:
            self._channel.send(offered=offered)
        self._offered = offered


def _token(fields: dict[str, Any]) -> Token:
    return Token(**{**fields, "top_logprobs": tuple(map(tuple, fields["top_logprobs"]))})


class DecodeLoop(ServingLoop):
    """The loop of the decode ranks. `channel` is None on all ranks but their first; `all_ranks` move."""

    def __init__(self, generator: Generator, all_ranks: Comm, channel: Channel | None) -> None:
        super().__init__(generator, None, should_stop=lambda: False, grace=0)
        self._all_ranks, self._channel = all_ranks, channel
        self._offered: list[tuple[int, int]] = []  # requests that wait on the prefill side, and their lengths
        self._news: list[Any] = []  # of the latest step

    def run(self) -> None:
        """Run until the end; all decode ranks call it."""
        super().run()
        if self._channel is not None:
            self._channel.close()

    def _next_commands(self) -> Commands:
        channel, until = self._channel, time.monotonic() + self._max_idle
        assert channel is not None
        commands = Commands()
        while True:
            while channel.poll(0.0):
                message = channel.receive()
                self._offered = message.get("offered", self._offered)
                commands.moved += message.get("moved", [])
                commands.cancelled += message.get("cancelled", [])
                commands.stop = commands.stop or message.get("stop", False)
            self._offer_room()
            if self._is_busy or commands or time.monotonic() >= until:
                return commands
            channel.poll(POLL)

    def _offer_room(self) -> None:
        """Tell the prefill side which requests there is room for; preempted requests come first."""
        if not self._offered or self._generator.num_waiting:
            return
        fitting = room_of(self._generator.engine.cache).num_fitting([length for _, length in self._offered])
        if fitting:
            assert self._channel is not None
            self._channel.send(room=[ticket for ticket, _ in self._offered[:fitting]])
            self._offered = []  # the remaining requests are offered again

    def _move(self, tickets: Sequence[int]) -> None:
        with suppress(CacheFull):  # on all ranks: they come again
            self._requests |= zip(tickets, move_requests(None, self._generator, self._all_ranks), strict=True)

    def _report(self, tokens: Sequence[Token]) -> None:
        super()._report(tokens)
        if self._news and self._channel is not None:
            self._channel.send(tokens=self._news)
        self._news = []

    def _tell(self, ticket: int, request: Request, new: Sequence[Token]) -> None:
        error = None if request.error is None else str(request.error)
        self._news.append((ticket, [asdict(token) for token in new], request.finish_reason, error, request.cached))
