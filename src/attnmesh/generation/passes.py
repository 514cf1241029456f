"""The forward passes of a Transformers model over a sharded KV cache: prefill chunks and decode steps.

A pass is what Transformers takes for a cache, and it computes the attention of `attn_implementation="attnmesh"`. Decode
steps of a single GPU run as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.ranges import Ranges
from attnmesh.generation.latents import LatentProjections
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import write_rows, write_tokens
from attnmesh.ops.decode.api import PagedStep
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.core import DecodeAttention, LocalKV, StateExchange, prefill_attention
from attnmesh.parallel.decode.positions import LocalPositions, key_range


@dataclass(frozen=True)
class CachePass:
    """A pass that writes keys and values of new tokens to `slots` [B, T] of this rank's cache; -1 is skipped."""

    cache: BlockCache
    slots: Tensor
    latents: LatentProjections | None = field(default=None, kw_only=True)  # of a model whose cache has latents

    is_compileable: ClassVar[bool] = False  # required by Transformers

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, T, D]. Returns them as they are: `attend` reads the others from the cache.

        Of a model with latent attention they are latents and the keys' rope parts, one head of each.
        """
        if self.slots.numel():
            k, v = self._stored_here(key), self._stored_here(value)
            if self.latents is None:
                write_tokens(self.cache.keys(layer), self.cache.values(layer), self.slots, k, v)
            else:
                write_rows(self.cache.keys(layer), self.slots, self.latents.vectors(k, v))
        return key, value

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
class PrefillPass(CachePass):
    """A prefill chunk: `length` tokens of one sequence from position `begin` on, sharded over the ranks.

    `parts[r]` are the positions of rank r's tokens. `stored` are the positions that this rank stores, the chunk
    included, and `blocks` their cache blocks. The first chunk of a prompt uses context parallelism. Later chunks attend
    over the sharded cache (`prefill_attention`): keys and values stay on the rank that computed them.
    """

    context: ContextParallel
    parts: Sequence[Ranges]
    begin: int
    length: int
    stored: Ranges
    blocks: Tensor

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of this rank's queries over all tokens up to and including this chunk."""
        if self.begin == 0:
            return self.context.attention(q, k, v, mask=mask, scale=scale, sinks=sinks, length=self.length)
        keys, values = self._stored(self.cache.keys(layer)), self._stored(self.cache.values(layer))
        return self._over_cache(
            layer, q,
            lambda queries: prefill_attention(
                self.context.comm, queries, self.parts, keys, values, self.stored, mask=mask, scale=scale, sinks=sinks
            ),
        )  # fmt: skip

    def _stored(self, pool: object) -> Tensor:
        """The tokens that this rank stores, [1, Hkv, n, D]: one copy out of the blocks."""
        assert isinstance(pool, Tensor)
        return pool[self.blocks].flatten(0, 1)[: ranges.size(self.stored)].transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class DecodePass(CachePass):
    """A decode step: the same few new tokens of some sequences on every rank, which all ranks compute.

    Each rank attends over the positions that it stores, and merges the states of all ranks in the same order, so all
    ranks continue with the same bits. `positions[b]` are those of the new tokens of sequence b, and `stored[b]` all
    that this rank stores of it, the new ones included.
    """

    comm: Comm
    block_table: Tensor  # int32 [B, blocks]
    cur_pos: Tensor  # int32 [B]: the index of the last key stored here
    positions: Sequence[range]
    stored: Sequence[LocalPositions]
    _key_ranges: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _attentions: dict[tuple[Mask, float, int, int], DecodeAttention] = field(default_factory=dict)  # shared by layers

    @cached_property
    def _step(self) -> PagedStep:
        return PagedStep(self.block_table, self.cur_pos)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of the new tokens over all positions, the same on every rank."""
        if not isinstance(mask, (Causal, SlidingWindow)):
            raise ValueError(f"mask must be Causal() or SlidingWindow(), got {mask!r}")
        kv = LocalKV(
            self.cache.keys(layer),
            self.cache.values(layer),
            self.block_table,
            self.cur_pos,
            self._key_range,
            self._step,
        )
        layers = mask, scale, q.shape[1], id(sinks)
        attention = self._attentions.get(layers)
        if attention is None:
            states = StateExchange(self.comm, (q.shape[1],) * self.comm.world)  # every rank has all heads
            window = mask.left + 1 if isinstance(mask, SlidingWindow) else None
            attention = self._attentions[layers] = DecodeAttention(states, scale, window, sinks)
        return self._over_cache(layer, q, lambda queries: attention(queries, kv, "all_gather"))

    def _key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The keys stored here that each new token attends to: the same for all layers with this window."""
        if window not in self._key_ranges:
            both = key_range(self.stored, self.positions, window).to(self.slots.device, non_blocking=True)
            self._key_ranges[window] = (both[0], both[1])
        return self._key_ranges[window]


# CUDA graphs.

Run = Callable[[DecodePass, Tensor, Tensor], Tensor]


class DecodeGraphs:
    """CUDA graphs of decode steps on a single GPU: a step of few tokens takes the host longer to launch than to run.

    Steps of the same shape share a graph. It reads what changes from step to step (tokens, positions, slots, tables)
    from static tensors, which every step refills. The first step of a shape runs eagerly, to compile kernels; the
    second is captured.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[torch.Size, _DecodeGraph | None] = {}

    def __call__(self, step: DecodePass, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits of a step, valid until the next call."""
        if ids.shape not in self._graphs:
            self._graphs[ids.shape] = None
            return self._run(step, ids, positions)
        graph = self._graphs[ids.shape]
        if graph is None:
            graph = self._graphs[ids.shape] = _DecodeGraph(self._run, step, ids, positions)
        return graph(step, ids, positions)


class _DecodeGraph:
    def __init__(self, run: Run, step: DecodePass, ids: Tensor, positions: Tensor) -> None:
        self._inputs = [x.clone() for x in _graph_inputs(step, ids, positions)]
        slots, table, cur_pos, static_ids, static_positions = self._inputs
        static = replace(step, slots=slots, block_table=table, cur_pos=cur_pos)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(ids.device)
        with torch.cuda.graph(self._graph):
            self._logits = run(static, static_ids, static_positions)

    def __call__(self, step: DecodePass, ids: Tensor, positions: Tensor) -> Tensor:
        for static, given in zip(self._inputs, _graph_inputs(step, ids, positions), strict=True):
            static.copy_(given)
        self._graph.replay()
        return self._logits


def _graph_inputs(step: DecodePass, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return step.slots, step.block_table, step.cur_pos, ids, positions
