"""Clients of `attnmesh serve` that are slow, idle or hostile: what they cost, and that others are answered."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name)

import uvicorn  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from attnmesh.serving.prompts import PromptTokenizer  # noqa: E402
from attnmesh.serving.server import (  # noqa: E402
    ConnectionLimits,
    LimitedProtocol,
    RequestGate,
    WaitingConnections,
)
from benchmarks import server_load  # noqa: E402
from helpers.serving import NAME, virtual_server, write_model  # noqa: E402

MAX_BODY = 200_000
MESSAGE = {"role": "user", "content": "a b"}
WAIT = 0.6  # seconds in place of 10 and 60
CONNECTIONS = 8 + 32  # what the server takes: 32 more than the queue


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with virtual_server(model, tmp_path_factory.mktemp("run"), ranks=1, max_body=MAX_BODY) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(model, tmp_path_factory):
    """A server whose clients have little time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnmesh.serving.server.HEADER_SECONDS", WAIT)
        patch.setattr("attnmesh.serving.server.WRITE_SECONDS", WAIT)
        with virtual_server(model, tmp_path_factory.mktemp("run"), ranks=1, cache_tokens=2000) as server:
            yield server


def address(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


@contextmanager
def connected(server):
    with socket.create_connection(address(server), timeout=30) as connection:
        yield connection


def head(path="/v1/completions", length=None):
    method = "GET" if length is None else "POST"
    body = "" if length is None else f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{body}".encode()


def ask(server, path, body=None):
    """The status, the bytes of the answer, and the seconds that it took."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    began = time.monotonic()
    with connected(server) as connection:
        connection.sendall(head(path, None if body is None else len(data)) + b"Connection: close\r\n\r\n" + data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split()[1]), answer, time.monotonic() - began


def completion(**changes):
    return {"model": NAME, "prompt": "a b c", "max_tokens": 3, "temperature": 0, **changes}


def chat(messages):
    return {"model": NAME, "messages": messages, "max_tokens": 3}


def was_closed(connection, within):
    """Whether the server closes a connection in time, whatever it sends before."""
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


# Amplification: what a request costs, against its size.


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", completion(prompt=[[1]] * 1000, n=1024), "1024000 samples"),
        ("completions", completion(prompt=["a"] * 30_000), "30000 samples"),
        ("completions", completion(n=1024), "1024 samples"),
        ("completions", completion(prompt="a " * 90_000), "characters"),
        ("completions", completion(prompt=["a", "a" * 90_000]), "characters"),
        ("completions", completion(prompt=[1] * 60_000), "exceed 200 tokens"),
        ("chat/completions", chat([{"role": "user", "content": "a" * 90_000}]), "characters"),
        ("chat/completions", chat([{"role": "user", "content": ""}] * 5000), "at most 200 messages"),
        ("chat/completions", chat([{**MESSAGE, "k" * 90_000: 1}]), "is not supported"),
        ("completions", completion(**{f"p{i}": 1 for i in range(10_000)}), "unknown parameter 'p0'"),
        ("completions", completion(stop=["a"] * 20_000), "stop must be"),
        ("completions", b"[" * 100_000, "must be JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_costs_little(server, path, body, message):
    began = time.process_time()
    status, answer, _ = ask(server, f"/v1/{path}", body)
    assert status == 400
    assert message in answer.decode()
    assert len(answer) < 1500
    assert time.process_time() - began < 1.0  # of this process, which has the server


# Connections that wait.


def test_idle_and_half_open_connections_lock_nobody_out(server):
    with ExitStack() as stack:
        for i in range(300):
            connection = stack.enter_context(connected(server))
            if i % 2:
                connection.sendall(head()[: 20 + i % 40])
        assert ask(server, "/health")[0] == 200
        status, answer, seconds = ask(server, "/v1/completions", completion())
        assert status == 200, answer
        assert seconds < 5


def test_connections_without_headers_are_closed(impatient):
    with connected(impatient) as idle, connected(impatient) as half, connected(impatient) as later:
        half.sendall(head())
        later.sendall(head("/health") + b"\r\n")
        for part in (b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n", b"X: "):  # each resets uvicorn's own timer
            time.sleep(WAIT / 5)
            later.sendall(part)
        assert all(was_closed(connection, 5 * WAIT) for connection in (idle, half, later))


def test_a_body_after_the_answer_is_not_read_for_ever(impatient):
    with connected(impatient) as connection:
        connection.sendall(head("/v1/nothing", 10_000) + b"\r\n")
        for _ in range(60):
            try:
                connection.sendall(b" ")
            except ConnectionError:
                return
            time.sleep(WAIT / 6)
    raise AssertionError("it is still open")


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_client_that_does_not_read_loses_its_connection(monkeypatch, reads_on):
    monkeypatch.setattr("attnmesh.serving.server.WRITE_SECONDS", 0.05)
    transport = Mock(asyncio.Transport, **{"is_closing.return_value": False, "get_extra_info.return_value": None})

    async def main():
        waiting = WaitingConnections(ConnectionLimits(10, 10))
        config = uvicorn.Config(lambda scope, receive, send: None)
        protocol = LimitedProtocol(
            waiting=waiting, config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
        )
        protocol.connection_made(transport)
        for _ in range(3):
            protocol.pause_writing()
            await asyncio.sleep(0.02)
            protocol.resume_writing()
        assert not transport.abort.called
        protocol.pause_writing()
        if reads_on:
            protocol.resume_writing()
        await asyncio.sleep(0.1)
        protocol.connection_lost(None)
        assert len(waiting) == 0

    asyncio.run(main())
    assert transport.abort.called != reads_on


@pytest.mark.sweep
def test_an_answer_that_nobody_reads_is_given_up(impatient):
    """An answer of more than what the kernel takes: it holds one of the connections that compute."""
    body = json.dumps(completion(max_tokens=1900, min_tokens=1900, n=8, logprobs=16, stream=True)).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(impatient))
        connection.sendall(head(length=len(body)) + b"\r\n" + body)
        deadline = time.monotonic() + 60
        while b'attnmesh_answers_total{finish_reason="cancelled"} 8.0' not in (found := ask(impatient, "/metrics")[1]):
            assert time.monotonic() < deadline, found.decode()
            time.sleep(0.05)
        assert was_closed(connection, 10)


def test_health_is_answered_when_all_connections_have_requests(server):
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):  # with bodies that do not come
            stack.enter_context(connected(server)).sendall(head(length=1000) + b"\r\n{")
        deadline = time.monotonic() + 10
        while (answer := ask(server, "/v1/models"))[0] != 503:
            assert time.monotonic() < deadline, answer
        assert b"connections" in answer[1]
        assert ask(server, "/health")[0] == 200
    deadline = time.monotonic() + 10
    while ask(server, "/v1/models")[0] != 200:
        assert time.monotonic() < deadline


def test_a_burst_of_connections_is_answered_after_the_event_loop_was_busy():
    """All are accepted in one pass of the loop, more than may wait, and their requests are there already."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b""})

    async def main():
        loop, waiting = asyncio.get_running_loop(), WaitingConnections(ConnectionLimits(most=3, per_address=3))
        config = uvicorn.Config(app, lifespan="off")
        config.load()
        state = ServerState()
        server = await loop.create_server(
            lambda: LimitedProtocol(waiting=waiting, config=config, server_state=state, app_state={}, _loop=loop),
            "127.0.0.1",
            0,
        )
        with ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(server.sockets[0].getsockname())) for _ in range(12)
            ]
            for client in clients:
                client.sendall(head("/health") + b"\r\n")  # the loop does not run meanwhile
                client.setblocking(False)
            answers = [await asyncio.wait_for(loop.sock_recv(client, 100), 30) for client in clients]
        server.close()
        assert [answer.split()[1] for answer in answers] == [b"200"] * 12

    asyncio.run(main())


