"""`/metrics`: counters and histograms for Prometheus.

`Status`: what the page at `/` shows of a server: which rank holds what, the requests in progress, and tokens so far.

Rank 0 knows all of it without messages, but for the memory of other ranks (`memory_of_ranks`) and, where prefill ranks
and decode ranks divide the work, the cache of the decode ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from attnmesh.comm import Comm
from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import Request
from attnmesh.plan.decode import DecodeSharding

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """The counts of one server. `in_progress` returns the number of requests that are not finished."""

    def __init__(self, generator: Generator, in_progress: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()  # one per server, so that tests can have several servers
        self.calls = Counter(
            "attnmesh_http_requests", "HTTP requests by path and status.", ["path", "status"], registry=registry
        )
        self.finished = Counter(
            "attnmesh_answers", "Answers by finish_reason: stop, length, cancelled, error.", ["finish_reason"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("attnmesh_prompt_tokens", "Tokens of accepted prompts.", registry=registry)
        self.new_tokens = Counter("attnmesh_generated_tokens", "Tokens of answers.", registry=registry)
        self.first_token = Histogram(
            "attnmesh_time_to_first_token_seconds", "From the request to the first token of its answer.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.next_token = Histogram(
            "attnmesh_inter_token_latency_seconds", "Between two tokens of an answer.", buckets=_TOKEN_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.latency = Histogram(
            "attnmesh_request_latency_seconds", "From the request to the end of its answer.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        _gauge(registry, "attnmesh_requests_in_progress", "Requests that are not finished.", in_progress)
        _gauge(registry, "attnmesh_requests_waiting", "Requests that wait for room.", lambda: generator.num_waiting)
        cache = generator.engine.cache.local
        _gauge(
            registry, "attnmesh_kv_cache_usage_ratio", "Blocks of rank 0 in use, also those kept for later prompts.",
            lambda: 1 - cache.stats().free / cache.stats().total,
        )  # fmt: skip
        _gauge(
            registry, "attnmesh_reused_tokens", "Prompt tokens that rank 0 took from its KV cache.",
            lambda: generator.stats.reused_tokens,
        )  # fmt: skip
        _gauge(registry, "attnmesh_preemptions", "Requests that rank 0 preempted.", lambda: generator.stats.preemptions)

    @property
    def token_counts(self) -> dict[str, float]:
        """The tokens of accepted prompts and of answers so far."""
        counters = {"prompt_tokens": self.prompt_tokens, "generated_tokens": self.new_tokens}
        return {name: next(iter(each.collect())).samples[0].value for name, each in counters.items()}

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        data: bytes = generate_latest(self._registry)
        return data


class AnswerTimes:
    """Measures one answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._began = metrics, time.perf_counter()
        self._latest: float | None = None

    def token(self) -> None:
        """Count a token."""
        now = time.perf_counter()
        if self._latest is None:
            self._metrics.first_token.observe(now - self._began)
        else:
            self._metrics.next_token.observe(now - self._latest)
        self._latest = now
        self._metrics.new_tokens.inc()

    def end(self, finish_reason: str) -> None:
        """Count the answer."""
        self._metrics.finished.labels(finish_reason).inc()
        self._metrics.latency.observe(time.perf_counter() - self._began)


def _gauge(registry: Collector, name: str, about: str, value: Callable[[], float]) -> None:
    Gauge(name, about, registry=registry).set_function(value)


# `Status`: what the page at `/` shows of a server: which rank holds what, the requests in progress, and tokens so far.


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

    `memory` has all ranks. With `decode`, the sharding of decode ranks, the ranks of `generator` are the prefill ranks.
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
