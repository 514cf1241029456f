"""What a layer asks of ranks in a step of token generation: products, attention, and the small kernels between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.core.validation import check_positive
from attnmesh.plan.decode import DecodeShape, DecodeSharding, messages_sent
from attnmesh.plan.program import Floats, Ints, Kernels, Messages, Program, Round
from attnmesh.planner.auto import pick_combine
from attnmesh.planner.cost import cost
from attnmesh.planner.hardware import Cluster, Link, group_cluster, group_ranks_per_node
from attnmesh.planner.models.config import (
    ModelConfig,
    Parameters,
    cached_numbers,
    experts_read,
    parameters,
    weight_bytes,
)
from attnmesh.planner.ranking import Memory, Option, Ranking, ranked

# Small kernels, in launches, from docs/benchmarks.md ("Overhead of the block"): one is a copy of 0.8 us and the
# microsecond until the next kernel.
AROUND_ATTENTION = 6  # the norm, and the kernel for RoPE and the cache, two each; two pass between the large kernels
AROUND_MLP = 3  # the norm, and what the way up and the gate make together
EXCHANGE = 1  # a rank's own part of what is exchanged is copied
MERGE = 2  # of states, after CP ranks have exchanged them


@dataclass(frozen=True)
class Linear:
    """The parameters of a layer's products, by how ranks divide them, and how large one is."""

    divided: int = 0  # over all ranks: W_q, and what belongs to query heads only
    by_kv_head: int = 0  # with the kv heads: W_k and W_v; ranks that share a kv head hold them alike
    out: int = 0  # W_out, over all ranks
    mlp: int = 0  # over all ranks; of experts, those that somebody chose
    mlp_used: float = 0.0  # parameters of the MLP that a token is multiplied with
    nbytes: float = 2.0  # of a parameter of attention
    mlp_nbytes: float = 2.0


@dataclass(frozen=True)
class DecodeLayer:
    """One layer: its attention, what is cached, and its linear layers."""

    shape: DecodeShape
    cached: float  # bytes of keys and values of one position and kv head
    context: int  # positions that a query sees: the context, or the layer's window
    linear: Linear = Linear()

    @property
    def rows(self) -> int:
        """New tokens of all sequences."""
        return self.shape.batch * self.shape.tokens

    def projected(self, sharding: DecodeSharding) -> Kernels:
        """Queries, keys and values: a rank's part of W_q, and W_k and W_v of all kv heads that it holds."""
        held = [len(sharding.kv_heads(rank, self.shape.kv_heads)) for rank in range(sharding.ranks)]
        used = self.linear.divided / sharding.ranks + self.linear.by_kv_head * np.array(held) / self.shape.kv_heads
        return self._product(used, used, self.linear.nbytes)

    def projected_out(self, sharding: DecodeSharding) -> Kernels:
        """The output projection."""
        used = np.full(sharding.ranks, self.linear.out / sharding.ranks)
        return self._product(used, used, self.linear.nbytes)

    def mlp(self, sharding: DecodeSharding) -> Kernels:
        """The MLP, up and down again."""
        used, read = (np.full(sharding.ranks, n / sharding.ranks) for n in (self.linear.mlp_used, self.linear.mlp))
        return self._product(used, read, self.linear.mlp_nbytes, calls=2)

    def attention(self, sharding: DecodeSharding) -> Kernels:
        """All query heads of a rank's kv heads, over the positions that it holds.

        Reading keys takes longest, but where many heads share what is cached (latent attention) computing may.
        """
        shape, flops, read = self.shape, [], []
        for rank in range(sharding.ranks):
            held = len(sharding.sequences(rank, shape.batch)) * sharding.position_shard(rank).length(self.context)
            heads = len(sharding.group_heads(rank, shape.q_heads))
            flops.append(4.0 * heads * shape.tokens * held * shape.head_dim)
            read.append(len(sharding.kv_heads(rank, shape.kv_heads)) * held * self.cached)
        return Kernels("attention", np.array(flops), np.ones(sharding.ranks), bytes_read=np.array(read))

    def small(self, sharding: DecodeSharding, launches: int) -> Kernels:
        """Kernels that pass over the new tokens: a launch each, unless there are many tokens."""
        once = 2.0 * self.rows * self.shape.hidden * self.shape.itemsize  # read and written
        return Kernels("relayout", np.full(sharding.ranks, launches * once), np.full(sharding.ranks, float(launches)))

    def _product(self, used: Floats, read: Floats, nbytes: float, calls: int = 1) -> Kernels:
        """Rows times parameters: two operations each, and every parameter is read once."""
        return Kernels("matmul", 2.0 * self.rows * used, np.full(len(used), float(calls)), bytes_read=read * nbytes)


