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
from attnmesh.core.ranges import Ranges
from attnmesh.generation.latents import LatentProjections
from attnmesh.generation.layer_caches import LayerCaches
from attnmesh.kv_cache.pools import as_stored, write_rows, write_tokens
from attnmesh.ops.decode.api import PagedStep
from attnmesh.ops.paged import PagedKV
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.core import DecodeAttention, LocalKV, StateExchange, prefill_attention
from attnmesh.parallel.decode.positions import LocalPositions, key_range


@dataclass(frozen=True)
class CachePass:
    """A pass that writes keys and values of new tokens to `slots` [B, T] of this rank's caches; below 0 is skipped."""

    cache: LayerCaches
    slots: tuple[Tensor, ...]  # of each cache; none if this rank stores none of the tokens
    latents: LatentProjections | None = field(default=None, kw_only=True)  # of a model whose cache has latents

    is_compileable: ClassVar[bool] = False  # required by Transformers

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, T, D]. Returns them as they are: `attend` reads the others from the cache.

        Of a model with latent attention they are latents and the keys' rope parts, one head of each, which the model
        expands: they are returned as they are stored.
        """
        slots = self.slots[self.cache.which(layer)] if self.slots and self.slots[0].numel() else None
        if self.latents is None:
            if slots is not None:
                k, v = self._stored_here(key), self._stored_here(value)
                write_tokens(self.cache.keys(layer), self.cache.values(layer), slots, k, v)
            return key, value
        pool, vectors = self.cache.keys(layer), self.latents.vectors(key, value)
        if slots is not None:
            write_rows(pool, slots, self._stored_here(vectors))
        return self.latents.parts(as_stored(pool, vectors))

    def _stored_here(self, x: Tensor) -> Tensor:
        """Those of new keys or values that `slots` are for: all of them."""
        return x

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


@dataclass(frozen=True)
class ChunkKV:
    """What this rank stores of a sequence once it has a chunk of it, from position `begin` on.

    `stored` are the positions, the chunk's included, and `blocks` their blocks in each cache.
    """

    begin: int
    stored: Ranges
    blocks: tuple[Tensor, ...]

    def read(self, cache: LayerCaches, layer: int, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Ranges]:
        """Keys and values [1, Hkv, n, D] that the chunk may attend to here, and their positions.

        `k` and `v` are those of the chunk on this rank. Layers that keep a window only need not store all of them: only
        those before the chunk are read.
        """
        which, count = cache.which(layer), ranges.size(self.stored)
        paged = PagedKV(cache.keys(layer), cache.values(layer), self.blocks[which][None])
        if not which:
            return *paged.read(range(count), k.dtype), self.stored
        assert isinstance(mask, SlidingWindow)
        first = LocalPositions(self.stored).count_below(self.begin - mask.left)
        keys, values = paged.read(range(first, count - k.shape[2]), k.dtype)
        keys = torch.cat([keys, as_stored(paged.k, k)], 2)
        values = torch.cat([values, as_stored(paged.v, v)], 2)
        return keys, values, ranges.narrow(self.stored, range(first, count))


@dataclass(frozen=True)
class PrefillPass(CachePass):
    """A prefill chunk: `length` tokens of one sequence, sharded over the ranks.

    `parts[r]` are the positions of rank r's tokens. The first chunk of a prompt uses context parallelism. Later chunks
    attend over the sharded cache (`prefill_attention`): keys and values stay on the rank that computed them.
    """

    context: ContextParallel
    parts: Sequence[Ranges]
    length: int
    chunk: ChunkKV

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of this rank's queries over all tokens up to and including this chunk."""
        self.cache.check_mask(layer, mask)
        if self.chunk.begin == 0:
            if self.latents is None:  # else they were expanded from what is stored
                k, v = as_stored(self.cache.keys(layer), k), as_stored(self.cache.values(layer), v)
            return self.context.attention(q, k, v, mask=mask, scale=scale, sinks=sinks, length=self.length)
        keys, values, positions = self.chunk.read(self.cache, layer, k, v, mask)
        return self._over_cache(
            layer, q,
            lambda queries: prefill_attention(
                self.context.comm, queries, self.parts, keys, values, positions, mask=mask, scale=scale, sinks=sinks
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class StepKV:
    """What this rank stores of the sequences of a decode step, the new tokens included.

    `positions[b]` are those of the new tokens of sequence b, and `stored[b]` all that this rank stores of it.
    """

    block_table: tuple[Tensor, ...]  # int32 [B, blocks], of each cache
    cur_pos: Tensor  # int32 [B]: the index of the last key stored here
    positions: Sequence[range]
    stored: Sequence[LocalPositions]
    _key_ranges: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _steps: dict[int, PagedStep] = field(default_factory=dict)  # of each cache, shared by its layers

    def of(self, cache: LayerCaches, layer: int) -> LocalKV:
        """The keys and values of a layer."""
        which = cache.which(layer)
        if which not in self._steps:
            self._steps[which] = PagedStep(self.block_table[which], self.cur_pos)
        return LocalKV(
            cache.keys(layer), cache.values(layer), self.block_table[which], self.cur_pos, self._key_range,
            self._steps[which],
        )  # fmt: skip

    def in_tables(self, block_table: tuple[Tensor, ...], cur_pos: Tensor) -> StepKV:
        """The same step with other tensors."""
        return replace(self, block_table=block_table, cur_pos=cur_pos, _steps={})

    def _key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The keys stored here that each new token attends to: the same for all layers with this window."""
        if window not in self._key_ranges:
            both = key_range(self.stored, self.positions, window).to(self.cur_pos.device, non_blocking=True)
            self._key_ranges[window] = (both[0], both[1])
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
        self.cache.check_mask(layer, mask)
        kv = self.step.of(self.cache, layer)
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
        static = replace(step, slots=tuple(tables[:caches]), step=step.step.in_tables(tuple(tables[caches:]), cur_pos))
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
    return step.step.cur_pos, ids, positions, *step.slots, *step.step.block_table
