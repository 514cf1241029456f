"""Ways to generate tokens on many devices: replicas of the model, and how each spreads its KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.core.validation import check_positive
from attnmesh.plan.decode_load import DecodeShape
from attnmesh.plan.rounds.decode import decode_program
from attnmesh.plan.rounds.decode_layer import DecodeLayer, Linear
from attnmesh.plan.sharding import DecodeSharding
from attnmesh.planner.cost import cost
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.model import ModelConfig
from attnmesh.planner.models.model_bytes import Parameters, cached_numbers, parameters, weight_bytes
from attnmesh.planner.models.model_work import experts_read
from attnmesh.planner.ranking import Memory, Option, Ranking, ranked
from attnmesh.planner.side_by_side import one_of_many, ranks_together

_ACTIVATION = 2  # bytes


@dataclass(frozen=True)
class Decode:
    """A step of `tokens` new tokens for each of `batch` sequences that hold `context` positions."""

    model: ModelConfig
    context: int
    batch: int
    devices: int
    cluster: Cluster
    tokens: int = 1
    cached_number: float = 2.0  # bytes of a number in the KV cache

    def __post_init__(self) -> None:
        check_positive(context=self.context, batch=self.batch, devices=self.devices, tokens=self.tokens)


def decode_ranking(asked: Decode) -> Ranking:
    """Every way, the fastest that fits first."""
    options = [
        _option(asked, replicas, sharding, f"{replicas} x {sharding}" if replicas > 1 else str(sharding))
        for replicas, sharding in shardings(asked)
    ]
    refused = {}
    if not options:
        heads = f"{asked.model.q_heads} query heads and a batch of {asked.batch}"
        refused["every way"] = f"{heads} leave some of {asked.devices} devices without anything to do"
    return ranked(options, asked.cluster.device.memory, refused)


def decode_layers(asked: Decode, sequences: int) -> dict[DecodeLayer, int]:
    """The layers of a model as a step sees them, and how many there are of each kind."""
    model = asked.model
    shape = _shape(model, sequences, asked.tokens)
    linear = _linear(model, sequences * asked.tokens)
    cached = cached_numbers(model) / _kv_heads(model) * asked.cached_number
    return {
        DecodeLayer(shape, cached, min(asked.context, window or asked.context), linear): layers
        for window, layers in model.window_layers.items()
    }


def shardings(asked: Decode) -> Iterator[tuple[int, DecodeSharding]]:
    """Replicas that take some of the sequences each, and all shardings of one that leave no rank without a head."""
    kv_heads = _kv_heads(asked.model)
    for replicas in (n for n in range(1, asked.batch + 1) if asked.devices % n == 0 and asked.batch % n == 0):
        ranks, sequences = asked.devices // replicas, asked.batch // replicas
        for tp in _divisors(ranks):
            if (kv_heads % tp and tp % kv_heads) or ranks > asked.model.q_heads:
                continue
            for kvdp in _divisors(ranks // tp):
                if kvdp <= sequences:
                    yield replicas, DecodeSharding(tp, kvdp, ranks // tp // kvdp)


def _option(asked: Decode, replicas: int, sharding: DecodeSharding, name: str) -> Option:
    sequences = asked.batch // replicas
    cluster = asked.cluster
    if replicas > 1:  # others stand beside it, and some may lie across nodes
        cluster = one_of_many(cluster, ranks_together(sharding.ranks, cluster.node, asked.devices), asked.devices)
    parts = dict.fromkeys(("computing", "exchanges"), 0.0)
    sent = 0.0
    bottlenecks: dict[str, float] = {}
    for layer, layers in decode_layers(asked, sequences).items():
        one = cost(decode_program(sharding, layer, cluster.near), cluster)
        parts["computing"] += one.computed * layers
        parts["exchanges"] += (one.seconds - one.computed) * layers
        sent += one.sent * layers
        bottlenecks[one.bottleneck] = bottlenecks.get(one.bottleneck, 0.0) + one.seconds * layers
    head = _head_seconds(asked, sharding.ranks, sequences)
    if head:
        parts["the head"] = head
    memory = decode_memory(asked, sharding, sequences)
    why = max(bottlenecks, key=lambda reason: bottlenecks[reason])
    return Option(name, sum(parts.values()), memory, sent, why, parts)


def decode_memory(asked: Decode, sharding: DecodeSharding, sequences: int) -> Memory:
    """Bytes of a rank of one replica."""
    model = asked.model
    kv_heads, shape = _kv_heads(model), _shape(model, sequences, asked.tokens)
    cached = cached_numbers(model) / kv_heads * asked.cached_number
    kept = 0.0
    for window, layers in model.window_layers.items():
        positions = sharding.position_shard(0).length(min(asked.context, window or asked.context))
        kept += layers * positions * cached
    heads, held = len(sharding.kv_heads(0, kv_heads)), -(-sequences // sharding.kvdp)
    working = 8.0 * sequences * asked.tokens * (model.hidden + model.q_heads * shape.head_dim) * _ACTIVATION
    return Memory(_weights(model, sharding), heads * held * kept, working)


def _weights(model: ModelConfig, sharding: DecodeSharding) -> float:
    """All weights are divided over all ranks, but W_k and W_v stay with their heads: copies of them add up."""
    if model.vocabulary is None:
        return 0.0
    copies = sharding.ranks / sharding.tp * max(1, sharding.tp // _kv_heads(model))
    kv = model.layers * _attention_parameters(model).by_kv_head * model.stored.projections / 8
    return (weight_bytes(model) + (copies - 1) * kv) / sharding.ranks


def _linear(model: ModelConfig, rows: int) -> Linear:
    """The products of one layer, the mean over layers with experts and without."""
    if model.vocabulary is None:
        return Linear()
    count, attention = parameters(model), _attention_parameters(model)
    chosen = experts_read(model, rows)
    mlp = (count.mlp + count.routers + count.experts * chosen) / model.layers
    bits = count.mlp * model.stored.projections + count.experts * chosen * model.stored.experts
    read = count.mlp + count.experts * chosen
    used = (count.mlp + count.routers + count.chosen) / model.layers
    return Linear(
        divided=attention.divided, by_kv_head=attention.by_kv_head, out=attention.out, mlp=round(mlp), mlp_used=used,
        nbytes=model.stored.projections / 8, mlp_nbytes=bits / 8 / read if read else 2.0,
    )  # fmt: skip


def _attention_parameters(model: ModelConfig) -> Linear:
    hidden, heads, latent = model.hidden, model.q_heads, model.latent
    if latent is None:
        query = hidden * heads * model.head_dim
        return Linear(divided=query, by_kv_head=2 * hidden * model.kv_heads * model.head_dim, out=query)
    # What keys and values are made of is everybody's; the rest belongs to heads, W_uk to queries and W_uv to results.
    query = heads * model.head_dim
    into_query = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    return Linear(
        divided=into_query + latent.kv_rank * heads * latent.nope,
        by_kv_head=hidden * latent.cached,
        out=heads * latent.value * (hidden + latent.kv_rank),
    )


def _head_seconds(asked: Decode, ranks: int, sequences: int) -> float:
    """The last product: the vocabulary, divided over all ranks."""
    if asked.model.vocabulary is None:
        return 0.0
    count: Parameters = parameters(asked.model)
    flops = 2.0 * count.head * sequences * asked.tokens / ranks
    read = count.head * asked.model.stored.rest / 8 / ranks
    device = asked.cluster.device
    return float(np.maximum(device.seconds("matmul", flops), device.seconds("decode", read)))


def _shape(model: ModelConfig, sequences: int, tokens: int) -> DecodeShape:
    """One kv head as wide as what latent attention caches; results are no wider than queries."""
    width = model.latent.cached if model.latent else model.head_dim
    return DecodeShape(sequences, tokens, model.q_heads, _kv_heads(model), width, model.hidden, _ACTIVATION)


def _kv_heads(model: ModelConfig) -> int:
    return 1 if model.latent else model.kv_heads


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
