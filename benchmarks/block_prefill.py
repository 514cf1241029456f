"""A prompt through `AttentionBlock` in one step, against steps of 8 tokens and against attention without a cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import attnmesh as am
from attnmesh.comm import SoloComm
from attnmesh.ops.block.config import split_and_rotate
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.testing.block import random_block
from benchmarks.common import JsonOption, QuickOption, make_app, publish

Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BLOCK_SIZE, ROUNDS = 16, 4, 64, 1024, 16, 5


class Case(NamedTuple):
    """`tokens` new tokens after `cached` ones, in a batch of `batch` rows of which one is in the step."""

    cached: int
    tokens: int
    storage: str | None = None
    window: int | None = None
    batch: int = 1


CASES = (
    Case(0, 512), Case(0, 2048), Case(4096, 512), Case(4096, 64), Case(0, 2048, storage="int8"),
    Case(0, 2048, window=256), Case(0, 512, batch=4),
)  # fmt: skip
QUICK = (Case(16, 24), Case(0, 24, storage="int8", window=8, batch=2))


def measure(case: Case, device: str) -> dict[str, Any]:
    """The time of the others divided by that of one step, each the median of alternating runs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config, weights = random_block(
        Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, biases=False, window=case.window, dtype=dtype, device=device
    )
    block = am.AttentionBlock(config, weights, am.DecodeSharding(), SoloComm())
    length = case.cached + case.tokens
    cache = block.make_cache(
        batch=case.batch, num_blocks=-(-length // BLOCK_SIZE), block_size=BLOCK_SIZE, max_length=length,
        storage=case.storage,
    )  # fmt: skip
    x = torch.randn(case.batch, length, HIDDEN, dtype=dtype, device=device)
    sequence = cache.allocate(length)
    if case.cached:
        block(x[:, : case.cached], cache, cache.append([sequence], case.cached))

    def in_steps_of(size: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cache.truncate(sequence, case.cached)
            parts = x[:, case.cached :].split(size, 1)
            return torch.cat([block(part, cache, cache.append([sequence], part.shape[1])) for part in parts], 1)

        return run

    @torch.no_grad()
    def without_a_cache() -> Tensor:
        """One row, all of it: only where nothing is cached is it the same work."""
        q, kv = F.linear(x[:1], weights.qkv).tensor_split([Q_HEADS * HEAD_DIM], -1)
        q, k, v = split_and_rotate(q, kv, torch.arange(length, device=device)[None], config, weights)
        mask = am.Causal() if case.window is None else am.SlidingWindow(case.window - 1)
        assert weights.out is not None
        return F.linear(am.attention(q, k, v, mask=mask).transpose(1, 2).flatten(2), weights.out)

    runs = {"once": in_steps_of(case.tokens), "eight": in_steps_of(MAX_DECODE_TOKENS)}
    if not case.cached:
        runs["uncached"] = without_a_cache
    row = sequence.row
    difference = (runs["once"]()[row] - runs["eight"]()[row]).float().norm() / runs["once"]()[row].float().norm()
    rounds = [{name: _seconds(run, device) for name, run in runs.items()} for _ in range(ROUNDS)]
    times = {name: statistics.median(each[name] for each in rounds) for name in runs}
    return case._asdict() | {
        "8 tokens at a time / one step": times["eight"] / times["once"],
        "attention without a cache / one step": times["uncached"] / times["once"] if "uncached" in times else None,
        "difference": float(difference),
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu", quick: QuickOption = False,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Time a prompt through AttentionBlock in one step and in steps of 8 tokens."""
    rows = [measure(case, device) for case in (QUICK if quick else CASES)]
    publish("block_prefill", device, [("a prompt in one step", rows)], json)


app = make_app(main)

if __name__ == "__main__":
    app()
