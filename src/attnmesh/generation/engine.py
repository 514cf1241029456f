"""`Engine`: the prefill chunks and decode steps of a Transformers model over a sharded KV cache.

With whole weights, every rank has the model. A prompt is prefilled in chunks, each sharded over the ranks of a group;
every group computes its own sequences. New tokens are computed on every rank of a group.

With sharded weights (`shard_model`, `load_model`), all ranks compute every pass together, for the sequences of all
groups, because each has a part of every layer.

Either way a rank caches the kv heads of its TP rank, for the sequences of its group (KVDP rank), at the positions of
its CP rank, and tracks the blocks of the others without their keys and values (`ShardedCache`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Layout, check_layout
from attnmesh.core.ranges import InterleavedShard, Ranges
from attnmesh.generation.attention_calls import (
    attention_calls,
    calls_of_config,
    recurrent_calls,
    run_model,
)
from attnmesh.generation.layers import run_in_one_call, use_linear, use_one_call
from attnmesh.generation.models import BLOCK_SIZE, CacheBlocks, LatentProjections, cache_storage
from attnmesh.generation.passes import (
    CachePass,
    ChunkKV,
    ContextPrefill,
    DecodeGraphs,
    DecodePass,
    HeadPrefill,
    HeadRanks,
    HomeExchange,
    StepKV,
)
from attnmesh.generation.recurrent_states import KEPT_STATES, RecurrentStates, RowStates
from attnmesh.generation.reproducible import (
    KeyRanks,
    ReproducibleDecode,
    ReproduciblePrefill,
    TiledPass,
    Tiles,
    prepare,
    tile_size,
)
from attnmesh.generation.sampling import LogProbs, log_probs, prompt_scores
from attnmesh.generation.tensor_parallel import TensorParallel
from attnmesh.integrations.reproducible import token_log_probs
from attnmesh.integrations.transformers_models import changing_rotary, check_model, check_text_only, text_config
from attnmesh.kv_cache.block_manager import WINDOW_MARGIN
from attnmesh.kv_cache.pools import CacheSpec
from attnmesh.kv_cache.sequence import NewTokens
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.models.sharded import ShardedWeights, check_heads, heads_of
from attnmesh.ops.decode.api import PagedStep
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.parallel.context import ContextParallel
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.shards import ScheduleName
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_count

MIN_TOKENS_PER_RANK = 2  # with this many, any layout gives every rank some tokens of a chunk


def min_prefill_chunk(world: int) -> int:
    """The fewest tokens that any layout can shard over `world` ranks."""
    return MIN_TOKENS_PER_RANK * world


class Engine:
    """The cache of a model, and the passes that compute new tokens. All ranks construct it and make the same calls.

    The ranks of `comm` compute together: the ranks of a group, or all ranks with sharded `weights`. `position_ranks`
    shard the positions of a sequence. A token attends to all keys and values as the cache stores them, its own and the
    keys and values of its chunk included. So they have one value for all later tokens, and neither chunks nor ranks nor
    prefix reuse change the result. The settings are the same as of a `Generator`: `max_sequences` is over all groups.
    """

    def __init__(
        self, model: Any, sharding: DecodeSharding, rank: int, comm: Comm, weights: ShardedWeights | None, *,
        cache_tokens: int, max_sequences: int, storage: str | None, layout: Layout, schedule: ScheduleName,
        prefill_chunk: int | None, reproducible: bool = False,
    ) -> None:  # fmt: skip
        check_model(model)
        check_text_only(model)
        config, weight, self._weights = text_config(model), model.get_input_embeddings().weight, weights
        if reproducible and weights is not None:
            raise ValueError("model must have whole weights on every rank with reproducible=True, got a sharded model")
        if weights is None:
            self.calls = attention_calls(model)
            self.position_ranks, self._heads = comm, HeadRanks.of_whole(comm)
        else:
            check_heads(config, sharding)
            self.calls = replace(calls_of_config(config), recurrent=recurrent_calls(model))
            self.position_ranks, self._heads = weights.ranks.cp, HeadRanks.of_sharded(weights, heads_of(config))
        self.model, self.comm, world = model, comm, self.position_ranks.world
        self.device, self.cache_tokens = weight.device, cache_tokens
        least = min_prefill_chunk(world)
        chunk = max(cache_tokens, least) if prefill_chunk is None else prefill_chunk
        self.prefill_chunk = check_count("prefill_chunk", chunk)
        if self.prefill_chunk < least:
            raise ValueError(
                f"prefill_chunk must be at least {MIN_TOKENS_PER_RANK} tokens per rank, {least} for "
                f"{counted(world, 'rank')}, got {prefill_chunk}"
            )
        check_layout("layout", layout)
        self.tile_size = 0
        if reproducible:
            self.tile_size, layout = tile_size(layout)
        if not all(layout.ranges(least, world, each) for each in range(world)):
            raise ValueError(
                f"layout must give every one of {counted(world, 'rank')} a part of the sequence, got {layout}"
            )
        self.context = ContextParallel(
            self.position_ranks, layout=layout, schedule=schedule, reproducible=reproducible
        )  # fmt: skip
        self._later_context = ContextParallel(
            self.position_ranks, layout=Contiguous(), schedule=schedule, reproducible=reproducible
        )  # fmt: skip
        self._token_ranks = ContextParallel(comm, layout=Contiguous(), schedule=schedule)
        self.storage = cache_storage(self.calls.latent, weight.dtype, storage)
        if reproducible:
            prepare(model, self.calls, self.storage, self.tile_size)
        self.max_sequences = -(-max_sequences // sharding.kvdp)
        """The most sequences of a group."""
        blocks = CacheBlocks(
            self.calls.windows, sharding.position_shard(rank), cache_tokens, self.max_sequences,
            min(self.prefill_chunk, cache_tokens),
        )  # fmt: skip
        layers = self.calls.layers
        spec = CacheSpec(
            layers=len(layers), kv_heads=[layer.kv_heads for layer in layers],
            head_dim=[layer.head_dim for layer in layers], value_dim=[layer.value_dim for layer in layers],
            latent=self.calls.latent is not None, storage=self.storage, windows=blocks.layer_windows,
        )  # fmt: skip
        self.cache = ShardedCache(
            sharding, rank, spec, batch=self.max_sequences * sharding.kvdp, num_blocks=blocks.full,
            block_size=BLOCK_SIZE, max_length=cache_tokens, device=self.device, window_blocks=blocks.windowed,
            num_states=KEPT_STATES * self.max_sequences if self.calls.recurrent else 0,
        )  # fmt: skip
        self.shard: InterleavedShard = sharding.position_shard(rank)
        self._kvdp_rank, self._kvdp = sharding.place(rank).kvdp, sharding.kvdp
        self._drafted: RowStates | None = None  # of a step with drafts, until some of them are accepted
        kvdp_ranks, rows = range(self._kvdp_rank, self._kvdp_rank + 1), self.cache.rows
        if weights is not None:  # every rank computes the sequences of all groups
            kvdp_ranks, rows = range(self._kvdp), range(self.cache.batch)
        self.states = RecurrentStates(self.calls.recurrent, kvdp_ranks, rows, self.device)
        local = self.cache.local
        self._steps = tuple(PagedStep(table, local.cur_pos) for table in local.block_tables)  # of each kind of layers
        self._latents = None if self.calls.latent is None else LatentProjections(model, self.calls.latent)
        self._exchanges = 0  # that were begun and have not ended, or were interrupted
        self._step_context: AbstractContextManager[None] = nullcontext()
        self.log_probs: LogProbs = log_probs
        self._forward: Callable[..., Tensor]
        if reproducible:
            self._forward, self.log_probs = partial(_tiled_logits, model), _token_log_probs
        else:
            use_one_call(model)
            use_linear(model)
            self._forward = partial(run_in_one_call, _logits, model)
        self._forward_step: Callable[[Any, Tensor, Tensor], Tensor] = self._forward
        if self.device.type == "cuda" and weights is None and not self.calls.recurrent and not reproducible:
            self.use_tensor_parallel()
            # What decides on the host, as the routing of experts may, cannot be captured. NCCL's messages can, but NCCL
            # does not destroy a communicator before the last graph with its messages: an engine that is still referred
            # to, as by the traceback of an exception, would block the end of its process.
            if comm.world == 1 and not _decides_on_host(model):
                self._forward_step = DecodeGraphs(self._forward)
        self._layer_bytes = [
            (layer.bytes_per_token(self.storage, len(sharding.kv_heads(rank, layer.kv_heads))),
             layer.bytes_per_token(self.storage))
            for layer in self.calls.layers
        ]  # fmt: skip
        """Of a token in each layer, on this rank and on a single device."""

    def use_tensor_parallel(self) -> None:
        """Compute decode steps of whole weights tensor-parallel from now on. All ranks must call it."""
        self._step_context = TensorParallel(self.model, self.comm)

    # Passes.

    def decode(self, sequences: Sequence[CacheSequence], ids: Sequence[Sequence[int]], new: NewTokens | None) -> Tensor:
        """The logits [B, T, vocabulary] after each of the T latest tokens of some sequences, the same on every rank.

        `new` are the slots of the tokens that this rank stores, in the same order; None if it stores none.
        """
        begins = [each.length - len(row) for each, row in zip(sequences, ids, strict=True)]
        return self._decode(sequences, begins, ids, self._slots(new), has_drafts=len(ids[0]) > 1)

    def accept_drafts(self, counts: Sequence[int]) -> None:
        """Let recurrent states continue after so many tokens of each sequence of the last step, which had drafts."""
        assert self._drafted is not None
        self._drafted.accept(counts)
        self._drafted = None

    def prefill(self, sequence: CacheSequence, begin: int, ids: list[int], new: NewTokens) -> Tensor:
        """The logits [vocabulary] after a chunk of a prompt, which is the end of a sequence; the same on every rank.

        `new` are its slots, which have no memory where another group stores the sequence.
        """
        return self.prefill_scored(sequence, begin, ids, new, None)[0]

    def prefill_scored(
        self, sequence: CacheSequence, begin: int, ids: list[int], new: NewTokens, scored: int | None
    ) -> tuple[Tensor, list[list[float]]]:
        """As `prefill`, and the scores of the tokens that follow each token of the chunk (`prompt_scores`).

        `scored` is the number of most likely tokens, None for no scores. The token after a prompt is not known: 0
        stands for it.
        """
        slots, n = self._slots(new), len(ids)
        next_ids = [] if scored is None else [*sequence.ids[begin + 1 : begin + n + 1], 0][:n]
        following = torch.tensor(next_ids, dtype=torch.int64, device="cpu")
        if n >= min_prefill_chunk(self.position_ranks.world):
            chunk = self._prefill_by_context if self._weights is None else self._prefill_by_heads
            logits, scores = chunk(sequence, range(begin, begin + n), ids, slots, following, scored)
            return logits, scores.tolist()
        rows: list[list[float]] = []
        logits = torch.empty(0, dtype=torch.float32, device="cpu")
        for at in range(0, n, MAX_DECODE_TOKENS):  # too short to shard
            some = slice(at, at + MAX_DECODE_TOKENS)
            some_slots = tuple(each[:, some] for each in slots)
            logits = self._decode([sequence], [begin + at], [ids[some]], some_slots)[0]
            rows += [] if scored is None else prompt_scores(logits, following[some], scored, self.log_probs).tolist()
        return logits[-1].clone(), rows  # not a view of memory that the next graph writes

    def _decode(
        self, sequences: Sequence[CacheSequence], begins: list[int], ids: Sequence[Sequence[int]],
        slots: tuple[Tensor, ...], has_drafts: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute a few tokens of each sequence, from the positions `begins` on."""
        count = len(ids[0])
        own = [i for i, each in enumerate(sequences) if each.kvdp_rank == self._kvdp_rank]
        rows = [sequences[i].row - self.cache.rows.start for i in own]
        state_rows = [self.states.row(each) for each in sequences] if self.calls.recurrent else []
        numbers = [*begins, *(token for row in ids for token in row), *rows, *state_rows]
        packed = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(self.device)
        begin, tokens, at, states = packed.split([len(begins), len(begins) * count, len(rows), len(state_rows)])
        positions = begin[:, None] + torch.arange(count, device=self.device)
        local = self.cache.local
        cur_pos, own_positions = local.cur_pos[at], positions[own[0] : own[0] + len(own)] if own else positions[:0]
        for kind, each in enumerate(self._steps):
            each.advance(local.block_tables[kind, at], cur_pos)
        step = StepKV(self._steps, own_positions, self.shard)
        by_rank = () if self._heads.exchange is None else self._rows(sequences)
        of_rows = self.states.of(states, begin == 0, has_drafts) if self.calls.recurrent else None
        if has_drafts:
            self._drafted = of_rows
        given = local, slots, positions, self.calls, self._heads, by_rank, step
        if self.tile_size:
            decode: DecodePass = ReproducibleDecode(*given, **self._tiled(positions, 0))
        else:
            decode = DecodePass(*given, latents=self._latents, states=of_rows)
        with self.exchange(self.comm), self._step_context:
            return self._forward_step(decode, tokens.view(-1, count), positions)

    def _rows(self, sequences: Sequence[CacheSequence]) -> tuple[int, ...]:
        """The number of sequences of each KVDP rank; the sequences of one rank are adjacent."""
        groups = [sequence.kvdp_rank for sequence in sequences]
        return tuple(groups.count(group) for group in range(self._kvdp))

    def _prefill_by_context(
        self, sequence: CacheSequence, at: range, ids: list[int], slots: tuple[Tensor, ...], following: Tensor,
        scored: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Prefill a chunk at these positions with whole weights, sharded over the ranks."""
        parts, comm, device = self._parts(at), self.comm, self.device
        chunk = self._chunk_kv(sequence, at)
        own = chunk.own.to(device)
        positions = ranges.as_tensor(parts[comm.rank])
        on_device = positions[None].to(device)
        keep = 1 if scored is None else 0
        given = (
            self.cache.local, tuple(each[:, own] for each in slots), on_device, self.calls, chunk,
            self._later_context if at.start else self.context, parts, HomeExchange(comm, parts, self.shard, device),
        )  # fmt: skip
        if self.tile_size:
            prefill: ContextPrefill = ReproduciblePrefill(*given, **self._tiled(on_device, keep))
        else:
            prefill = ContextPrefill(*given, latents=self._latents, states=self._chunk_states(sequence, at))
        tokens = torch.tensor(ids, device="cpu")[positions - at.start]
        last = next(rank for rank, part in enumerate(parts) if at[-1] in part[-1])
        with self.exchange(comm):
            logits = self._forward(prefill, tokens[None].to(device), on_device, keep)[0]
            after = _broadcast(comm, logits[-1], last)
            if scored is None:
                return after, logits.new_empty(0)
            own_scores = prompt_scores(logits, following[positions - at.start], scored, self.log_probs)
            by_rank = [ranges.as_tensor(part) for part in parts]
            gathered = comm.all_gather(own_scores, [(len(each), own_scores.shape[1]) for each in by_rank])
            return after, torch.cat(list(gathered)).cpu()[torch.cat(by_rank).argsort()]

    def _tiled(self, positions: Tensor, keep: int) -> dict[str, Any]:
        """What a reproducible pass has more. The logits of the last `keep` tokens are wanted, of all if 0."""
        head = self.model.get_output_embeddings()
        tiles = Tiles.of(positions.cpu(), self.tile_size, keep, head)
        return {"tiles": tiles, "keys": KeyRanks(self.comm, self.shard)}

    def _parts(self, at: range) -> list[Ranges]:
        """The positions of a chunk that each rank computes: in the layout, or later where they are stored."""
        world = self.comm.world
        if at.start == 0:
            return [self.context.layout.ranges(len(at), world, rank) for rank in range(world)]
        if self.calls.recurrent:  # they need ranges of positions
            return [self._later_parts(at, rank) for rank in range(world)]
        if self.shard.interleave == 1:
            return [InterleavedShard(world, rank).ranges(at.stop, at.start) for rank in range(world)]
        return [(at[len(at) * rank // world : len(at) * (rank + 1) // world],) for rank in range(world)]

    def _later_parts(self, at: range, rank: int) -> Ranges:
        parts = self._later_context.layout.ranges(len(at), self.comm.world, rank)
        return tuple(range(at.start + part.start, at.start + part.stop) for part in parts)

    def _prefill_by_heads(
        self, sequence: CacheSequence, at: range, ids: list[int], slots: tuple[Tensor, ...], following: Tensor,
        scored: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Prefill a chunk at these positions with sharded weights."""
        assert self._weights is not None
        chunk, n, world = self._chunk_kv(sequence, at), len(ids), self.comm.world
        own = chunk.own.to(self.device)
        positions = torch.arange(at.start, at.stop, device=self.device)[None]
        is_divided = n >= world > 1 and scored is None  # otherwise every rank has the logits of all tokens
        prefill = HeadPrefill(
            self.cache.local, tuple(each[:, own] for each in slots), positions, self.calls, chunk, self._heads,
            self._rows([sequence]), own, self._token_ranks if is_divided else None, latents=self._latents,
            states=self._chunk_states(sequence, at),
        )  # fmt: skip
        counts = [self._token_ranks.layout.local_length(n, world, rank) for rank in range(world)]
        divided = self._weights.tokens.divided(counts) if is_divided else nullcontext()
        tokens = torch.tensor([ids], device=self.device)
        with self.exchange(self.comm), divided:
            logits = self._forward(prefill, tokens, positions, 1 if scored is None else 0)[0]
        scores = logits.new_empty(0) if scored is None else prompt_scores(logits, following, scored)
        return logits[-1], scores

    def _chunk_states(self, sequence: CacheSequence, at: range) -> RowStates | None:
        """The recurrent states before a chunk at these positions."""
        if not self.calls.recurrent:
            return None
        row, is_new = (torch.tensor([x], device=self.device) for x in (self.states.row(sequence), at.start == 0))
        return self.states.of(row, is_new)

    def _slots(self, new: NewTokens | None) -> tuple[Tensor, ...]:
        """The slots of new tokens for each kind of layers; none if this rank does not store them."""
        if new is None or new.slots.is_meta:
            return ()
        return (new.slots, new.window_slots)[: len(self.cache.local.block_tables)]

    def _chunk_kv(self, sequence: CacheSequence, at: range) -> ChunkKV:
        """The tokens that this rank stores of a sequence with a chunk at these positions."""
        lists = (sequence.blocks, sequence.window_blocks)[: len(self.cache.local.block_tables)]
        blocks = (torch.tensor(each, dtype=torch.int64, device=self.device) for each in lists)
        return ChunkKV(at, self.shard, tuple(blocks))

    # Interruption: by an exception of the model or of a callback, or by a KeyboardInterrupt, which comes at any time.

    @property
    def is_out_of_step(self) -> bool:
        """Whether this rank was interrupted where the ranks must do the same: it cannot work with them any more."""
        return self._exchanges > 0

    @contextmanager
    def exchange(self, comm: Comm) -> Iterator[None]:
        """Around messages to other ranks of `comm`: without the end of this, ranks are out of step."""
        self._exchanges += comm.world > 1
        yield
        self._exchanges -= comm.world > 1

    def state(self) -> str:
        """The cache of all groups, in short: equal on all ranks that are in step."""
        stats = [(each.free, each.cached, each.hits, each.evictions) for each in self.cache.stats()]
        sequences = [(row, each.length) for row, each in self.cache.sequences.items()]
        return f"{len(sequences)}, digest {hash((*stats, *sequences)) % 2**64:016x}"

    def kv_bytes(self, sequence: CacheSequence) -> tuple[int, int]:
        """Bytes of a sequence in the cache of this rank, and in the cache of a single device."""
        begin = max(0, sequence.length + 1 - (self.cache.local.window or 0) - WINDOW_MARGIN)
        counts = (self.shard.length(sequence.length), self.shard.length(begin)), (sequence.length, begin)
        own, of_all = (
            sum(
                (count - passed * (pools.kind > 0)) * both[side]
                for pools, both in zip(self.cache.local.pools, self._layer_bytes, strict=True)
            )
            for side, (count, passed) in enumerate(counts)
        )
        return own, of_all


@torch.no_grad()
def _logits(model: Any, cache_pass: CachePass, ids: Tensor, positions: Tensor, keep: int = 0) -> Tensor:
    """The logits of the last `keep` tokens, or of all if 0."""
    logits = run_model(model, cache_pass, ids, positions, keep)
    cache_pass.check_complete()
    return logits


def _tiled_logits(model: Any, tiled: TiledPass, ids: Tensor, positions: Tensor, keep: int = 0) -> Tensor:
    """As `_logits`, of a model that computes tiles."""
    tiles = tiled.tiles
    assert keep == tiles.keep
    return tiles.logits(_logits(model, tiled, tiles.spread(ids), tiles.spread(positions)))


def _token_log_probs(logits: Tensor) -> Tensor:
    """The log-probabilities that training computes."""
    return torch.cat(token_log_probs(logits))


def _decides_on_host(model: Any) -> bool:
    """Whether a pass may read the device: to route experts, or to choose rotary frequencies by the largest position."""
    experts = any("expert" in name.rpartition(".")[2] for name, _ in model.named_modules())
    return experts or changing_rotary(text_config(model)) is not None


def _broadcast(comm: Comm, x: Tensor, rank: int) -> Tensor:
    """The tensor of one rank, on every rank."""
    if comm.world == 1:
        return x
    shapes = [x.shape if i == rank else (0,) for i in range(comm.world)]
    return comm.all_gather(x.contiguous() if comm.rank == rank else x.new_empty(0), shapes)[rank]
