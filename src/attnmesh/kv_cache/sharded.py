"""`ShardedCache`: a block cache sharded over ranks by heads, sequences and positions. `Step`: its new tokens.

Steps with the same number of tokens share their tensors, which each append refills in place: a CUDA graph captured with
one step serves all later ones.
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm.base import CallLog, text_digest
from attnmesh.kv_cache.block_manager import BlockLayout, CacheFull, CacheStats
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.kv_cache.sequence import NewTokens, Sequence, check_distinct, check_length, check_live, new_ids
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import Stored
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.validation import check_bool, check_index, check_positive, check_type

_Appended = tuple[tuple[Sequence, ...], "list[array[int]] | None"]  # sequences and the ids of their new tokens


class StepTensors:
    """Tensors of steps of `tokens` tokens. `local_lengths[n]` is the number of the first n positions stored here."""

    def __init__(self, tokens: int, batch: int, rows: range, local_lengths: Tensor) -> None:
        self._rows, self._local_lengths = rows, local_lengths
        with torch.inference_mode(False):  # tensors made in inference mode could not be filled outside it
            device = local_lengths.device
            self._steps = torch.arange(1, tokens + 1, device=device)
            self.positions = torch.empty(batch, tokens, dtype=torch.int32, device=device)
            self.slots = torch.empty(len(rows), tokens, dtype=torch.int64, device=device)
            self.cur_pos = torch.empty(len(rows), dtype=torch.int32, device=device)
            self._end = torch.empty(len(rows), tokens, dtype=torch.int32, device=device)
            # Position + 1 of each token. It keeps its address, too: a captured graph may compute `first` from it.
            self._after = torch.empty(len(rows), tokens, dtype=torch.int64, device=device)
        self._first: dict[int | None, Tensor] = {}

    def fill(self, begins: Tensor, at: Tensor, slots: Tensor) -> None:
        """Set a new step: the first position of each row of the batch (-1: not in the step), and the slots of rows
        `at` of this rank.
        """
        begins = begins[:, None]
        after = torch.where(begins >= 0, begins + self._steps, 0)
        self.positions.copy_(after - 1)
        self._after.copy_(after[self._rows.start : self._rows.stop])
        self._end.copy_(self._local_lengths[self._after])
        self.cur_pos.copy_(self._end[:, -1] - 1)
        self.slots.fill_(-1).index_copy_(0, at, slots)
        for window in self._first:
            self._fill_first(window)

    def key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The keys on this rank that each new token attends to, as `Step.key_range`."""
        if window not in self._first:
            if window is not None:
                check_positive(window=window)
            with torch.inference_mode(False):
                self._first[window] = torch.zeros_like(self._end)
            self._fill_first(window)
        return self._first[window], self._end

    def _fill_first(self, window: int | None) -> None:
        if window is not None:
            self._first[window].copy_(self._local_lengths[(self._after - window).clamp_(min=0)])


@dataclass(eq=False, repr=False)
class Step:
    """T new `tokens` for some rows of a batch, whose keys and values are to be written. Made by `ShardedCache.append`.

    `positions` int32 [batch, T] are of the new tokens, -1 in rows that are not in the step. Of the rows that this
    rank stores: `slots` int64 [rows, T], -1 where there is nothing to write here, and `cur_pos` int32 [rows], the index
    of the last key stored here, -1 if there is none or the row is not in the step.

    Up to 8 tokens, the tensors keep their addresses and hold the latest step with this number of tokens.
    """

    tokens: int
    sequences: tuple[Sequence, ...]
    new_tokens: dict[int, NewTokens]  # by KVDP rank
    skipped: dict[int, Sequence]  # layers in which a sequence lacks earlier tokens, and one such sequence
    tensors: StepTensors

    def __post_init__(self) -> None:
        tensors = self.tensors
        self.positions, self.slots, self.cur_pos = tensors.positions, tensors.slots, tensors.cur_pos

    @property
    def unwritten_layers(self) -> set[int]:
        """The layers that are not written yet: the same for all KVDP ranks."""
        return next(iter(self.new_tokens.values())).unwritten_layers

    def key_range(self, window: int | None = None) -> tuple[Tensor, Tensor]:
        """The keys on this rank that each new token attends to: indices `first` and `end`, int32 [rows, T].

        With a window, those among the last `window` positions. Both are 0 in rows that are not in the step. After the
        first call for a window, every later step with the same number of tokens fills them: call it before capturing a
        graph.
        """
        return self.tensors.key_range(window)

    def __repr__(self) -> str:
        layers = sorted(self.unwritten_layers)
        return f"Step({self.tokens} tokens on {list(self.sequences)}, unwritten layers {layers})"


