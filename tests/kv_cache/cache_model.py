"""A block cache beside a model of it in plain lists: every operation goes to both, and both must agree after it.

What a token's keys and values are depends, as in a language model, on all tokens before it and on the cache key. So
a block that is found, shared, copied or evicted wrongly shows: some sequence reads numbers that are not its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import count
from random import Random

import numpy as np
import torch

from attnmesh import BlockCache, CacheSpec
from attnmesh.decode import CacheFull

ALPHABET, KEYS = 2, ("", "tenant")
OPERATIONS = (
    "allocate", "allocate", "allocate", "append", "append", "append", "append", "write", "fork", "truncate", "free",
    "free", "misuse",
)  # fmt: skip


@dataclass
class Token:
    """One token in one place of one sequence (or of several that share it)."""

    id: int | None
    number: int  # what its keys and values are made of
    layers: int = 0  # those written, as bits


@dataclass
class Model:
    """A sequence as the model knows it."""

    key: str
    tokens: list[Token]
    prompt: list[int] | int  # what is outstanding: ids, or how many


@dataclass
class Outstanding:
    """Slots that have been given out and not been filled in every layer."""

    new: object
    rows: list[list[Token]]
    unwritten_layers: list[int]


class Pair:
    """The cache and its model."""

    def __init__(self, *, layers=2, num_blocks=9, block_size=2, max_sequences=5, max_length=11) -> None:
        self.sizes = (layers, num_blocks, block_size, max_sequences, max_length)
        self.cache = self.make()
        self.stranger = self.make().allocate(3)
        self.live: dict = {}
        self.dead: list = []
        self.said: list[tuple[str, list[int]]] = []  # the last prompts
        self.outstanding: list[Outstanding] = []
        self.numbers: dict[tuple, int] = {}
        self.fresh = count(1)
        self.done: dict[str, int] = {}
        self.pools = [x.numpy()[..., 0, 0] for x in self.cache.stored_tensors]
        self.addresses = self.where()

    def make(self) -> BlockCache:
        layers, num_blocks, block_size, max_sequences, max_length = self.sizes
        return BlockCache(
            CacheSpec(layers=layers, kv_heads=1, head_dim=1, storage="fp32"),
            num_blocks=num_blocks,
            block_size=block_size,
            device="cpu",
            max_sequences=max_sequences,
            max_length=max_length,
        )

    def where(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for x in (self.cache.block_table, self.cache.cur_pos, *self.cache.stored_tensors))

    def step(self, operation: str, random: Random) -> None:
        """One random operation of a kind, then everything is compared."""
        getattr(self, operation)(random)
        self.done[operation] = self.done.get(operation, 0) + 1
        self.check()

    # Operations.

    def allocate(self, random: Random) -> None:
        key = random.choice(KEYS)
        length = random.randrange(self.sizes[4] + 1)
        anonymous = random.random() < 0.1
        prompt = length if anonymous else [random.randrange(ALPHABET) for _ in range(length)]
        if not anonymous and self.said and random.random() < 0.7:  # begin as another did, of whom some still wait
            key, other = random.choice(self.said)
            prompt = [*other, *prompt][: self.sizes[4]]
            length = len(prompt)
        room = self.cache.stats()
        sequence = self.attempt(lambda: self.cache.allocate(prompt, cache_key=key))
        if sequence is None:
            needed = -(-length // self.sizes[2])
            assert len(self.live) == self.sizes[3] or needed > room.free + room.cached, "there was room"
            return
        assert sequence.cached == sequence.length
        assert sequence.cached % self.sizes[2] == 0
        assert sequence.cached < length or not sequence.cached  # the last token is never found
        assert not (anonymous and sequence.cached)
        found = [] if anonymous else prompt[: sequence.cached]
        model = Model(key, [], length if anonymous else prompt[sequence.cached :])
        for id in found:
            model.tokens.append(Token(id, self.number(model, id), layers=-1))
        self.live[sequence] = model
        if not anonymous:
            self.said = [*self.said[-3:], (key, prompt)]
        self.done["found"] = self.done.get("found", 0) + sequence.cached

    def append(self, random: Random) -> None:
        if not self.live:
            return
        chosen = random.sample(list(self.live), random.randint(1, min(2, len(self.live))))
        tokens = random.randint(1, 3) if random.random() < 0.9 else random.randint(4, 9)
        models = [self.live[sequence] for sequence in chosen]
        tokens = min(tokens, *(self.sizes[4] - len(model.tokens) for model in models), 99)
        if tokens < 1:
            return
        anonymous = random.random() < 0.3
        ids = [self.next_ids(model, tokens, None if anonymous else random) for model in models]
        promised = len(chosen) == 1 and not self.shares_tail(chosen[0]) and self.promised(models[0]) >= tokens
        new = self.attempt(lambda: self.cache.append(chosen, tokens if anonymous else ids))
        if new is None:
            assert not promised, "an outstanding prompt has its room"
            return
        rows = []
        for model, each in zip(models, ids, strict=True):
            begin = len(model.tokens)
            for id in each:
                model.tokens.append(Token(id, self.number(model, id)))
            model.prompt = model.prompt[tokens:] if isinstance(model.prompt, list) else max(0, model.prompt - tokens)
            rows.append(model.tokens[begin:])
        assert new.slots.shape == (len(chosen), tokens)
        order = list(range(self.sizes[0]))
        random.shuffle(order)
        self.outstanding.append(Outstanding(new, rows, order))
        if random.random() < 0.5 or len(self.outstanding) > 4:
            while self.outstanding:
                self.write(random)

    def write(self, random: Random) -> None:
        """One layer of any tokens that wait: not always the oldest first."""
        if not self.outstanding:
            return
        one = random.choice(self.outstanding)
        layer = one.unwritten_layers.pop()
        numbers = torch.tensor([[token.number for token in row] for row in one.rows], dtype=torch.float32)
        k = self.content(numbers, layer, 0)[:, None, :, None]
        self.cache.write(layer, one.new, k, k + 1)
        for row in one.rows:
            for token in row:
                token.layers |= 1 << layer
        if not one.unwritten_layers:
            self.outstanding.remove(one)

    def fork(self, random: Random) -> None:
        if not self.live:
            return
        sequence = random.choice(list(self.live))
        if sequence.pending:
            self.refused(lambda: self.cache.fork(sequence))
            return
        twin = self.attempt(lambda: self.cache.fork(sequence))
        if twin is not None:
            model = self.live[sequence]
            self.live[twin] = Model(model.key, list(model.tokens), [])
        else:
            assert len(self.live) == self.sizes[3]

    def truncate(self, random: Random) -> None:
        if not self.live:
            return
        sequence = random.choice(list(self.live))
        model = self.live[sequence]
        length = random.randint(max(0, len(model.tokens) - 4), len(model.tokens))
        self.cache.truncate(sequence, length)
        del model.tokens[length:]
        model.prompt = []

    def free(self, random: Random) -> None:
        if not self.live:
            return
        sequence = random.choice(list(self.live))
        self.cache.free(sequence)
        del self.live[sequence]
        self.dead = [*self.dead[-3:], sequence]

    def misuse(self, random: Random) -> None:
        """Everything that is an error, one at a time."""
        cache, wrong = self.cache, [lambda: cache.allocate([0] * (self.sizes[4] + 1)), lambda: cache.append([], 1)]
        for bad in (*self.dead, self.stranger):
            wrong += [
                lambda bad=bad: cache.append([bad], 1),
                lambda bad=bad: cache.fork(bad),
                lambda bad=bad: cache.truncate(bad, 0),
                lambda bad=bad: cache.free(bad),
            ]
        for good, model in self.live.items():
            past = self.sizes[4] - len(model.tokens) + 1
            wrong += [
                lambda good=good: cache.append([good, good], 1),
                lambda good=good: cache.append([good, self.stranger], 1),
                lambda good=good: cache.truncate(good, good.length + 1),
                lambda good=good: cache.truncate(good, -1),
                lambda good=good, past=past: cache.append([good], past),
            ]
            if isinstance(model.prompt, list) and model.prompt:
                other = [[model.prompt[0] + 1]]
                wrong.append(lambda good=good, other=other: cache.append([good], other))
        self.refused(random.choice(wrong))

    # What operations share.

    def attempt(self, operation):
        """The result, or None if the cache is full: then nothing has changed."""
        before, full = self.snapshot(), None
        try:
            return operation()
        except CacheFull as error:
            full = error
        assert full.resource == "sequences" or full.needed > full.free + full.cached
        assert self.snapshot() == before
        self.done["full"] = self.done.get("full", 0) + 1
        return None

    def refused(self, operation) -> None:
        before = self.snapshot()
        try:
            operation()
        except ValueError:
            assert self.snapshot() == before
        else:
            raise AssertionError("this should have been refused")

    def snapshot(self) -> tuple:
        """All that the cache knows, as one value."""
        cache = self.cache
        sequences = [
            (
                id(s),
                s.row,
                s.length,
                s.cached,
                id(s.owner),
                list(s.blocks),
                list(s.ids),
                list(s.hashes),
                len(s.pending),
            )
            for s in (*self.live, *self.dead)
        ]
        metadata = copy.deepcopy(
            {name: list(x) if hasattr(x, "popitem") else x for name, x in vars(cache._pool).items()}
        )
        mirror = (cache._tables._mirror.tobytes(), dict(cache._tables._changed), list(cache._manager.free_rows))
        device = (cache._tables._device_copy.numpy().tobytes(), *(pool.tobytes() for pool in self.pools))
        return sequences, metadata, mirror, device, cache.stats()

    def number(self, model: Model, id: int | None) -> int:
        """What a token after those of a model is made of: the same if all ids up to it are known and the same."""
        ids = [token.id for token in model.tokens]
        if id is None or None in ids:
            return next(self.fresh) % 2**20
        name = (model.key, *ids, id)
        if name not in self.numbers:
            self.numbers[name] = next(self.fresh) % 2**20
        return self.numbers[name]

    def content(self, number, layer: int, values: int):
        return number * 4.0 + layer * 2.0 + values

    def next_ids(self, model: Model, tokens: int, random: Random | None) -> list[int | None]:
        """The ids of the next tokens: what the prompt has promised, then random or unknown ones."""
        promised = model.prompt[:tokens] if isinstance(model.prompt, list) else []
        more = tokens - len(promised)
        if random is None:
            return [*promised, *[None] * more]
        return [*promised, *(random.randrange(ALPHABET) for _ in range(more))]

    def promised(self, model: Model) -> int:
        return model.prompt if isinstance(model.prompt, int) else len(model.prompt)

    def shares_tail(self, sequence) -> bool:
        index, filled = divmod(sequence.length, self.sizes[2])
        return bool(filled) and self.cache._pool.ref_counts[sequence.blocks[index]] > 1

    # What must hold after every operation.

    def check(self) -> None:
        cache, block_size, every = self.cache, self.sizes[2], (1 << self.sizes[0]) - 1
        cache._pool.check_invariants([sequence.blocks for sequence in self.live])
        table, last = cache.block_table.numpy(), cache.cur_pos.numpy()
        wanted_table, wanted_last = np.full_like(table, -1), np.full_like(last, -1)
        rows = [sequence.row for sequence in self.live]
        assert len(set(rows)) == len(rows), "two sequences in one row"
        for sequence, model in self.live.items():
            assert sequence.length == len(model.tokens)
            wanted_table[sequence.row, : len(sequence.blocks)] = sequence.blocks
            wanted_last[sequence.row] = sequence.length - 1
            reserved = sequence.blocks[-(-sequence.length // block_size) :]
            assert all(cache._pool.ref_counts[block] == 1 for block in reserved), "reserved for two"
            assert None not in map(cache._pool.lookup, sequence.hashes), "a live sequence holds it, and it is not found"
            for i, block in enumerate(sequence.blocks):
                if block in cache._pool.hash_of_block:
                    tokens = model.tokens[i * block_size : (i + 1) * block_size]
                    assert all(token.layers & every == every for token in tokens), "findable before it is written"
        assert (table == wanted_table).all()
        assert (last == wanted_last).all()
        assert cache._tables._device_copy.numpy().tobytes() == cache._tables._mirror.tobytes()
        assert self.where() == self.addresses
        for sequence, model in self.live.items():
            self.check_content(table[sequence.row], last[sequence.row] + 1, model)

    def check_content(self, row: np.ndarray, length: int, model: Model) -> None:
        numbers = np.array([token.number for token in model.tokens], dtype=np.float32)
        written = np.array([token.layers for token in model.tokens], dtype=np.int64)
        blocks = row[: -(-length // self.sizes[2])]
        for values, pool in enumerate(self.pools):
            for layer in range(self.sizes[0]):
                read = pool[layer, blocks].reshape(-1)[:length]
                wrong = (read != self.content(numbers, layer, values)) & (written >> layer & 1 == 1)
                assert not wrong.any(), f"tokens {wrong.nonzero()[0]} of {model} are not its own in layer {layer}"


def drive(operations: int, seed: int, every: int = 2000, **sizes) -> Pair:
    """So many random operations, on a new cache after `every`: the sizes of a small cache say a lot each time."""
    random = Random(seed)
    done: dict[str, int] = {}
    for begin in range(0, operations, every):
        pair = Pair(**sizes)
        for _ in range(min(every, operations - begin)):
            pair.step(random.choice(OPERATIONS), random)
        while pair.live:
            pair.free(random)
        pair.check()
        for name, times in (*pair.done.items(), ("evicted", pair.cache.stats().evictions)):
            done[name] = done.get(name, 0) + times
    pair.done = done
    return pair
