"""Plans for the prefill of a model on many devices: data, tensor and context parallelism, and the schedule.

DP   replicas of the model, each with some of the sequences
TP   ranks of a node that divide heads and weights: two all-reduces of the activations per layer
CP   ranks that divide the positions under a schedule of ContextParallel; each holds the weights of its TP rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.ops.recurrent.layers import ShortConvolution
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards, why_not
from attnmesh.planner.cost import Cost, Memory, Option, Ranking, ranked, schedule_cost
from attnmesh.planner.hardware import Cluster, group_cluster, group_ranks_per_node
from attnmesh.planner.models import (
    ModelConfig,
    cache_bytes,
    layer_weight_bytes_read,
    linear_flops,
    state_bytes,
    weight_bytes,
)
from attnmesh.planner.recurrent import KINDS, RecurrentShape, RecurrentWorkload, recurrent_cost, recurrent_memory
from attnmesh.planner.schedules import peak_bytes
from attnmesh.utils.progress import reported_steps
from attnmesh.utils.sizes import check_sizes, divisors
from attnmesh.utils.validation import check_number, check_type

MAX_CP_RANKS = 1024
"""The most CP ranks that are ranked; `attnmesh simulate` supports more."""

_ACTIVATION = 2  # bytes per element
_SUM = 4
_LINEAR_CALLS = 4  # matrix products per layer: q, k and v; out; up and gate; down


@dataclass(frozen=True)
class PrefillRequest:
    """A prompt of `context` positions for each of `batch` sequences, on `devices` devices of a cluster."""

    model: ModelConfig
    context: int
    batch: int
    devices: int
    cluster: Cluster
    kv_itemsize: float = 2.0  # bytes per element of the KV cache

    def __post_init__(self) -> None:
        check_type("model", self.model, ModelConfig)
        check_type("cluster", self.cluster, Cluster)
        check_number("kv_itemsize", self.kv_itemsize, above=0)
        check_sizes(
            devices=self.devices, context=self.context, batch=self.batch,
            q_heads=self.model.q_heads, head_dim=self.model.head_dim,
        )  # fmt: skip


@dataclass(frozen=True)
class Parallelism:
    """The sizes of data, tensor and context parallelism."""

    dp: int
    tp: int
    cp: int

    def __str__(self) -> str:
        parts = [f"{name}{n}" for name, n in (("DP", self.dp), ("TP", self.tp), ("CP", self.cp)) if n > 1]
        return "-".join(parts) or "one device"


def prefill_ranking(request: PrefillRequest) -> Ranking:
    """All plans, the fastest that fits first."""
    check_type("request", request, PrefillRequest)
    options, refused = [], {}
    found = list(parallelisms(request))
    most = sum(parallelism.cp for parallelism in found if parallelism.cp <= MAX_CP_RANKS)
    done = 0  # the time grows with CP ranks
    with reported_steps() as report:
        for parallelism in found:
            if parallelism.cp > MAX_CP_RANKS:
                refused[str(parallelism)] = f"more than {MAX_CP_RANKS} CP ranks: use `attnmesh simulate`"
                continue
            schedules = _schedules(request, parallelism)
            for i, (schedule, why) in enumerate(schedules.items()):
                report(done + i * parallelism.cp // len(schedules), most)
                name = f"{parallelism} {schedule}" if parallelism.cp > 1 else str(parallelism)
                if why is not None:
                    refused[name] = why
                    continue
                options.append(_option(request, parallelism, schedule, name))
            done += parallelism.cp
    return ranked(options, request.cluster.device.memory, refused)


def prefill_memory(request: PrefillRequest, parallelism: Parallelism, schedule: str = "ring") -> Memory:
    """Bytes per rank: weights, its part of the KV cache, and the activations of one layer."""
    model, (dp, tp, cp) = request.model, (parallelism.dp, parallelism.tp, parallelism.cp)
    sequences, rows = -(-request.batch // dp), -(-request.context // cp)
    heads_divided = 1 if model.latent else min(tp, model.kv_heads)
    cache = sequences * cache_bytes(model, request.context, request.kv_itemsize) / cp / heads_divided
    cache += sequences * state_bytes(model) / tp  # of recurrent layers, which every CP rank holds
    shape = _shape(request, parallelism)
    windows = model.window_layers
    widest = None if None in windows else max(window for window in windows if window is not None)
    attention = int(peak_bytes(schedule, _workload(request, parallelism, widest), backward=False).max())
    residual = (
        4 * rows * sequences * model.hidden * _ACTIVATION
    )  # as it is, normalized, and the input and output of a product
    mixing = rows * (shape.query_row + shape.key_row) + attention
    for workload in _recurrent(request, parallelism):
        recurrent = rows * workload.shape.input_row + int(recurrent_memory(workload, backward=False).max())
        mixing = max(mixing, recurrent)
    working = mixing + residual
    return Memory(weight_bytes(model) / tp, cache, working)


def _option(request: PrefillRequest, parallelism: Parallelism, schedule: str, name: str) -> Option:
    model, cluster = request.model, request.cluster
    attention = _attention(request, parallelism, schedule)
    rows = -(-request.context // parallelism.cp) * -(-request.batch // parallelism.dp)
    linear = _linear(request, parallelism, rows)
    sums, summed = 2 * model.layers, 2 * (parallelism.tp - 1) / parallelism.tp * rows * model.hidden * _ACTIVATION
    ranks_per_port = min(cluster.ranks_per_node, request.devices) if cluster.intra_node.shared else 1
    summing = (
        ranks_per_port * summed / cluster.intra_node.bandwidth + 2 * cluster.intra_node.latency
        if parallelism.tp > 1
        else 0.0
    )
    parts = {
        "attention": attention.computed,
        "exposed KV communication": attention.seconds - attention.computed,
        "linear layers": linear,
        "TP all-reduce": sums * summing,
    }
    sent = attention.sent + sums * summed
    if model.recurrent is not None:
        recurrent = _recurrent_cost(request, parallelism).times(model.recurrent.count)
        parts["recurrent layers"] = recurrent.computed
        parts["exposed state communication"] = recurrent.seconds - recurrent.computed
        sent += recurrent.sent
    seconds = sum(parts.values())
    longest = max(parts, key=lambda part: parts[part])
    why = attention.bottleneck if longest == "exposed KV communication" else longest
    memory = prefill_memory(request, parallelism, schedule)
    return Option(name, seconds, memory, sent, why, parts)


def _linear(request: PrefillRequest, parallelism: Parallelism, rows: int) -> float:
    """Seconds of the linear layers. Every CP rank reads all weights, however few rows it has."""
    model, device = request.model, request.cluster.device
    calls = _LINEAR_CALLS * model.layers
    computed = device.seconds("matmul", linear_flops(model, head=False) * rows / parallelism.tp, calls)
    read = device.seconds("decode", layer_weight_bytes_read(model, rows) / parallelism.tp, calls)
    return float(np.maximum(computed, read))


def _attention(request: PrefillRequest, parallelism: Parallelism, schedule: str) -> Cost:
    """The cost of attention in all layers."""
    total = Cost(0.0, 0.0, 0, 0, 0, 0, "compute")
    for window, layers in request.model.window_layers.items():
        workload = _workload(request, parallelism, window)
        one = schedule_cost(
            schedule, workload, group_cluster(request.cluster, workload.ranks_per_node, request.devices), backward=False
        )
        total = total + one.times(layers)
    return total


def _recurrent(request: PrefillRequest, parallelism: Parallelism) -> list[RecurrentWorkload]:
    """A recurrent layer of the model: its recurrence, and the short convolution before it. Empty without any."""
    layers = request.model.recurrent
    if layers is None:
        return []
    batch, tp = -(-request.batch // parallelism.dp), parallelism.tp
    sizes = (layers.heads // tp, max(1, layers.groups // tp), layers.key_dim, layers.value_dim)
    shapes = [RecurrentShape(KINDS[layers.kind], batch, *sizes, _ACTIVATION, _SUM)]
    if layers.channels:
        channels = -(-layers.channels // tp)
        shapes.append(RecurrentShape(ShortConvolution, batch, channels, 1, layers.width - 1, 1, _ACTIVATION, _SUM))
    node = _cp_ranks_per_node(request, parallelism)
    return [RecurrentWorkload(shape, request.context, parallelism.cp, node, final=True) for shape in shapes]


def _recurrent_cost(request: PrefillRequest, parallelism: Parallelism) -> Cost:
    """The cost of one recurrent layer, with the final state, which decoding goes on from."""
    total = Cost(0.0, 0.0, 0, 0, 0, 0, "compute")
    for workload in _recurrent(request, parallelism):
        cluster = group_cluster(request.cluster, workload.ranks_per_node, request.devices)
        total = total + recurrent_cost(workload, cluster, backward=False)
    return total


def _schedules(request: PrefillRequest, parallelism: Parallelism) -> dict[str, str | None]:
    """The schedules, each with the reason why it cannot serve, or None. One CP rank needs no schedule."""
    if parallelism.cp == 1:
        return {"ring": None}
    workload = _workload(request, parallelism, None)
    reasons = {name: why_not(name, workload.shards, workload.ranks_per_node) for name in SCHEDULES}
    if _cp_ranks_per_node(request, parallelism) in (
        1,
        parallelism.cp,
    ):  # one level: two-level schedules need no mention
        reasons = {name: why for name, why in reasons.items() if "+" not in name}
    return reasons


def parallelisms(request: PrefillRequest) -> Iterator[Parallelism]:
    """All ways to divide the devices under which the heads divide evenly."""
    model, node = request.model, request.cluster.ranks_per_node
    for dp in divisors(gcd(request.batch, request.devices)):
        replica = request.devices // dp
        for tp in divisors(gcd(replica, node)):
            divides = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
            divides &= model.recurrent is None or model.recurrent.heads % tp == 0
            if model.q_heads % tp == 0 and divides:
                yield Parallelism(dp, tp, replica // tp)


def _workload(request: PrefillRequest, parallelism: Parallelism, window: int | None) -> Workload:
    mask: Mask = Causal() if window is None else Causal() & SlidingWindow(window - 1)
    positions = shards(mask, Zigzag(), request.context, parallelism.cp)
    return Workload(positions, _shape(request, parallelism), _cp_ranks_per_node(request, parallelism))


def _cp_ranks_per_node(request: PrefillRequest, parallelism: Parallelism) -> int:
    """CP ranks per node."""
    whole = group_ranks_per_node(parallelism.cp * parallelism.tp, request.cluster.ranks_per_node, request.devices)
    return max(1, whole // parallelism.tp)


def _shape(request: PrefillRequest, parallelism: Parallelism) -> Shape:
    """The tensors of one rank. Latent attention is expanded to all heads; keys and values differ in width."""
    model = request.model
    kv_heads = model.q_heads if model.latent else model.kv_heads
    return Shape(
        batch=-(-request.batch // parallelism.dp),
        q_heads=model.q_heads // parallelism.tp,
        kv_heads=max(1, kv_heads // parallelism.tp),
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        itemsize=_ACTIVATION,
        sum_itemsize=_SUM,
    )
