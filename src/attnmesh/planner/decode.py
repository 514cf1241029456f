"""Plans for decode steps on many devices: replicas of the model, and how each shards its KV cache.

A layer of a decode step is a sequence without overlap:

    project q, k, v | queries to the ranks that hold the keys (KVDP, then CP) | attention | merge of states (CP)
    | results back (KVDP) | output projection, all-reduce | MLP, all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from attnmesh.plan.decode import DecodeShape, DecodeSharding
from attnmesh.planner.auto import pick_combine
from attnmesh.planner.cost import Memory, Option, Ranking, cost, messages_sent, ranked
from attnmesh.planner.hardware import Cluster, Device, Link, group_cluster, group_ranks_per_node
from attnmesh.planner.models import (
    AttentionParameters,
    ModelConfig,
    attention_parameters,
    expert_fraction_read,
    kv_elements_per_position,
    parameters,
    weight_bytes,
)
from attnmesh.planner.program import Floats, Ints, Kernels, Messages, Program, Round
from attnmesh.utils.progress import reported
from attnmesh.utils.sizes import check_sizes, divisors
from attnmesh.utils.validation import check_number, check_type

# Small kernels, in launches (docs/notes/decode.md, "Overhead of a sharded step"): one is a copy of 0.8 us and the
# microsecond until the next kernel.
ATTENTION_LAUNCHES = 6  # the norm, and the kernel for RoPE and the cache, two each; two between the large kernels
MLP_LAUNCHES = 3  # the norm, and the activation of up and gate projections
EXCHANGE_LAUNCHES = 1  # the copy of a rank's own part
MERGE_LAUNCHES = 2  # of states, after CP ranks have exchanged them


@dataclass(frozen=True)
class LinearLayers:
    """The parameters of a layer's linear layers by how they are sharded, and their size."""

    attention: AttentionParameters = field(default_factory=AttentionParameters)
    mlp: int = 0  # over all ranks; of the experts that some token is routed to
    mlp_used: float = 0.0  # parameters of the MLP per token
    nbytes: float = 2.0  # per parameter of attention
    mlp_nbytes: float = 2.0


@dataclass(frozen=True)
class DecodeLayer:
    """One layer: its attention, its KV cache, and its linear layers."""

    shape: DecodeShape
    cached: float  # bytes of K and V per position and kv head
    context: int  # visible positions: the context, or the layer's window
    linear: LinearLayers = LinearLayers()

    @property
    def rows(self) -> int:
        """New tokens of all sequences."""
        return self.shape.batch * self.shape.tokens

    def qkv_projection(self, sharding: DecodeSharding) -> Kernels:
        """The projection of a rank's query heads, and of K and V for all kv heads that it holds."""
        heads = [len(sharding.kv_heads(rank, self.shape.kv_heads)) for rank in range(sharding.ranks)]
        weights = self.linear.attention
        used = weights.sharded / sharding.ranks + weights.by_kv_head * np.array(heads) / self.shape.kv_heads
        return self._matmul(used, used, self.linear.nbytes)

    def out_projection(self, sharding: DecodeSharding) -> Kernels:
        """The output projection."""
        used = np.full(sharding.ranks, self.linear.attention.out / sharding.ranks)
        return self._matmul(used, used, self.linear.nbytes)

    def mlp(self, sharding: DecodeSharding) -> Kernels:
        """The MLP, in two calls."""
        used, read = (np.full(sharding.ranks, n / sharding.ranks) for n in (self.linear.mlp_used, self.linear.mlp))
        return self._matmul(used, read, self.linear.mlp_nbytes, calls=2)

    def attention(self, sharding: DecodeSharding) -> Kernels:
        """All query heads of a rank's kv heads, over the positions that it holds.

        Usually bound by reading the KV cache; latent attention, where many heads share it, may be compute bound.
        """
        shape, flops, read = self.shape, [], []
        for rank in range(sharding.ranks):
            held = len(sharding.sequences(rank, shape.batch)) * sharding.position_shard(rank).length(self.context)
            heads = len(sharding.group_heads(rank, shape.q_heads))
            flops.append(4.0 * heads * shape.tokens * held * shape.head_dim)
            read.append(len(sharding.kv_heads(rank, shape.kv_heads)) * held * self.cached)
        return Kernels("attention", np.array(flops), np.ones(sharding.ranks), bytes_read=np.array(read))

    def small_kernels(self, sharding: DecodeSharding, launches: int) -> Kernels:
        """Kernels over the activations of the new tokens: about one launch time each, unless there are many tokens."""
        once = 2.0 * self.rows * self.shape.hidden * self.shape.itemsize  # read and written
        return Kernels("relayout", np.full(sharding.ranks, launches * once), np.full(sharding.ranks, float(launches)))

    def _matmul(self, used: Floats, read: Floats, nbytes: float, calls: int = 1) -> Kernels:
        """A product with parameters: two operations per row and parameter; every parameter is read once."""
        return Kernels("matmul", 2.0 * self.rows * used, np.full(len(used), float(calls)), bytes_read=read * nbytes)


