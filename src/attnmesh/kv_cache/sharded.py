"""A step of generation over a cache that is spread over ranks: where its tokens are, and what they see, on a device.

Steps of equally many tokens share their tensors. Each append fills them anew, where they are: a CUDA graph captured
with one step serves all later ones.
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.kv_cache import sequence as check
from attnmesh.kv_cache.block_manager import Paging
from attnmesh.kv_cache.block_pool import CacheFull, CacheStats
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import fp8_scale, write_tokens
from attnmesh.kv_cache.sequence import NewTokens, Sequence, ShardedSequence, check_sizes
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import Stored
from attnmesh.plan.decode import DecodeSharding


class StepTensors:
    """The tensors of steps of `tokens` tokens each. `held[n]` is how many of the first n positions this rank holds."""

    def __init__(self, tokens: int, batch: int, rows: range, held: Tensor) -> None:
        self._rows, self._held = rows, held
        with torch.inference_mode(False):  # what is made within inference mode could not be filled outside it
            device = held.device
            self._steps = torch.arange(1, tokens + 1, device=device)
            self.positions = torch.empty(batch, tokens, dtype=torch.int32, device=device)
            self.slots = torch.empty(len(rows), tokens, dtype=torch.int64, device=device)
            self.cur_pos = torch.empty(len(rows), dtype=torch.int32, device=device)
            self._end = torch.empty(len(rows), tokens, dtype=torch.int32, device=device)
            # One more than a token's position. It stays where it is, too: a captured graph may fill `first` from it.
            self._after = torch.empty(len(rows), tokens, dtype=torch.int64, device=device)
        self._first: dict[int | None, Tensor] = {}

    def fill(self, begins: Tensor, at: Tensor, slots: Tensor) -> None:
        """A new step: where each row of the batch begins (-1: not in the step), and the slots of own rows `at`."""
        begins = begins[:, None]
        after = torch.where(begins >= 0, begins + self._steps, 0)
        self.positions.copy_(after - 1)
        self._after.copy_(after[self._rows.start : self._rows.stop])
        self._end.copy_(self._held[self._after])
        self.cur_pos.copy_(self._end[:, -1] - 1)
        self.slots.fill_(-1).index_copy_(0, at, slots)
        for window in self._first:
            self._fill_first(window)

    def key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What each new token sees of this rank's keys."""
        if window not in self._first:
            if window is not None:
                check_sizes(window=window)
            with torch.inference_mode(False):
                self._first[window] = torch.zeros_like(self._end)
            self._fill_first(window)
        return self._first[window], self._end

    def _fill_first(self, window: int | None) -> None:
        if window is not None:
            self._first[window].copy_(self._held[(self._after - window).clamp_(min=0)])


@dataclass(eq=False, repr=False)
class Step:
    """T new `tokens` for some rows of a batch, whose keys and values are to be written. Made by `ShardedCache.append`.

    `positions` int32 [batch, T] are the new tokens', -1 in rows that are not in the step. Of the rows whose keys this
    rank holds: `slots` int64 [rows, T], -1 where there is nothing to write here, and `cur_pos` int32 [rows], the index
    of the last key held here, -1 where there is none or the row is not in the step.

    Up to 8 tokens, the tensors stay where they are and are those of the latest step with as many tokens.
    """

    tokens: int
    sequences: tuple[ShardedSequence, ...]
    parts: dict[int, NewTokens]  # of each bank that has some of the sequences
    skipped: dict[int, ShardedSequence]  # layers in which a sequence lacks tokens before these, and one that does
    tensors: StepTensors

    @property
    def positions(self) -> Tensor:
        """Of the new tokens, in the whole sequence."""
        return self.tensors.positions

    @property
    def slots(self) -> Tensor:
        """Where new tokens are written on this rank."""
        return self.tensors.slots

    @property
    def cur_pos(self) -> Tensor:
        """The last key of each row on this rank."""
        return self.tensors.cur_pos

    @property
    def missing(self) -> set[int]:
        """The layers that are not yet written: the same in all banks."""
        return next(iter(self.parts.values())).missing

    def key_range(self, window: int | None = None) -> tuple[Tensor, Tensor]:
        """What each new token sees of the keys this rank holds: `first` and `end`, int32 [rows, T], indices of keys.

        With a window, of the last `window` positions. Both are 0 in rows that are not in the step. Once asked for,
        they are filled by every later step with as many tokens; so ask before a graph is captured.
        """
        return self.tensors.key_range(window)

    def __repr__(self) -> str:
        return f"Step({self.tokens} tokens on {list(self.sequences)}, missing layers {sorted(self.missing)})"


