"""Decode attention and the block cache on one device.

Results that must not depend on something, such as the other sequences of a batch, are compared bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.sequence import Sequence
from attnmesh.kv_cache.spec import CacheSpec
from attnmesh.ops.decode import api
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.testing.decode import DecodeProblem, compare, poison_cache, random_decode, reference_decode
from attnmesh.testing.errors import Comparison
from attnmesh.verify.mode import DTYPES, Mode

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 32
BLOCK_SIZE, CAPACITY, SPLIT_SIZE = 16, 304, 64
POSITIONS = (2, 299, 130)  # the first sequence is shorter than four new tokens: some of its rows see nothing


def decode_modes(device: str) -> Iterator[Mode]:
    """Yield every mode of decode attention."""
    fused = "cpu" if device == "cpu" else "triton"
    for paged, dtype in product((False, True), DTYPES):
        yield _decode_mode("auto", paged, dtype, 4)
    for paged, tokens, dtype in product((False, True), (1, 4), DTYPES):
        yield _decode_mode(fused, paged, dtype, tokens)
    yield from _option_modes(fused)
    for paged in (False, True):
        yield _decode_mode(fused, paged, "bf16", 1, "split_size same bits", split_size=SPLIT_SIZE)


def _option_modes(backend: str) -> Iterator[Mode]:
    """Yield every option over both kinds of cache, in one precision there and in the other here."""
    for paged, (dtype, other) in ((False, ("fp32", "bf16")), (True, ("bf16", "fp32"))):
        mode = partial(_decode_mode, backend, paged)
        yield mode(dtype, 4, "window", window=37)
        yield mode(other, 1, "sinks", sinks=True)
        yield mode(dtype, 4, "boolean mask", key_range="bool bht")
        yield mode(other, 4, "additive mask", key_range="bias bht")
        yield mode(dtype, 4, "tree", key_range="trees")
        yield mode(other, 4, "share_cache", share="cache")
        yield mode(dtype, 1, "skipped sequence", positions=(*POSITIONS[:2], -1))
        yield mode(other, 4, "split_size", split_size=SPLIT_SIZE)
        yield mode(dtype, 1, "Dv != D", dims=(48, 32))
    yield _decode_mode(backend, True, "bf16", 1, "v in k", dims=(48, 32), v_in_k=True)
    for storage in ("fp8", "int8", "bfp8"):
        yield _decode_mode(backend, True, "bf16", 1, storage, storage=storage)
        yield _decode_mode(backend, False, "fp32", 4, f"{storage} window", storage=storage, window=37)


def _decode_mode(backend: str, paged: bool, dtype: str, tokens: int, option: str = "", **how: Any) -> Mode:
    def run(seed: int, device: str) -> list[Comparison]:
        problem = random_decode(
            **{"positions": POSITIONS} | how, tokens=tokens, group=GROUP, kv_heads=KV_HEADS, capacity=CAPACITY,
            block_size=BLOCK_SIZE if paged else None, dtype=DTYPES[dtype], at="int32", device=device, seed=seed,
        )  # fmt: skip
        actual = problem.run(backend)
        return _alone(problem, backend, actual) if option.endswith("same bits") else problem.compare(actual)

    name = f"decode {backend} {'paged' if paged else 'contiguous'} {option or f'T={tokens}'}"
    return Mode(name, _shape(len(POSITIONS), tokens, CAPACITY, dtype, how.get("dims")), run)


def _alone(problem: DecodeProblem, backend: str, actual: State) -> list[Comparison]:
    """Compare each sequence of a batch with the same sequence decoded alone, bitwise."""
    results = []
    for i in range(len(POSITIONS)):
        alone = problem.sequence(i).run(backend)
        results.append(Comparison("out bits", actual.out[i : i + 1], alone.out))
        results.append(Comparison("lse bits", actual.lse[i : i + 1], alone.lse))
    return results


def _shape(batch: int, tokens: int, length: int, dtype: str, dims: tuple[int, int] | None = None) -> str:
    width = f"{HEAD_DIM}" if dims is None else f"{dims[0]}/{dims[1]}"
    return f"{batch}x{KV_HEADS * GROUP}/{KV_HEADS}x{tokens}:{length}x{width} {dtype}"


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
