"""Decode attention and the block cache on one device.

Results that must not depend on something, such as the other sequences of a batch, are compared bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.kv_cache.sequence import Sequence
from attnmesh.ops.decode import api
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.testing.decode import DecodeProblem, compare, poison_cache, random_decode, reference_decode
from attnmesh.testing.errors import ROUNDING, Comparison
from attnmesh.verify.mode import Mode, Pair, covering_rows

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 32
BLOCK_SIZE, CAPACITY, SPLIT_SIZE = 16, 304, 64
POSITIONS = (2, 299, 130)  # the first sequence is shorter than four new tokens: some of its rows see nothing

STORAGES = ("plain", "fp8", "fp8 heads", "int8", "bfp8")
CONTIGUOUS, PAGED = ("own", "token major"), (1, 3, 16, 64, 256)  # the memory of a cache, or the block size of a pool
AXES: dict[str, tuple[Any, ...]] = {
    "cache": (*CONTIGUOUS, *PAGED),
    "key_range": ("causal", "tree", "trees", "bool bht", "bool t short", "added h", "added bt short", "intervals"),
    "storage": STORAGES,
    "dims": ((16, 16), (48, 32), (32, 64), (40, 24), "v in k"),
    "group": (1, 3, 7, 8, 64),
    "tokens": (1, 2, 3, 5, 8),
    "splits": (None, ("max_splits", 1), ("max_splits", 3), ("split_size", 16), ("split_size", 13)),
    "window": (None, 1, 5, 17, 1000),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "at": ("list", "int32", "int64", None),
    "share": (None, "cache", "blocks"),
    "sinks": (False, True),
    "q_memory": ("own", "transposed", "fused"),
    "scale": (None, -0.3),
}
"""The values that a decode call may have."""
# cur_pos has a default in a cache only; only tables can name blocks twice; bfp8 has groups of 16; intervals say it all.
UNSERVED: set[Pair] = {
    *((("cache", cache), ("at", None)) for cache in PAGED),
    *((("cache", cache), ("share", "blocks")) for cache in CONTIGUOUS),
    (("storage", "bfp8"), ("dims", (40, 24))),
    *((("key_range", "intervals"), ("window", window)) for window in (1, 5, 17, 1000)),
    (("key_range", "intervals"), ("share", "cache")),
    # Follows from the first two: the default position means a cache, whose sequences share no blocks.
    (("at", None), ("share", "blocks")),
}


def decode_problem(row: Mapping[str, Any], number: int, *, seed: int | None = None, **how: Any) -> DecodeProblem:
    """Return the random call of a row of the table; `number` selects the lengths of its sequences.

    One sequence reaches across a few blocks, often to the edge of one; one is skipped; one is shorter than its tokens.
    `how` has further arguments of `random_decode`.
    """
    row, cache = dict(row), row["cache"]
    step = cache if cache in PAGED else 16
    long = (2 * step - 1, 2 * step, 2 * step + 1, 41, 64, 75)[number % 6] if step < 64 else step + number % 3 - 1
    young = (0, max(row["tokens"] - 2, 0), row["tokens"] - 1)[number % 3]
    lasts = [max(long, 20), young, -1]
    positions = lasts[number % 3 :] + lasts[: number % 3]
    length = max(positions) + 1
    dims, scale, splits = row.pop("dims"), row.pop("scale"), row.pop("splits")
    del row["cache"]
    return random_decode(
        [length - 1] * 3 if row["at"] is None else positions, dims=(64, 32) if dims == "v in k" else dims,
        v_in_k=dims == "v in k", block_size=cache if cache in PAGED else None,
        capacity=length if row["at"] is None else length + (0, 5, 40)[number % 3],
        memory=cache if cache in CONTIGUOUS else ("own", "layer", "layer inside")[number % 3],
        seed=number if seed is None else seed, **row | how, **({} if scale is None else {"scale": scale}),
        **({} if splits is None else dict([splits])),
    )  # fmt: skip


def decode_modes(device: str) -> Iterator[Mode]:
    """Yield the modes of decode attention.

    Every two values of two axes occur together; on a GPU, where most values compile a kernel, every value occurs.
    """
    fused = "cpu" if device == "cpu" else "triton"
    for number, row in enumerate(covering_rows(AXES, UNSERVED, pairs=device == "cpu")):
        yield _decode_mode(("auto", fused)[number % 2], row, number)
    for paged in (False, True):
        kind = "paged" if paged else "contiguous"
        shape = _shape(len(POSITIONS), 1, CAPACITY, "bf16")
        yield Mode(f"decode {fused} {kind} split_size same bits", shape, partial(_same_bits, fused, paged))


def _decode_mode(backend: str, row: Mapping[str, Any], number: int) -> Mode:
    def run(seed: int, device: str) -> list[Comparison]:
        problem = decode_problem(row, number, seed=seed, device=device)
        rounding = ROUNDING[problem.q.dtype]
        return [each._replace(rounding=rounding) for each in problem.compare(problem.run(backend))]

    cache = f"paged {row['cache']}" if row["cache"] in PAGED else f"contiguous {row['cache']}"
    window, share, splits = (row[name] for name in ("window", "share", "splits"))
    details = (
        cache, row["key_range"], row["storage"], splits and "{}={}".format(*splits), window and f"window={window}",
        share and f"shared {share}", row["sinks"] and "sinks", row["scale"] and f"scale={row['scale']}",
    )  # fmt: skip
    dims = "64/32" if row["dims"] == "v in k" else "{}/{}".format(*row["dims"])
    dtype = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[row["dtype"]]
    name = " ".join(("decode", backend, *(detail for detail in details if detail)))
    return Mode(name, f"3x{2 * row['group']}/2x{row['tokens']}x{dims} {dtype}", run)


def _same_bits(backend: str, paged: bool, seed: int, device: str) -> list[Comparison]:
    """Compare each sequence of a batch with the same sequence decoded alone, bitwise."""
    problem = random_decode(
        POSITIONS, group=GROUP, kv_heads=KV_HEADS, capacity=CAPACITY, block_size=BLOCK_SIZE if paged else None,
        dtype=torch.bfloat16, at="int32", split_size=SPLIT_SIZE, device=device, seed=seed,
    )  # fmt: skip
    actual = problem.run(backend)
    results = []
    for i in range(len(POSITIONS)):
        alone = problem.sequence(i).run(backend)
        results.append(Comparison("out bits", actual.out[i : i + 1], alone.out))
        results.append(Comparison("lse bits", actual.lse[i : i + 1], alone.lse))
    return results


def _shape(batch: int, tokens: int, length: int, dtype: str) -> str:
    return f"{batch}x{KV_HEADS * GROUP}/{KV_HEADS}x{tokens}:{length}x{HEAD_DIM} {dtype}"


_LAYERS, _ROWS, _MAX_LENGTH, _PROMPT = 2, 4, 96, 75


def cache_modes() -> Iterator[Mode]:
    """Yield the operations of the block cache, for its storage types."""
    for names, compute, title in (
        (("fp32", "bf16", "fp8", "int8", "bfp8"), _append_fork_truncate, "append fork truncate"),
        (("bf16", "int8"), _prefix_bits, "prefix same bits"),
    ):
        for storage in names:
            shape = _shape(_ROWS, 1, _MAX_LENGTH, "fp32" if storage == "fp32" else "bf16")
            yield Mode(f"cache {storage} {title}", shape, partial(compute, storage))


class _CacheCheck:
    """A poisoned cache, and beside it the keys and values of every sequence, [2, layers, Hkv, L, D]."""

    def __init__(self, storage: str, seed: int, device: str) -> None:
        self.storage, self.device = storage, device
        self.generator = torch.Generator().manual_seed(seed)
        k_scale, v_scale = (0.01, 0.012) if storage == "fp8" else (None, None)
        self.cache = BlockCache(
            CacheSpec(
                layers=_LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, storage=storage, k_scale=k_scale, v_scale=v_scale
            ),
            num_blocks=32, block_size=BLOCK_SIZE, max_sequences=_ROWS, max_length=_MAX_LENGTH, device=device,
        )  # fmt: skip
        for layer, pool in product(range(_LAYERS), (self.cache.keys, self.cache.values)):
            poison_cache(pool(layer))
        self.expected: dict[Sequence, Tensor] = {}

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def random_tokens(self, count: int) -> Tensor:
        """Return keys and values of new tokens."""
        return self._normal(2, _LAYERS, KV_HEADS, count, HEAD_DIM).to(self.device)

    def append(self, *new: tuple[Sequence, list[int], Tensor]) -> None:
        """Append and write the same number of tokens for each sequence."""
        sequences, ids, tokens = (list(each) for each in zip(*new, strict=True))
        step = self.cache.append(sequences, ids)
        for layer in range(_LAYERS):
            self.cache.write(layer, step, *(torch.stack([x[i, layer] for x in tokens]) for i in range(2)))
        for sequence, x in zip(sequences, tokens, strict=True):
            self.expected[sequence] = torch.cat([self.expected.get(sequence, x[:, :, :, :0]), x], 3)

    def query(self, rows: int) -> Tensor:
        """Return [rows, Hq, 1, D]."""
        q = self._normal(rows, KV_HEADS * GROUP, 1, HEAD_DIM)
        return q.to(self.device, PLAIN.get(self.storage, torch.bfloat16))

    def decode(self, q: Tensor, layer: int, **options: Any) -> State:
        """Decode over all rows of the block table; rows without a sequence are skipped."""
        cache = self.cache
        return State(
            *api.paged_decode_attention(
                q, cache.keys(layer), cache.values(layer), cache.block_table, cur_pos=cache.cur_pos, return_lse=True,
                **options,
            )
        )  # fmt: skip

    def compare(self, *sequences: Sequence) -> list[Comparison]:
        """Compare every layer with the sequences' own tokens, rounded as the cache stores them."""
        positions, results = [-1] * _ROWS, []
        for layer in range(_LAYERS):
            k, v = torch.zeros(2, _ROWS, KV_HEADS, _MAX_LENGTH, HEAD_DIM, dtype=torch.float64, device=self.device)
            for sequence in sequences:
                own = self.expected[sequence]
                positions[sequence.row] = own.shape[3] - 1
                for whole, x, pool in ((k, own[0], self.cache.keys), (v, own[1], self.cache.values)):
                    scale = getattr(pool(layer), "scales", None) if self.storage == "fp8" else None
                    stored = dequantize(quantize(x[layer], self.storage, scale=scale, head_axis=0), torch.float64)
                    whole[sequence.row, :, : stored.shape[1]] = stored
            q = self.query(_ROWS)
            exact = reference_decode(q.double(), k, v, cur_pos=positions)
            plain = reference_decode(q, k, v, cur_pos=positions, plain=True)
            for result in compare(self.decode(q, layer), exact, plain):
                results.append(result._replace(name=f"{result.name} {layer}"))
        return results