_Part = tuple[list[Sequence], int | abc.Sequence[abc.Sequence[int]]]  # a bank's sequences, and their new tokens


class ShardedCache:
    """One rank's part of a cache for a batch of sequences: its kv heads, its rows of the batch, its positions.

    All ranks perform the same operations in the same order, and then their books are equal: rows, prefixes found and
    CacheFull come out alike on all of them, without a message. `batch`, `kv_heads`, `max_length` and fp8's scales are
    the model's; `num_blocks` is each rank's.

    The rows of each KVDP rank are a bank: a `BlockCache` of their own. A rank has the memory of its own bank, and keeps
    the books of the others.
    """

    def __init__(
        self,
        sharding: DecodeSharding,
        rank: int,
        *,
        batch: int,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        storage: str = "bf16",
        device: torch.device | str | None = None,
        max_length: int,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None:
        _check_place(sharding, rank)
        check.check_sizes(
            batch=batch, kv_heads=kv_heads, num_blocks=num_blocks, block_size=block_size, max_length=max_length
        )
        sharding.check_heads(kv_heads * sharding.ranks, kv_heads)  # however many query heads there are
        share, heads = sharding.share(rank), sharding.kv_heads(rank, kv_heads)
        needed = Paging(share, block_size).blocks(max_length)
        if needed > num_blocks:
            raise ValueError(
                f"num_blocks must be at least {needed}, what one sequence of max_length={max_length} needs on a rank "
                f"under {sharding} with block_size={block_size}, got {num_blocks}"
            )
        self.sharding, self.rank, self.batch = sharding, rank, batch
        self.kv_heads, self.head_dim, self.value_dim = kv_heads, head_dim, value_dim or head_dim
        self.block_size, self.num_blocks, self.max_length, self.storage = block_size, num_blocks, max_length, storage
        self._layers = layers
        self._shape = (len(heads), head_dim, head_dim if value_dim is None else value_dim)
        self._bank_rows = [sharding.sequences(peer, batch) for peer in sharding.kvdp_peers(rank)]
        own = sharding.place(rank).kvdp
        self._banks = [
            BlockCache(
                layers=layers, num_blocks=num_blocks, block_size=block_size, kv_heads=len(heads), head_dim=head_dim,
                value_dim=value_dim, storage=storage, device=device if bank == own else "meta",
                max_sequences=max(1, len(rows)), max_length=max_length, share=share,
                k_scale=_own_scale("k_scale", k_scale, storage, kv_heads, heads),
                v_scale=_own_scale("v_scale", v_scale, storage, kv_heads, heads),
            )
            for bank, rows in enumerate(self._bank_rows)
        ]  # fmt: skip
        self._own_bank, self._own = own, self._banks[own]
        self.rows = self._bank_rows[own]
        self.block_table = self._own.block_table[: len(self.rows)]
        lengths = torch.arange(max_length + 1, device=self.block_table.device)
        self._held = share.length(lengths).to(torch.int32)
        self._tensors: dict[int, StepTensors] = {}
        self._current: Step | None = None

    def keys(self, layer: int) -> Stored:
        """The pool of a layer's keys, [num_blocks, block_size, own kv heads, head_dim]."""
        return self._own.keys(layer)

    def values(self, layer: int) -> Stored:
        """The pool of a layer's values, [num_blocks, block_size, own kv heads, value_dim]."""
        return self._own.values(layer)

    def stats(self) -> list[CacheStats]:
        """Each bank in numbers: on every rank the same."""
        return [bank.stats() for bank in self._banks]

    def allocate(self, prompt: abc.Sequence[int] | int, *, cache_key: str = "") -> ShardedSequence:
        """A sequence for a prompt, as `BlockCache.allocate` has it, in the bank that serves it best.

        That is the one that finds most of the prompt; of equal ones that with most rows free; then the first. If it is
        full, the next one serves. CacheFull means that all are.
        """
        banks = [bank for bank, rows in enumerate(self._bank_rows) if rows]  # a batch may be smaller than kvdp
        if len(banks) > 1:
            found = {bank: self._banks[bank].find(prompt, cache_key=cache_key) for bank in banks}
            banks.sort(key=lambda bank: (-found[bank], -self._banks[bank].free_rows, bank))
        full: CacheFull | None = None
        for bank in banks:
            try:
                return self._enter(bank, self._banks[bank].allocate(prompt, cache_key=cache_key))
            except CacheFull as error:
                full = full or error
        assert full is not None  # a batch has a row, and so a bank
        raise full

    def append(self, sequences: abc.Sequence[ShardedSequence], tokens: int | abc.Sequence[abc.Sequence[int]]) -> Step:
        """T more tokens on each of these sequences: on all of them or, with CacheFull, on none.

        `tokens` is as for `BlockCache.append`. Write every layer of a step before the next one: it is current until the
        next append, or until one of its sequences is truncated or freed.
        """
        sequences = check.each_once(sequences, self._check_own)
        count, given = check.new_ids(tokens, len(sequences))
        longest = max(sequences, key=lambda sequence: sequence.length)
        check.check_length(longest, longest.length + count, self.max_length)
        parts = _by_bank(sequences, count, given)
        if len(parts) > 1:  # one bank alone changes nothing when it raises
            for bank, part in parts.items():
                self._banks[bank].check_append(*part)
        begins = [-1] * self.batch
        for sequence in sequences:
            begins[sequence.row] = sequence.length
        skipped = _skipped(sequences)
        new = {bank: self._banks[bank].append(*part) for bank, part in parts.items() if bank != self._own_bank}
        tensors = self._tensors_for(count)
        if self._own_bank in parts:
            held, own_tokens = parts[self._own_bank]
            numbers = [*begins, *(sequence.row for sequence in held)]
            new[self._own_bank], along = self._own.append_along(held, own_tokens, numbers)
            tensors.fill(along[: self.batch], along[self.batch :], new[self._own_bank].slots)
        else:
            along = self._own.send(begins)
            tensors.fill(along, along[:0], along[:0, None].expand(0, count))
        self._current = Step(count, sequences, new, skipped, tensors)
        return self._current

    def check_current(self, step: Step, layer: int, *, written: bool = False) -> None:
        """Raise ValueError unless a step is the latest, and all tokens before its own are written in a layer.

        Its own are not written there yet, or, with `written`, they are.
        """
        check.check_layer(layer, self._layers)
        self._check_step(step)
        if layer in step.skipped:
            sequence = step.skipped[layer]
            raise ValueError(
                f"positions would skip tokens of {sequence} that were never written in layer {layer}: truncate it to "
                f"{sequence.held.written} tokens, and append those again"
            )
        if layer in step.missing and written:
            raise ValueError(f"layer {layer} of this step is not written yet")
        if layer not in step.missing and not written:
            raise ValueError(f"layer {layer} of this step is written already; missing are {sorted(step.missing)}")

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        """Fill one layer of a step: k [rows, own kv heads, T, head_dim] and v [rows, own kv heads, T, value_dim].

        Rows are this rank's, and those that are not in the step are ignored. Positions that other ranks hold are, too:
        every rank is given all T tokens.
        """
        self.check_current(step, layer)
        check.check_new(step.slots, k, v, *self._shape)
        write_tokens(self.keys(layer), self.values(layer), step.slots, k, v)
        self._keep(step, layer)

    def wrote(self, step: Step, layer: int | None = None) -> None:
        """The books of `write`, where somebody else has filled the slots: in one layer, or in all that are missing."""
        self._check_step(step)
        layers = sorted(step.missing) if layer is None else [layer]
        for each in layers:
            self.check_current(step, each)
        for each in layers:
            self._keep(step, each)

    def fork(self, sequence: ShardedSequence) -> ShardedSequence:
        """A second sequence with the same tokens in the same blocks, and so in the same bank."""
        self._check_own(sequence)
        return self._enter(sequence.bank, self._banks[sequence.bank].fork(sequence.held))

    def truncate(self, sequence: ShardedSequence, length: int) -> None:
        """Keep the first `length` tokens, as after rejected drafts. Room that a prompt had reserved goes back, too."""
        self._check_own(sequence)
        self._banks[sequence.bank].truncate(sequence.held, length)
        self._outdate(sequence)

    def free(self, sequence: ShardedSequence) -> None:
        """End a sequence. Its blocks go back; those that can be found again stay as long as there is room."""
        self._check_own(sequence)
        self._banks[sequence.bank].free(sequence.held)
        self._outdate(sequence)

    def _enter(self, bank: int, held: Sequence) -> ShardedSequence:
        return ShardedSequence(self._bank_rows[bank][held.row], bank, held, self)

    def _tensors_for(self, tokens: int) -> StepTensors:
        """Those of all steps of decode with so many tokens; a longer one, of a prompt, has its own."""
        if tokens in self._tensors:
            return self._tensors[tokens]
        tensors = StepTensors(tokens, self.batch, self.rows, self._held)
        if tokens <= MAX_DECODE_TOKENS:
            self._tensors[tokens] = tensors
        return tensors

    def _keep(self, step: Step, layer: int) -> None:
        for bank, new in step.parts.items():
            self._banks[bank].wrote(new, layer)

    def _outdate(self, sequence: ShardedSequence) -> None:
        if self._current is not None and sequence in self._current.sequences:
            self._current = None

    def _check_step(self, step: Step) -> None:
        if not isinstance(step, Step):
            raise ValueError(f"step must be what append returned, got {type(step).__name__}")
        if step is not self._current:
            raise ValueError(
                f"{step} is not the latest of this cache, or one of its sequences was truncated or freed: "
                "its positions would skip or repeat tokens"
            )

    def _check_own(self, sequence: ShardedSequence) -> None:
        if not isinstance(sequence, ShardedSequence):
            raise ValueError(f"sequence must be what allocate or fork returned, got {type(sequence).__name__}")
        if sequence.owner is not self or sequence.freed:
            raise ValueError(f"{sequence} {'was freed' if sequence.freed else 'belongs to another cache'}")


def _check_place(sharding: DecodeSharding, rank: int) -> None:
    if not isinstance(sharding, DecodeSharding):
        raise ValueError(f"sharding must be a DecodeSharding, got {type(sharding).__name__}")
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ValueError(f"rank must be 0 to {sharding.ranks - 1} under {sharding}, got {rank!r}")
    sharding.place(rank)


def _own_scale(
    name: str, scale: float | Tensor | None, storage: str, kv_heads: int, heads: range
) -> float | Tensor | None:
    """What belongs to a rank's heads of the scales of a model; a scale for all heads is everybody's."""
    if isinstance(scale, Tensor) and scale.dim():
        return fp8_scale(name, scale, storage, kv_heads, scale.device)[heads.start : heads.stop]
    return scale


def _by_bank(sequences: tuple[ShardedSequence, ...], count: int, given: list[array[int]] | None) -> dict[int, _Part]:
    """What every bank is to append, if anything."""
    parts: dict[int, _Part] = {}
    for bank in sorted({sequence.bank for sequence in sequences}):
        mine = [i for i, sequence in enumerate(sequences) if sequence.bank == bank]
        tokens = count if given is None else [given[i] for i in mine]
        parts[bank] = ([sequences[i].held for i in mine], tokens)
    return parts


def _skipped(sequences: tuple[ShardedSequence, ...]) -> dict[int, ShardedSequence]:
    """The layers in which tokens wait to be written, and one sequence whose tokens do."""
    return {layer: sequence for sequence in sequences for new in sequence.held.pending for layer in new.missing}
