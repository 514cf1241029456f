"""Sparse decode over a paged cache: attention over named keys, and the indexer's top-k.

Blocks are shuffled. Slots of the pool that nothing reads hold poison, and unused entries of the table anything.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.ops.storage import Quantized, Stored, dequantize
from attnmesh.testing.decode import UNUSED_ENTRIES, poison_cache
from helpers.sparse import embedded

from . import indexed
from .cases import DTYPES, Case, chance, draw_length, integers, normal, pick
from .decode import assert_no_device_errors, drop_device_errors
from .sparse import assert_topk

DIMS = {(576, 512): 8, (512, 512): 2, (192, 128): 1, (64, 64): 1, (40, 24): 0.5}
LATENTS = {(576, 512): 8, (418, 384): 0.5, (192, 128): 1}  # widths of fp8_ds_mla
HEADS = {64: 4, 128: 5, 16: 4, 32: 1, 8: 1, 1: 1, 20: 0.5}
BACKENDS = {"cuda": {"auto": 4, "triton": 1}, "cpu": {"auto": 1, "torch": 1}}
MOST_KEYS, MOST_SLOTS = {"cuda": 150_000, "cpu": 600}, {"cuda": 3 << 20, "cpu": 1 << 11}
MOST_DOTS = {"cuda": 1 << 29, "cpu": 1 << 20}


def draw(random: Random, build: Random, device: str) -> Case:
    gpu = device == "cuda"
    op = pick(build, {"attention": 3, "topk": 2})
    topk = pick(build, {2048: 3, 512: 3, 128: 1, 100: 1, 1: 0.5}) if gpu else pick(build, {1: 1, 9: 3, 33: 3})
    tokens = pick(build, {1: 5, 2: 2, 3: 1, 4: 1, 8: 0.5})
    batch = draw_length(random, 200 if gpu else 4)
    longest = draw_length(random, 20_000 if gpu else 200)
    index = pick(build, {(64, 128): 5, (32, 128): 2, (4, 64): 1, (3, 20): 0.5})
    while (
        batch * longest > MOST_KEYS[device]
        or batch * tokens * topk > MOST_SLOTS[device]
        or (op == "topk" and batch * longest * tokens * index[0] > MOST_DOTS[device])
    ):
        batch, longest = (max(1, batch * 2 // 3), longest) if chance(random, 0.5) else (batch, longest * 2 // 3 or 1)
    fp8 = chance(build, 0.55)
    case: Case = {
        "op": op, "batch": batch, "longest": longest, "tokens": tokens, "topk": topk, "fp8": fp8,
        "block": pick(build, {64: 6, 16: 1, 1: 0.5, 4: 0.5, 256: 0.5}),
        "dtype": pick(build, {"bf16": 8, "fp16": 1, "fp32": 1}), "backend": pick(build, BACKENDS[device]),
    }  # fmt: skip
    if op == "attention":
        case |= {"heads": pick(build, HEADS), "dims": pick(build, LATENTS if fp8 else DIMS)}
        odds = {"counts": 0.6, "sinks": 0.3, "slots": 0.3, "wide_out": 0.15, "max_logits": 0.5, "embedded": 0.3}
        case |= {name: chance(build, each) for name, each in odds.items()}
        case["split_size"] = pick(random, {None: 6, 64: 1, 1000: 1})
    else:
        case |= {"index": index, "relu": chance(build, 0.8), "key_range": chance(random, 0.3)}
    return case | {"seed": random.randrange(10**6)}


def check(case: Case, device: str) -> None:
    drop_device_errors()
    random = Random(case["seed"])
    lengths = [
        random.choice((0, 1, case["longest"], *(random.randint(0, case["longest"]) for _ in range(5))))
        for _ in range(case["batch"])
    ]
    table, blocks = _table(lengths, case["block"], random, device)
    (_attention if case["op"] == "attention" else _topk)(case, lengths, table, blocks, device)
    assert_no_device_errors()


def _table(lengths: list[int], block: int, random: Random, device: str) -> tuple[Tensor, int]:
    """Return a table of shuffled blocks, and how many blocks there are."""
    used = [-(-n // block) for n in lengths]
    blocks = sum(used) + 3
    order = iter(random.sample(range(blocks), blocks))
    width = max(1, *used)
    rows = [
        [next(order) if i < count else UNUSED_ENTRIES[i % len(UNUSED_ENTRIES)] for i in range(width)] for count in used
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device), blocks


def _slots(table: Tensor, positions: Tensor, block: int) -> Tensor:
    """Return where the pool holds positions [B, ...]; any number where a position is not of the sequence."""
    flat = positions.clamp(min=0).long().flatten(1)
    held = table.gather(1, (flat // block).clamp(max=table.shape[1] - 1)).long() * block + flat % block
    return held.view(positions.shape)


def _spoiled(pool: Stored, live: Tensor) -> Stored:
    """Return the pool with poison in every slot that is not live."""
    if isinstance(pool, Tensor):
        return pool.masked_fill(~live[..., None, None], torch.nan)
    spoiled = Quantized(pool.values.clone(), pool.scales.clone(), None if pool.rope is None else pool.rope.clone())
    poison_cache(spoiled)
    for name in ("values", "scales") if pool.rope is None else ("values", "scales", "rope"):
        target, source = (getattr(each, name) for each in (spoiled, pool))
        if name == "values":
            target, source = target.view(torch.int8), source.view(torch.int8)
        target[live] = source[live]
    return spoiled


def _attention(case: Case, lengths: list[int], table: Tensor, blocks: int, device: str) -> None:
    batch, tokens, topk, heads = case["batch"], case["tokens"], case["topk"], case["heads"]
    (d, d_v), seed, block, dtype = case["dims"], case["seed"], case["block"], DTYPES[case["dtype"]]
    size = torch.tensor(lengths, device=device)[:, None, None]
    draws = integers(0, 2**31 - 1, batch, tokens, topk, seed=f"{seed}-indices", device=device)
    positions = torch.where(size > 0, draws % size.clamp(min=1), -1).int()
    positions = positions.masked_fill(integers(0, 9, *positions.shape, seed=f"{seed}-odd", device=device) == 0, -1)
    counts = None
    valid = positions >= 0
    if case.get("counts"):
        counts = integers(-1, topk + 3, batch, tokens, seed=f"{seed}-counts", device=device)
        counts = counts.masked_fill(integers(0, 4, batch, tokens, seed=f"{seed}-zeros", device=device) == 0, 0)
        beyond = torch.arange(topk, device=device) >= counts[..., None]
        positions = positions.masked_fill(beyond, 10**6)  # not looked at
        valid &= ~beyond
    slots = _slots(table, torch.where(valid, positions, 0), block)
    indices = torch.where(valid, slots, positions).int() if case.get("slots") else positions

    x = normal(blocks, block, 1, d, seed=f"{seed}-pool", device=device)
    pool = am.quantize(x, "fp8_ds_mla") if case.get("fp8") else x.to(dtype)
    if isinstance(pool, Quantized) and seed % 3 == 0:
        pool.scales.mul_(1.7)  # other projects' scales are not powers of two
    live = torch.zeros(blocks * block, dtype=torch.bool, device=device)
    live[slots[valid]] = True
    q = normal(batch, tokens, heads, d, seed=f"{seed}-q", device=device, dtype=dtype)
    sinks = 2 * normal(heads, seed=f"{seed}-sinks", device=device) if case.get("sinks") else None
    how: dict[str, Any] = {"scale": d**-0.5, "d_v": d_v, "split_size": case.get("split_size")}
    chosen = indices if counts is None else am.sparse.TopKIndices(indices, None, counts)
    results = am.sparse.paged_sparse_decode_attention(
        embedded(q) if case.get("embedded") else q, _spoiled(pool, live.view(blocks, block)),
        None if case.get("slots") else table, chosen, sinks=sinks,
        out_dtype=torch.float32 if case.get("wide_out") else None, backend=case["backend"],
        return_max_logits=bool(case.get("max_logits")), **how,
    )  # fmt: skip
    # Keys in float64 for the exact result; rounded to the dtype of q for the plain one.
    exact, plain = (
        indexed.attention_results(
            q.flatten(0, 1).to(kind), dequantize(pool, kind, head_axis=2).flatten(0, 2), None, slots.flatten(0, 1),
            valid.flatten(0, 1), how["scale"], d_v, sinks, plain=kind == dtype,
        )
        for kind in (torch.float64, dtype)
    )  # fmt: skip
    for name, result in zip(("out", "lse", "max_logits"), results, strict=False):
        indexed.assert_rows_close(name, result.flatten(0, 1), plain[name], exact[name], dtype)
    assert not results[0][~valid.any(2)].any(), "out: not 0 where nothing is read"


def _topk(case: Case, lengths: list[int], table: Tensor, blocks: int, device: str) -> None:
    batch, tokens, topk, (heads, d) = case["batch"], case["tokens"], case["topk"], case["index"]
    seed, block, dtype, relu = case["seed"], case["block"], DTYPES[case["dtype"]], bool(case.get("relu"))

    def whole(name: str, *shape: int) -> Tensor:
        return integers(-2, 3, *shape, seed=f"{seed}-{name}", device=device).to(dtype)

    iq, w, x = whole("iq", batch, tokens, heads, d), whole("w", batch, tokens, heads), whole("x", blocks, block, 1, d)
    pool = am.quantize(x, "fp8_token") if case.get("fp8") else x
    end = torch.tensor(lengths, device=device)[:, None] - torch.arange(tokens - 1, -1, -1, device=device)
    first, where = torch.zeros_like(end), {"cur_pos": torch.tensor(lengths, device=device) - 1}
    if case.get("key_range"):
        first = integers(-1, case["longest"] + 2, batch, tokens, seed=f"{seed}-first", device=device).long()
        where = {"key_range": (first, end)}
    # Positions that any token of a sequence selects among.
    keys = torch.arange(case["longest"], device=device).expand(batch, -1)
    visible = (keys[:, None] >= first[..., None]) & (keys[:, None] < end[..., None])
    slots = _slots(table, keys, block)
    live = torch.zeros(blocks * block, dtype=torch.bool, device=device)
    read = visible.any(1)
    live[slots[read]] = True
    found = am.sparse.paged_indexer_topk(
        iq, _spoiled(pool, live.view(blocks, block)), table, w, topk, scale=0.5, relu=relu, backend=case["backend"],
        **where,
    )  # fmt: skip
    stored = dequantize(pool, torch.float64, head_axis=2).flatten(0, 2)
    for b in range(batch):
        own = stored[torch.where(read[b], slots[b], 0)]
        scores = indexed.index_scores(iq[b].double(), own, w[b].double(), 0.5, relu)
        assert_topk(found.indices[b], found.scores[b], found.lengths[b], scores, visible[b])
