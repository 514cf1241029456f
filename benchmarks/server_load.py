"""`python -m benchmarks.server_load`: `attnmesh serve` under clients that come, hang up and misbehave, for long.

Every answer is compared with that of a `Generator` on one rank. The resident memory of all processes of the server is
read every few seconds; its slope is that of a least squares line after a fifth of the time. Exits with 1 if an answer
is wrong or missing.
"""

from __future__ import annotations

import asyncio
import json as json_text
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from attnmesh.cli import output
from attnmesh.cli.output import Rows
from attnmesh.generation.generator import Generator
from attnmesh.generation.sampling import Sampling
from attnmesh.models.loading import load_model
from benchmarks.common import JsonOption, make_app, publish

WORDS = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(61))]
NAME, CACHE, QUEUE = "load", 1000, 96
MIB = 2**20
BUSY = (429, 503)  # answers that ask to come again

Body = dict[str, Any]


def write_model(folder: Path) -> Path:
    """A small Llama with random weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CACHE, eos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Case:
    """A body, the texts that its answer must have, and their number of tokens."""

    body: Body
    texts: list[str]
    tokens: int


def make_cases(model: Path, count: int, seed: int) -> list[Case]:
    """Requests with the answers of one rank."""
    loaded, tokenizer = load_model(model)
    generator, dice, cases = Generator(loaded, tokenizer, cache_tokens=CACHE), random.Random(seed), []
    words = [word for word in tokenizer.get_vocab() if not word.startswith("<")]
    for i in range(count):
        prompt = " ".join(dice.choice(words) for _ in range(dice.choice([1, 7, 30, 150])))
        most, n = dice.choice([1, 8, 24, 60]), dice.choice([1, 1, 3])
        temperature = dice.choice([0.0, 1.0])
        requests = [
            generator.submit(prompt, max_new_tokens=most, sampling=Sampling(temperature, seed=i), sample=j)
            for j in range(n)
        ]
        while generator.num_unfinished:
            generator.step()
        body = {"prompt": prompt, "max_tokens": most, "n": n, "temperature": temperature, "seed": i}
        texts = [request.text for request in requests]
        cases.append(Case({"model": NAME, **body}, texts, sum(len(request.ids) for request in requests)))
    return cases


@dataclass
class Load:
    """Clients of one server, and what became of their requests."""

    host: str
    port: int
    cases: list[Case]
    seed: int = 0
    wait: float = 300.0  # seconds for an answer, after which it is lost
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_health: float = 0.0

    async def run(self, clients: int, seconds: float, pause: float) -> None:
        """Let the clients ask for some time."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._client(random.Random(self.seed * 1000 + i), until, pause) for i in range(clients)))

    async def _client(self, dice: random.Random, until: float, pause: float) -> None:
        kinds: dict[Callable[[random.Random], Awaitable[str]], int] = {
            self.whole: 40, self.streamed: 30, self.hangs_up: 12, self.hangs_up_early: 6, self.is_half_open: 3,
            self.sends_slowly: 3, self.sends_junk: 4, self.asks_too_much: 2,
        }  # fmt: skip
        while time.monotonic() < until:
            kind = dice.choices(list(kinds), list(kinds.values()))[0]
            name = kind.__name__.replace("_", " ")
            try:
                async with asyncio.timeout(self.wait):
                    outcome = await kind(dice)
            except TimeoutError:
                outcome = "lost: no answer in time"
            except (OSError, EOFError, ValueError, IndexError) as error:
                outcome = f"lost: {type(error).__name__}"
            self.outcomes[f"{name}: {outcome.partition('!')[0]}"] += 1
            if outcome.startswith(("lost", "wrong")):
                self.faults.append(f"{name}: {outcome}"[:300])
            await asyncio.sleep(dice.uniform(0, 2 * pause))

    # What clients do.

    async def whole(self, dice: random.Random) -> str:
        case = dice.choice(self.cases)
        status, text = await self._ask(case.body)
        if status != 200:
            return "asked to come again" if status in BUSY else f"wrong status {status}! {text}"
        answer = json_text.loads(text)
        found = [choice["text"] for choice in answer["choices"]]
        is_right = found == case.texts and answer["usage"]["completion_tokens"] == case.tokens
        return "right" if is_right else f"wrong answer! {found} instead of {case.texts}"

    async def streamed(self, dice: random.Random) -> str:
        case = dice.choice(self.cases)
        status, text = await self._ask({**case.body, "stream": True})
        if status != 200:
            return "asked to come again" if status in BUSY else f"wrong status {status}! {text}"
        *events, last = re.findall(r"data: (.*)\n\n", text)
        found = [""] * len(case.texts)
        for event in map(json_text.loads, events):
            found[event["choices"][0]["index"]] += event["choices"][0]["text"]
        is_right = found == case.texts and last == "[DONE]"
        return "right" if is_right else f"wrong answer! {found} instead of {case.texts}"

    async def hangs_up(self, dice: random.Random) -> str:
        """In the middle of a stream, without a farewell half of the time."""
        reader, writer = await self._send({**dice.choice(self.cases).body, "stream": True, "max_tokens": 200})
        await reader.read(dice.choice([1, 200, 2000]))
        if dice.random() < 0.5:
            writer.transport.abort()
        writer.close()
        return "gone"

    async def hangs_up_early(self, dice: random.Random) -> str:
        """Before the answer, or within the body."""
        data = _request({**dice.choice(self.cases).body, "max_tokens": 200})
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data[: len(data) - dice.choice([0, 30])])
        await writer.drain()
        await asyncio.sleep(dice.uniform(0, 0.3))
        writer.close()
        return "gone"

    async def is_half_open(self, dice: random.Random) -> str:
        """Sends a part of its headers, or nothing."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(_request({})[: dice.choice([0, 1, 40])])
        await reader.read()  # the server gives it up
        writer.close()
        return "closed"

    async def sends_slowly(self, dice: random.Random) -> str:
        case = dice.choice(self.cases)
        data = _request(case.body)
        reader, writer = await asyncio.open_connection(self.host, self.port)
        for at in range(0, len(data), 40):
            writer.write(data[at : at + 40])
            await asyncio.sleep(0.02)
        status, text = await _answer(reader, writer)
        if status != 200:
            return "asked to come again" if status in BUSY else f"wrong status {status}! {text}"
        found = [choice["text"] for choice in json_text.loads(text)["choices"]]
        return "right" if found == case.texts else f"wrong answer! {found} instead of {case.texts}"

    async def sends_junk(self, dice: random.Random) -> str:
        case = dice.choice(self.cases)
        changes: list[Body] = [
            {"prompt": "\ud800"}, {"\udfff": 1}, {"n": -1}, {"temperature": []}, {"prompt": [99999]}, {"model": "x"},
            {"presence_penalty": 3e38}, {"logit_bias": {"x": 1}}, {"stop": [""]},
        ]  # fmt: skip
        status, text = await self._ask({**case.body, **dice.choice(changes)})
        return "refused" if status in (400, 404, *BUSY) else f"wrong status {status}! {text}"

    async def asks_too_much(self, dice: random.Random) -> str:
        changes: list[Body] = [{"prompt": [[1]] * 1000, "n": 1024}, {"prompt": "w1 " * 300_000}, {"max_tokens": 10**6}]
        status, text = await self._ask({**dice.choice(self.cases).body, **dice.choice(changes)})
        return "refused" if status in (400, *BUSY) else f"wrong status {status}! {text}"

    # How they do it.

    async def _send(self, body: Body) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(_request(body))
        return reader, writer

    async def _ask(self, body: Body) -> tuple[int, str]:
        return await _answer(*await self._send(body))

    async def health(self) -> bool:
        """Whether the server is in good health, and within how many seconds it said so."""
        began = time.monotonic()
        status, _ = await self._get("/health")
        self.slowest_health = max(self.slowest_health, time.monotonic() - began)
        return status == 200

    async def metric(self, name: str) -> float:
        """A metric of the server."""
        _, text = await self._get("/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def _get(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return await _answer(reader, writer)


def _request(body: Body) -> bytes:
    data = json_text.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str]:
    """The status and the text of an answer, which must be complete."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split()[1])
        if found := re.search(r"content-length: (\d+)", head):
            return status, (await reader.readexactly(int(found[1]))).decode()
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        return status, b"".join(parts).decode()
    finally:
        writer.close()


