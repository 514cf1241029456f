"""`python -m benchmarks.server_overhead`: tokens per second of streams over HTTP beside a `Generator` in process.

Both compute the same prompts on one rank with the same number of threads, in turns: the server is idle while the
`Generator` computes. The clients take a part of the same cores.
"""

from __future__ import annotations

import asyncio
import json as json_text
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnmesh.cli.output import Rows
from attnmesh.generation.generator import Generator
from attnmesh.models.loading import load_model, model_folder
from benchmarks.common import JsonOption, make_app, publish


def in_process(generator: Generator, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of requests that are submitted together."""
    began = time.perf_counter()
    requests = [generator.submit(ids, max_new_tokens=tokens, stop=[]) for ids in prompts]
    while not all(request.finished for request in requests):
        generator.step()
    return len(prompts) * tokens / (time.perf_counter() - began)


async def over_http(host: str, port: int, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of as many streams."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(_stream(host, port, ids, tokens) for ids in prompts))
    assert counts == [tokens] * len(prompts), f"streams of {counts} tokens instead of {tokens}"
    return len(prompts) * tokens / (time.perf_counter() - began)


async def _stream(host: str, port: int, ids: list[int], tokens: int) -> int:
    """The number of tokens of a stream, by its usage."""
    body: dict[str, Any] = {
        "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json_text.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    text = (await reader.read(-1)).decode()
    writer.close()
    found = re.search(r'"completion_tokens": (\d+)', text)
    return int(found[1]) if found and "data: [DONE]" in text else 0


def main(
    model: Annotated[Path | None, typer.Option(help="Folder or GGUF file of a model.", show_default="SmolLM2")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each, in turns; the first is left out.")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each.", show_default="torch's")] = None,
    json: JsonOption = None,
) -> None:
    """Measure tokens per second over HTTP and in process."""
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    folder, cache = model_folder(model), streams * (prompt_tokens + tokens + 16)
    loaded, tokenizer = load_model(folder)
    generator = Generator(loaded, tokenizer, cache_tokens=cache, max_sequences=streams)
    options = ("--model", folder, "--port", 0, "--cache-tokens", cache, "--max-sequences", streams, "--ranks", 1)
    server = subprocess.Popen(
        [sys.executable, "-m", "attnmesh", "serve", *map(str, options), "--no-access-log"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    speeds: list[tuple[float, float]] = []
    try:
        assert server.stdout is not None
        found = re.search(r"http://(.*):(\d+)/v1", server.stdout.readline())
        if found is None:
            raise RuntimeError("the server has not started")
        for i in range(rounds):
            random = torch.Generator().manual_seed(i)
            shape = (streams, prompt_tokens)
            prompts = torch.randint(3, loaded.config.vocab_size, shape, generator=random).tolist()
            alone = in_process(generator, prompts, tokens)
            speeds.append((alone, asyncio.run(over_http(found[1], int(found[2]), prompts, tokens))))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    kept = speeds[1:] or speeds
    alone, http = (statistics.median(each) for each in zip(*kept, strict=True))
    rows: Rows = [
        {
            "streams": streams, "prompt": prompt_tokens, "tokens": tokens, "threads": threads,
            "generator_tokens_s": round(alone, 1), "http_tokens_s": round(http, 1),
            "ratio": round(statistics.median(b / a for a, b in kept), 3),
        }
    ]  # fmt: skip
    publish("server_overhead", "cpu", [("server overhead", rows)], json)


app = make_app(main)

if __name__ == "__main__":
    app()
