"""The cost of a schedule and of a sharded decode step: seconds, operations, bytes, and the bottleneck.

The program of a schedule is simulated on a cluster, round by round: in every round a rank takes the longer of its
compute and of the communication that it waits for. No overlap is assumed beyond what the rounds allow. Of a decode
step: the bytes that ranks send in each collective, and that they store.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from attnmesh.plan.decode import COMBINES, KVDP_EXCHANGES, Combine, DecodeShape, DecodeSharding, KvdpExchange
from attnmesh.plan.shards import Workload
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Load, LoadCounter, Program
from attnmesh.planner.schedules import program
from attnmesh.planner.simulator import Slowdown, run_rounds
from attnmesh.utils.text import readable_bytes, readable_seconds
from attnmesh.utils.validation import check_choice, check_positive, check_type

_SUMMED = ("seconds", "computed", "flops", "intra_node", "inter_node", "rounds")  # what the parts of a cost add up
_NEGLIGIBLE = 0.1  # fraction of the time spent waiting up to which a run is compute bound


@dataclass(frozen=True)
class Cost:
    """One run of a program; operations and bytes are the maximum over ranks.

    Attributes:
        seconds: until the last rank finishes.
        computed: seconds of compute on the busiest rank.
        flops: floating point operations.
        intra_node: bytes sent within the node.
        inter_node: bytes sent to other nodes.
        rounds: rounds of messages.
        bottleneck: what most of the time is spent on.

    Examples:
        >>> layer = schedule_cost("ring", workload, cluster("h200"), backward=False)
        >>> layer.times(32).rounds == 32 * layer.rounds, 0 <= layer.exposed < 1
        (True, True)
    """

    seconds: float
    computed: float
    flops: int
    intra_node: int
    inter_node: int
    rounds: int
    bottleneck: str

    @property
    def sent(self) -> int:
        """Bytes that one rank sends, at most."""
        return self.intra_node + self.inter_node

    @property
    def exposed(self) -> float:
        """The fraction of the time in which the busiest rank does not compute."""
        return 1 - self.computed / self.seconds if self.seconds else 0.0

    def times(self, count: int) -> Cost:
        """The cost of `count` runs in sequence, such as the layers of a model."""
        return replace(self, **{name: count * getattr(self, name) for name in _SUMMED})

    def __add__(self, other: Cost) -> Cost:
        """The cost of both in sequence, with the bottleneck of the longer one."""
        longer = max(self, other, key=lambda cost: cost.seconds)
        return replace(longer, **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED})


def schedule_cost(schedule: str, workload: Workload, cluster: Cluster, *, backward: bool) -> Cost:
    """The cost of one direction of a schedule that can serve the workload.

    Examples:
        >>> costs = [schedule_cost(name, workload, cluster("h200"), backward=False) for name in ("ring", "ulysses")]
        >>> [cost.sent for cost in costs]  # bytes
        [469762048, 293601280]
    """
    check_type("cluster", cluster, Cluster)
    return cost(program(schedule, workload, backward=backward), cluster.with_ranks_per_node(workload.ranks_per_node))


def cost(whole: Program, cluster: Cluster, limit: float = np.inf) -> Cost:
    """The cost of a program. Raises TooLongError, before its end, if it takes longer than `limit` seconds."""
    counter = LoadCounter(whole.world, cluster.ranks_per_node)
    ran = run_rounds(counter.counting(whole), cluster, Slowdown(), limit=limit)
    most = counter.maximum()
    seconds, computed = float(ran.finish.max(initial=0.0)), float(ran.computed.max(initial=0.0))
    why = _bottleneck(seconds, float(np.median(ran.computed)), most, cluster)
    return Cost(seconds, computed, most.flops, most.intra_node, most.inter_node, counter.rounds, why)


def _bottleneck(seconds: float, computed: float, most: Load, cluster: Cluster) -> str:
    """Where most of the time goes, for the median rank and the busiest port."""
    if not seconds:
        return "none"
    if computed >= (1 - _NEGLIGIBLE) * seconds:
        return "compute"
    intra_node = (
        most.intra_node * (cluster.ranks_per_node if cluster.intra_node.shared else 1) / cluster.intra_node.bandwidth
    )
    ports = 1 if cluster.inter_node.shared else cluster.rails
    sharing = -(-cluster.ranks_per_node // ports)  # ranks on the busiest port
    taken = {
        "compute": computed,
        f"{cluster.intra_node.name} intra-node bandwidth": intra_node,
        f"{cluster.inter_node.name} inter-node bandwidth": most.inter_node * sharing / cluster.inter_node.bandwidth,
    }
    most_taken = max(taken, key=lambda name: taken[name])
    return most_taken if taken[most_taken] >= seconds / 2 else f"waiting for other ranks, then {most_taken}"


_STATE_ITEMSIZE = 4  # (out, lse) are sent in float32 until they are merged


class Copies(NamedTuple):
    """On how many ranks every part of a weight is replicated."""

    w_q: int
    w_kv: int
    w_out: int


def bytes_sent(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, *, kvdp: KvdpExchange = "all_to_all",
    combine: Combine = "all_to_all", replicate_q: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Bytes that a rank sends in each collective of a decode step, per layer.

    With `replicate_q` a rank projects the queries of all its CP peers instead of gathering them.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_choice("kvdp", kvdp, KVDP_EXCHANGES)
    check_choice("combine", combine, COMBINES)
    messages = messages_sent(sharding, shape, rank, kvdp=kvdp, combine=combine, replicate_q=replicate_q)
    sent = {name: sum(parts.values()) for name, parts in messages.items()}
    if combine == "all_reduce":
        out = len(sharding.group_heads(rank, shape.q_heads)) * _lse_row(sharding, shape, rank) * shape.head_dim
        sent["cp out"] = _all_reduced(out, sharding.cp)
    projected = shape.batch * shape.tokens * shape.hidden * shape.itemsize
    return {**sent, "projection": _all_reduced(projected, sharding.ranks)}


def messages_sent(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, *, kvdp: KvdpExchange = "all_to_all",
    combine: Combine, replicate_q: bool = False,
) -> dict[str, dict[int, int]]:  # fmt: skip
    """Bytes of each message between peers, by collective and target; an all-reduce is sent as a reduce-scatter is.

    KVDP peers exchange query heads of all sequences before attention, and results of all query heads after it. CP peers
    send the lse alone and then out, or both in one message.
    """
    kvdp_peers, cp_peers = (
        [peer for peer in peers(rank) if peer != rank] for peers in (sharding.kvdp_peers, sharding.cp_peers)
    )
    mine, lse_row = _row(sharding, shape, rank), _lse_row(sharding, shape, rank)
    projected = len((sharding.replicated_q_heads if replicate_q else sharding.q_heads)(rank, shape.q_heads))
    gathered = _cp_heads(sharding, shape, rank)
    if kvdp == "all_gather":
        all_rows = shape.batch * shape.tokens * shape.head_dim * shape.itemsize
        there = dict.fromkeys(kvdp_peers, projected * all_rows)
        back = dict.fromkeys(kvdp_peers, gathered * mine)
    else:
        there = {peer: projected * _row(sharding, shape, peer) for peer in kvdp_peers}
        back = {peer: len(sharding.q_heads(peer, shape.q_heads)) * mine for peer in kvdp_peers}
    result_row = lse_row * (shape.head_dim + 1) if combine == "all_to_all" else lse_row * shape.head_dim
    lse = 0 if combine == "all_to_all" else len(sharding.group_heads(rank, shape.q_heads)) * lse_row
    return {
        "kvdp in": there,
        "cp in": dict.fromkeys(cp_peers, 0 if replicate_q else gathered * mine),
        "cp lse": dict.fromkeys(cp_peers, lse),
        "cp out": {peer: _cp_heads(sharding, shape, peer) * result_row for peer in cp_peers},
        "kvdp out": back,
    }


def cache_bytes(sharding: DecodeSharding, shape: DecodeShape, rank: int, context: int, kv_bytes: int) -> int:
    """KV cache bytes of a rank, with `context` positions per sequence.

    `kv_bytes` is the bytes of K and V per token and kv head: of one layer, or of all layers.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_positive(context=context, kv_bytes=kv_bytes)
    heads, sequences = sharding.kv_heads(rank, shape.kv_heads), sharding.sequences(rank, shape.batch)
    return len(heads) * len(sequences) * sharding.position_shard(rank).length(context) * kv_bytes