def summed(name: str, nbytes: int, ranks: int, link: Link) -> Iterator[Round]:
    """The rounds of a sum of `nbytes` over all ranks; `link` is what the way is chosen by."""
    if ranks == 1:
        return
    ends = nbytes * np.arange(ranks + 1, dtype=np.int64) // ranks  # of the slices, by owner
    halvings = (ranks - 1).bit_length()
    in_pairs = halvings * (link.message + link.latency) < (ranks - 1) * link.message + link.latency
    if in_pairs and ranks == 1 << halvings:
        steps = list(_in_pairs(ends, halvings))
    else:
        steps = list(_at_once(np.diff(ends)))
    for half, order in (("scatter", steps), ("gather", steps[::-1])):
        for i, (source, target, moved) in enumerate(order):
            if half == "gather":  # what a rank gave its peer to sum is what comes back as sums
                source, target = target, source
            there = moved > 0
            exchange = f"{name}, {half} {i + 1} of {len(order)}" if len(order) > 1 else f"{name}, {half}"
            messages = Messages(source[there], target[there], moved[there])
            yield Round(exchange, {exchange: messages}, (), (exchange,))


def _at_once(slices: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Every slice to its owner: sources, targets, bytes."""
    ranks = np.arange(len(slices), dtype=np.int64)
    source, target = np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks))
    source, target = source[source != target], target[source != target]
    yield source, target, slices[target]


def _in_pairs(ends: Ints, halvings: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """The half that a peer's side owns, to the peer: its number differs in one bit, in the lowest one first."""
    ranks = np.arange(1 << halvings, dtype=np.int64)
    place = np.zeros_like(ranks)  # which slice a rank owns
    for bit in range(halvings):
        place |= (ranks >> bit & 1) << (halvings - 1 - bit)
    for bit in range(halvings):
        peer = ranks ^ (1 << bit)
        width = 1 << (halvings - 1 - bit)  # slices that a side owns
        first = place[peer] // width * width
        yield ranks, peer, ends[first + width] - ends[first]


def decode_program(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Program:
    """One layer's step on all ranks. `link` is what ways to merge and to sum are chosen by."""
    sharding.check_heads(layer.shape.q_heads, layer.shape.kv_heads)
    return Program(f"decode {sharding}", sharding.ranks, lambda: _rounds(sharding, layer, link))


def _rounds(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Iterator[Round]:
    exchanges = _exchanges(sharding, layer.shape, link)
    nbytes = layer.rows * layer.shape.hidden * layer.shape.itemsize

    def trade(name: str, launches: int = EXCHANGE) -> Iterator[Round]:
        """An exchange, if there is anything to send, and the kernels that it wants afterwards."""
        if len(exchanges[name]):
            yield Round(name, {name: exchanges[name]}, (), (name,))
            yield Round(f"after {name}", work=(layer.small(sharding, launches),))

    yield Round("project", work=(layer.small(sharding, AROUND_ATTENTION), layer.projected(sharding)))
    yield from trade("kvdp in")
    yield from trade("cp in")
    yield Round("attend", work=(layer.attention(sharding),))
    yield from trade("cp lse")
    yield from trade("cp out", EXCHANGE + MERGE)
    yield from trade("kvdp out")
    yield Round("project out", work=(layer.projected_out(sharding),))
    yield from summed("sum of projections", nbytes, sharding.ranks, link)
    if layer.linear.mlp:
        yield Round("mlp", work=(layer.small(sharding, AROUND_MLP), layer.mlp(sharding)))
        yield from summed("sum of MLPs", nbytes, sharding.ranks, link)


def _exchanges(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[str, Messages]:
    """The messages between KVDP peers and between CP peers, by the name of their exchange."""
    combine = pick_combine(sharding, shape, link)
    assert combine != "all_reduce", "it costs more than a reduce-scatter on every link"
    found: dict[str, list[tuple[int, int, int]]] = {}
    for rank in range(sharding.ranks):
        for name, parts in messages_sent(sharding, shape, rank, combine=combine).items():
            found.setdefault(name, []).extend((rank, peer, nbytes) for peer, nbytes in parts.items())
    return {name: Messages.of(messages) for name, messages in found.items()}


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
        cluster = group_cluster(
            cluster, group_ranks_per_node(sharding.ranks, cluster.ranks_per_node, asked.devices), asked.devices
        )
    parts = dict.fromkeys(("computing", "exchanges"), 0.0)
    sent = 0.0
    bottlenecks: dict[str, float] = {}
    for layer, layers in decode_layers(asked, sequences).items():
        one = cost(decode_program(sharding, layer, cluster.intra_node), cluster)
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