class ServerProcess:
    """`attnmesh serve` in processes of its own."""

    def __init__(self, model: Path, ranks: int) -> None:
        options = ("--port", 0, "--served-model-name", NAME, "--ranks", ranks, "--cache-tokens", CACHE)
        limits = ("--max-queue", QUEUE, "--no-access-log")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attnmesh", "serve", "--model", str(model), *map(str, (*options, *limits))],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        found = re.search(r"http://(.*):(\d+)/v1", self._process.stdout.readline())
        if found is None:
            raise RuntimeError("the server has not started")
        self.host, self.port = found[1], int(found[2])

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        pages = 0
        for process in _family(self._process.pid):
            with suppress(OSError):
                pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> int:
        """End it; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()


def _family(process: int) -> Iterator[int]:
    """A process and all that it started."""
    yield process
    for thread in Path(f"/proc/{process}/task").glob("*"):
        with suppress(OSError):
            for child in (thread / "children").read_text().split():
                yield from _family(int(child))


async def measure(server: ServerProcess, load: Load, clients: int, seconds: float, pause: float) -> list[list[float]]:
    """Load a server; the seconds and the MiB of its memory at some moments."""
    samples, began = [], time.monotonic()
    console = output.console(stderr=True)
    working = asyncio.create_task(load.run(clients, seconds, pause))
    said = began
    while not working.done():
        await asyncio.wait({working}, timeout=min(5.0, seconds / 20))
        if not working.done() and not await load.health():
            load.faults.append("/health is not 200")
        now = time.monotonic()
        samples.append([now - began, server.memory() / MIB])
        if now - said >= 60:
            said = now
            requests = load.outcomes.total()
            console.print(f"{now - began:.0f} s: {requests} requests, {samples[-1][1]:.0f} MiB", soft_wrap=True)
    await working
    deadline = time.monotonic() + 30
    while await load.metric("attnmesh_requests_in_progress") and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    if left := await load.metric("attnmesh_requests_in_progress"):
        load.faults.append(f"{left:.0f} requests are in progress after all clients have ended")
    return samples


def slope(samples: list[list[float]]) -> tuple[float, float]:
    """MiB per hour after a fifth of the time, and the standard error."""
    x, y = np.array([each for each in samples if each[0] >= samples[-1][0] / 5]).T
    if len(x) < 3:
        return float("nan"), float("nan")
    (a, b), rest = np.polyfit(x, y, 1), len(x) - 2
    errors = y - (a * x + b)
    deviation = np.sqrt((errors @ errors) / rest / ((x - x.mean()) @ (x - x.mean())))
    return 3600 * float(a), 3600 * float(deviation)


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long clients come.")] = 60.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 50,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the server.")] = 2,
    wait: Annotated[float, typer.Option(min=1, help="Seconds for an answer, after which it counts as lost.")] = 300.0,
    pause: Annotated[float, typer.Option(min=0, help="Mean seconds between two requests of a client.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what clients do.")] = 0,
    json: JsonOption = None,
) -> None:
    """Let clients that come, hang up and misbehave load a server, and compare its answers and its memory."""
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name))
        cases = make_cases(model, 64, seed)
        server = ServerProcess(model, ranks)
        load = Load(server.host, server.port, cases, seed, wait)
        code = -1
        try:
            samples = asyncio.run(measure(server, load, clients, 60 * minutes, pause))
        finally:
            code = server.stop()
    if code:
        load.faults.append(f"the server has ended with {code}")
    per_hour, error = slope(samples)
    memory: Rows = [
        {
            "minutes": round(samples[-1][0] / 60, 1), "clients": clients, "ranks": ranks,
            "requests": load.outcomes.total(), "faults": len(load.faults), "first_mib": round(samples[0][1], 1),
            "last_mib": round(samples[-1][1], 1), "most_mib": round(max(mib for _, mib in samples), 1),
            "mib_per_hour": round(per_hour, 1), "standard_error": round(error, 1),
            "slowest_health_s": round(load.slowest_health, 2),
        }
    ]  # fmt: skip
    outcomes: Rows = [{"outcome": name, "requests": count} for name, count in sorted(load.outcomes.items())]
    publish("server_load", "cpu", [("outcomes", outcomes), ("server load", memory)], json)
    for fault in load.faults[:20]:
        output.console(stderr=True).print(fault, soft_wrap=True, markup=False)
    if load.faults:
        raise typer.Exit(1)


app = make_app(main)

if __name__ == "__main__":
    app()
