"""`/metrics`: counters and histograms for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from attnmesh.generation.generator import Generator

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
