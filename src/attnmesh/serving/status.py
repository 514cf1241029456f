"""`Status`: what the page at `/` shows of a server: which rank holds what, the requests in progress, and tokens so far.

Rank 0 knows all of it without messages, but for the memory of other ranks (`memory_of_ranks`) and, where prefill ranks
and decode ranks divide the work, the cache of the decode ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmesh.comm import Comm
from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import Request
from attnmesh.plan.decode import DecodeSharding


@dataclass(frozen=True)
class RankMemory:
    """The bytes that a rank holds."""

    weights: int
    cache: int


def memory_of_ranks(comm: Comm, generator: Generator) -> list[RankMemory]:
    """The memory of every rank of `comm`. All ranks call it."""
    model, engine = generator.model, generator.engine
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    cache = sum(each.nbytes for each in (*engine.cache.local.stored_tensors, *engine.states.tensors))
    own = torch.tensor([weights, cache], dtype=torch.int64, device=engine.device)
    return [RankMemory(*map(int, each)) for each in comm.all_gather(own, [(2,)] * comm.world)]


class Status:
    """The state of a server as JSON. `snapshot` may be called on any thread.

    `memory` has all ranks. With `decode`, the sharding of decode ranks, those of `generator` are the prefill ranks.
    """

    def __init__(
        self,
        generator: Generator,
        memory: Sequence[RankMemory],
        decode: DecodeSharding | None,
    ) -> None:
        self._generator, self._own = generator, generator.sharding
        sides = [("", self._own)] if decode is None else [("prefill", self._own), ("decode", decode)]
        layers = generator.engine.calls.layers
        self._heads = max((layer.kv_heads for layer in layers), default=0)
        self._ranks: list[dict[str, Any]] = []
        for side, sharding in sides:
            for rank in range(sharding.ranks):
                each, held, place = memory[len(self._ranks)], sharding.kv_heads(rank, self._heads), sharding.place(rank)
                self._ranks.append({
                    "rank": len(self._ranks), "side": side, **place._asdict(), "weight_bytes": each.weights,
                    "cache_bytes": each.cache, "kv_heads": [held.start, held.stop],
                })  # fmt: skip
        self._about = {
            "device": generator.engine.device.type, "storage": generator.engine.storage, "kv_heads": self._heads,
            "sharding": {name: getattr(self._own, name) for name in ("tp", "kvdp", "cp", "interleave")},
            "is_latent": any(layer.latent for layer in layers),
        }  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        """The state now."""
        requests = [self._request(each) for each in self._generator.requests]
        blocks = self._generator.engine.cache.stats()  # of each KVDP rank
        tokens = [[0] * self._own.cp for _ in blocks]
        for each in requests:
            for cp, count in enumerate(each["held"]):
                tokens[each["kvdp"]][cp] += count
        ranks = []
        for each in self._ranks:
            known: dict[str, Any] = {}
            if each["side"] != "decode":
                of = blocks[each["kvdp"]]
                of_blocks = {"used": of.used, "cached": of.cached, "total": of.total}
                known = {"tokens": tokens[each["kvdp"]][each["cp"]], "blocks": of_blocks}
            ranks.append({**each, **known})
        waiting = self._generator.num_waiting
        return {
            **self._about, "seconds": time.monotonic(), "ranks": ranks, "requests": requests, "waiting": waiting,
        }  # fmt: skip

    def _request(self, request: Request) -> dict[str, Any]:
        sequences = list(request.sequences)
        lengths = [each.length for each in sequences]
        shards = [self._own.position_shard(rank) for rank in self._own.cp_peers(0)]
        return {
            "number": request.number, "prompt": len(request.prompt), "cached": request.cached,
            "new": len(request.tokens), "most": request.options.max_new_tokens,
            "kvdp": sequences[0].kvdp_rank if sequences else 0,
            "held": [sum(map(shard.length, lengths)) for shard in shards],
        }  # fmt: skip