def _append_fork_truncate(storage: str, seed: int, device: str) -> list[Comparison]:
    """A prompt in chunks, a fork, drafts taken back, a freed sequence, and a prompt that reuses its prefix."""
    check = _CacheCheck(storage, seed, device)
    cache, tokens, ids = check.cache, check.random_tokens, list(range(1000, 1000 + _PROMPT))
    first = cache.allocate(ids)
    check.append((first, ids[:40], tokens(40)))
    check.append((first, ids[40:], tokens(_PROMPT - 40)))
    results = check.compare(first)

    second = cache.fork(first)
    check.expected[second] = check.expected[first]
    check.append((second, [1] * 4, tokens(4)), (first, [2] * 4, tokens(4)))  # the first of the two copies its block
    cache.truncate(second, 60)  # back into a shared block: the next token copies it
    check.expected[second] = check.expected[second][:, :, :, :60]
    check.append((first, [3], tokens(1)), (second, [4], tokens(1)))
    results += check.compare(first, second)

    prompt = check.expected[first]
    cache.free(first)
    third = cache.allocate([*ids[:60], 7, 8])
    check.expected[third] = prompt[:, :, :, : third.length]
    check.append((third, [*ids[third.length : 60], 7, 8], tokens(62 - third.length)))
    reused = _counted(third.cached, 48)
    return [*results, *check.compare(second, third), reused]


