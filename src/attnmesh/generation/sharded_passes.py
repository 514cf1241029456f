"""The forward passes of a model with sharded weights: every rank projects its query heads, and its TP rank's kv heads.

In a decode step every rank has the new tokens of all sequences. KVDP ranks exchange query heads for sequences, CP ranks
merge their states, and the results return to the ranks of the heads, as in `AttentionBlock`. In a prefill chunk every
rank has the queries, keys and values of its heads for all tokens: the first chunk of a prompt attends by heads, without
messages, and later chunks over the sharded cache, as a decode step does.

Every rank has the keys and values of all tokens of the pass, and stores those of its sequences and positions. The
latents of latent attention are one kv head, which every TP rank has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnmesh.core.masks import Mask
from attnmesh.generation.passes import CachePass, ChunkKV, StepKV, window_of
from attnmesh.kv_cache.pools import as_stored
from attnmesh.ops.dense.api import attention, attention_state
from attnmesh.parallel.decode.core import DecodeAttention, StateExchange, pack_state
from attnmesh.parallel.decode.exchange import HeadExchange, part_of
from attnmesh.parallel.decode.prefill import kv_heads_of
from attnmesh.parallel.decode.ranks import DecodeRanks
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.weights import Heads


@dataclass(frozen=True)
class HeadRanks:
    """Which heads the ranks have, and how they exchange them."""

    sharding: DecodeSharding
    ranks: DecodeRanks
    heads: Heads

    @cached_property
    def own(self) -> range:
        """The query heads that this rank projects."""
        return self.sharding.q_heads(self.ranks.rank, self.heads.q)

    @cached_property
    def group(self) -> range:
        """The query heads that this rank attends for, over its cache."""
        return self.sharding.group_heads(self.ranks.rank, self.heads.q)

    @cached_property
    def kv(self) -> range:
        """The kv heads of this rank."""
        return self.sharding.kv_heads(self.ranks.rank, self.heads.kv)

    @cached_property
    def kvdp_heads(self) -> tuple[int, ...]:
        """The number of query heads that each KVDP peer projects."""
        return tuple(
            len(self.sharding.q_heads(peer, self.heads.q)) for peer in self.sharding.kvdp_peers(self.ranks.rank)
        )

    @cached_property
    def states(self) -> StateExchange:
        """The exchange of states between CP ranks."""
        peers = self.sharding.cp_peers(self.ranks.rank)
        return StateExchange(self.ranks.cp, tuple(len(self.sharding.cp_heads(peer, self.heads.q)) for peer in peers))


@dataclass(frozen=True)
class _HeadShardedPass(CachePass, ABC):
    """A pass over rows of sequences, those of KVDP rank 0 first. `slots` [rows of this rank, T] are in its caches."""

    heads: HeadRanks
    rows: tuple[int, ...]  # of each KVDP rank

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of this rank's query heads, [B, h, T, Dv], from q [B, h, T, D] and its TP rank's k and v."""
        self.check_mask(layer, mask)
        return self._attend(layer, q, k, v, mask, scale, sinks)

    @property
    def _own_rows(self) -> slice:
        return part_of(self.rows, self.heads.ranks.kvdp.rank)

    @abstractmethod
    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The output of this rank's query heads, over what the caches of all ranks hold."""

    def _over_caches(self, layer: int, q: Tensor, over_own: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of this rank's query heads, where `over_own` attends for all heads of this rank's sequences."""
        return self._over_cache(layer, q, lambda queries: self._exchanged(queries, over_own))

    def _exchanged(self, q: Tensor, over_own: Callable[[Tensor], Tensor]) -> Tensor:
        """Exchange heads for sequences, let `over_own` attend, [B_own, h_c, T, Dv] from [B_own, H, T, D], and back."""
        if self.heads.sharding.ranks == self.heads.sharding.tp:  # this rank's heads attend here
            return over_own(q)
        exchange = HeadExchange(self.heads.ranks.kvdp, self.rows, self.heads.kvdp_heads)
        tokens, dim = q.shape[2:]
        buffer = torch.cat([part.transpose(0, 1).reshape(-1) for part in q.split(self.rows)])
        gathered = self.heads.states.gather_heads(exchange.gather_heads(buffer, tokens, dim))
        if gathered.shape[1]:
            out = over_own(gathered.transpose(0, 1))
        else:  # none of these sequences is cached here, nor by the ranks that would merge with this one
            out = q.new_empty(0, sum(exchange.heads), tokens, self.cache.value_dim)
        return exchange.scatter_heads(out).transpose(1, 2)

    def _group_sinks(self, sinks: Tensor | None) -> Tensor | None:
        return None if sinks is None else sinks[self.heads.group.start : self.heads.group.stop]


@dataclass(frozen=True)
class ShardedDecodePass(_HeadShardedPass):
    """A decode step: the new tokens of all sequences, on every rank. `step` has those that this rank stores."""

    step: StepKV

    def _stored_here(self, layer: int, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x[self._own_rows] for x in new)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        kv = self.step.of(self, layer)
        attend = DecodeAttention(self.heads.states, scale, window_of(mask), self._group_sinks(sinks))
        return self._over_caches(layer, q, lambda own: attend(own, kv, "all_to_all"))


@dataclass(frozen=True)
class ShardedPrefillPass(_HeadShardedPass):
    """A prefill chunk of one sequence.

    This rank stores the tokens `own` of the chunk, at `slots` [1, n]; none if another KVDP rank has the sequence.
    """

    own: Tensor
    chunk: ChunkKV

    def _stored_here(self, layer: int, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        home = tuple(x[:, :, self.own] for x in new)
        if self.cache.kind_of(layer) and self.chunk.new.start:
            self.chunk.home[:] = [home]
        return home

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        if self.chunk.new.start == 0:
            own = self.heads.own
            if self.latents is None:  # else they were expanded from what is stored, for these heads only
                k, v = as_stored(self.cache.keys(layer), k), as_stored(self.cache.values(layer), v)
                per_kv = self.heads.heads.q // self.heads.heads.kv
                k, v = (kv_heads_of(x, own, per_kv, self.heads.kv.start) for x in (k, v))
            return attention(
                q, k, v, mask=mask, scale=scale, sinks=None if sinks is None else sinks[own.start : own.stop],
                k_positions=torch.arange(len(self.chunk.new), device="cpu"),  # or a short prompt would be warned of
            )  # fmt: skip
        return self._over_caches(layer, q, lambda queries: self._over_stored(layer, queries, mask, scale, sinks))

    def _over_stored(self, layer: int, q: Tensor, mask: Mask, scale: float, sinks: Tensor | None) -> Tensor:
        keys, values, positions = self.chunk.read(self, layer, q.dtype, mask)
        state = attention_state(
            q, keys, values, mask=mask, scale=scale, k_positions=positions,
            q_positions=torch.arange(self.chunk.new.start, self.chunk.new.stop, device="cpu"),
        )  # fmt: skip
        return self.heads.states.combine(pack_state(state), self._group_sinks(sinks), q.dtype, "all_to_all")