class Connection:
    def __init__(self, number):
        self.number, self.is_open = number, True

    def close(self):
        self.is_open = False


def test_the_oldest_connections_that_wait_are_closed():
    waiting = WaitingConnections(ConnectionLimits(most=10, per_address=4))
    places = ["10.0.0.1"] * 6 + ["10.0.0.2"] * 2 + ["127.0.0.1"] * 5 + ["10.0.0.3"] * 1
    connections = [Connection(i) for i in range(len(places))]
    for place, connection in zip(places, connections, strict=True):
        waiting.add(place, connection)
    # Two of the first address beyond its own limit, then one beyond the limit of all, then one of this machine.
    assert [each.number for each in connections if not each.is_open] == [0, 1, 2, 8]
    for place, connection in zip(places, connections, strict=True):
        waiting.discard(place, connection)
    assert len(waiting) == 0


def gate(limits, **how):
    """A gate, and a function that begins a request through it; the requests end when `go` is set."""
    go, found = asyncio.Event(), []

    async def app(scope, receive, send):
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message):
        if "status" in message:
            found.append(message["status"])

    each = RequestGate(app, limits, **{"access_log": False, **how})

    def begin(host, path="/v1/models"):
        scope = {"type": "http", "client": (host, 5), "path": path, "raw_path": path.encode(), "method": "GET"}
        return asyncio.create_task(each(scope, None, send))

    return begin, go, found