class ShardedCache:
    """One rank's shard of the cache of a batch of sequences: its kv heads, its rows of the batch, its positions.

    All ranks must perform the same operations in the same order. They then agree on rows, reused prefixes and CacheFull
    without communication. `log` has the operations so far; an `AttentionBlock` compares it with that of other ranks.
    `batch`, `spec` and `max_length` describe the whole model; `num_blocks` and `window_blocks` are per rank.
    `device` is torch's default device if it is None. There are no index keys.

    The rows of each KVDP rank are a `BlockCache` of their own. A rank has the memory of its own rows, and tracks the
    blocks of the other KVDP ranks on the meta device.

    Examples:
        >>> spec = am.CacheSpec(layers=1, kv_heads=2, head_dim=16)
        >>> sizes = dict(batch=1, num_blocks=4, block_size=4, max_length=16, device="cpu")
        >>> caches = [am.ShardedCache(am.DecodeSharding(cp=2), rank, spec, **sizes) for rank in range(2)]
        >>> for cache in caches:
        ...     cache.mark_written(cache.append([cache.allocate(7)], 7))
        >>> [cache.sequences[0].length for cache in caches]
        [7, 7]
        >>> [cache.local.cur_pos.tolist() for cache in caches]  # 4 and 3 of the positions
        [[3], [2]]
    """

    def __init__(
        self,
        sharding: DecodeSharding,
        rank: int,
        spec: CacheSpec,
        *,
        batch: int,
        num_blocks: int,
        block_size: int,
        max_length: int,
        device: torch.device | str | None = None,
        window_blocks: int = 0,
        num_states: int = 0,
    ) -> None:
        check_type("sharding", sharding, DecodeSharding)
        sharding.place(rank)  # raises
        check_type("spec", spec, CacheSpec)
        if spec.index_dim is not None:
            raise ValueError(f"spec.index_dim must be None in a ShardedCache, got {spec.index_dim}")
        check_positive(batch=batch, num_blocks=num_blocks, block_size=block_size, max_length=max_length)
        for kv_heads in dict.fromkeys(heads for heads, _, _ in spec.shapes):
            sharding.check_heads(kv_heads * sharding.ranks, kv_heads)  # valid for any number of query heads
        shard, heads = sharding.position_shard(rank), [sharding.kv_heads(rank, n) for n, _, _ in spec.shapes]
        needed = BlockLayout(shard, block_size).num_blocks(max_length)
        if needed > num_blocks:
            raise ValueError(
                f"num_blocks must be at least {needed}, what one sequence of max_length={max_length} needs on a rank "
                f"under {sharding} with block_size={block_size}, got {num_blocks}"
            )
        self.sharding, self.rank, self.batch = sharding, rank, batch
        self.spec, self.layers = spec, spec.layers
        self.block_size, self.num_blocks, self.max_length = block_size, num_blocks, max_length
        self._rows_of_rank = [sharding.sequences(peer, batch) for peer in sharding.kvdp_peers(rank)]
        kvdp_rank, local_spec = sharding.place(rank).kvdp, spec.of_heads(heads)
        self.by_kvdp_rank = [
            BlockCache(
                local_spec, num_blocks=num_blocks, block_size=block_size, max_sequences=max(1, len(rows)),
                max_length=max_length, device=device if peer == kvdp_rank else "meta", window_blocks=window_blocks,
                num_states=num_states, shard=shard, rows=rows or range(rows.start, rows.start + 1), kvdp_rank=peer,
            )
            for peer, rows in enumerate(self._rows_of_rank)
        ]  # fmt: skip
        """The cache of each KVDP rank, without memory for the caches of other KVDP ranks."""
        self.local: BlockCache = self.by_kvdp_rank[kvdp_rank]
        """The cache of this rank's rows, which has its memory."""
        self._kvdp_rank, self.value_dim = kvdp_rank, self.local.value_dim
        self.rows = self._rows_of_rank[kvdp_rank]
        self.block_table = self.local.block_table[: len(self.rows)]
        lengths = torch.arange(max_length + 1, device=self.block_table.device)
        self._local_lengths = shard.length(lengths).to(torch.int32)
        self._tensors: dict[int, StepTensors] = {}
        self._current: Step | None = None
        self.log = CallLog()
        self.number: int | None = None
        """Which of the caches of its ranks this is: given by `AttentionBlock`, which compares it between ranks."""

    def keys(self, layer: int) -> Stored:
        """The pool of a layer's keys, [num_blocks, block_size, own kv heads, head_dim]."""
        return self.local.keys(layer)

    def values(self, layer: int) -> Stored:
        """The pool of a layer's values, [num_blocks, block_size, own kv heads, value_dim]."""
        return self.local.values(layer)

    @property
    def sequences(self) -> dict[int, Sequence]:
        """All sequences that were not freed, by row."""
        return {row: each for cache in self.by_kvdp_rank for row, each in cache.sequences.items()}

    def stats(self) -> list[CacheStats]:
        """The statistics of each KVDP rank's cache, the same on every rank."""
        return [cache.stats() for cache in self.by_kvdp_rank]

    def allocate(self, prompt: abc.Sequence[int] | int, *, cache_key: str = "") -> Sequence:
        """A sequence for a prompt, as `BlockCache.allocate`, on the KVDP rank that reuses the longest prefix.

        Ties go to the KVDP rank with the most free rows, then to the first. If one is full, the next is tried. Raises
        CacheFull if all are full.
        """
        ranks = [peer for peer, rows in enumerate(self._rows_of_rank) if rows]  # a batch may be smaller than kvdp
        if len(ranks) > 1:
            cached = {peer: self.by_kvdp_rank[peer].find_prefix(prompt, cache_key=cache_key) for peer in ranks}
            ranks.sort(key=lambda peer: (-cached[peer], -self.by_kvdp_rank[peer].free_rows, peer))
        full: list[CacheFull] = []
        for peer in ranks:
            try:
                sequence = self.by_kvdp_rank[peer].allocate(prompt, cache_key=cache_key)
            except CacheFull as error:
                full.append(error)
            else:
                ids = (prompt, 0) if isinstance(prompt, int) else (len(prompt), hash(tuple(prompt)))
                self._log("allocate", row=sequence.row, tokens=ids[0], ids=ids[1], cache_key=text_digest(cache_key))
                return sequence
        if all(error.resource == "sequences" for error in full):
            raise _no_row(self.batch, limit=f"batch={self.batch}")
        raise next(error for error in full if error.resource == "blocks")

    def append(self, sequences: abc.Sequence[Sequence], tokens: int | abc.Sequence[abc.Sequence[int]]) -> Step:
        """A step of T more tokens for each sequence. Raises CacheFull, for all of them, if blocks are missing.

        Raises ValueError where layers with a window have blocks of their own: append to `by_kvdp_rank` there. `tokens`
        is as for `BlockCache.append`. Write every layer of a step before the next append. A step is valid
        until the next append, or until one of its sequences is truncated or freed.
        """
        if self.local.window is not None:
            raise ValueError(
                f"a step has the same slots in every layer, got a cache with a window of {self.local.window} in "
                f"{self.local.num_windowed} of {self.layers} layers: append to the caches in by_kvdp_rank"
            )
        sequences = check_distinct(sequences, self._check_sequence)
        count, given = new_ids(tokens, len(sequences))
        longest = max(sequences, key=lambda sequence: sequence.length)
        check_length(longest, longest.length + count, self.max_length)
        parts = _by_kvdp_rank(sequences, given)
        if len(parts) > 1:  # a single cache changes nothing when it raises
            for kvdp_rank, (some, _) in parts.items():
                self.by_kvdp_rank[kvdp_rank].check_extend(some, count)
        begins = [-1] * self.batch
        for sequence in sequences:
            begins[sequence.row] = sequence.length
        skipped = _unwritten_layers(sequences)
        own = self._kvdp_rank
        new = {
            peer: self.by_kvdp_rank[peer].extend(some, count, ids)[0]
            for peer, (some, ids) in parts.items()
            if peer != own
        }
        tensors = self._tensors_for(count)
        if own in parts:
            local, local_ids = parts[own]
            numbers = [*begins, *(sequence.row - self.rows.start for sequence in local)]
            new[own], sent = self.local.extend(local, count, local_ids, numbers)
            tensors.fill(sent[: self.batch], sent[self.batch :], new[own].slots)
        else:
            sent = self.local.upload(begins)
            tensors.fill(sent, sent[:0], sent[:0, None].expand(0, count))
        ids = 0 if given is None else hash(tuple(map(tuple, given)))
        self._log("append", tokens=count, rows=tuple(s.row for s in sequences), at=tuple(begins), ids=ids)
        self._current = Step(count, sequences, new, skipped, tensors)
        return self._current

    def check_step(self, step: Step, layer: int, *, written: bool = False) -> None:
        """Raise ValueError unless a step is the latest, and all earlier tokens are written in a layer.

        The step's own tokens must not be written there yet or, with `written`, must be.
        """
        check_index("layer", layer, self.layers)
        check_bool(written=written)
        self._check_latest(step)
        if layer in step.skipped:
            sequence = step.skipped[layer]
            raise ValueError(
                f"{sequence} has earlier tokens that are not written in layer {layer}: truncate it to "
                f"{sequence.written} tokens, and append those again"
            )
        if layer in step.unwritten_layers and written:
            raise ValueError(f"layer {layer} of this step is not written yet, got written=True")
        if layer not in step.unwritten_layers and not written:
            raise ValueError(
                f"layer {layer} of this step is already written, unwritten are {sorted(step.unwritten_layers)}"
            )

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor | None = None) -> None:
        """Write one layer of a step: k [rows, own kv heads, T, head_dim] and v [rows, own kv heads, T, value_dim].

        Rows are of this rank; rows that are not in the step are ignored. Every rank passes all T tokens, and
        those that other ranks store are skipped. Of latents there is no v.
        """
        self.check_step(step, layer)
        self.local.write_slots(layer, step.slots, k, v)
        self._mark_written(step, layer)

    def mark_written(self, step: Step, layer: int | None = None) -> None:
        """Record that the slots of one layer, or of all unwritten layers, were filled by other means than `write`."""
        self._check_latest(step)
        layers = sorted(step.unwritten_layers) if layer is None else [layer]
        for each in layers:
            self.check_step(step, each)
        for each in layers:
            self._mark_written(step, each)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens in the same blocks, and so on the same KVDP rank.

        Raises CacheFull if that has no free row, whatever others have.
        """
        self._check_sequence(sequence)
        rank, rows = sequence.kvdp_rank, len(self._rows_of_rank[sequence.kvdp_rank])
        try:
            fork = self.by_kvdp_rank[rank].fork(sequence)
        except CacheFull:
            limit = f"batch={self.batch}"
            raise _no_row(
                rows, limit if rows == self.batch else f"the {rows} rows of KVDP rank {rank} ({limit})"
            ) from None
        self._log("fork", row=sequence.row, fork=fork.row)
        return fork

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens, as after rejected drafts. Blocks reserved for a prompt are freed, too."""
        self._check_sequence(sequence)
        self.by_kvdp_rank[sequence.kvdp_rank].truncate(sequence, length)
        self._log("truncate", row=sequence.row, length=length)
        self._invalidate_step(sequence)

    def free(self, sequence: Sequence) -> None:
        """End a sequence and free its blocks. Blocks with a prefix hash stay cached until they are evicted."""
        self._check_sequence(sequence)
        self.by_kvdp_rank[sequence.kvdp_rank].free(sequence)
        self._log("free", row=sequence.row)
        self._invalidate_step(sequence)

    def restore(
        self, row: int, length: int, reserved: int, ids: array[int], root: bytes, shared: list[int]
    ) -> Sequence:
        """A sequence in a given free row whose keys and values the caller copies, as `BlockManager.restore`."""
        kvdp_rank = next(peer for peer, rows in enumerate(self._rows_of_rank) if row in rows)
        sequence = self.by_kvdp_rank[kvdp_rank].restore(row, length, reserved, ids, root, shared)
        self._log("restore", row=row, length=length, ids=hash(tuple(ids)))
        return sequence

    def mark_restored(self, sequence: Sequence) -> None:
        """Record that the keys and values of a restored sequence were copied: prompts can reuse its full blocks."""
        self._check_sequence(sequence)
        self.by_kvdp_rank[sequence.kvdp_rank].mark_restored(sequence)

    def _log(self, operation: str, **numbers: int | tuple[int, ...]) -> None:
        self.log.add(operation, hash((text_digest(operation), *numbers.values())), numbers)

    def _tensors_for(self, tokens: int) -> StepTensors:
        """The tensors shared by all decode steps of `tokens` tokens; a longer step, of a prompt, gets its own."""
        if tokens in self._tensors:
            return self._tensors[tokens]
        tensors = StepTensors(tokens, self.batch, self.rows, self._local_lengths)
        if tokens <= MAX_DECODE_TOKENS:
            self._tensors[tokens] = tensors
        return tensors

    def _mark_written(self, step: Step, layer: int) -> None:
        for kvdp_rank, new in step.new_tokens.items():
            self.by_kvdp_rank[kvdp_rank].mark_written(new, layer)

    def _invalidate_step(self, sequence: Sequence) -> None:
        if self._current is not None and sequence in self._current.sequences:
            self._current = None

    def _check_latest(self, step: Step) -> None:
        check_type("step", step, Step, "what append returned")
        if step is not self._current:
            raise ValueError(
                f"step must be the latest of this cache, with no sequence truncated or freed since, got {step}"
            )

    def _check_sequence(self, sequence: Sequence, at: int | None = None) -> None:
        check_live(sequence, lambda each: self.by_kvdp_rank[each.kvdp_rank % len(self.by_kvdp_rank)].has(each), at)


def _no_row(total: int, limit: str) -> CacheFull:
    return CacheFull("sequences", needed=1, free=0, cached=0, total=total, limit=limit)


def _by_kvdp_rank(sequences: tuple[Sequence, ...], given: list[array[int]] | None) -> dict[int, _Appended]:
    """The sequences and new tokens of each KVDP rank that has any."""
    parts: dict[int, _Appended] = {}
    for kvdp_rank in sorted({sequence.kvdp_rank for sequence in sequences}):
        indices = [i for i, sequence in enumerate(sequences) if sequence.kvdp_rank == kvdp_rank]
        ids = None if given is None else [given[i] for i in indices]
        parts[kvdp_rank] = tuple(sequences[i] for i in indices), ids
    return parts


def _unwritten_layers(sequences: tuple[Sequence, ...]) -> dict[int, Sequence]:
    """The layers in which tokens of a sequence are still unwritten, and a sequence with unwritten tokens."""
    return {layer: sequence for sequence in sequences for new in sequence.pending for layer in new.unwritten_layers}
