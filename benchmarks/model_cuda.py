"""A model of Llama-3.1-8B's shape with random weights on one GPU, in turns with Transformers' own attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.cli.output import Rows
from attnmesh.core.optional import require
from attnmesh.generation.engine import Engine
from attnmesh.integrations.transformers_attention import NAME, register_attention
from benchmarks.model_prompt import PEER, STEPS, prompt_ids

_LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


def measure_model_cuda(prompts: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    """A model of Llama-3.1-8B's shape on one GPU, in turns with Transformers' own attention."""
    model = _random_llama()
    for prompt in prompts:
        ids = prompt_ids(model, prompt)
        rounds = 3 if prompt <= 32768 else 2
        _ours(model, ids[:2048], 4), _peer(model, ids[:2048], 4)  # compile, and warm up
        results = [(_ours(model, ids, STEPS), _peer(model, ids, STEPS)) for _ in range(rounds)]
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
def _ours(model: Any, ids: list[int], steps: int) -> tuple[float, float, Tensor]:
    """Seconds to the first token, seconds a token, and the logits of the first."""
    model.set_attn_implementation(NAME)
    engine = Engine(model, cache_tokens=len(ids) + steps + 8)
    torch.cuda.synchronize()
    began = time.perf_counter()
    sequence = engine.prefill(ids, max_new_tokens=steps)
    logits = sequence.logits
    token = int(logits.argmax())
    prefill = time.perf_counter() - began
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        token = int(engine.decode([sequence], [[token]])[0, -1].argmax())
        seconds.append(time.perf_counter() - began)
    return prefill, statistics.median(seconds), logits


@torch.no_grad()
def _peer(model: Any, ids: list[int], steps: int) -> tuple[float, float, Tensor]:
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
