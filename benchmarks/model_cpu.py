"""A language model on the cores of one machine: ranks are processes that share them, beside Transformers alone.

Two ranks with a thread each stand beside one process with two: what is lost to working apart.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from attnmesh.cli.output import Rows
from attnmesh.comm import Comm, launch
from attnmesh.generation.generator import Generator
from attnmesh.integrations.loading import load_model
from benchmarks.model_prompt import PEER, STEPS, prompt_ids


def measure_model_cpu(prompt: int, ranks: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    """The default model on the cores of this machine, divided among so many ranks; and Transformers alone."""
    cores = os.cpu_count() or 1
    load_model()  # converted before anybody is timed
    runs = [_in_processes(_rank, world, max(1, cores // world), prompt) for world in ranks]
    peer = _in_processes(_peer, 1, cores, prompt)
    rows = [{"what": "attnmesh", **run} for run in runs] + [{"what": f"Transformers, {PEER}", **peer}]
    first = rows[0]
    for row in rows:
        for part in ("prefill", "decode"):
            row[f"{part}_over_first"] = row[f"{part}_s"] / first[f"{part}_s"]
        if row["tokens"] != first["tokens"]:
            raise RuntimeError(f"{row['what']} on {row['ranks']} ranks says other tokens than {first['what']}")
    # Times of a CPU are ratios within one run.
    hidden = ("tokens", "prefill_s", "decode_s")
    shown = [{name: value for name, value in row.items() if name not in hidden} for row in rows]
    title = f"SmolLM2-135M, float32, a prompt of {prompt} tokens, {STEPS} new: times over those of the first line"
    yield title, shown


def _in_processes(fn: Callable[..., dict[str, Any]], world: int, threads: int, prompt: int) -> dict[str, Any]:
    """The results of rank 0 of new processes."""
    facts = launch.run(fn, world, threads=threads, prompt=prompt)[0]
    return {"ranks": world, "threads": threads, **facts}


def _rank(comm: Comm, prompt: int) -> dict[str, Any]:
    model, _ = load_model()
    generator = Generator(model, None, comm, cache_tokens=2 * prompt + 4 * STEPS)
    ids = prompt_ids(model, prompt)
    list(generator.generate([ids[:64]], max_new_tokens=2, stop=[]))  # what is made once is made now
    before = generator.stats.prefill_seconds, generator.stats.decode_seconds, generator.stats.decode_steps
    generator.engine.free(generator.engine.sequences[0])
    tokens = [token.id for token in generator.generate([ids], max_new_tokens=STEPS, stop=[])]
    stats = generator.stats
    return {
        "prefill_s": stats.prefill_seconds - before[0],
        "decode_s": (stats.decode_seconds - before[1]) / (stats.decode_steps - before[2]),
        "kv_mb_a_rank": stats.kv_bytes / 1e6,
        "tokens": tokens,
    }


@torch.no_grad()
def _peer(comm: Comm, prompt: int) -> dict[str, Any]:
    model, _ = load_model(attn_implementation=PEER)
    ids = torch.tensor([prompt_ids(model, prompt)])
    model(ids[:, :64])
    began = time.perf_counter()
    out = model(ids, logits_to_keep=1, use_cache=True)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    prefill = time.perf_counter() - began
    seconds, tokens = [], [int(token)]
    for _ in range(STEPS - 1):
        began = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens.append(int(token))
        seconds.append(time.perf_counter() - began)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"prefill_s": prefill, "decode_s": statistics.mean(seconds), "kv_mb_a_rank": held / 1e6, "tokens": tokens}
