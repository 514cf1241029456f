"""Decode tokens per second of a `Generator` against Transformers' `generate`, in one process on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer

from attnmesh.cli.output import Rows
from attnmesh.generation.generator import Generator
from attnmesh.models.loading import load_model
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.model import PEER, prompt_ids

TOKENS, STEPS, ROUNDS = 64, 32, 3  # of a prompt, after its first token, and in turns


def measure(batches: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    """The default model with so many concurrent requests, in turns; the tokens of both must be equal."""
    ours, peer = load_model()[0], load_model(attn_implementation=PEER)[0]
    rows: Rows = []
    for batch in batches:
        ids = prompt_ids(ours, batch * TOKENS)
        prompts = [ids[at : at + TOKENS] for at in range(0, len(ids), TOKENS)]
        results = [(_ours(ours, prompts), _peer(peer, prompts)) for _ in range(1 + ROUNDS)][1:]
        for (_, found), (_, wanted) in results:
            if found != wanted:
                raise RuntimeError(f"a Generator with {batch} requests generates other tokens than Transformers")
        ratios = sorted(wanted[0] / found[0] for found, wanted in results)
        rows.append({
            "requests": batch, "decode_over_generate": statistics.median(ratios), "least": ratios[0],
            "most": ratios[-1],
        })  # fmt: skip
    # Times of a CPU are ratios within one run.
    yield (
        f"SmolLM2-135M, float32, one process, {torch.get_num_threads()} threads, prompts of {TOKENS} tokens, {STEPS} "
        "decode steps: tokens per second over those of Transformers' generate",
        rows,
    )


def _ours(model: Any, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds of all decode steps, and the tokens of each prompt."""
    generator = Generator(
        model, None, cache_tokens=len(prompts) * (TOKENS + STEPS + 1), max_sequences=len(prompts),
        step_tokens=len(prompts) * (TOKENS + 1),
    )  # fmt: skip
    requests = [generator.submit(ids, max_new_tokens=1 + STEPS, stop=[]) for ids in prompts]
    while not all(request.ids for request in requests):
        generator.step()
    done = sum(len(request.ids) for request in requests)
    began = time.perf_counter()
    while not all(request.finished for request in requests):
        generator.step()
    seconds = time.perf_counter() - began
    left = len(prompts) * (1 + STEPS) - done  # the first requests may have gone on while the last were prefilled
    return seconds * len(prompts) * STEPS / left, [request.ids for request in requests]


@torch.no_grad()
def _peer(model: Any, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """The same of `generate`; what its first token takes is subtracted."""
    ids = torch.tensor(prompts)

    def run(count: int) -> tuple[float, Any]:
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return time.perf_counter() - began, out

    first, _ = run(1)
    seconds, out = run(1 + STEPS)
    return seconds - first, out[:, TOKENS:].tolist()


def main(
    batches: Annotated[
        list[int] | None, typer.Option("--requests", min=1, help="Concurrent requests. Repeatable. [default: 1, 8]")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure decode tokens per second of a Generator against Transformers' generate, in one process on the CPU."""
    publish("generate", "cpu", measure(batches or (1, 8)), json)


app = make_app(main)

if __name__ == "__main__":
    app()
