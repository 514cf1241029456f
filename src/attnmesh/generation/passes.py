"""The forward passes of a Transformers model over a sharded KV cache: prefill chunks and decode steps.

A pass is what Transformers takes for a cache, and it computes the attention of `attn_implementation="attnmesh"`. Decode
steps of a single GPU run as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.ranges import InterleavedShard, Ranges
from attnmesh.generation.latents import LatentProjections
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import as_stored, write_rows, write_tokens
from attnmesh.ops.decode.api import PagedStep
from attnmesh.ops.paged import PagedKV
from attnmesh.ops.storage import Quantized, Stored
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.core import DecodeAttention, LocalKV, StateExchange, prefill_attention


@dataclass(frozen=True)
class CachePass:
    """A pass that writes keys and values of new tokens to `slots` [B, T] of this rank's cache; below 0 is skipped.

    There are slots for each kind of layers (`BlockCache.kind_of`); none if this rank stores none of the tokens.
    """

    cache: BlockCache
    slots: tuple[Tensor, ...]
    latents: LatentProjections | None = field(default=None, kw_only=True)  # of a model whose cache has latents

    is_compileable: ClassVar[bool] = False  # required by Transformers

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, T, D]. Returns them as they are: `attend` reads the others from the cache.

        Of a model with latent attention they are latents and the keys' rope parts, one head of each, which the model
        expands: they are returned as they are stored.
        """
        if self.latents is None:
            self._write(layer, (key, value))
            return key, value
        vectors = self.latents.vectors(key, value)
        self._write(layer, (vectors,))
        return self.latents.parts(as_stored(self.cache.keys(layer), vectors))

    def _write(self, layer: int, new: tuple[Tensor, ...]) -> None:
        """Write keys and values, or latents, of new tokens."""
        stored = self._stored_here(layer, new)
        if not self.slots:
            return
        slots = self.slots[self.cache.kind_of(layer)]
        if len(stored) == 1:
            write_rows(self.cache.keys(layer), slots, *stored)
        else:
            write_tokens(self.cache.keys(layer), self.cache.values(layer), slots, *stored)

    def _stored_here(self, layer: int, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of new keys and values that `slots` are for: all of them."""
        return new

    def pools(self, layer: int) -> tuple[Stored, Stored]:
        """Where a layer's keys and values are read; of latents in fp8_ds_mla both are the keys."""
        keys = self.cache.keys(layer)
        return keys, keys if isinstance(keys, Quantized) and keys.rope is not None else self.cache.values(layer)

    def check_mask(self, layer: int, mask: Mask) -> None:
        """Raise ValueError if a layer that keeps a window only attends to more."""
        window = self.cache.window or 0
        if self.cache.kind_of(layer) and not (isinstance(mask, SlidingWindow) and mask.left < window):
            raise ValueError(
                f"mask of layer {layer} must be a sliding window of at most {window} tokens, as the model's "
                f"configuration has it, got {mask!r}"
            )

    def _over_cache(self, layer: int, q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of q [B, h, T, D], where `attend` attends with its argument to what the cache has."""
        return attend(q) if self.latents is None else self.latents.attend(layer, q, attend)

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        """Required by Transformers, for a mask that is never made."""
        return query_length, 0

    def get_query_offset(self, layer: int = 0) -> int:
        """Required by Transformers, for a mask that is never made."""
        return 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Required by Transformers; positions are passed with every call."""
        return 0


# Prefill.


@dataclass(frozen=True)
class ChunkKV:
    """What this rank stores of a sequence with a chunk at positions `new`: `blocks` of each kind of layers.

    `home` are the keys and values of the chunk that it stores, of the layer that is being computed.
    """

    new: range
    shard: InterleavedShard
    blocks: tuple[Tensor, ...]
    home: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def own(self) -> Tensor:
        """The indices in the chunk of the tokens that this rank stores, ascending."""
        first, end = self.shard.length(self.new.start), self.shard.length(self.new.stop)
        return self.shard.position(torch.arange(first, end, device="cpu")) - self.new.start

    def read(self, cache_pass: CachePass, layer: int, dtype: torch.dtype, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [1, Hkv, n, D] that the chunk may attend to here, and their positions.

        Layers that keep a window only need not store all of the chunk: only what was before it is read.
        """
        kind, end = cache_pass.cache.kind_of(layer), self.shard.length(self.new.stop)
        paged = PagedKV(*cache_pass.pools(layer), self.blocks[kind][None])
        if not kind:
            return *paged.read(range(end), dtype), self.shard.position(torch.arange(end, device="cpu"))
        assert isinstance(mask, SlidingWindow)
        first = self.shard.length(max(0, self.new.start - mask.left))
        k, v = self.home.pop()
        keys, values = paged.read(range(first, self.shard.length(self.new.start)), dtype)
        keys = torch.cat([keys, as_stored(paged.k, k)], 2)
        values = torch.cat([values, as_stored(paged.v, v)], 2)
        return keys, values, self.shard.position(torch.arange(first, end, device="cpu"))


class HomeExchange:
    """Sends keys and values of a chunk from the ranks that compute them, `parts[r]`, to the ranks that store them."""

    def __init__(self, comm: Comm, parts: Sequence[Ranges], shard: InterleavedShard, device: torch.device) -> None:
        self._comm = comm
        positions = [ranges.as_tensor(part) for part in parts]
        owners = [shard.owner(each) for each in positions]
        self.is_needed = any(bool((owner != rank).any()) for rank, owner in enumerate(owners))
        self._sent = [(owners[comm.rank] == rank).nonzero().flatten().to(device) for rank in range(comm.world)]
        received = [each[owner == comm.rank] for each, owner in zip(positions, owners, strict=True)]
        self._counts = [len(each) for each in received]
        self._order = torch.cat(received).argsort().to(device)  # the cache has them in the order of their positions

    def __call__(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors [1, H, n, D] of the tokens that this rank stores, from those of the tokens that it computes."""
        if not self.is_needed:
            return new
        heads, widths = new[0].shape[1], [x.shape[3] for x in new]
        tokens = torch.cat([x[0] for x in new], -1).transpose(0, 1)  # [n, H, D]: one message for all
        shapes = [(count, heads, sum(widths)) for count in self._counts]
        received = self._comm.all_to_all([tokens[at].contiguous() for at in self._sent], shapes)
        home = torch.cat(list(received))[self._order].transpose(0, 1)[None]
        return tuple(torch.split(home, widths, -1))


@dataclass(frozen=True)
class PrefillPass(CachePass):
    """A prefill chunk of one sequence, sharded over the ranks: `parts[r]` are the positions of rank r's tokens.

    The first chunk of a prompt uses context parallelism, in its layout. Later chunks attend over the sharded cache
    (`prefill_attention`). Either way every key goes to the rank that stores its position (`exchange`).
    """

    context: ContextParallel
    parts: Sequence[Ranges]
    chunk: ChunkKV
    exchange: HomeExchange

    def _stored_here(self, layer: int, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        home = self.exchange(new)
        if self.cache.kind_of(layer) and self.chunk.new.start:
            self.chunk.home[:] = [home]
        return home

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of this rank's queries over all tokens up to and including this chunk."""
        self.check_mask(layer, mask)
        if self.chunk.new.start == 0:
            if self.latents is None:  # else they were expanded from what is stored
                k, v = as_stored(self.cache.keys(layer), k), as_stored(self.cache.values(layer), v)
            return self.context.attention(q, k, v, mask=mask, scale=scale, sinks=sinks, length=len(self.chunk.new))
        keys, values, positions = self.chunk.read(self, layer, k.dtype, mask)
        return self._over_cache(
            layer, q,
            lambda queries: prefill_attention(
                self.context.comm, queries, self.parts, keys, values, positions, mask=mask, scale=scale, sinks=sinks
            ),
        )  # fmt: skip


# Decode.


@dataclass(frozen=True)
class StepKV:
    """What this rank stores of the sequences of a decode step, the new tokens included.

    `positions` int64 [B, T] are those of the new tokens. `shard` are the positions of a sequence that are stored here.
    """

    block_tables: tuple[Tensor, ...]  # int32 [B, blocks], of each kind of layers
    cur_pos: Tensor  # int32 [B]: the index of the last key stored here
    positions: Tensor
    shard: InterleavedShard
    _key_ranges: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _steps: dict[int, PagedStep] = field(default_factory=dict)  # of each kind, shared by its layers

    def of(self, cache_pass: CachePass, layer: int) -> LocalKV:
        """The keys and values of a layer."""
        kind = cache_pass.cache.kind_of(layer)
        table = self.block_tables[kind]
        if kind not in self._steps:
            self._steps[kind] = PagedStep(table, self.cur_pos)
        return LocalKV(*cache_pass.pools(layer), table, self.cur_pos, self._key_range, self._steps[kind])

    def _key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The keys stored here that each new token attends to: the same for all layers with this window."""
        if window not in self._key_ranges:
            end = self.shard.length(self.positions + 1).to(torch.int32)
            begin = None if window is None else (self.positions + 1 - window).clamp(min=0)
            first = torch.zeros_like(end) if begin is None else self.shard.length(begin).to(torch.int32)
            self._key_ranges[window] = (first, end)
        return self._key_ranges[window]


def window_of(mask: Mask) -> int | None:
    """The window of a decode step, None for all keys. Raises ValueError for masks that a step does not take."""
    if not isinstance(mask, (Causal, SlidingWindow)):
        raise ValueError(f"mask must be Causal() or SlidingWindow(), got {mask!r}")
    return mask.left + 1 if isinstance(mask, SlidingWindow) else None


@dataclass(frozen=True)
class DecodePass(CachePass):
    """A decode step: the same few new tokens of some sequences on every rank, which all ranks compute.

    Each rank attends over the positions that it stores, and merges the states of all ranks in the same order, so all
    ranks continue with the same bits.
    """

    comm: Comm
    step: StepKV
    _attentions: dict[tuple[Mask, float, int, int], DecodeAttention] = field(default_factory=dict)  # shared by layers

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of the new tokens over all positions, the same on every rank."""
        self.check_mask(layer, mask)
        kv = self.step.of(self, layer)
        layers = mask, scale, q.shape[1], id(sinks)
        attention = self._attentions.get(layers)
        if attention is None:
            states = StateExchange(self.comm, (q.shape[1],) * self.comm.world)  # every rank has all heads
            attention = self._attentions[layers] = DecodeAttention(states, scale, window_of(mask), sinks)
        return self._over_cache(layer, q, lambda queries: attention(queries, kv, "all_gather"))


# CUDA graphs.

Run = Callable[[DecodePass, Tensor, Tensor], Tensor]


class DecodeGraphs:
    """CUDA graphs of decode steps on a single GPU: a step of few tokens takes the host longer to launch than to run.

    Steps of the same shape share a graph. It reads what changes from step to step (tokens, positions, slots, tables)
    from static tensors, which every step refills. The first step of a shape runs eagerly, to compile kernels; the
    second is captured. All graphs share the memory of what they compute on the way.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[torch.Size, _DecodeGraph | None] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: DecodePass, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits of a step, valid until the next call."""
        if ids.shape not in self._graphs:
            self._graphs[ids.shape] = None
            return self._run(step, ids, positions)
        graph = self._graphs[ids.shape]
        if graph is None:
            graph = self._graphs[ids.shape] = _DecodeGraph(self._run, self._memory, step, ids, positions)
        return graph(step, ids, positions)


class _DecodeGraph:
    def __init__(self, run: Run, memory: Any, step: DecodePass, ids: Tensor, positions: Tensor) -> None:
        self._inputs = [x.clone() for x in _graph_inputs(step, ids, positions)]
        cur_pos, static_ids, static_positions, *tables = self._inputs
        caches = len(step.slots)
        static_step = replace(
            step.step, block_tables=tuple(tables[caches:]), cur_pos=cur_pos, positions=static_positions,
            _key_ranges={}, _steps={},
        )  # fmt: skip
        static = replace(step, slots=tuple(tables[:caches]), step=static_step)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(ids.device)
        with torch.cuda.graph(self._graph, pool=memory):
            self._logits = run(static, static_ids, static_positions)

    def __call__(self, step: DecodePass, ids: Tensor, positions: Tensor) -> Tensor:
        for static, given in zip(self._inputs, _graph_inputs(step, ids, positions), strict=True):
            static.copy_(given)
        self._graph.replay()
        return self._logits


def _graph_inputs(step: DecodePass, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return step.step.cur_pos, ids, positions, *step.slots, *step.step.block_tables