def all_reduce_rounds(name: str, nbytes: int, ranks: int, link: Link) -> Iterator[Round]:
    """The rounds of an all-reduce of `nbytes` over all ranks, with the faster of two algorithms on `link`.

    Directly: every rank sends each other rank its slice, twice. Recursive halving and doubling: log2(ranks) pairwise
    exchanges, twice. Both send the same bytes. Many ranks take the second, since messages are started one after
    another; few take the first, which waits only twice.
    """
    if ranks == 1:
        return
    ends = nbytes * np.arange(ranks + 1, dtype=np.int64) // ranks  # of the slices, by rank
    halvings = (ranks - 1).bit_length()
    halve = halvings * (link.message + link.latency) < (ranks - 1) * link.message + link.latency
    if halve and ranks == 1 << halvings:
        steps = list(_recursive_halving(ends, halvings))
    else:
        steps = list(_direct(np.diff(ends)))
    for half, order in (("reduce-scatter", steps), ("all-gather", steps[::-1])):
        for i, (source, target, moved) in enumerate(order):
            if half == "all-gather":  # a rank receives the slices that it sent to be summed
                source, target = target, source
            sent = moved > 0
            exchange = f"{name}, {half} {i + 1} of {len(order)}" if len(order) > 1 else f"{name}, {half}"
            messages = Messages(source[sent], target[sent], moved[sent])
            yield Round(exchange, {exchange: messages}, (), (exchange,))


