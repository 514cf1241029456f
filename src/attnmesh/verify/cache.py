"""The block cache against float64: what decode reads from it is what each sequence's own tokens say.

A cache lives a little: prompts in chunks, forks, drafts taken back, ends, prefixes found again. Beside it stand the
keys and values of every token of every sequence. The pools are poisoned first: what nobody wrote shows if it is read.
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
from attnmesh.ops.decode import api
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.verify.decode import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, by_definition, fill_with_poison, shape_of
from attnmesh.verify.mode import Compared, ComparedMode

_LAYERS = 2
_ROWS = 4  # of the tables
_LENGTH = 96  # the most tokens of a sequence
_PROMPT = 75


def cache_modes() -> Iterator[ComparedMode]:
    """Every mode of the cache, for its storage types."""
    shape = partial(shape_of, _ROWS, 1, _LENGTH, (HEAD_DIM, HEAD_DIM))
    for storage in ("fp32", "bf16", "fp8", "int8", "bfp8"):
        found = partial(_lived_in, storage)
        yield ComparedMode(f"cache {storage} append fork truncate", shape(_query_dtype(storage)), found)
    for storage in ("bf16", "int8"):
        found = partial(_found_again, storage)
        yield ComparedMode(f"cache {storage} prefix same bits", shape(_query_dtype(storage)), found)


class _Story:
    """A cache, and beside it the keys and values of every token of every sequence, [layers, Hkv, L, D] each."""

    def __init__(self, storage: str, seed: int, device: str) -> None:
        self.storage, self.device = storage, device
        self.dice = torch.Generator().manual_seed(seed)
        self.dtype = _query_dtype(storage)
        k_scale, v_scale = (0.01, 0.012) if storage == "fp8" else (None, None)
        self.cache = BlockCache(
            layers=_LAYERS, num_blocks=32, block_size=BLOCK_SIZE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, storage=storage,
            device=device, max_sequences=_ROWS, max_length=_LENGTH, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        for layer, pool in product(range(_LAYERS), (self.cache.keys, self.cache.values)):
            fill_with_poison(pool(layer))
        self.own: dict[Sequence, Tensor] = {}

    def drawn(self, count: int) -> Tensor:
        """Keys and values of new tokens: [2, layers, Hkv, T, D]."""
        return torch.randn(2, _LAYERS, KV_HEADS, count, HEAD_DIM, generator=self.dice).to(self.device)

    def fill(self, sequences: list[Sequence], tokens: list[list[int]], numbers: list[Tensor]) -> None:
        """Append and write the same number of tokens on each sequence."""
        new = self.cache.append(sequences, tokens)
        for layer in range(_LAYERS):
            k, v = (torch.stack([x[i, layer] for x in numbers]) for i in range(2))
            self.cache.write(layer, new, k, v)
        for sequence, x in zip(sequences, numbers, strict=True):
            held = self.own.get(sequence, x[:, :, :, :0])
            self.own[sequence] = torch.cat([held, x], 3)

    def query(self, rows: int) -> Tensor:
        """[rows, Hq, 1, D]."""
        return torch.randn(rows, HEADS, 1, HEAD_DIM, generator=self.dice).to(self.device, self.dtype)

    def read(self, q: Tensor, layer: int, **options: Any) -> State:
        """Decode over all rows of the cache's tables; rows without a sequence are skipped."""
        cache = self.cache
        return State(
            *api.paged_decode_attention(
                q, cache.keys(layer), cache.values(layer), cache.block_table, cur_pos=cache.cur_pos, return_lse=True,
                **options,
            )
        )  # fmt: skip

    def compared(self, sequences: list[Sequence]) -> list[Compared]:
        """Every layer against the sequences' own tokens."""
        positions = [-1] * _ROWS
        results = []
        for layer in range(_LAYERS):
            k, v = (
                torch.zeros(_ROWS, KV_HEADS, _LENGTH, HEAD_DIM, dtype=torch.float64, device=self.device) for _ in "kv"
            )
            for sequence in sequences:
                own = self.own[sequence]
                positions[sequence.row] = own.shape[3] - 1
                for held, x, pool in ((k, own[0], self.cache.keys), (v, own[1], self.cache.values)):
                    scale = getattr(pool(layer), "scales", None) if self.storage == "fp8" else None
                    plain = dequantize(quantize(x[layer], self.storage, scale=scale, head_axis=0), torch.float64)
                    held[sequence.row, :, : plain.shape[1]] = plain
            q = self.query(_ROWS)
            for result in by_definition(self.read(q, layer), q, k, v, cur_pos=positions):
                results.append(result._replace(name=f"{result.name} {layer}"))
        return results


def _lived_in(storage: str, seed: int, device: str) -> list[Compared]:
    """A prompt in chunks, a fork that goes its own way, drafts taken back, an end, and a prompt that began alike."""
    story = _Story(storage, seed, device)
    cache, ids = story.cache, list(range(1000, 1000 + _PROMPT))
    first = cache.allocate(ids)
    story.fill([first], [ids[:40]], [story.drawn(40)])
    story.fill([first], [ids[40:]], [story.drawn(_PROMPT - 40)])
    results = story.compared([first])

    second = cache.fork(first)
    story.own[second] = story.own[first]
    story.fill([second, first], [[1] * 4, [2] * 4], [story.drawn(4), story.drawn(4)])  # the first of the two copies
    cache.truncate(second, 60)  # back into a block that is shared: the next token copies it
    story.own[second] = story.own[second][:, :, :, :60]
    story.fill([first, second], [[3], [4]], [story.drawn(1), story.drawn(1)])
    results += story.compared([first, second])

    prompt = story.own[first]
    cache.free(first)
    third = cache.allocate([*ids[:60], 7, 8])
    story.own[third] = prompt[:, :, :, : third.length]
    story.fill([third], [[*ids[third.length : 60], 7, 8]], [story.drawn(62 - third.length)])
    reused = torch.tensor([float(third.cached)])
    return [*results, *story.compared([second, third]), Compared("reused", reused, torch.tensor([48.0]))]


def _found_again(storage: str, seed: int, device: str) -> list[Compared]:
    """A prompt over blocks found again, and the same prompt written anew under another key: the same bits."""
    story = _Story(storage, seed, device)
    ids = list(range(_PROMPT))
    numbers = story.drawn(_PROMPT)
    results, reused, rows = [], [], []
    for key in ("one", "one", "other"):
        sequence = story.cache.allocate(ids, cache_key=key)
        begin = sequence.cached
        story.own[sequence] = numbers[:, :, :, :begin]
        story.fill([sequence], [ids[begin:]], [numbers[:, :, :, begin:]])
        rows.append(sequence.row)
        found = 64.0 if len(rows) == 2 else 0.0
        reused.append(Compared("reused", torch.tensor([float(begin)]), torch.tensor([found])))
    q = story.query(1).expand(_ROWS, -1, -1, -1)
    for layer in range(_LAYERS):
        out, lse = story.read(q, layer, split_size=BLOCK_SIZE)
        for row in rows[1:]:
            results.append(Compared("out bits", out[row], out[rows[0]]))
            results.append(Compared("lse bits", lse[row], lse[rows[0]]))
    return [*results, *reused]


def _query_dtype(storage: str) -> torch.dtype:
    return PLAIN.get(storage, torch.bfloat16)
