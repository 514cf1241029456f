"""`ShardedCache` on all ranks of a sharding in lockstep, beside a model of whole sequences in plain lists."""

from __future__ import annotations

from itertools import count
from random import Random

import numpy as np
import torch

from attnmesh import ShardedCache
from attnmesh.decode import CacheFull
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.plan.decode import DecodeSharding, Place
from helpers.caches import cache_sizes

LAYERS, WINDOWS = 2, (None, 3, 10)
OPERATIONS = ("allocate", "allocate", "append", "append", "append", "append", "fork", "truncate", "free")


def sizes(**more):
    return {
        "batch": 5, "layers": LAYERS, "num_blocks": 12, "block_size": 3, "kv_heads": 2, "head_dim": 1,
        "storage": "fp32", "device": "cpu", "max_length": 30,
    } | more  # fmt: skip


def arguments(**more):
    return cache_sizes(**sizes(**more))


class Mesh:
    """The caches of all ranks, and the model: of each sequence the ids and what its keys are made of."""

    def __init__(self, sharding: DecodeSharding, seed: int = 0, **more) -> None:
        self.sharding, self.sizes, self.random = sharding, sizes(**more), Random(f"{sharding} {more} {seed}")
        self.caches = [ShardedCache(sharding, rank, **cache_sizes(**self.sizes)) for rank in range(sharding.ranks)]
        for cache in self.caches:
            for layer in range(LAYERS):
                cache.keys(layer).fill_(torch.nan)
                cache.values(layer).fill_(torch.nan)
        self.live: dict[tuple, list[tuple[int, int]]] = {}  # handles of all ranks: (id, number) of every token
        self.prompts: dict[tuple, list[int]] = {}  # what is outstanding
        self.said: list[list[int]] = []
        self.numbers: dict[tuple, int] = {}
        self.fresh = count(1)
        self.addresses: dict[tuple, int] = {}
        self.done = dict.fromkeys((*OPERATIONS, "found", "full"), 0)

    def step(self) -> None:
        operation = self.random.choice(OPERATIONS)
        getattr(self, operation)()
        self.done[operation] += 1
        self.check()

    def each(self, operation):
        """One operation on all ranks: all do it, or all are full, nothing has changed and None comes back."""
        results, errors = [], []
        before = [self.metadata(rank) for rank in range(len(self.caches))]
        for rank, cache in enumerate(self.caches):
            try:
                results.append(operation(cache, rank))
            except CacheFull as full:
                errors.append(str(full))
        assert not (results and errors), "some ranks are full, others are not"
        assert len(set(errors)) <= 1
        if errors:
            assert before == [self.metadata(rank) for rank in range(len(self.caches))]
            self.done["full"] += 1
            return None
        return tuple(results)

    # Operations.

    def allocate(self, prompt: list[int] | None = None) -> tuple | None:
        random, most = self.random, self.sizes["max_length"]
        if prompt is None:
            prompt = [random.randrange(2) for _ in range(random.randrange(most + 1))]
            if self.said and random.random() < 0.6:
                prompt = [*random.choice(self.said), *prompt][:most]
        found = [part.find_prefix(prompt) for part in self.caches[0].by_kvdp_rank]
        handles = self.each(lambda cache, rank: cache.allocate(prompt))
        if handles is None:
            return None
        assert len({(one.row, one.kvdp_rank, one.length, one.cached) for one in handles}) == 1
        assert handles[0].row in self.rows(handles[0].kvdp_rank)
        assert handles[0].cached == found[handles[0].kvdp_rank]
        self.live[handles], self.prompts[handles] = [], prompt[handles[0].cached :]
        for id in prompt[: handles[0].cached]:
            self.add(handles, id)
        self.said = [*self.said[-3:], prompt]
        self.done["found"] += handles[0].cached
        return handles

    def append(self, chosen: list[tuple] | None = None, tokens: int | None = None) -> tuple | None:
        random, most = self.random, self.sizes["max_length"]
        if chosen is None:
            chosen = random.sample(list(self.live), random.randint(0, len(self.live)))
        tokens = tokens or (random.randint(1, 8) if random.random() < 0.8 else random.randint(9, most))
        tokens = min([tokens, *(most - len(self.live[handles]) for handles in chosen)])
        if not chosen or not tokens:
            return None
        ids = [self.next_ids(handles, tokens) for handles in chosen]
        before = [len(self.live[handles]) for handles in chosen]
        steps = self.each(lambda cache, rank: cache.append([handles[rank] for handles in chosen], ids))
        if steps is None:
            return None
        for handles, each in zip(chosen, ids, strict=True):
            for id in each:
                self.add(handles, id)
            del self.prompts[handles][:tokens]
        for rank in range(len(self.caches)):
            self.check_step(rank, steps[rank], {h[0].row: n for h, n in zip(chosen, before, strict=True)})
        for layer in range(LAYERS):
            self.write(layer, steps, chosen)
        return steps

    def write(self, layer: int, steps: tuple, chosen: list[tuple]) -> None:
        for rank, (cache, step) in enumerate(zip(self.caches, steps, strict=True)):
            heads = self.sharding.kv_heads(rank, self.sizes["kv_heads"])
            k = torch.full((len(cache.rows), len(heads), step.tokens, 1), torch.nan)
            for handles in chosen:
                if handles[rank].row in cache.rows:
                    numbers = torch.tensor([float(number) for _, number in self.live[handles][-step.tokens :]])
                    k[handles[rank].row - cache.rows.start, :, :, 0] = self.content(
                        numbers, layer, torch.tensor(list(heads))[:, None]
                    )
            cache.check_step(step, layer)
            cache.write(layer, step, k, -k)

    def fork(self) -> None:
        if self.live:
            handles = self.random.choice(list(self.live))
            twins = self.each(lambda cache, rank: cache.fork(handles[rank]))
            if twins is not None:
                assert twins[0].kvdp_rank == handles[0].kvdp_rank
                self.live[twins], self.prompts[twins] = list(self.live[handles]), []

    def truncate(self) -> None:
        if self.live:
            handles, tokens = self.random.choice(list(self.live.items()))
            length = self.random.randint(max(0, len(tokens) - 9), len(tokens))
            self.each(lambda cache, rank: cache.truncate(handles[rank], length))
            del tokens[length:]
            self.prompts[handles] = []

    def free(self) -> None:
        if self.live:
            handles = self.random.choice(list(self.live))
            self.each(lambda cache, rank: cache.free(handles[rank]))
            del self.live[handles], self.prompts[handles]

    def add(self, handles: tuple, id: int) -> None:
        tokens = self.live[handles]
        name = (*(id for id, _ in tokens), id)
        tokens.append((id, self.numbers.setdefault(name, next(self.fresh) % 2**17)))

    def next_ids(self, handles: tuple, tokens: int) -> list[int]:
        promised = self.prompts[handles][:tokens]
        return [*promised, *(self.random.randrange(2) for _ in range(tokens - len(promised)))]

    def content(self, numbers, layer: int, heads):
        return numbers * 16 + layer * 8 + heads

    def rows(self, kvdp_rank: int) -> range:
        return self.sharding.sequences(self.sharding.rank(Place(0, 0, kvdp_rank)), self.sizes["batch"])

    # What must hold.

    def metadata(self, rank: int) -> tuple:
        """The metadata of every KVDP rank on one rank."""
        cache = self.caches[rank]
        handles: list[CacheSequence] = [each[rank] for each in self.live]
        sequences = [
            (
                one.row,
                one.kvdp_rank,
                one.row,
                one.length,
                one.cached,
                list(one.blocks),
                list(one.hashes),
            )
            for one in handles
        ]
        pools = [[repr(x) for _, x in sorted(vars(part._pool).items())] for part in cache.by_kvdp_rank]
        return sequences, pools, cache.stats(), [list(part._manager.free_rows) for part in cache.by_kvdp_rank]

    def check(self) -> None:
        first = self.metadata(0)
        rows = [handles[0].row for handles in self.live]
        assert len(set(rows)) == len(rows)
        for rank, cache in enumerate(self.caches):
            assert self.metadata(rank) == first, f"the metadata of rank {rank} differs"
            for i, part in enumerate(cache.by_kvdp_rank):
                part._pool.check_invariants([h[rank].blocks for h in self.live if h[rank].kvdp_rank == i])
            for handles, tokens in self.live.items():
                if handles[rank].row in cache.rows:
                    self.check_content(rank, handles[rank], tokens)

    def check_content(self, rank: int, sequence: CacheSequence, tokens: list[tuple[int, int]]) -> None:
        cache, share, size = self.caches[rank], self.sharding.position_shard(rank), self.sizes["block_size"]
        index = np.arange(share.length(len(tokens)))
        row = cache.block_table[sequence.row - cache.rows.start].numpy()
        numbers = np.array([tokens[share.position(int(i))][1] for i in index], dtype=np.int64)
        heads = np.array(self.sharding.kv_heads(rank, self.sizes["kv_heads"]))
        for layer in range(LAYERS):
            wanted = self.content(numbers[:, None], layer, heads)
            for pool, sign in ((cache.keys(layer), 1), (cache.values(layer), -1)):
                assert (pool.numpy()[row[index // size], index % size, :, 0] == sign * wanted).all()

    def check_step(self, rank: int, step, begins: dict[int, int]) -> None:
        """The tensors of a step, number by number."""
        cache, share, tokens = self.caches[rank], self.sharding.position_shard(rank), step.tokens
        size, rows = self.sizes["block_size"], cache.rows
        after = [[begins[row] + t + 1 if row in begins else 0 for t in range(tokens)] for row in range(cache.batch)]
        assert step.positions.tolist() == [[n - 1 for n in row] for row in after]
        assert step.positions.dtype == step.cur_pos.dtype == torch.int32
        assert step.slots.dtype == torch.int64
        table = cache.block_table.tolist()
        slots = [[-1] * tokens for _ in rows]
        for own, row in enumerate(rows):
            for t, n in enumerate(after[row]):
                if n and share.owner(n - 1) == share.rank:
                    index = share.index(n - 1)
                    slots[own][t] = table[own][index // size] * size + index % size
        assert step.slots.tolist() == slots
        assert step.cur_pos.tolist() == [share.length(after[row][-1]) - 1 for row in rows]
        for window in WINDOWS:
            first, end = step.key_range(window)
            assert first.dtype == end.dtype == torch.int32
            assert end.tolist() == [[share.length(n) for n in after[row]] for row in rows]
            begin = [[share.length(max(0, n - window)) if window else 0 for n in after[row]] for row in rows]
            assert first.tolist() == begin
            self.check_address(rank, tokens, ("first", window), first)
            self.check_address(rank, tokens, "end", end)
        for name in ("positions", "slots", "cur_pos"):
            self.check_address(rank, tokens, name, getattr(step, name))

    def check_address(self, rank: int, tokens: int, name, x: torch.Tensor) -> None:
        if tokens <= 8:
            assert self.addresses.setdefault((rank, tokens, name), x.data_ptr()) == x.data_ptr()