def _direct(slices: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Every slice to the rank that sums it: sources, targets, bytes."""
    ranks = np.arange(len(slices), dtype=np.int64)
    source, target = np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks))
    source, target = source[source != target], target[source != target]
    yield source, target, slices[target]


def _recursive_halving(ends: Ints, halvings: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """The half that the peer's side sums, to the peer, whose rank differs in one bit, the lowest first."""
    ranks = np.arange(1 << halvings, dtype=np.int64)
    place = np.zeros_like(ranks)  # the slice that a rank sums
    for bit in range(halvings):
        place |= (ranks >> bit & 1) << (halvings - 1 - bit)
    for bit in range(halvings):
        peer = ranks ^ (1 << bit)
        width = 1 << (halvings - 1 - bit)  # slices of a side
        first = place[peer] // width * width
        yield ranks, peer, ends[first + width] - ends[first]


def decode_program(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Program:
    """One layer of a decode step on all ranks. `link` decides the algorithms of merge and all-reduce."""
    sharding.check_heads(layer.shape.q_heads, layer.shape.kv_heads)
    return Program(f"decode {sharding}", sharding.ranks, lambda: _rounds(sharding, layer, link))


def _rounds(sharding: DecodeSharding, layer: DecodeLayer, link: Link) -> Iterator[Round]:
    exchanges = _exchanges(sharding, layer.shape, link)
    nbytes = layer.rows * layer.shape.hidden * layer.shape.itemsize

    def exchange(name: str, launches: int = EXCHANGE_LAUNCHES) -> Iterator[Round]:
        """An exchange, if there is anything to send, and the small kernels after it."""
        if len(exchanges[name]):
            yield Round(name, {name: exchanges[name]}, (), (name,))
            yield Round(f"after {name}", work=(layer.small_kernels(sharding, launches),))

    yield Round("project", work=(layer.small_kernels(sharding, ATTENTION_LAUNCHES), layer.qkv_projection(sharding)))
    yield from exchange("kvdp in")
    yield from exchange("cp in")
    yield Round("attention", work=(layer.attention(sharding),))
    yield from exchange("cp lse")
    yield from exchange("cp out", EXCHANGE_LAUNCHES + MERGE_LAUNCHES)
    yield from exchange("kvdp out")
    yield Round("project out", work=(layer.out_projection(sharding),))
    yield from all_reduce_rounds("all-reduce of projections", nbytes, sharding.ranks, link)
    if layer.linear.mlp:
        yield Round("mlp", work=(layer.small_kernels(sharding, MLP_LAUNCHES), layer.mlp(sharding)))
        yield from all_reduce_rounds("all-reduce of MLPs", nbytes, sharding.ranks, link)


def _exchanges(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[str, Messages]:
    """The messages between KVDP peers and between CP peers, by the name of their exchange."""
    combine = pick_combine(sharding, shape, link)
    assert combine != "all_reduce", "an all-reduce always costs more than a reduce-scatter"
    found: dict[str, list[tuple[int, int, int]]] = {}
    for rank in range(sharding.ranks):
        for name, parts in messages_sent(sharding, shape, rank, combine=combine).items():
            found.setdefault(name, []).extend((rank, peer, nbytes) for peer, nbytes in parts.items())
    return {name: Messages.of(messages) for name, messages in found.items()}


_ACTIVATION = 2  # bytes


@dataclass(frozen=True)
class DecodeRequest:
    """A decode step of `tokens` new tokens for each of `batch` sequences of `context` positions."""

    model: ModelConfig
    context: int
    batch: int
    devices: int
    cluster: Cluster
    tokens: int = 1
    kv_itemsize: float = 2.0  # bytes per element of the KV cache

    def __post_init__(self) -> None:
        check_type("model", self.model, ModelConfig)
        check_type("cluster", self.cluster, Cluster)
        if self.model.recurrent is not None:
            raise ValueError(
                f"model must have attention in all layers for plans of decode steps, got {self.model.name}, which has "
                f"{self.model.recurrent.count} recurrent layers"
            )
        check_number("kv_itemsize", self.kv_itemsize, above=0)
        check_sizes(
            devices=self.devices, context=self.context, batch=self.batch, tokens=self.tokens,
            q_heads=self.model.q_heads, head_dim=self.model.head_dim,
        )  # fmt: skip


def decode_ranking(request: DecodeRequest) -> Ranking:
    """All plans, the fastest that fits first."""
    check_type("request", request, DecodeRequest)
    found = list(shardings(request))
    options = [decode_option(request, replicas, sharding) for replicas, sharding in reported(found, len(found))]
    refused = {}
    if not options:
        heads = f"{request.model.q_heads} query heads and a batch of {request.batch}"
        refused["all plans"] = f"{heads} leave some of {request.devices} devices idle"
    return ranked(options, request.cluster.device.memory, refused)


def decode_layers(request: DecodeRequest, sequences: int) -> dict[DecodeLayer, int]:
    """The different layers of a model, and how many there are of each."""
    model = request.model
    shape = _shape(model, sequences, request.tokens)
    linear = _linear(model, sequences * request.tokens)
    cached = kv_elements_per_position(model) / _kv_heads(model) * request.kv_itemsize
    return {
        DecodeLayer(shape, cached, min(request.context, window or request.context), linear): layers
        for window, layers in model.window_layers.items()
    }


def shardings(request: DecodeRequest) -> Iterator[tuple[int, DecodeSharding]]:
    """Numbers of replicas, and all shardings of one replica that leave no rank without a head."""
    kv_heads = _kv_heads(request.model)
    for replicas in divisors(gcd(request.devices, request.batch)):
        ranks, sequences = request.devices // replicas, request.batch // replicas
        for tp in divisors(ranks):
            if (kv_heads % tp and tp % kv_heads) or ranks > request.model.q_heads:
                continue
            for kvdp in divisors(ranks // tp):
                if kvdp <= sequences:
                    yield replicas, DecodeSharding(tp, kvdp, ranks // tp // kvdp)


def decode_option(request: DecodeRequest, replicas: int, sharding: DecodeSharding) -> Option:
    """What it costs to divide the devices into replicas, and each of these by a sharding."""
    sequences = request.batch // replicas
    cluster = request.cluster
    if replicas > 1:  # which share the nodes
        cluster = group_cluster(
            cluster, group_ranks_per_node(sharding.ranks, cluster.ranks_per_node, request.devices), request.devices
        )
    parts = dict.fromkeys(("compute", "communication"), 0.0)
    sent = 0.0
    bottlenecks: dict[str, float] = {}
    for layer, layers in decode_layers(request, sequences).items():
        one = cost(decode_program(sharding, layer, cluster.intra_node), cluster)
        parts["compute"] += one.computed * layers
        parts["communication"] += (one.seconds - one.computed) * layers
        sent += one.sent * layers
        why = _kernel_bound(layer, sharding, cluster.device) if one.bottleneck == "compute" else one.bottleneck
        bottlenecks[why] = bottlenecks.get(why, 0.0) + one.seconds * layers
    head = _head_seconds(request, sharding.ranks, sequences)
    if head:
        parts["LM head"] = head
    memory = decode_memory(request, sharding, sequences)
    bottleneck = max(bottlenecks, key=lambda reason: bottlenecks[reason])
    name = f"{replicas} x {sharding}" if replicas > 1 else str(sharding)
    return Option(name, sum(parts.values()), memory, sent, bottleneck, parts, sharding, replicas)


def _kernel_bound(layer: DecodeLayer, sharding: DecodeSharding, device: Device) -> str:
    """Whether the large kernels of a layer are limited by memory bandwidth or by compute."""
    kernels = [layer.qkv_projection(sharding), layer.attention(sharding), layer.out_projection(sharding)]
    if layer.linear.mlp:
        kernels.append(layer.mlp(sharding))
    read = sum(
        float(device.seconds("decode", k.bytes_read, k.calls).max()) for k in kernels if k.bytes_read is not None
    )
    computed = sum(float(device.seconds(k.kind, k.size, k.calls).max()) for k in kernels)
    return "memory bandwidth" if read >= computed else "compute"


def decode_memory(request: DecodeRequest, sharding: DecodeSharding, sequences: int) -> Memory:
    """Bytes per rank of one replica."""
    model = request.model
    kv_heads, shape = _kv_heads(model), _shape(model, sequences, request.tokens)
    cached = kv_elements_per_position(model) / kv_heads * request.kv_itemsize
    kept = 0.0
    for window, layers in model.window_layers.items():
        positions = sharding.position_shard(0).length(min(request.context, window or request.context))
        kept += layers * positions * cached
    heads, held = len(sharding.kv_heads(0, kv_heads)), -(-sequences // sharding.kvdp)
    working = 8.0 * sequences * request.tokens * (model.hidden + model.q_heads * shape.head_dim) * _ACTIVATION
    return Memory(_weights(model, sharding), heads * held * kept, working)


def _weights(model: ModelConfig, sharding: DecodeSharding) -> float:
    """Weights are sharded over all ranks, except that W_k and W_v are replicated with their kv heads."""
    if model.vocab_size is None:
        return 0.0
    copies = sharding.ranks / sharding.tp * max(1, sharding.tp // _kv_heads(model))
    kv = model.layers * attention_parameters(model).by_kv_head * model.weight_bits.projections / 8
    return (weight_bytes(model) + (copies - 1) * kv) / sharding.ranks


def _linear(model: ModelConfig, rows: int) -> LinearLayers:
    """The linear layers of one layer, averaged over layers with and without experts."""
    if model.vocab_size is None:
        return LinearLayers()
    count = parameters(model)
    chosen = expert_fraction_read(model, rows)
    mlp = (count.mlp + count.routers + count.experts * chosen) / model.layers
    bits = count.mlp * model.weight_bits.projections + count.experts * chosen * model.weight_bits.experts
    read = count.mlp + count.experts * chosen
    used = (count.mlp + count.routers + count.chosen) / model.layers
    return LinearLayers(
        attention_parameters(model), round(mlp), used, nbytes=model.weight_bits.projections / 8,
        mlp_nbytes=bits / 8 / read if read else 2.0,
    )  # fmt: skip


def _head_seconds(request: DecodeRequest, ranks: int, sequences: int) -> float:
    """The LM head, sharded over all ranks."""
    if request.model.vocab_size is None:
        return 0.0
    count = parameters(request.model)
    flops = 2.0 * count.head * sequences * request.tokens / ranks
    read = count.head * request.model.weight_bits.rest / 8 / ranks
    device = request.cluster.device
    return float(np.maximum(device.seconds("matmul", flops), device.seconds("decode", read)))


def _shape(model: ModelConfig, sequences: int, tokens: int) -> DecodeShape:
    """The shape of the exchanges. Latent attention has one kv head, as wide as its cached vector."""
    width = model.latent.cached if model.latent else model.head_dim
    return DecodeShape(sequences, tokens, model.q_heads, _kv_heads(model), width, model.hidden, _ACTIVATION)


def _kv_heads(model: ModelConfig) -> int:
    return 1 if model.latent else model.kv_heads
