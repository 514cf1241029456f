"""`Engine`: prefill and decode of a Transformers model whose KV cache is sharded over ranks by position.

Every rank has the whole model. A prompt is prefilled in chunks, each sharded over the ranks by a layout. New tokens are
computed on every rank, and their keys and values are stored by the ranks in turn. Finished sequences stay cached, so
that a later prompt with the same prefix reuses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, comm_from
from attnmesh.core import ranges
from attnmesh.core.layouts import Layout, Zigzag
from attnmesh.core.ranges import Ranges
from attnmesh.core.text import counted
from attnmesh.core.validation import check_count, check_positive
from attnmesh.generation.latents import LatentProjections, latent_widths
from attnmesh.generation.layer_caches import Appended, LayerCaches, StoredSequence
from attnmesh.generation.models import cache_storage, cached_widths, check_generation, kv_bytes_per_token
from attnmesh.generation.norms import one_call, use_one_call
from attnmesh.generation.passes import CachePass, ChunkKV, DecodeGraphs, DecodePass, PrefillPass, StepKV
from attnmesh.generation.prefill_shards import (
    MIN_TOKENS_PER_RANK,
    min_prefill_chunk,
    prefilled,
    rank_capacity,
    shard_chunk,
)
from attnmesh.generation.rank_memory import BLOCK_SIZE, cache_blocks, num_blocks, window_blocks
from attnmesh.generation.tensor_parallel import TensorParallel
from attnmesh.generation.windows import MARGIN, KeptPositions, layer_windows
from attnmesh.integrations.transformers_models import check_model
from attnmesh.integrations.weight_splits import heads_of
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.positions import LocalPositions, SequenceShards, interleave

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineSequence:
    """A sequence in the engine: its token ids, and the positions that each rank stores."""

    ids: list[int]
    shards: SequenceShards
    stored: StoredSequence | None  # this rank's part, in its cache; None if another KVDP rank stores the sequence
    kept: KeptPositions | None = None  # in layers that keep a window only; None if there are none
    group: int = 0  # the KVDP rank, of those that this engine serves
    reused: int = 0  # prompt tokens that were not computed again
    logits: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu")
    )  # [vocabulary], for the next token
    max_tokens: int = 0  # tokens that it may grow to
    max_tokens_per_rank: list[int] = field(default_factory=list)
    max_forks: int = 1  # sequences that it may become, itself included
    active: bool = True  # False once it is only kept for reuse

    @property
    def local(self) -> LocalPositions:
        """The positions that this rank stores."""
        return self.shards.local


class Engine:
    """Prefill and decode steps. All ranks of `comm` must construct it and call its methods with the same arguments.

    The cache holds `cache_tokens` tokens of at most `max_sequences` sequences at a time, over all ranks. `storage` is
    fp8, int8 or bfp8, or by default the dtype of the model. A token attends to all keys and values as the cache stores
    them, its own and those of its chunk included. So they have one value for all later tokens, and neither chunks nor
    ranks nor prefix reuse change the result.

    `prefill_chunk` is the number of tokens per prefill pass, by default the whole prompt. `on_prefill` is called after
    every pass with the number of prompt tokens that are cached and the length of the prompt.

    `comm` are the ranks that compute together, and `position_ranks` those that shard the positions of a sequence: here
    the same.
    """

    own_group = 0  # of the groups of sequences, the one that this rank stores

    def __init__(
        self,
        model: Any,
        comm: Comm | None = None,
        *,
        cache_tokens: int,
        max_sequences: int = 1,
        storage: str | None = None,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        prefill_chunk: int | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> None:
        check_model(model)
        self._check_model(model)
        self.model, self._on_prefill = model, on_prefill
        self.prefill_tokens = self.reused_tokens = 0
        self.context = ContextParallel(comm_from(comm), layout=layout, schedule=schedule)
        self.comm, world = self.context.comm, self.context.world
        self.position_ranks = self.comm
        check_positive(cache_tokens=cache_tokens, max_sequences=max_sequences)
        chunk = max(cache_tokens, min_prefill_chunk(world)) if prefill_chunk is None else prefill_chunk
        self.prefill_chunk = check_count("prefill_chunk", chunk)
        if self.prefill_chunk < min_prefill_chunk(world):
            raise ValueError(
                f"prefill_chunk must be at least {MIN_TOKENS_PER_RANK} tokens per rank, {min_prefill_chunk(world)} "
                f"for {counted(world, 'rank')}, got {prefill_chunk}"
            )
        config, weight = model.config, model.get_input_embeddings().weight
        self.cache_tokens, self.max_sequences, self.device = cache_tokens, max_sequences, weight.device
        if not all(layout.ranges(min_prefill_chunk(world), world, rank) for rank in range(world)):
            raise ValueError(
                f"layout must give every one of {counted(world, 'rank')} a part of the sequence, got {layout}"
            )
        self.capacity = rank_capacity(layout, world, cache_tokens, self.prefill_chunk)
        self.storage = cache_storage(config, weight.dtype, storage)
        kv_heads, windows = self._cached_heads(), layer_windows(config)
        self.cache = LayerCaches(
            windows, num_blocks=cache_blocks(self.capacity, max_sequences),
            window_blocks=window_blocks(windows, max_sequences), block_size=BLOCK_SIZE,
            kv_heads=kv_heads, **cached_widths(config), storage=self.storage, device=weight.device,
            max_sequences=max_sequences, max_length=self.capacity,
        )  # fmt: skip
        self.nothing_kept = None if self.cache.window is None else KeptPositions(self.cache.window, MARGIN)
        widths = latent_widths(config)
        self._latents = None if widths is None else LatentProjections(model, widths)
        self.sequences: list[EngineSequence] = []
        self.passes = 0
        """Prefill and decode passes so far; the same on every rank."""
        self._changes = self._exchanges = 0  # that were begun and have not ended, or were interrupted
        self._step_context: AbstractContextManager[None] = nullcontext()
        use_one_call(model)
        self._forward = partial(_logits, model)
        self._forward_step: Callable[[Any, Tensor, Tensor], Tensor] = self._forward
        self._prepare_steps()
        self.kv_bytes_per_token = kv_bytes_per_token(config, self.storage, kv_heads)
        """Bytes of one token in the cache of this rank, in all layers."""
        self.kv_bytes_per_token_of_all = self.kv_bytes_per_token
        """Bytes of one token with all kv heads."""

    def _check_model(self, model: Any) -> None:
        """Raise ValueError unless this engine serves the model."""
        check_generation(model.config, type(model).__name__)

    def _cached_heads(self) -> int:
        """The number of kv heads that this rank caches."""
        return heads_of(self.model.config).kv

    def _prepare_steps(self) -> None:
        """Decide how decode steps run."""
        if self.device.type == "cuda":
            self.use_tensor_parallel()
        # Mixture-of-experts routing on the host cannot be captured. NCCL's messages can, but NCCL does not destroy a
        # communicator before the last graph with its messages: an engine that is still referred to, as by the traceback
        # of an exception, would block the end of its process.
        if self.device.type == "cuda" and self.comm.world == 1 and not hasattr(self.model.config, "num_local_experts"):
            self._forward_step = DecodeGraphs(self._forward)

    def use_tensor_parallel(self) -> None:
        """Compute decode steps tensor-parallel from now on. All ranks must call it."""
        self._step_context = TensorParallel(self.model, self.comm)

    def prefill(
        self, ids: Sequence[int], max_new_tokens: int = 0, group: int = 0, max_forks: int = 1
    ) -> EngineSequence:
        """A sequence that starts with the prompt `ids` and may grow by `max_new_tokens`, with its next `logits`.

        The longest common prefix with a cached sequence is not computed again, as far as layers with a window still
        have what follows it: that sequence is taken over or, while it is active, forked. Inactive sequences are evicted
        to make room, the oldest first. All this is per `group`. There is room to `fork` it into `max_forks` sequences,
        itself included, that grow as much.
        """
        ids = list(ids)
        if not ids:
            raise ValueError("ids must have at least one token, got none")
        cached, begin, common = self._longest_prefix(ids, group)
        per_rank: list[int] = []
        if cached is not None:
            per_rank = self._tokens_per_rank(cached.shards.truncated(begin).counts, begin, len(ids), max_new_tokens)
        if cached is None or max(per_rank) > self.capacity:  # too uneven: one rank stores most of the prefix
            cached, begin = None, 0
            per_rank = self._tokens_per_rank([0] * self.position_ranks.world, 0, len(ids), max_new_tokens)
        tokens = len(ids) + max_forks * max_new_tokens
        # A fork copies a block that is partly filled, and begins one.
        of_fork = -(-max_new_tokens // self.position_ranks.world) + 2 * BLOCK_SIZE
        per_rank = [count + (max_forks - 1) * of_fork for count in per_rank]
        evicted = self._room_for(tokens, per_rank, cached, group, max_forks)
        if evicted:
            _LOG.info("evicted %d cached sequences for one of %d tokens", len(evicted), tokens)
        with self._change():
            for inactive in evicted:
                self.free(inactive)
            sequence = self.start(cached, begin, group, marks=(common, len(ids)))
            sequence.max_tokens, sequence.max_tokens_per_rank, sequence.max_forks = tokens, per_rank, max_forks
        while len(sequence.ids) < len(ids):
            self.extend(sequence, ids[len(sequence.ids) : len(sequence.ids) + self.prefill_chunk])
            if self._on_prefill is not None:
                self._on_prefill(len(sequence.ids), len(ids))
        return sequence

    def start(
        self,
        cached: EngineSequence | None,
        length: int,
        group: int = 0,
        *,
        keep: bool = False,
        marks: Sequence[int] = (),
    ) -> EngineSequence:
        """An active sequence with the first `length` tokens of a cached one: a fork of an active one, or it itself.

        To `keep` what an inactive one has, it is forked, too. `marks` are where later prompts may part from this one.
        """
        with self._change():
            sequence = self._start_from(cached, group, keep)
            self.truncate(sequence, length)
            if sequence.kept is not None:
                self._keep(sequence, sequence.kept.marked(marks))
            sequence.active, sequence.reused = True, length
            self.reused_tokens += length
        return sequence

    def fork(self, sequence: EngineSequence) -> EngineSequence:
        """A second active sequence with the same tokens, which shares their blocks."""
        with self._change():
            twin = self._start_from(sequence, sequence.group, keep=True)
            self.truncate(twin, len(twin.ids))  # with positions of its own
        return twin

    def extend(self, sequence: EngineSequence, ids: list[int]) -> None:
        """Append a chunk of a prompt to a sequence, at most `prefill_chunk` tokens; sets its next `logits`."""
        if len(ids) >= min_prefill_chunk(self.position_ranks.world):
            sequence.logits = self._prefill_chunk(sequence, ids)
        else:  # too short to shard
            for at in range(0, len(ids), MAX_DECODE_TOKENS):
                self.decode([sequence], [ids[at : at + MAX_DECODE_TOKENS]])
        self.prefill_tokens += len(ids)

    def decode(self, sequences: Sequence[EngineSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        """Append T tokens to each sequence: logits [B, T, vocabulary] for what follows each, the same on every rank."""
        logits = self._decode(sequences, ids)
        last = logits[:, -1].clone()  # not a view of all tokens' logits, or of memory that the next graph writes
        for sequence, row in zip(sequences, last, strict=True):
            sequence.logits = row
        return logits

    def truncate(self, sequence: EngineSequence, length: int) -> None:
        """Keep the first `length` tokens only."""
        shards = sequence.shards.truncated(length)
        with self._change():
            if sequence.stored is not None and len(shards.local) < sequence.stored.length:
                self.cache.truncate(sequence.stored, len(shards.local))
            sequence.shards, sequence.ids = shards, sequence.ids[:length]
            sequence.kept = None if sequence.kept is None else sequence.kept.truncated(length)

    def release(self, sequence: EngineSequence) -> None:
        """Mark a sequence as finished: it stays cached for reuse until room is needed."""
        sequence.active, sequence.max_tokens, sequence.max_forks = False, len(sequence.ids), 1
        sequence.logits = sequence.logits[:0].clone()  # a view of what all sequences of its last step have
        sequence.max_tokens_per_rank = sequence.shards.counts

    def free(self, sequence: EngineSequence) -> None:
        """Remove a sequence from the cache."""
        with self._change():
            if sequence.stored is not None:
                self.cache.free(sequence.stored)
            self.sequences.remove(sequence)

    def clear(self) -> None:
        """Remove all sequences from the cache."""
        self.sequences.clear()
        self.cache.clear()
        self._changes = 0

    # Interruption: by an exception of the model or of a callback, or by a KeyboardInterrupt, which comes at any time.

    @property
    def is_out_of_step(self) -> bool:
        """Whether this rank was interrupted where the ranks must do the same: it cannot work with them any more."""
        return self._exchanges > 0 or (self._changes > 0 and self.comm.world > 1)

    def release_all(self) -> None:
        """Release all active sequences, also those that an interrupted call left behind.

        The tokens of an interrupted pass are removed; those of earlier passes stay cached.
        """
        if self.is_out_of_step:
            return
        if self._changes:  # nothing is known about the cache
            self.clear()
        for sequence in [sequence for sequence in self.sequences if sequence.active]:
            self.truncate(sequence, len(sequence.ids))
            self.release(sequence)
            if not sequence.ids:
                self.free(sequence)

    def state(self) -> str:
        """The cached sequences, in short: equal on all ranks that are in step."""
        sequences = [(len(each.ids), each.active, each.reused, *each.shards.counts) for each in self.sequences]
        tokens = sum(len(each.ids) for each in self.sequences)
        return f"{tokens} tokens after {self.passes} passes, digest {hash(tuple(sequences)) % 2**64:016x}"

    @contextmanager
    def exchange(self, comm: Comm) -> Iterator[None]:
        """Around messages to other ranks of `comm`: without the end of this, ranks are out of step."""
        self._exchanges += comm.world > 1
        yield
        self._exchanges -= comm.world > 1

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around changes of sequences and cache that belong together."""
        self._changes += 1
        yield
        self._changes -= 1

    def kv_bytes(self, sequence: EngineSequence) -> tuple[int, int]:
        """Bytes of a sequence in the cache of this rank, and in that of a single device."""
        local, length = len(sequence.local), len(sequence.ids)
        if sequence.kept is None:
            return local * self.kv_bytes_per_token, length * self.kv_bytes_per_token_of_all
        layers, windowed = self.model.config.num_hidden_layers, self.cache.num_windowed
        kept_local, kept = sequence.kept.count(sequence.local), ranges.size(sequence.kept.ranges)
        own = (local * (layers - windowed) + kept_local * windowed) * self.kv_bytes_per_token // layers
        return own, (length * (layers - windowed) + kept * windowed) * self.kv_bytes_per_token_of_all // layers

    def check_room(self, tokens: Sequence[int], group: int = 0, max_forks: int = 1) -> None:
        """Raise ValueError unless new sequences with so many tokens each fit beside the active ones of a group.

        Each may become `max_forks` sequences, with so many tokens together.
        """
        active = [each.max_tokens for each in self.sequences if each.active and each.group == group]
        new = len(tokens) * max_forks
        if sum(active) + sum(tokens) > self.cache_tokens or len(active) + new > self.max_sequences:
            beside = f" beside {sum(active)} of {len(active)} active ones" if active else ""
            raise ValueError(
                f"{sum(tokens)} tokens of {counted(new, 'sequence')}, {MAX_DECODE_TOKENS} each for drafts, do not fit"
                f"{beside}: there is room for cache_tokens={self.cache_tokens} of max_sequences={self.max_sequences}"
            )

    def cached_prefix(self, ids: list[int], group: int = 0) -> int:
        """The number of tokens of a prompt that a group has cached."""
        return self._longest_prefix(ids, group)[1]

    def _longest_prefix(self, ids: list[int], group: int) -> tuple[EngineSequence | None, int, int]:
        """The cached sequence that has most of a prefix, how much, and the longest common prefix with any.

        The last token is computed again.
        """
        cached = [sequence for sequence in self.sequences if sequence.group == group]
        common = [min(_common_prefix(sequence.ids, ids), len(ids) - 1) for sequence in cached]
        reusable = [
            most if sequence.kept is None else sequence.kept.reusable(most)
            for sequence, most in zip(cached, common, strict=True)
        ]
        longest = max(reusable, default=0)
        return (cached[reusable.index(longest)] if longest else None), longest, max(common, default=0)

    def _keep(self, sequence: EngineSequence, kept: KeptPositions) -> None:
        """Free the blocks that layers with a window do not need any more."""
        sequence.kept = kept
        if sequence.stored is not None:
            self.cache.keep(sequence.stored, kept.blocks(sequence.local, BLOCK_SIZE))

    def _start_from(self, cached: EngineSequence | None, group: int, keep: bool) -> EngineSequence:
        """A new sequence, a fork of an active one, or an inactive one itself; it becomes the most recent one."""
        if cached is None:
            empty = SequenceShards.empty(self.position_ranks.world, self.position_ranks.rank)
            stored = self.cache.allocate() if group == self.own_group else None
            sequence = EngineSequence([], empty, stored, self.nothing_kept, group)
        elif cached.active or keep:
            stored = None if cached.stored is None else self.cache.fork(cached.stored)
            sequence = EngineSequence(list(cached.ids), cached.shards, stored, cached.kept, group)
        else:
            sequence = cached
            self.sequences.remove(cached)
        self.sequences.append(sequence)
        return sequence

    def shard(self, counts: Sequence[int], new: range) -> list[Ranges]:
        """The new positions that each rank stores, where the ranks store `counts` positions before them."""
        return shard_chunk(self.context.layout, counts, new)

    def _tokens_per_rank(self, counts: Sequence[int], begin: int, length: int, max_new_tokens: int) -> list[int]:
        """The tokens per rank after prefill from `begin` (with `counts` per rank) to `length`, and all new tokens."""
        counts = prefilled(self.context.layout, counts, range(begin, length), self.prefill_chunk)
        return [count + -(-max_new_tokens // self.position_ranks.world) for count in counts]

    def _room_for(
        self, tokens: int, per_rank: list[int], reused: EngineSequence | None, group: int, max_forks: int
    ) -> list[EngineSequence]:
        """The inactive sequences to evict, so that one of so many tokens fits; `reused` is taken over unless active.

        All ranks evict the same ones, because they decide by what all ranks store. Raises ValueError if eviction does
        not make enough room.
        """
        kept = [each for each in self.sequences if each.group == group and (each.active or each is not reused)]
        evicted: list[EngineSequence] = []

        def fits() -> bool:
            all_per_rank = (per_rank, *(sequence.max_tokens_per_rank for sequence in kept))
            blocks = [[num_blocks(n) for n in each] for each in all_per_rank]
            return (
                sum(sequence.max_tokens for sequence in kept) + tokens <= self.cache_tokens
                and sum(sequence.max_forks for sequence in kept) + max_forks <= self.max_sequences
                and max(map(sum, zip(*blocks, strict=True))) <= self.cache.stats().total
            )

        for inactive in [sequence for sequence in kept if not sequence.active]:
            if fits():
                break
            kept.remove(inactive)
            evicted.append(inactive)
        if not fits():
            raise ValueError(
                f"{tokens} tokens do not fit beside {sum(sequence.max_tokens for sequence in kept)} of {len(kept)} "
                f"active sequences: there is room for cache_tokens={self.cache_tokens} of "
                f"max_sequences={self.max_sequences}"
            )
        return evicted

    def _prefill_chunk(self, sequence: EngineSequence, ids: list[int]) -> Tensor:
        """Prefill a chunk, sharded over the ranks; returns the logits of its last token on every rank."""
        begin = len(sequence.ids)
        parts = self.shard(sequence.shards.counts, range(begin, begin + len(ids)))
        own = parts[self.comm.rank]
        assert sequence.stored is not None
        new, kept = self._append_chunk(sequence, parts)
        assert new is not None
        chunk = PrefillPass(
            self.cache, new.slots, self.context, parts, len(ids), self._chunk_kv(sequence, begin), latents=self._latents
        )
        positions = ranges.as_tensor(own)
        tokens = torch.tensor(ids, device="cpu")[positions - begin]
        device = self.device
        last = next(rank for rank, part in enumerate(parts) if part[-1][-1] == begin + len(ids) - 1)
        with self.exchange(self.comm):
            logits = self._forward(chunk, tokens[None].to(device), positions[None].to(device), keep=1)[0, -1]
            logits = self._broadcast(logits, last)
        self._end_chunk(sequence, ids, new, kept)
        return logits

    def _append_chunk(
        self, sequence: EngineSequence, parts: Sequence[Ranges]
    ) -> tuple[Appended | None, KeptPositions | None]:
        """Slots for this rank's tokens of a chunk, None if it stores none, and what is kept after the chunk."""
        before, size = sequence.kept, sum(map(ranges.size, parts))
        after = None if before is None else before.grown(len(sequence.ids) + size)
        with self._change():
            sequence.shards.extend(parts)
            if sequence.stored is None:
                return None, after
            blocks = None
            if before is not None and after is not None:  # the chunk attends to what was before it
                blocks = before.blocks(sequence.local, BLOCK_SIZE) | after.blocks(sequence.local, BLOCK_SIZE)
            own = ranges.size(parts[self.position_ranks.rank])
            return self.cache.append([sequence.stored], own, blocks), after

    def _end_chunk(
        self, sequence: EngineSequence, ids: list[int], new: Appended | None, kept: KeptPositions | None
    ) -> None:
        """Record that a chunk was computed."""
        with self._change():
            if new is not None:
                self.cache.mark_written(new)
            sequence.ids += ids
            if kept is not None:
                self._keep(sequence, kept)
            self.passes += 1

    def _chunk_kv(self, sequence: EngineSequence, begin: int) -> ChunkKV:
        """What this rank stores of a sequence with a chunk from `begin` on."""
        if sequence.stored is None:
            return ChunkKV(begin, (), ())
        blocks = (torch.tensor(part.blocks, dtype=torch.int64, device=self.device) for part in sequence.stored.parts)
        return ChunkKV(begin, sequence.local.ranges, tuple(blocks))

    def _decode(self, sequences: Sequence[EngineSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        """Compute a few tokens on every rank; each rank stores those that `interleave` gives it."""
        count, world, rank = len(ids[0]), self.position_ranks.world, self.position_ranks.rank
        positions = [range(len(sequence.ids), len(sequence.ids) + count) for sequence in sequences]
        parts = [interleave(new, world) for new in positions]
        own = {
            sequence.stored: (
                list(range(count)) if world == 1 else [position - new.start for run in part[rank] for position in run]
            )
            for sequence, new, part in zip(sequences, positions, parts, strict=True)
            if sequence.stored is not None
        }
        with self._change():
            slots, appended = self._append(own, count)
            for sequence, part in zip(sequences, parts, strict=True):
                sequence.shards.extend(part)
        step = self._decode_pass(sequences, slots, positions)
        at = torch.tensor([list(new) for new in positions], device="cpu")
        tokens = torch.tensor([list(row) for row in ids], device=self.device)
        with self.exchange(self.comm), self._step_context:
            logits = self._forward_step(step, tokens, at.to(self.device))
        with self._change():
            for new in appended:
                self.cache.mark_written(new)
            for sequence, row in zip(sequences, ids, strict=True):
                sequence.ids += row
                if sequence.kept is not None:
                    self._keep_window(sequence)
            self.passes += 1
        return logits

    def _keep_window(self, sequence: EngineSequence) -> None:
        """After a decode step: blocks are freed when another one has been filled."""
        assert sequence.kept is not None
        before, sequence.kept = sequence.kept, sequence.kept.grown(len(sequence.ids))
        count, count_before = len(sequence.local), sequence.local.count_below(before.length)
        if count // BLOCK_SIZE > count_before // BLOCK_SIZE:
            self._keep(sequence, sequence.kept)

    def _decode_pass(
        self, sequences: Sequence[EngineSequence], slots: tuple[Tensor, ...], positions: list[range]
    ) -> CachePass:
        """The pass of a decode step with new tokens at these positions, stored in `slots` [B, T] of each cache."""
        step = self._step_kv(sequences, positions)
        return DecodePass(self.cache, slots, self.comm, step, latents=self._latents)

    def _step_kv(self, sequences: Sequence[EngineSequence], positions: Sequence[range]) -> StepKV:
        """What this rank stores of the sequences of a decode step with new tokens at these positions."""
        own = [
            (each, each.stored, new) for each, new in zip(sequences, positions, strict=True) if each.stored is not None
        ]
        rows = [[stored.parts[i].row for _, stored, _ in own] for i in range(len(self.cache.caches))]
        at = torch.tensor(rows, dtype=torch.int64, device=self.device)
        return StepKV(
            tuple(cache.block_table[rows] for cache, rows in zip(self.cache.caches, at, strict=True)),
            self.cache.caches[0].cur_pos[at[0]],  # the same in each
            [new for _, _, new in own],
            [sequence.local for sequence, _, _ in own],
        )

    def _append(self, own: dict[StoredSequence, list[int]], count: int) -> tuple[tuple[Tensor, ...], list[Appended]]:
        """Slots [B, count] of new tokens, -1 for those of other ranks; `own[b]` are the indices of this rank's."""
        if own and all(len(indices) == count for indices in own.values()):  # as always on a single rank
            new = self.cache.append(list(own), count)
            return new.slots, [new]
        slots = tuple(
            torch.full((len(own), count), -1, dtype=torch.int64, device=self.device) for _ in self.cache.caches
        )
        appended: list[Appended] = []
        for n in sorted({len(indices) for indices in own.values()} - {0}):  # the cache appends equally many to each
            some = {row: sequence for row, (sequence, indices) in enumerate(own.items()) if len(indices) == n}
            new = self.cache.append(list(some.values()), n)
            appended.append(new)
            places = [[[row] * n for row in some], [own[sequence] for sequence in some.values()]]
            at, columns = torch.tensor(places, device=self.device)  # one transfer, and one write for all rows
            for of_cache, given in zip(slots, new.slots, strict=True):
                of_cache[at, columns] = given
        return slots, appended

    def _broadcast(self, x: Tensor, rank: int) -> Tensor:
        """The tensor of one rank, on every rank."""
        comm = self.comm
        if comm.world == 1:
            return x
        shapes = [x.shape if i == rank else (0,) for i in range(comm.world)]
        return comm.all_gather(x.contiguous() if comm.rank == rank else x.new_empty(0), shapes)[rank]


@torch.no_grad()
def _logits(model: Any, cache_pass: CachePass, ids: Tensor, positions: Tensor, keep: int = 0) -> Tensor:
    """The logits of the last `keep` tokens, or of all if 0."""
    with one_call():
        out = model(
            input_ids=ids, position_ids=positions, past_key_values=cache_pass, mesh=cache_pass, use_cache=True,
            logits_to_keep=keep,
        )  # fmt: skip
    logits: Tensor = out.logits
    return logits


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