def test_requests_are_limited_by_address():
    async def main():
        begin, go, found = gate(ConnectionLimits(most=6, per_address=2))
        others = ["10.0.0.1"] * 3 + ["127.0.0.1"] * 4 + ["10.0.0.2"]
        tasks = [begin(host) for host in others] + [begin("10.0.0.1", "/health") for _ in range(3)]
        await asyncio.sleep(0.05)
        assert found == [429, 503]  # the third of an address, and the seventh of all; none of /health
        go.set()
        await asyncio.gather(*tasks)
        assert found == [429, 503] + [200] * 9
        await begin("10.0.0.1")
        assert found[-1] == 200

    asyncio.run(main())


def test_the_access_log_has_a_line_per_request(caplog):
    caplog.set_level(logging.INFO, "attnmesh.serving.access")

    async def main():
        for access_log in (True, False):
            begin, go, _ = gate(ConnectionLimits(1, 1), access_log=access_log)
            task = begin("10.0.0.1")
            await asyncio.sleep(0)
            await begin("10.0.0.2", "/v1/" + "x" * 300)
            gone = begin("10.0.0.3", "/health")
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait({gone})
            go.set()
            await task

    asyncio.run(main())
    assert [re.sub(r"0\.\d+ s", "T", record.getMessage()) for record in caplog.records] == [
        f'10.0.0.2:5 "GET /v1/{"x" * 196}" 503, T',
        '10.0.0.3:5 "GET /health" 499, T, not complete',
        '10.0.0.1:5 "GET /v1/models" 200, T',
    ]


# What takes long for one client does not keep others waiting.


class SlowTokenizer:
    """Takes a long text in the time until `go`."""

    chat_template = None

    def __init__(self, began, go):
        self.began, self.go = began, go

    def __deepcopy__(self, memo):
        return self

    def __call__(self, text, **how):
        if len(text) > 100_000:
            self.began.set()
            assert self.go.wait(30)
        return {"input_ids": [3, 4, 5]}

    def get_vocab(self):
        return {"a" * 1000: 0}

    def decode(self, ids, **how):
        return "a"


def slow_tokenizer(began, go, tokenizer, context):
    return PromptTokenizer(SlowTokenizer(began, go), context)


def test_a_long_prompt_is_tokenized_beside_short_ones(model, tmp_path, monkeypatch):
    began, go = threading.Event(), threading.Event()
    monkeypatch.setattr("attnmesh.serving.app.PromptTokenizer", partial(slow_tokenizer, began, go))
    with virtual_server(model, tmp_path, ranks=1, max_body=MAX_BODY) as server:
        found = []
        body = completion(prompt="a" * 150_000)
        threads = [
            threading.Thread(target=lambda: found.append(ask(server, "/v1/completions", body)[0])) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        assert began.wait(30)
        status, _, seconds = ask(server, "/v1/completions", completion())
        assert (status, found) == (200, [])
        assert seconds < 5
        go.set()
        for thread in threads:
            thread.join(30)
        assert set(found) <= {200, 429}


# All of them at once: `python -m benchmarks.server_load` does it for as long as one likes.


@pytest.mark.sweep
def test_answers_under_load_are_those_of_one_rank(tmp_path):
    model = server_load.write_model(tmp_path / "model")
    cases = server_load.make_cases(model, 12, seed=3)
    (tmp_path / "run").mkdir()
    how = {"cache_tokens": server_load.CACHE, "max_queue": server_load.QUEUE, "max_body": 2**20}
    with virtual_server(model, tmp_path / "run", **how) as server:
        load = server_load.Load(
            *address(server), [replace(case, body={**case.body, "model": NAME}) for case in cases], seed=3
        )
        asyncio.run(load.run(clients=20, seconds=5, pause=0.1))
        assert load.faults == []
        assert load.outcomes["whole: right"] > 5
        deadline = time.monotonic() + 30
        while b"attnmesh_requests_in_progress 0.0" not in ask(server, "/metrics")[1]:
            assert time.monotonic() < deadline
