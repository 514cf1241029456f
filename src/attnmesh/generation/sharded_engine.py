"""`ShardedEngine`: prefill and decode of a model whose weights are divided over ranks (`shard_model`, `load_model`).

All ranks compute every pass together, for the sequences of all KVDP ranks, because each has a part of every layer. A
rank caches the kv heads of its TP rank, for the sequences of its KVDP rank, at the positions of its CP rank. It tracks
the others' sequences without their keys and values, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.generation.engine import Engine, EngineSequence
from attnmesh.generation.models import check_attention
from attnmesh.generation.passes import CachePass
from attnmesh.generation.sharded_passes import HeadRanks, ShardedDecodePass, ShardedPrefillPass
from attnmesh.integrations.sharded_model import ShardedWeights, sharded_weights
from attnmesh.integrations.weight_splits import check_sharded_model, heads_of


class ShardedEngine(Engine):
    """An `Engine` over all ranks of a sharded model, for the sequences of all KVDP ranks (`group` of a sequence).

    `cache_tokens` and `max_sequences` are those of one KVDP rank. The other arguments are as for `Engine`.
    """

    def __init__(self, model: Any, weights: ShardedWeights, **settings: Any) -> None:
        sharding, ranks = weights.sharding, weights.ranks
        self._weights = weights
        self._heads = HeadRanks(sharding, ranks, heads_of(model.config))
        self.own_group = sharding.place(ranks.rank).kvdp
        super().__init__(model, ranks.cp, **settings)
        self.comm = ranks.all_ranks
        self.kv_bytes_per_token_of_all = self.kv_bytes_per_token // len(self._heads.kv) * self._heads.heads.kv

    def _check_model(self, model: Any) -> None:
        check_attention(model.config, type(model).__name__)
        check_sharded_model(model.config, type(model).__name__, self._weights.sharding)

    def _cached_heads(self) -> int:
        return len(self._heads.kv)

    def _prepare_steps(self) -> None:
        """Weights are divided already, and graphs with messages of NCCL would outlive the process group."""

    def _decode(self, sequences: Sequence[EngineSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        order = sorted(range(len(sequences)), key=lambda i: sequences[i].group)
        logits = super()._decode([sequences[i] for i in order], [ids[i] for i in order])
        return logits if order == sorted(order) else logits[[order.index(i) for i in range(len(order))]]

    def _decode_pass(
        self, sequences: Sequence[EngineSequence], slots: tuple[Tensor, ...], positions: list[range]
    ) -> CachePass:
        step = self._step_kv(sequences, positions)
        return ShardedDecodePass(
            self.cache, slots, self._heads, self._rows(sequences), step, latents=self._latents
        )  # fmt: skip

    def _prefill_chunk(self, sequence: EngineSequence, ids: list[int]) -> Tensor:
        """Prefill a chunk, its tokens divided over all ranks; returns the logits of its last token on every rank."""
        begin, n = len(sequence.ids), len(ids)
        parts = self.shard(sequence.shards.counts, range(begin, begin + n))
        own = parts[self.position_ranks.rank] if sequence.stored is not None else ()
        new, kept = self._append_chunk(sequence, parts)
        chunk = ShardedPrefillPass(
            self.cache, () if new is None else new.slots, self._heads, self._rows([sequence]), n,
            (ranges.as_tensor(own) - begin).to(self.device), self._chunk_kv(sequence, begin), latents=self._latents,
        )  # fmt: skip
        world = self.comm.world
        counts = [n * (rank + 1) // world - n * rank // world for rank in range(world)]
        divided = self._weights.tokens.divided(counts) if n >= world > 1 else nullcontext()
        tokens = torch.tensor([ids], device=self.device)
        positions = torch.arange(begin, begin + n, device=self.device)[None]
        with self.exchange(self.comm), divided:
            logits = self._forward(chunk, tokens, positions, keep=1)[0, -1]
        self._end_chunk(sequence, ids, new, kept)
        return logits

    def _rows(self, sequences: Sequence[EngineSequence]) -> tuple[int, ...]:
        """The number of sequences of each KVDP rank."""
        groups = [sequence.group for sequence in sequences]
        return tuple(groups.count(group) for group in range(self._weights.sharding.kvdp))


def engine_for(model: Any, comm: Any, **settings: Any) -> Engine:
    """The engine of a model over the ranks of `comm`, which for a sharded model are those of its weights."""
    weights = sharded_weights(model)
    return Engine(model, comm, **settings) if weights is None else ShardedEngine(model, weights, **settings)
