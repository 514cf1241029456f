"""A language model over ranks, compared with Transformers' own attention."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from attnmesh import launch
from attnmesh.cli.options import MeasuredDeviceOption, default_device, length_argument
from attnmesh.cli.output import Rows
from attnmesh.comm import Comm
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import kv_bytes_per_token
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import NAME
from attnmesh.models.loading import load_model
from attnmesh.utils.optional import require
from benchmarks.common import JsonOption, make_app, publish

PEER = "sdpa"  # Transformers' own attention
STEPS = 32  # tokens after the first
SEQUENCES, SEQUENCE_TOKENS = 32, 8192  # of a step of a batch, on CUDA


def prompt_ids(model: Any, count: int) -> list[int]:
    """Return random tokens, the same on every rank."""
    dice = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(1000, model.config.vocab_size, (count,), generator=dice).tolist()
    return ids


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
            raise RuntimeError(f"{row['what']} on {row['ranks']} ranks generates other tokens than {first['what']}")
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
    generator.reset_prefix_cache()
    tokens = [token.id for token in generator.generate([ids], max_new_tokens=STEPS, stop=[])]
    stats = generator.stats
    return {
        "prefill_s": stats.prefill_seconds - before[0],
        "decode_s": (stats.decode_seconds - before[1]) / (stats.decode_steps - before[2]),
        "kv_mb_per_rank": stats.kv_bytes / 1e6,
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
    return {"prefill_s": prefill, "decode_s": statistics.mean(seconds), "kv_mb_per_rank": held / 1e6, "tokens": tokens}


_LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


def measure_model_cuda(prompts: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    """A model of Llama-3.1-8B's shape on one GPU, in turns with Transformers' own attention; then a batch."""
    model = _random_llama()
    yield from _measure_prompts(model, prompts)
    title = f"the same model, a step of {SEQUENCES} requests of {SEQUENCE_TOKENS} tokens, one rank"
    yield title, [_batch_cuda(model, SEQUENCES, SEQUENCE_TOKENS)]


def _measure_prompts(model: Any, prompts: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    for prompt in prompts:
        ids = prompt_ids(model, prompt)
        rounds = 3 if prompt <= 32768 else 2
        _attnmesh_cuda(model, ids[:2048], 4), _peer_cuda(model, ids[:2048], 4)  # compile, and warm up
        results = [(_attnmesh_cuda(model, ids, STEPS), _peer_cuda(model, ids, STEPS)) for _ in range(rounds)]
        rows: Rows = []
        for which, what in enumerate((NAME, f"Transformers, {PEER}")):
            prefill = statistics.median(result[which][0] for result in results)
            decode = statistics.median(result[which][1] for result in results)
            rows.append({"what": what, "prompt": prompt, "prefill_s": prefill, "decode_ms": 1e3 * decode})
        for row in rows:
            row["prefill_over_ours"] = row["prefill_s"] / rows[0]["prefill_s"]  # type: ignore[operator]
            row["decode_over_ours"] = row["decode_ms"] / rows[0]["decode_ms"]  # type: ignore[operator]
        # Of random weights the likeliest tokens are near ties: the logits after the prompt say whether both read alike.
        ours, peers = results[0][0][2].double(), results[0][1][2].double()
        rows[1]["logits_apart"] = float((ours - peers).norm() / peers.norm())
        rows[0]["logits_apart"] = 0.0
        yield f"Llama-3.1-8B's shape, bf16, random weights, {prompt} tokens, one rank", rows


def _random_llama() -> Any:
    register_attention()
    transformers = require("transformers", extra="hf")
    config = transformers.LlamaConfig(**_LLAMA_8B)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    return model.eval()


@torch.no_grad()
def _attnmesh_cuda(model: Any, ids: list[int], steps: int) -> tuple[float, float, Tensor]:
    """Seconds to the first token, seconds a token, and the logits of the first."""
    model.set_attn_implementation(NAME)
    logits: list[Tensor] = []
    callbacks = Callbacks(on_logits=lambda _, row: logits.append(row))
    generator = Generator(model, None, cache_tokens=len(ids) + steps + 8, callbacks=callbacks)
    tokens = generator.generate([ids], max_new_tokens=1 + steps, stop=[])
    torch.cuda.synchronize()
    seconds = []
    for _ in range(1 + steps):
        began = time.perf_counter()
        next(tokens)
        seconds.append(time.perf_counter() - began)
    return seconds[0], statistics.median(seconds[1:]), logits[0]


@torch.no_grad()
def _peer_cuda(model: Any, ids: list[int], steps: int) -> tuple[float, float, Tensor]:
    model.set_attn_implementation(PEER)
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = model(torch.tensor([ids], device=model.device), logits_to_keep=1, use_cache=True)
    logits, cache = out.logits[0, -1], out.past_key_values
    token = logits.argmax().view(1, 1)
    int(token)
    prefill = time.perf_counter() - began
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        int(token)
        seconds.append(time.perf_counter() - began)
    return prefill, statistics.median(seconds), logits


@torch.no_grad()
def _batch_cuda(model: Any, sequences: int, length: int) -> dict[str, Any]:
    """A decode step of many submitted requests, and the share of it in which the GPU waits for the host."""
    model.set_attn_implementation(NAME)
    new = STEPS + sequences + 8  # the first ones go on while the last prompts are computed, one in each step
    generator = Generator(
        model, None, cache_tokens=sequences * (length + new), max_sequences=sequences, step_tokens=length + sequences
    )
    engine = generator.engine
    run, events = engine._forward_step, []

    def timed(*step: Any) -> Tensor:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        logits: Tensor = run(*step)
        end.record()
        events.append((begin, end))
        return logits

    engine._forward_step = timed
    dice = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, model.config.vocab_size, (sequences, length), generator=dice).tolist()
    requests = [generator.submit(ids, max_new_tokens=new, stop=[]) for ids in prompts]
    while min(len(request.ids) for request in requests) < 4:  # then the step has been captured
        generator.step()
    events.clear()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        generator.step()
        seconds.append(time.perf_counter() - began)
    pace = statistics.median(seconds)
    on_gpu = statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3
    weights = sum(x.nbytes for x in model.parameters()) - model.get_input_embeddings().weight.nbytes
    read = weights + sequences * length * kv_bytes_per_token(model.config, engine.storage)
    return {
        "sequences": sequences, "tokens": length, "steps": len(seconds), "step_ms": 1e3 * pace, "gpu_ms": 1e3 * on_gpu,
        "host_share": 1 - on_gpu / pace, "tokens_per_s": sequences / pace, "read_tb_per_s": read / pace / 1e12,
    }  # fmt: skip


def main(
    device: MeasuredDeviceOption = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            parser=length_argument,
            metavar="LENGTH",
            help="Tokens of the prompt. Repeatable. [default: 2048; 32k, 128k on CUDA]",
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=1, help="Ranks on the CPU. Repeatable. [default: 1, 2, 4]")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure a language model over ranks against Transformers' own attention: prefill, decode, KV cache per rank."""
    chosen = default_device(device)
    if chosen == "cuda":
        sections = measure_model_cuda(lengths or (32768, 131072))
    else:
        sections = (each for length in lengths or (2048,) for each in measure_model_cpu(length, ranks or (1, 2, 4)))
    publish("model", chosen, sections, json)


app = make_app(main)

if __name__ == "__main__":
    app()