def weight_copies(sharding: DecodeSharding, kv_heads: int, *, replicate_q: bool = False) -> Copies:
    """W_q and W_out are sharded over all ranks; W_kv is replicated on all ranks that share its kv heads."""
    shared = sharding.kvdp * sharding.cp * max(1, sharding.tp // kv_heads)
    return Copies(w_q=sharding.cp if replicate_q else 1, w_kv=shared, w_out=1)


def _row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * shape.head_dim * shape.itemsize


def _lse_row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of the lse of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * _STATE_ITEMSIZE


def _cp_heads(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    return len(sharding.cp_heads(rank, shape.q_heads))


def _all_reduced(nbytes: int, ranks: int) -> int:
    """Bytes per rank of an all-reduce: reduce-scatter and all-gather, everything but the own part."""
    return round(2 * (ranks - 1) / ranks * nbytes)


# Options ranked by time, options that fit into memory first, each with a reason.


RESERVED_MEMORY = 0.1
"""The fraction of device memory that is reserved for the runtime, fragmentation and library buffers."""

TIE = 0.005
"""Relative difference in time up to which two options are called a tie."""


def usable_memory(device_memory: float) -> float:
    """The bytes of a device that a plan may take."""
    return (1 - RESERVED_MEMORY) * device_memory


@dataclass(frozen=True)
class Memory:
    """Bytes per rank, the maximum over ranks."""

    weights: float
    cache: float  # KV cache
    working: float  # activations, messages, partial results

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.cache + self.working


@dataclass(frozen=True)
class Option:
    """One plan: how devices are divided, and what it costs."""

    name: str
    seconds: float
    memory: Memory
    sent: float  # bytes per rank, the maximum over ranks
    bottleneck: str
    parts: dict[str, float] = field(default_factory=dict)  # seconds by what they are spent on
    sharding: DecodeSharding | None = None  # of each replica, in plans for decode
    replicas: int = 1

    def fits(self, device_memory: float) -> bool:
        """Whether it fits into a device with this much memory."""
        return self.memory.total <= usable_memory(device_memory)


@dataclass(frozen=True)
class Ranking:
    """Options that fit, by time, then the other options; and advice where none fits."""

    options: tuple[Option, ...]
    device_memory: float  # bytes
    refused: dict[str, str]  # plans that are not supported, and why
    advice: str = ""

    @property
    def best(self) -> Option | None:
        """The fastest option that fits; None if none does."""
        return self.options[0] if self.options and self.options[0].fits(self.device_memory) else None

    def why(self, option: Option) -> str:
        """Why an option is the best, or why it is slower."""
        if not option.fits(self.device_memory):
            return f"does not fit in {readable_bytes(usable_memory(self.device_memory))}"
        best = self.best
        assert best is not None, "an option fits"
        if option == best:
            return "fastest that fits"
        ratio = option.seconds / best.seconds if best.seconds else 1.0
        if is_tie(option.seconds, best.seconds):
            return "tie"
        slower = f"{100 * (ratio - 1):.2g}% slower" if ratio < 1.995 else f"{ratio:.3g}x slower"
        return f"{slower}: {_main_difference(option, best)}"


def is_tie(seconds: float, best: float) -> bool:
    """Whether two times differ by less than the estimates can tell apart."""
    return seconds <= (1 + TIE) * best


def ranked(options: list[Option], device_memory: float, refused: dict[str, str]) -> Ranking:
    """The options in order of time, options that fit first."""
    order = sorted(options, key=lambda option: (not option.fits(device_memory), option.seconds, option.memory.total))
    return Ranking(tuple(order), device_memory, refused)


def _main_difference(option: Option, best: Option) -> str:
    """The part of the time that is longer than the best option's by most."""
    more = {name: seconds - best.parts.get(name, 0.0) for name, seconds in option.parts.items()}
    worst = max(more, key=lambda name: more[name], default="")
    if worst and more[worst] > 0:
        return f"+{readable_seconds(more[worst])} {worst}"
    return option.bottleneck
