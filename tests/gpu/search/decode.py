"""`paged_decode_attention` and `decode_attention`: storages, ragged lengths, poisoned caches, replayed graphs.

The cache holds NaN wherever nothing may be read, and unused entries of the block table hold -1 or very large numbers.
"""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import torch

import attnmesh as am
from attnmesh.core.state import State
from attnmesh.ops.storage import Stored
from attnmesh.testing.decode import DecodeProblem, random_decode
from helpers.decode import LSE_UNITS, MASK_SHAPES, assert_decode_close

from .cases import DTYPES, Case, chance, draw_length, pick

# Compile-time choices: the widths of keys and values, query heads per KV head, KV heads.
SHAPES = {
    ((128, 128), 8, 2): 6, ((128, 128), 4, 8): 3, ((64, 64), 8, 1): 3, ((128, 128), 1, 4): 2, ((256, 256), 2, 2): 1,
    ((96, 96), 3, 2): 1, ((192, 128), 6, 1): 1, ((80, 48), 5, 2): 1, ((32, 32), 16, 1): 1, ((128, 128), 64, 1): 1,
}  # fmt: skip
LATENT_GROUPS = {128: 4, 64: 2, 16: 3, 32: 1, 20: 1}  # query heads of MLA, which has one KV head of 576/512
BACKENDS = {
    "cuda": {"auto": 6, "triton": 3, "gluon": 2, "gluon_gqa": 2},
    "cpu": {"auto": 3, "cpu": 3, "reference": 1},
}
MOST_NUMBERS = {"cuda": 24_000_000, "cpu": 400_000}  # in a cache
MOST_SCORES = {"cuda": 30_000_000, "cpu": 400_000}
KEY_RANGES = {"causal": 10, "intervals": 2, "tree": 1, "trees": 1, "mask": 1}


