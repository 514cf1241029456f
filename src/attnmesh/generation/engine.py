"""`Reader`: a Transformers model whose sequences, and their keys and values, are spread over ranks.

Every rank has the whole model. A prompt is read in stretches, each spread over the ranks by a layout; new tokens are
computed on every rank, and kept by one of them in turn. What was read stays, so that a later prompt that begins alike
need not be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, comm_from
from attnmesh.core import ranges
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.core.ranges import Ranges
from attnmesh.generation.passes import CachePass, ReadingPass, StepGraphs, SteppingPass
from attnmesh.generation.tensor_parallel import SharedWork
from attnmesh.integrations.transformers_attention import check_model
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.sequence import NewTokens
from attnmesh.kv_cache.sequence import Sequence as Kept
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.positions import Held, Shares, evened, grown, in_turn

BLOCK_SIZE = 32
_BY_LAYOUT = 2  # tokens a rank: any layout then gives every rank some of a stretch
_SPARE = 4


@dataclass(eq=False)
class Reading:
    """A sequence that was read: its tokens, and what this rank holds of them."""

    ids: list[int]
    shares: Shares
    kept: Kept
    reused: int = 0  # tokens that need not have been read
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [vocabulary], of the token to come
    room: int = 0  # tokens it may grow to
    room_of_ranks: list[int] = field(default_factory=list)  # how many of them each rank may come to hold
    busy: bool = True  # somebody still steps on from it

    @property
    def held(self) -> Held:
        """What this rank holds of it."""
        return self.shares.own


@dataclass
class Work:
    """What a reader has done so far, in tokens."""

    read: int = 0
    reused: int = 0


class Reader:
    """Reads prompts and steps on from them. All ranks of `comm` make it, and call it, alike.

    There is room for `tokens` tokens of at most `sequences` sequences at a time, over all ranks. `prefill_chunk` is how many
    tokens are read in one pass, all of a prompt by default. `on_read` is called after every pass over a prompt with
    how many of its tokens are there, and how many it has.
    """

    def __init__(
        self,
        model: Any,
        comm: Comm | None = None,
        *,
        tokens: int,
        sequences: int = 1,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        prefill_chunk: int | None = None,
        on_read: Callable[[int, int], None] | None = None,
    ) -> None:
        check_model(model)
        self.model, self.work, self._on_read = model, Work(), on_read
        self.ranks = ContextParallel(comm_from(comm), layout=layout, schedule=schedule)
        self.comm, world = self.ranks.comm, self.ranks.world
        self.prefill_chunk = tokens if prefill_chunk is None else prefill_chunk
        if self.prefill_chunk < min_prefill_chunk(world):
            raise ValueError(
                f"prefill_chunk must be {_BY_LAYOUT} tokens for each of {world} ranks or more, got {prefill_chunk}"
            )
        config, weight = model.config, model.get_input_embeddings().weight
        self.tokens, self.sequences, self.device = tokens, sequences, weight.device
        if not all(layout.ranges(min_prefill_chunk(world), world, rank) for rank in range(world)):
            raise ValueError(f"layout must give every one of {world} ranks a part of the sequence, got {layout}")
        # A shorter sequence may give a rank a token or two more than the longest does; steps give it at most one.
        self._most = max(self._room_of_ranks([0] * world, 0, tokens, 0)) + _SPARE
        plain = {dtype: name for name, dtype in PLAIN.items()}
        if weight.dtype not in plain:
            raise ValueError(f"the model must be of {', '.join(map(str, plain))}, got {weight.dtype}")
        self.cache = BlockCache(
            layers=config.num_hidden_layers, num_blocks=_blocks(self._most) + 4 * sequences, block_size=BLOCK_SIZE,
            kv_heads=config.num_key_value_heads, head_dim=_head_dim(config), storage=plain[weight.dtype],
            device=weight.device, max_sequences=sequences, max_length=self._most,
        )  # fmt: skip
        self.readings: list[Reading] = []
        # Over gloo a message takes longer than the weights that it spares a core: measured, 2 and 4 ranks on 2 cores.
        self._shared = SharedWork(model, self.comm) if self.device.type == "cuda" else nullcontext()
        # Neither messages between ranks nor experts, whose work the host deals out, can be captured.
        graphs = self.device.type == "cuda" and world == 1 and not hasattr(config, "num_local_experts")
        self._call = partial(_logits, model)
        self._step = StepGraphs(self._call) if graphs else self._call
        self.token_bytes = token_bytes(config, weight.dtype)

    def read(self, ids: Sequence[int], more: int = 0) -> Reading:
        """A sequence that begins with these tokens, and may grow by `more`.

        What an earlier one has in common with them is not read again: it is taken over, or shared while somebody still
        steps on from it. Sequences that nobody uses make room, the oldest first.
        """
        ids = list(ids)
        if not ids:
            raise ValueError("a prompt must have at least one token")
        alike, begin = self._alike(ids)
        room = self._room_of_ranks(alike.shares.truncated(begin).counts, begin, len(ids), more) if alike else []
        if alike is None or max(room) > self._most:  # too uneven to go on from: one rank has kept most of it
            alike, begin = None, 0
            room = self._room_of_ranks([0] * self.comm.world, 0, len(ids), more)
        self._make_room(len(ids) + more, room, alike)
        if alike is None:
            reading = Reading([], Shares.nothing(self.comm.world, self.comm.rank), self.cache.allocate(0))
        elif alike.busy:
            reading = Reading(list(alike.ids), alike.shares, self.cache.fork(alike.kept))
        else:
            reading = alike
            self.readings.remove(alike)
        self.readings.append(reading)
        self.truncate(reading, begin)
        reading.busy, reading.reused, reading.room, reading.room_of_ranks = True, begin, len(ids) + more, room
        self.work.reused += begin
        self.work.read += len(ids) - begin
        while len(reading.ids) < len(ids):
            rest = ids[len(reading.ids) : len(reading.ids) + self.prefill_chunk]
            if len(rest) >= min_prefill_chunk(self.comm.world):
                reading.logits = self._read_stretch(reading, rest)
            else:
                reading.logits = self._forward([reading], [rest[:MAX_DECODE_TOKENS]])[0, -1]
            if self._on_read is not None:
                self._on_read(len(reading.ids), len(ids))
        return reading

    def step(self, readings: Sequence[Reading], ids: Sequence[Sequence[int]]) -> Tensor:
        """T more tokens of each sequence, to logits [B, T, vocabulary] of what follows each; the same on every rank."""
        logits = self._forward(readings, ids)
        for reading, row in zip(readings, logits, strict=True):
            reading.logits = row[-1].clone()  # of many tokens only the last, and no graph's own
        return logits

    def truncate(self, reading: Reading, length: int) -> None:
        """Keep the first `length` tokens only."""
        shares = reading.shares.truncated(length)
        if len(shares.own) < reading.kept.length:
            self.cache.truncate(reading.kept, len(shares.own))
        reading.shares, reading.ids = shares, reading.ids[:length]

    def rest(self, reading: Reading) -> None:
        """Nobody steps on from a sequence any more: it is there to be found, until room is needed."""
        reading.busy, reading.room = False, len(reading.ids)

    def free(self, reading: Reading) -> None:
        """Forget a sequence."""
        self.cache.free(reading.kept)
        self.readings.remove(reading)

    def check_room(self, tokens: Sequence[int]) -> None:
        """Raise ValueError unless new sequences of so many tokens fit beside those in use."""
        busy = [reading.room for reading in self.readings if reading.busy]
        if sum(busy) + sum(tokens) > self.tokens or len(busy) + len(tokens) > self.sequences:
            raise ValueError(
                f"{sum(tokens)} tokens of {len(tokens)} sequences do not fit beside {sum(busy)} of {len(busy)} in use: "
                f"there is room for {self.tokens} of {self.sequences}"
            )

    def _alike(self, ids: list[int]) -> tuple[Reading | None, int]:
        """The sequence that has most in common with these tokens, and how much. Not the last: it says what comes."""
        common = [min(_in_common(reading.ids, ids), len(ids) - 1) for reading in self.readings]
        most = max(common, default=0)
        return (self.readings[common.index(most)], most) if most else (None, 0)

    def _parts(self, counts: Sequence[int], new: range) -> list[Ranges]:
        """Which of some new positions each rank is to hold, if it holds so many of those before them."""
        world = self.comm.world
        if len(new) < min_prefill_chunk(world):
            return in_turn(new, world)
        if new.start:  # every rank attends for all, over what it holds: that is to be even, whatever the layout
            return evened(new, counts)
        return [self.ranks.layout.ranges(len(new), world, rank) for rank in range(world)]

    def _room_of_ranks(self, counts: Sequence[int], begin: int, length: int, more: int) -> list[int]:
        """How many tokens each rank comes to hold: from `counts` of `begin` on, of `length` and `more` steps."""
        for at in range(begin, length, self.prefill_chunk):
            counts = grown(counts, self._parts(counts, range(at, min(length, at + self.prefill_chunk))))
        return [count + -(-more // self.comm.world) for count in counts]

    def _make_room(self, tokens: int, of_ranks: list[int], alike: Reading | None) -> None:
        """For a sequence of so many tokens, which takes over what is like it unless that is busy.

        Every rank decides the same: it goes by what all of them hold. Nothing is given up where that would not do.
        """
        staying = [reading for reading in self.readings if reading.busy or reading is not alike]
        leaving: list[Reading] = []

        def fits() -> bool:
            each = [
                [_blocks(n) for n in rooms] for rooms in (of_ranks, *(reading.room_of_ranks for reading in staying))
            ]
            return (
                sum(reading.room for reading in staying) + tokens <= self.tokens
                and len(staying) < self.sequences
                and max(map(sum, zip(*each, strict=True))) <= self.cache.stats().total
            )

        for idle in [reading for reading in staying if not reading.busy]:
            if fits():
                break
            staying.remove(idle)
            leaving.append(idle)
        if not fits():
            raise ValueError(
                f"{tokens} tokens do not fit beside {sum(reading.room for reading in staying)} of {len(staying)} "
                f"sequences in use: there is room for {self.tokens} of {self.sequences}"
            )
        for reading in leaving:
            self.free(reading)

    def _read_stretch(self, reading: Reading, ids: list[int]) -> Tensor:
        """Every rank reads its part; the logits of the last token, from the rank that has it."""
        begin = len(reading.ids)
        parts = self._parts(reading.shares.counts, range(begin, begin + len(ids)))
        mine = parts[self.comm.rank]
        new = self.cache.append([reading.kept], ranges.size(mine))
        reading.shares.extend(parts)
        blocks = torch.tensor(reading.kept.blocks, device=self.device)
        how = ReadingPass(self.cache, new.slots, self.ranks, parts, begin, len(ids), reading.held.runs, blocks)
        at = ranges.as_tensor(mine)
        tokens = torch.tensor(ids)[at - begin]
        device = self.device
        logits = self._call(how, tokens[None].to(device), at[None].to(device), keep=1)[0, -1]
        self.cache.mark_written(new)
        reading.ids += ids
        last = next(rank for rank, part in enumerate(parts) if part[-1][-1] == begin + len(ids) - 1)
        return self._from(last, logits)

    def _forward(self, readings: Sequence[Reading], ids: Sequence[Sequence[int]]) -> Tensor:
        """A few tokens on every rank."""
        count, world, rank = len(ids[0]), self.comm.world, self.comm.rank
        positions = [range(len(reading.ids), len(reading.ids) + count) for reading in readings]
        parts = [in_turn(new, world) for new in positions]
        mine = [
            [position - new.start for run in part[rank] for position in run]
            for new, part in zip(positions, parts, strict=True)
        ]
        slots = torch.full((len(readings), count), -1, dtype=torch.int64, device=self.device)
        appended: list[NewTokens] = []
        for n in sorted({len(own) for own in mine} - {0}):  # a cache appends equally many at a time
            rows = [b for b, own in enumerate(mine) if len(own) == n]
            new = self.cache.append([readings[b].kept for b in rows], n)
            appended.append(new)
            for b, at in zip(rows, new.slots, strict=True):
                slots[b, mine[b]] = at
        for reading, part in zip(readings, parts, strict=True):
            reading.shares.extend(part)
        rows_at = torch.tensor([reading.kept.row for reading in readings], device=self.device)
        how = SteppingPass(
            self.cache, slots, self.comm, self.cache.block_table[rows_at], self.cache.cur_pos[rows_at], positions,
            [reading.held for reading in readings],
        )  # fmt: skip
        at = torch.tensor([list(new) for new in positions])
        tokens = torch.tensor([list(row) for row in ids], device=self.device)
        with self._shared:
            logits = self._step(how, tokens, at.to(self.device))
        for new in appended:
            self.cache.mark_written(new)
        for reading, row in zip(readings, ids, strict=True):
            reading.ids += row
        return logits

    def _from(self, rank: int, x: Tensor) -> Tensor:
        """One rank's tensor, on every rank."""
        comm = self.comm
        if comm.world == 1:
            return x
        shapes = [x.shape if i == rank else (0,) for i in range(comm.world)]
        return comm.all_gather(x.contiguous() if comm.rank == rank else x.new_empty(0), shapes)[rank]


def min_prefill_chunk(world: int) -> int:
    """The fewest tokens that any layout can spread over so many ranks."""
    return _BY_LAYOUT * world


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """What the keys and values of a token take, in all layers of a model."""
    return 2 * int(config.num_hidden_layers) * int(config.num_key_value_heads) * _head_dim(config) * dtype.itemsize


@torch.no_grad()
def _logits(model: Any, how: CachePass, ids: Tensor, positions: Tensor, keep: int = 0) -> Tensor:
    """Those of the last `keep` tokens, or of all."""
    out = model(
        input_ids=ids, position_ids=positions, past_key_values=how, mesh=how, use_cache=True, logits_to_keep=keep
    )
    logits: Tensor = out.logits
    return logits


def _head_dim(config: Any) -> int:
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
