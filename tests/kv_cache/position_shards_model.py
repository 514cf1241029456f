"""The caches of all ranks of a share in lockstep, beside a model of whole sequences in plain lists.

A token's keys and values depend on all tokens before it, so a prefix found wrongly shows. Whatever no sequence may read
is made NaN again after every operation, so a read too far shows, too. One more cache, on the meta device, follows.

With a window, the second layer has blocks of its own: as many as generation gives it, which are always enough if every
step is written before the next one; or, if it is tight, too few.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import lcm
from random import Random

import numpy as np
import torch

from attnmesh import BlockCache, CacheSpec
from attnmesh.core.ranges import InterleavedShard
from attnmesh.decode import CacheFull
from attnmesh.kv_cache import block_manager
from attnmesh.kv_cache.block_manager import BlockLayout, max_window_blocks

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
    least: int = 0  # with a window, truncation to so many tokens or more is possible


class Ranks:
    """The caches, and the model."""

    def __init__(
        self, ranks: int, run: int, block_size: int, seed: int, window: int | None = None, tight: bool = False
    ) -> None:
        self.random = Random(f"{ranks} {run} {block_size} {seed}")
        self.block_size = block_size
        # Long enough to find something that all ranks can go on from, and room for a few of that length.
        self.max_length = max(12, ranks * (lcm(run, block_size) + 2 * block_size))
        self.num_blocks = 2 + 5 * self.max_length // (2 * ranks * block_size)
        self.window, self.waits = window, tight or window is None
        if window is not None:
            self.max_length += 2 * (window + block_manager.WINDOW_MARGIN)
            self.num_blocks = 2 + 5 * self.max_length // (2 * ranks * block_size)
            layout = BlockLayout(InterleavedShard(ranks, 0, run), block_size)
            self.most = max_window_blocks(layout, window, self.max_length)
            self.window_blocks = self.most + 2 if tight else 5 * self.most
        self.shares = [InterleavedShard(ranks, rank, run) for rank in range(ranks)]
        self.caches = [self.make(share, "cpu") for share in self.shares]
        self.follower = self.make(self.shares[0], "meta")
        # Of each rank and layer: keys and values.
        self.pools = [
            [[x[layer].numpy()[..., 0, 0] for x in cache.stored_tensors] for layer in range(LAYERS)]
            if window is None
            else [[x[0].numpy()[..., 0, 0] for x in cache.stored_tensors[at : at + 2]] for at in (0, 2)]
            for cache in self.caches
        ]
        for pools in self.pools:
            for layer in pools:
                for pool in layer:
                    pool[:] = np.nan
        self.live: dict[tuple, Model] = {}
        self.said: list[list[int]] = []
        self.waiting: list[tuple] = []  # new tokens, their rows in the model, layers to write
        self.numbers: dict[tuple, int] = {}
        self.fresh = count(1)
        self.done = dict.fromkeys((*OPERATIONS, "found", "full", "copied", "refused"), 0)

    def make(self, share: InterleavedShard, device: str) -> BlockCache:
        return BlockCache(
            CacheSpec(
                layers=LAYERS,
                kv_heads=1,
                head_dim=1,
                storage="fp32",
                windows=() if self.window is None else (None, self.window),
            ),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            device=device,
            max_sequences=5,
            max_length=self.max_length,
            shard=share,
            window_blocks=0 if self.window is None else self.window_blocks,
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
        assert self.waits or not any("window_blocks" in error for error in errors), "windows have too few blocks"
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
        model = Model([], prompt[cached:], cached)
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
            model.least = max(model.least, len(model.tokens) - block_manager.WINDOW_MARGIN)
            rows.append(model.tokens[begin:])
        order = list(range(LAYERS))
        random.shuffle(order)
        self.waiting.append((news, rows, order))
        if random.random() < 0.7 or not self.waits:
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
                self.live[twins] = Model(list(self.live[handles].tokens), [], self.live[handles].least)

    def truncate(self) -> None:
        if self.live:
            handles, model = self.random.choice(list(self.live.items()))
            length = self.random.randint(max(0, len(model.tokens) - 9), len(model.tokens))
            if self.window is not None and self.random.random() < 0.2:
                length = 0
            before = self.metadata(self.caches[0], 0)
            refused = self.each(lambda cache, i: self.is_refused(lambda: cache.truncate(handles[i], length)))
            assert len(set(refused)) == 1, "some ranks refuse"
            if refused[0]:
                assert 0 < length < model.least, "a window has what it needs for this"
                assert self.metadata(self.caches[0], 0) == before
                self.done["refused"] += 1
                return
            del model.tokens[length:]
            model.prompt, model.least = [], min(model.least, length)

    def is_refused(self, operation) -> bool:
        try:
            operation()
        except ValueError:
            return True
        return False

    def free(self) -> None:
        if self.live:
            handles = self.random.choice(list(self.live))
            forget = self.window is not None and self.random.random() < 0.2
            self.each(lambda cache, i: cache.free(handles[i], forget=forget))
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
            (
                s.row, s.length, s.cached, list(s.blocks), list(s.window_blocks), list(s.ids), list(s.hashes),
                list(s.pending.values()),
            )
            for s in (handles[i] for handles in self.live)
        ]  # fmt: skip
        blocks = [vars(kind.pool) for kind in cache._manager._kinds]
        return (
            sequences,
            [repr(each[name]) for each in blocks for name in sorted(each)],
            list(cache._manager.free_rows),
            cache.stats(),
        )

    def check(self) -> None:
        first = self.metadata(self.caches[0], 0)
        for i, cache in enumerate((*self.caches, self.follower)):
            cache._pool.check_invariants([handles[i].blocks for handles in self.live])
            for kind in cache._manager._kinds[1:]:
                kind.pool.check_invariants([stored(handles[i].window_blocks) for handles in self.live])
            assert self.metadata(cache, i) == first, f"the books of cache {i} are others"
        for handles, model in self.live.items():
            assert handles[0].length == len(model.tokens)
            seen = []
            for rank in range(len(self.caches)):
                seen += self.check_rank(rank, handles[rank], model)
            assert sorted(seen) == list(range(len(model.tokens))), "a position is nowhere, or twice"
            if self.window is not None:
                self.check_window(handles[0])

    def check_window(self, sequence) -> None:
        """A window has no more blocks than it may have, and none of which all tokens are too far back."""
        assert self.waits or len(stored(sequence.window_blocks)) <= self.most
        begin = sequence.written + 1 - self.window - block_manager.WINDOW_MARGIN
        last_rank = self.shares[-1]
        for at, block in enumerate(sequence.window_blocks):
            passed = last_rank.position((at + 1) * self.block_size - 1) < begin
            assert block < 0 or not passed, f"block {at} of {sequence} is behind the window"

    def check_rank(self, rank: int, sequence, model: Model) -> list[int]:
        """What a rank holds of a sequence is its own; which positions these are."""
        cache, share = self.caches[rank], self.shares[rank]
        index = np.arange(int(cache.cur_pos[sequence.row]) + 1)
        positions = [share.position(i) for i in range(len(index))]
        tokens = [model.tokens[position] for position in positions]
        numbers = np.array([token.number for token in tokens])
        written = np.array([token.layers for token in tokens], dtype=np.int64)
        for layer, pools in enumerate(self.pools[rank]):
            blocks = cache.block_tables[cache.pools[layer].kind, sequence.row].numpy()[index // self.block_size]
            if cache.pools[layer].kind:  # the table has what the window passed until the next operation
                own = np.array(sequence.window_blocks, dtype=np.int64)[index // self.block_size]
                assert (blocks == own)[own >= 0].all()
                blocks = own
            reach = 0 if not cache.pools[layer].kind else len(model.tokens) + 1 - self.window
            assert (blocks >= 0)[np.array(positions, dtype=np.int64) >= reach].all(), "the next token needs it"
            for values, pool in enumerate(pools):
                read = pool[blocks, index % self.block_size]
                wrong = (read != numbers * 4 + layer * 2 + values) & (written >> layer & 1 == 1) & (blocks >= 0)
                assert not wrong.any(), f"rank {rank} reads others' tokens at {wrong.nonzero()[0]} of {model}"
        return positions

    def poison(self) -> None:
        """NaN wherever no sequence looks and no prompt may find anything."""
        for rank, (cache, share) in enumerate(zip(self.caches, self.shares, strict=True)):
            for layer, pools in enumerate(self.pools[rank]):
                kind = cache._manager._kinds[cache.pools[layer].kind]
                mine = np.zeros((kind.pool.total, self.block_size), dtype=bool)
                mine[list(kind.pool.hash_of_block)] = True
                for handles in self.live:
                    held = share.length(handles[0].length)
                    for index, block in enumerate(kind.blocks(handles[0])):
                        if block >= 0:
                            mine[block, : max(0, held - index * self.block_size)] = True
                for pool in pools:
                    pool[~mine] = np.nan


def stored(blocks: list[int]) -> list[int]:
    """Without those that a sequence does not have."""
    return [block for block in blocks if block >= 0]


def drive(ranks: int, run: int, block_size: int, *, steps: int, seed: int = 0, **window) -> Ranks:
    """So many random operations."""
    machine = Ranks(ranks, run, block_size, seed, **window)
    for _ in range(steps):
        machine.step()
    return machine