def _counted(actual: int, expected: int) -> Comparison:
    """The number of reused tokens, which must be exact."""
    found, wanted = (torch.tensor([float(n)], dtype=torch.float32, device="cpu") for n in (actual, expected))
    return Comparison("reused", found, wanted)


def _prefix_bits(storage: str, seed: int, device: str) -> list[Comparison]:
    """A prompt over reused blocks has the bits of the same prompt written anew under another key."""
    check = _CacheCheck(storage, seed, device)
    ids, tokens = list(range(_PROMPT)), check.random_tokens(_PROMPT)
    results, rows = [], []
    for key, reused in (("one", 0), ("one", 64), ("other", 0)):
        sequence = check.cache.allocate(ids, cache_key=key)
        start = sequence.cached
        check.expected[sequence] = tokens[:, :, :, :start]
        check.append((sequence, ids[start:], tokens[:, :, :, start:]))
        rows.append(sequence.row)
        results.append(_counted(start, reused))
    q = check.query(1).expand(_ROWS, -1, -1, -1)
    for layer in range(_LAYERS):
        out, lse = check.decode(q, layer, split_size=BLOCK_SIZE)
        for row in rows[1:]:
            results.append(Comparison("out bits", out[row], out[rows[0]]))
            results.append(Comparison("lse bits", lse[row], lse[rows[0]]))
    return results
