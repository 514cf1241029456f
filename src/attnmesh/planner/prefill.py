"""Ways to read a prompt over many devices: how sequences, heads and positions are divided, under which schedule.

DP   replicas of the model that take some sequences each
TP   ranks of a node that divide heads and weights: two sums of the activations a layer
CP   ranks that divide the positions: a schedule of ContextParallel; they hold the same weights
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.validation import check_positive
from attnmesh.plan.schedules import SCHEDULES, peak_bytes, refusal
from attnmesh.plan.shards import shards
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.cost import Cost, schedule_cost
from attnmesh.planner.hardware import Cluster, group_cluster, group_ranks_per_node
from attnmesh.planner.models.config import ModelConfig, cache_bytes, layer_weights_read, linear_flops, weight_bytes
from attnmesh.planner.ranking import Memory, Option, Ranking, ranked

MOST_CP = 1024
"""CP ranks up to which every schedule is costed; `attnmesh simulate` takes more."""

_ACTIVATION = 2  # bytes
_SUM = 4
_LINEAR_CALLS = 4  # products of a layer: q, k and v; out; up and gate; down


@dataclass(frozen=True)
class Prefill:
    """A prompt of `context` positions for each of `batch` sequences, on `devices` devices of a cluster."""

    model: ModelConfig
    context: int
    batch: int
    devices: int
    cluster: Cluster
    cached_number: float = 2.0  # bytes of a number in the KV cache

    def __post_init__(self) -> None:
        check_positive(context=self.context, batch=self.batch, devices=self.devices)


@dataclass(frozen=True)
class Division:
    """How many replicas, ranks that divide heads, and ranks that divide positions."""

    dp: int
    tp: int
    cp: int

    def __str__(self) -> str:
        said = [f"{name}{n}" for name, n in (("DP", self.dp), ("TP", self.tp), ("CP", self.cp)) if n > 1]
        return "-".join(said) or "one device"


def prefill_ranking(asked: Prefill) -> Ranking:
    """Every way, the fastest that fits first."""
    options, refused = [], {}
    for division in divisions(asked):
        if division.cp > MOST_CP:
            refused[str(division)] = f"more than {MOST_CP} CP ranks are left to `attnmesh simulate`"
            continue
        for schedule, why in _schedules(asked, division).items():
            name = f"{division} {schedule}" if division.cp > 1 else str(division)
            if why is not None:
                refused[name] = why
                continue
            options.append(_option(asked, division, schedule, name))
    return ranked(options, asked.cluster.device.memory, refused)


def prefill_memory(asked: Prefill, division: Division, schedule: str = "ring") -> Memory:
    """Bytes of a rank: its weights, its part of the cache, and the activations of one layer."""
    model, (dp, tp, cp) = asked.model, (division.dp, division.tp, division.cp)
    sequences, rows = -(-asked.batch // dp), -(-asked.context // cp)
    heads_divided = 1 if model.latent else min(tp, model.kv_heads)
    cache = sequences * cache_bytes(model, asked.context, asked.cached_number) / cp / heads_divided
    shape = _shape(asked, division)
    windows = model.window_layers
    widest = None if None in windows else max(window for window in windows if window is not None)
    attending = int(peak_bytes(schedule, _case(asked, division, widest), backward=False).max())
    residual = 4 * rows * sequences * model.hidden * _ACTIVATION  # as it is, normed, and on the way through a product
    working = rows * (shape.query_row + shape.key_row) + attending + residual
    return Memory(weight_bytes(model) / tp, cache, working)


def _option(asked: Prefill, division: Division, schedule: str, name: str) -> Option:
    model, cluster = asked.model, asked.cluster
    attention = _attention(asked, division, schedule)
    rows = -(-asked.context // division.cp) * -(-asked.batch // division.dp)
    linear = _linear(asked, division, rows)
    sums, summed = 2 * model.layers, 2 * (division.tp - 1) / division.tp * rows * model.hidden * _ACTIVATION
    on_a_port = min(cluster.ranks_per_node, asked.devices) if cluster.intra_node.shared else 1
    summing = (
        on_a_port * summed / cluster.intra_node.bandwidth + 2 * cluster.intra_node.latency if division.tp > 1 else 0.0
    )
    parts = {
        "attention": attention.computed,
        "keys on their way": attention.seconds - attention.computed,
        "linear layers": linear,
        "sums over TP": sums * summing,
    }
    seconds = sum(parts.values())
    longest = max(parts, key=lambda part: parts[part])
    why = attention.bottleneck if longest == "keys on their way" else longest
    memory = prefill_memory(asked, division, schedule)
    return Option(name, seconds, memory, attention.sent + sums * summed, why, parts)


def _linear(asked: Prefill, division: Division, rows: int) -> float:
    """Seconds of the products of all layers. Every CP rank reads all weights, however few rows it has."""
    model, device = asked.model, asked.cluster.device
    calls = _LINEAR_CALLS * model.layers
    computed = device.seconds("matmul", linear_flops(model, head=False) * rows / division.tp, calls)
    read = device.seconds("decode", layer_weights_read(model, rows) / division.tp, calls)
    return float(np.maximum(computed, read))


def _attention(asked: Prefill, division: Division, schedule: str) -> Cost:
    """The attention of all layers."""
    total = Cost(0.0, 0.0, 0, 0, 0, 0, "computing")
    for window, layers in asked.model.window_layers.items():
        workload = _case(asked, division, window)
        one = schedule_cost(
            schedule, workload, group_cluster(asked.cluster, workload.ranks_per_node, asked.devices), backward=False
        )
        total = total + one.times(layers)
    return total


def _schedules(asked: Prefill, division: Division) -> dict[str, str | None]:
    """The schedules, and why some cannot serve. A rank alone needs none of them: any will do."""
    if division.cp == 1:
        return {"ring": None}
    workload = _case(asked, division, None)
    flat = {name: refusal(name, workload.shards, workload.ranks_per_node) for name in SCHEDULES}
    if _inner(asked, division) in (1, division.cp):  # one level only: that is no news
        flat = {name: why for name, why in flat.items() if "+" not in name}
    return flat


def divisions(asked: Prefill) -> Iterator[Division]:
    """All ways to divide the devices that divide the heads evenly."""
    model, node = asked.model, asked.cluster.ranks_per_node
    for dp in (dp for dp in range(1, asked.batch + 1) if asked.batch % dp == 0 and asked.devices % dp == 0):
        replica = asked.devices // dp
        for tp in (tp for tp in range(1, min(node, replica) + 1) if replica % tp == 0 and node % tp == 0):
            divides = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
            if model.q_heads % tp == 0 and divides:
                yield Division(dp, tp, replica // tp)


def _case(asked: Prefill, division: Division, window: int | None) -> Workload:
    mask: Mask = Causal() if window is None else Causal() & SlidingWindow(window - 1)
    positions = shards(mask, Zigzag(), asked.context, division.cp)
    return Workload(positions, _shape(asked, division), _inner(asked, division))


def _inner(asked: Prefill, division: Division) -> int:
    """CP ranks of a node."""
    whole = group_ranks_per_node(division.cp * division.tp, asked.cluster.ranks_per_node, asked.devices)
    return max(1, whole // division.tp)


def _shape(asked: Prefill, division: Division) -> Shape:
    """The tensors of one rank. Latent attention is expanded to all heads; its keys and values differ in width."""
    model = asked.model
    kv_heads = model.q_heads if model.latent else model.kv_heads
    return Shape(
        batch=-(-asked.batch // division.dp),
        q_heads=model.q_heads // division.tp,
        kv_heads=max(1, kv_heads // division.tp),
        head_dim=(model.head_dim + model.value_dim) // 2,
        itemsize=_ACTIVATION,
        sum_itemsize=_SUM,
    )
