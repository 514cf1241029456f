"""The caches of all ranks of a share in lockstep, beside a model of whole sequences in plain lists.

A token's keys and values depend on all tokens before it, so a prefix found wrongly shows. Whatever no sequence may read
is made NaN again after every operation, so a read too far shows, too. One more cache, on the meta device, follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import lcm
from random import Random

import numpy as np
import torch

from attnmesh import BlockCache, CacheFull
from attnmesh.core.ranges import InterleavedShard

LAYERS = 2
OPERATIONS = ("allocate", "allocate", "append", "append", "append", "write", "fork", "truncate", "free")


@dataclass
class Token:
    id: int | None
    number: int
    layers: int = 0  # those written, as bits


@dataclass
class Model:
    tokens: list[Token]
    prompt: list[int]  # what is outstanding


class Ranks:
    """The caches, and the model."""

    def __init__(self, ranks: int, run: int, block_size: int, seed: int) -> None:
        self.random = Random(f"{ranks} {run} {block_size} {seed}")
        self.block_size = block_size
        # Long enough to find something that all ranks can go on from, and room for a few of that length.
        self.max_length = max(12, ranks * (lcm(run, block_size) + 2 * block_size))
        self.num_blocks = 2 + 5 * self.max_length // (2 * ranks * block_size)
        self.shares = [InterleavedShard(ranks, rank, run) for rank in range(ranks)]
        self.caches = [self.make(share, "cpu") for share in self.shares]
        self.follower = self.make(self.shares[0], "meta")
        self.pools = [[x.numpy()[..., 0, 0] for x in cache.stored_tensors] for cache in self.caches]
        for pools in self.pools:
            for pool in pools:
                pool[:] = np.nan
        self.live: dict[tuple, Model] = {}
        self.said: list[list[int]] = []
        self.waiting: list[tuple] = []  # new tokens, their rows in the model, layers to write
        self.numbers: dict[tuple, int] = {}
        self.fresh = count(1)
        self.done = dict.fromkeys((*OPERATIONS, "found", "full", "copied"), 0)

    def make(self, share: InterleavedShard, device: str) -> BlockCache:
        return BlockCache(
            layers=LAYERS,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            kv_heads=1,
            head_dim=1,
            storage="fp32",
            device=device,
            max_sequences=5,
            max_length=self.max_length,
            shard=share,
        )

    def step(self) -> None:
        operation = self.random.choice(OPERATIONS)
        getattr(self, operation)()
        self.done[operation] += 1
        self.check()
        self.poison()

    def each(self, operation):
        """One operation on all caches: all do it, or all are full for the same reason and None comes back."""
        results, errors = [], []
        for i, cache in enumerate((*self.caches, self.follower)):
            try:
                results.append(operation(cache, i))
            except CacheFull as full:
                errors.append(str(full))
        assert not (results and errors), "some ranks are full, others are not"
        assert len(set(errors)) <= 1
        self.done["full"] += bool(errors)
        return tuple(results) if results else None

    # Operations.

    def allocate(self) -> None:
        random = self.random
        prompt = [random.randrange(2) for _ in range(random.randrange(self.max_length + 1))]
        if self.said and random.random() < 0.7:
            prompt = [*random.choice(self.said), *prompt][: self.max_length]
        found = {cache.find_prefix(prompt) for cache in (*self.caches, self.follower)}
        handles = self.each(lambda cache, i: cache.allocate(prompt))
        if handles is None:
            return
        assert {handle.cached for handle in handles} == found
        (cached,) = found
        assert cached < len(prompt) or not cached
        model = Model([], prompt[cached:])
        for id in prompt[:cached]:
            model.tokens.append(Token(id, self.number(model, id), layers=-1))
        self.live[handles] = model
        self.said = [*self.said[-3:], prompt]
        self.done["found"] += cached

    def append(self) -> None:
        random = self.random
        chosen = random.sample(list(self.live), min(len(self.live), random.randint(1, 3)))
        models = [self.live[handles] for handles in chosen]
        tokens = random.randint(1, 8) if random.random() < 0.7 else self.max_length
        tokens = min([tokens, *(self.max_length - len(model.tokens) for model in models)])
        if not chosen or not tokens:
            return
        anonymous = random.random() < 0.1
        ids = [self.next_ids(model, tokens, anonymous) for model in models]
        given = tokens if anonymous else ids
        sequences = list(zip(*chosen, strict=True))  # for each cache
        before = self.metadata(self.caches[0], 0)
        checked = self.each(lambda cache, i: cache.check_append(sequences[i], given))
        assert self.metadata(self.caches[0], 0) == before
        held = [set(handles[0].blocks) for handles in chosen]
        news = self.each(lambda cache, i: cache.append(sequences[i], given))
        assert (news is None) == (checked is None)
        if news is None:
            assert self.metadata(self.caches[0], 0) == before
            return
        self.done["copied"] += sum(bool(old - set(each[0].blocks)) for old, each in zip(held, chosen, strict=True))
        rows = []
        for model, each in zip(models, ids, strict=True):
            begin = len(model.tokens)
            for id in each:
                model.tokens.append(Token(id, self.number(model, id)))
            del model.prompt[:tokens]
            rows.append(model.tokens[begin:])
        order = list(range(LAYERS))
        random.shuffle(order)
        self.waiting.append((news, rows, order))
        if random.random() < 0.7:
            while self.waiting:
                self.write()

    def write(self) -> None:
        if not self.waiting:
            return
        one = self.random.choice(self.waiting)
        news, rows, order = one
        layer = order.pop()
        k = torch.tensor([[token.number for token in row] for row in rows], dtype=torch.float32) * 4 + layer * 2
        k = k[:, None, :, None]
        for cache, new in zip(self.caches, news, strict=False):
            cache.write(layer, new, k, k + 1)
        self.follower.mark_written(news[-1], layer)
        for row in rows:
            for token in row:
                token.layers |= 1 << layer
        if not order:
            self.waiting.remove(one)

    def fork(self) -> None:
        whole = [handles for handles in self.live if not handles[0].pending]
        if whole:
            handles = self.random.choice(whole)
            twins = self.each(lambda cache, i: cache.fork(handles[i]))
            if twins is not None:
                self.live[twins] = Model(list(self.live[handles].tokens), [])

    def truncate(self) -> None:
        if self.live:
            handles, model = self.random.choice(list(self.live.items()))
            length = self.random.randint(max(0, len(model.tokens) - 9), len(model.tokens))
            self.each(lambda cache, i: cache.truncate(handles[i], length))
            del model.tokens[length:]
            model.prompt = []

    def free(self) -> None:
        if self.live:
            handles = self.random.choice(list(self.live))
            self.each(lambda cache, i: cache.free(handles[i]))
            del self.live[handles]

    def number(self, model: Model, id: int | None) -> int:
        ids = (*(token.id for token in model.tokens), id)
        name = ids if None not in ids else ("unknown", next(self.fresh))
        return self.numbers.setdefault(name, next(self.fresh) % 2**20)

    def next_ids(self, model: Model, tokens: int, anonymous: bool) -> list[int | None]:
        promised = model.prompt[:tokens]
        return [*promised, *(None if anonymous else self.random.randrange(2) for _ in range(tokens - len(promised)))]

    # What must hold after every operation.

    def metadata(self, cache: BlockCache, i: int) -> tuple:
        """All that a cache knows, but for whose rank it is."""
        sequences = [
            (s.row, s.length, s.cached, list(s.blocks), list(s.ids), list(s.hashes), list(s.pending.values()))
            for s in (handles[i] for handles in self.live)
        ]
        blocks = vars(cache._pool)
        return (
            sequences,
            [repr(blocks[name]) for name in sorted(blocks)],
            list(cache._manager._free_rows),
            cache.stats(),
        )

    def check(self) -> None:
        first = self.metadata(self.caches[0], 0)
        for i, cache in enumerate((*self.caches, self.follower)):
            cache._pool.check_invariants([handles[i].blocks for handles in self.live])
            assert self.metadata(cache, i) == first, f"the books of cache {i} are others"
        for handles, model in self.live.items():
            assert handles[0].length == len(model.tokens)
            seen = []
            for rank in range(len(self.caches)):
                seen += self.check_rank(rank, handles[rank].row, model)
            assert sorted(seen) == list(range(len(model.tokens))), "a position is nowhere, or twice"

    def check_rank(self, rank: int, row: int, model: Model) -> list[int]:
        """What a rank holds of a sequence is its own; which positions these are."""
        cache, share = self.caches[rank], self.shares[rank]
        index = np.arange(int(cache.cur_pos[row]) + 1)
        blocks = cache.block_table[row].numpy()[index // self.block_size]
        assert (blocks >= 0).all()
        positions = [share.position(i) for i in range(len(index))]
        tokens = [model.tokens[position] for position in positions]
        numbers = np.array([token.number for token in tokens])
        written = np.array([token.layers for token in tokens], dtype=np.int64)
        for values, pool in enumerate(self.pools[rank]):
            for layer in range(LAYERS):
                read = pool[layer, blocks, index % self.block_size]
                wrong = (read != numbers * 4 + layer * 2 + values) & (written >> layer & 1 == 1)
                assert not wrong.any(), f"rank {rank} reads others' tokens at {wrong.nonzero()[0]} of {model}"
        return positions

    def poison(self) -> None:
        """NaN wherever no sequence looks and no prompt may find anything."""
        for rank, (cache, share) in enumerate(zip(self.caches, self.shares, strict=True)):
            mine = np.zeros((self.num_blocks, self.block_size), dtype=bool)
            mine[list(cache._pool._hash_of_block)] = True
            for handles in self.live:
                held = share.length(handles[0].length)
                for index, block in enumerate(handles[0].blocks):
                    mine[block, : max(0, held - index * self.block_size)] = True
            for pool in self.pools[rank]:
                pool[:, ~mine] = np.nan


def drive(ranks: int, run: int, block_size: int, *, steps: int, seed: int = 0) -> Ranks:
    """So many random operations."""
    machine = Ranks(ranks, run, block_size, seed)
    for _ in range(steps):
        machine.step()
    return machine