def draw(random: Random, build: Random, device: str) -> Case:
    latent = chance(build, 0.35)
    dims, group, kv_heads = ((576, 512), pick(build, LATENT_GROUPS), 1) if latent else pick(build, SHAPES)
    storages = {"plain": 5, "fp8_ds_mla": 3, "fp8": 2} if latent else {
        "plain": 6, "fp8": 3, "fp8 heads": 2, "int8": 2, "bfp8": 2
    }  # fmt: skip
    block = pick(build, {64: 5, 16: 3, 128: 1, 1: 0.5, 7: 0.5, 256: 0.5, None: 2})
    tokens = pick(build, {1: 6, 2: 2, 3: 1, 4: 1, 5: 1, 8: 1})
    batch = draw_length(random, 300 if device == "cuda" else 5)
    longest = draw_length(random, 6000 if device == "cuda" else 150)
    while (
        batch * longest * kv_heads * sum(dims) > MOST_NUMBERS[device]
        or batch * longest * tokens * group * kv_heads > MOST_SCORES[device]
    ):
        batch, longest = (max(1, batch * 2 // 3), longest) if chance(random, 0.5) else (batch, longest * 2 // 3 or 1)
    key_range = pick(build, KEY_RANGES)
    if key_range == "mask":
        kind = build.choice(("bool", "bias"))
        key_range = f"{kind} {random.choice(MASK_SHAPES)}" + (" short" if chance(random, 0.3) else "")
    window = draw_length(random, longest) if key_range == "causal" and chance(build, 0.25) else None
    case: Case = {
        "batch": batch, "longest": longest, "tokens": tokens, "group": group, "kv_heads": kv_heads, "dims": dims,
        "v_in_k": latent, "storage": pick(build, storages), "block": block, "key_range": key_range, "window": window,
        "dtype": pick(build, {"bf16": 8, "fp16": 2, "fp32": 1}), "backend": pick(build, BACKENDS[device]),
        "sinks": chance(build, 0.2),
    }  # fmt: skip
    if case["storage"] == "fp8_ds_mla":
        case["block"] = block = block or 64  # such caches are paged
    case = {name: value.replace(" ", "_") if isinstance(value, str) else value for name, value in case.items()}
    shares = {None: 8, "blocks": 2 if block else 0, "cache": 0 if key_range == "intervals" else 1}
    case["share"] = pick(random, shares)
    case["memory"] = pick(random, {"own": 4, "layer": 1, "layer_inside": 1, "token_major": 0 if block else 1})
    case["q_memory"] = pick(random, {"transposed": 2, "own": 2, "fused": 1})
    case["split_size"] = pick(random, {None: 6, 64: 1, 1000: 1})
    case["max_splits"] = pick(random, {None: 6, 1: 1, 3: 1}) if case["split_size"] is None else None
    case["wide_out"] = chance(build, 0.15)
    case["replay"] = chance(random, 0.4)
    return case | {"seed": random.randrange(10**6)}


def check(case: Case, device: str) -> None:
    random = Random(case["seed"])
    drop_device_errors()
    problem = _problem(case, random, device)
    backend = case["backend"]
    units = 2 * LSE_UNITS * max(1.0, case["dims"][0] / 128)  # there are many more rows than in a test
    if not case.get("replay"):
        assert_decode_close(problem.run(backend), problem, units)
        assert_no_device_errors()
        return
    replay = _captured(problem, backend, device)
    for _ in range(3):
        actual = replay()
        assert_decode_close(State(*(x.clone() for x in actual)), problem, units)
        problem = _changed(problem, case, random)
    assert_no_device_errors()


def drop_device_errors() -> None:
    """Forget what kernels of an earlier case reported."""
    with contextlib.suppress(ValueError):
        am.decode.check_decode_errors()


def assert_no_device_errors() -> None:
    """Assert that kernels have reported no wrong block or position: there is none in what they may read."""
    try:
        am.decode.check_decode_errors()
    except ValueError as error:
        raise AssertionError(f"reported on the device: {error}") from None


def _problem(case: Case, random: Random, device: str) -> DecodeProblem:
    names = ("storage", "key_range", "memory")
    words = {name: case[name].replace("_", " ") for name in names if case[name] != "fp8_ds_mla"}
    longest, tokens = case["longest"], case["tokens"]
    # A sequence that is not skipped holds at least its new tokens.
    positions = [
        random.choice((-1, tokens - 1, longest - 1, *(random.randint(0, longest - 1) for _ in range(5))))
        for _ in range(case["batch"])
    ]
    positions = [at if at < 0 else max(at, tokens - 1) for at in positions]
    options: dict[str, Any] = {name: case[name] for name in ("split_size", "max_splits") if case.get(name)}
    if case.get("wide_out"):
        options["out_dtype"] = torch.float32
    return random_decode(
        positions, tokens=tokens, group=case["group"], kv_heads=case["kv_heads"], dims=case["dims"],
        v_in_k=bool(case.get("v_in_k")), block_size=case.get("block"), dtype=DTYPES[case["dtype"]],
        share=case.get("share"), q_memory=case["q_memory"], window=case.get("window"), sinks=bool(case.get("sinks")),
        at="int32", device=device, seed=case["seed"], **{"storage": case["storage"], **words}, **options,
    )  # fmt: skip


def _captured(problem: DecodeProblem, backend: str, device: str) -> Any:
    """Return a function that computes the call again from what its tensors hold: on a GPU, a graph."""
    if device == "cpu":
        return lambda: problem.run(backend)
    problem.run(backend)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = problem.run(backend)

    def replay() -> State:
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        return results

    return replay


def _changed(problem: DecodeProblem, case: Case, random: Random) -> DecodeProblem:
    """Return the problem with other blocks and lengths in the same tensors. Lengths shrink where all keys are there."""
    table, at = problem.table, problem.options["cur_pos"]
    if table is not None:
        blocks = _tensors(problem.k)[0].shape[0]
        order = torch.tensor(random.sample(range(blocks), blocks), device=table.device)
        inside = (table >= 0) & (table < blocks)
        table.copy_(torch.where(inside, order[table.clamp(0, blocks - 1).long()].int(), table))
        for x in _tensors(problem.k) + ([] if case.get("v_in_k") else _tensors(problem.v)):
            as_bytes = x.view(torch.int8) if x.itemsize == 1 else x
            as_bytes[order] = as_bytes.clone()
    if case.get("window") is None and case["key_range"] == "causal" and not case.get("share"):
        least = case["tokens"] - 1
        shorter = [last if last < 0 else random.randint(min(least, last), last) for last in at.tolist()]
        at.copy_(torch.tensor(shorter))
    return problem


def _tensors(stored: Stored) -> list[torch.Tensor]:
    """Return the tensors with a block in every row."""
    if isinstance(stored, torch.Tensor):
        return [stored]
    scales = [] if stored.storage == "fp8" else [stored.scales]
    return [stored.values, *scales, *([] if stored.rope is None else [stored.rope])]
