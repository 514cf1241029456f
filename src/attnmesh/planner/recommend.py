"""Which sharding to generate tokens with, what it costs a rank, and what else there is.

TP    as many as divide the kv heads: beyond that, every further rank would keep a copy of somebody's cache
KVDP  as much of the rest as there are sequences for: they are independent, so only queries and results travel
CP    what is left: positions are not independent, so results also have to be merged

That is the rule, which divides the cache as far as it goes. Where the machines and the context are known, the choice is
the fastest of the same ways by the cost of their programs: short contexts may be read several times in less time than
it takes to trade queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from attnmesh.core.validation import check_positive
from attnmesh.plan.decode import Copies, DecodeShape, DecodeSharding, bytes_sent, cache_bytes, weight_copies
from attnmesh.planner.cost import Cost, cost
from attnmesh.planner.decode import DecodeLayer, decode_program
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.units import readable_bytes, readable_seconds


@dataclass(frozen=True)
class ShardingOption:
    """One sharding, and what it asks of the rank that it asks most of."""

    sharding: DecodeSharding
    holds: str  # which part of the KV cache
    kv_bytes: int | None  # of it, if the context is known
    copies: Copies  # of the weights, over all ranks
    x: str  # the part of the input activation that a rank projects
    sent: dict[str, int]  # bytes a step and layer, by collective
    reason: str
    seconds: float | None = None  # of a layer's attention with its exchanges, if the machines are known

    def row(self) -> dict[str, str]:
        """The option in words, by what they are about."""
        between = sum(nbytes for name, nbytes in self.sent.items() if name != "projection")
        timed = {} if self.seconds is None else {"time": readable_seconds(self.seconds)}
        return {
            "sharding": str(self.sharding),
            **timed,
            "a rank holds": self.holds,
            "KV cache": "?" if self.kv_bytes is None else readable_bytes(self.kv_bytes),
            "W_q": f"{self.copies.w_q}x",
            "W_kv": f"{self.copies.w_kv}x",
            "W_out": f"{self.copies.w_out}x",
            "X": self.x,
            "sends": readable_bytes(between),
            "and to project": readable_bytes(self.sent["projection"]),
            "because": self.reason,
        }


@dataclass(frozen=True)
class Recommendation:
    """The sharding to use, and the others. `str()` is for people; the fields are for programs."""

    choice: ShardingOption
    alternatives: tuple[ShardingOption, ...]

    @property
    def reason(self) -> str:
        """Why this choice."""
        return self.choice.reason

    def __str__(self) -> str:
        rows = [option.row() for option in (self.choice, *self.alternatives)]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([f"{self.choice.sharding} over {self.choice.sharding.ranks} ranks", *lines])


def recommend_sharding(
    batch: int,
    q_heads: int,
    kv_heads: int,
    ranks: int,
    context: int | None = None,
    *,
    head_dim: int = 128,
    hidden: int | None = None,
    tokens: int = 1,
    itemsize: int = 2,
    kv_bytes: int | None = None,
    layers: int = 1,
    cluster: Cluster | None = None,
) -> Recommendation:
    """The sharding for `batch` sequences over `ranks` ranks, and the alternatives.

    `context` is how many positions a sequence may have; without it, the bytes of a KV cache are not known. `hidden` is
    the model's width, q_heads x head_dim by default, and `itemsize` the bytes of an activation. `kv_bytes` is what K
    and V of one token and kv head take, by default in one layer and as wide as activations: give the bytes of all
    layers, and the KV cache is counted for all of them; `layers` says how many they are.

    Without a `cluster` the choice follows the rule of this module. With a cluster
    and a context it is the fastest of the same ways: `seconds` are those of one layer's attention, its small kernels,
    its exchanges and the sum of the projections, without reading weights, which all ways do alike.
    """
    check_positive(ranks=ranks, layers=layers)
    if cluster is not None and context is None:
        raise ValueError("cluster needs a context to count times for, got context=None")
    shape = DecodeShape(
        batch, tokens, q_heads, kv_heads, head_dim, q_heads * head_dim if hidden is None else hidden, itemsize
    )
    kv_bytes = 2 * head_dim * itemsize if kv_bytes is None else kv_bytes
    by_rule = _chosen(shape, ranks)
    by_rule.check_heads(q_heads, kv_heads)
    ways = [by_rule, *_others(by_rule, kv_heads)]
    if cluster is None or context is None:
        options = [
            _option(way, shape, context, kv_bytes, _reasons(way, by_rule, shape) + _warnings(way, shape, context))
            for way in ways
        ]
        return Recommendation(options[0], tuple(options[1:]))
    layer = DecodeLayer(shape, kv_bytes / layers, context)
    costs = {way: cost(decode_program(way, layer, cluster.intra_node), cluster) for way in ways}
    ways.sort(key=lambda way: costs[way].seconds)  # of those that tie, the rule's comes first
    options = [
        replace(
            _option(way, shape, context, kv_bytes, _timed(way, costs, cluster) + _warnings(way, shape, context)),
            seconds=costs[way].seconds,
        )
        for way in ways
    ]
    return Recommendation(options[0], tuple(options[1:]))


def tensor_parallel_size(kv_heads: int, ranks: int) -> int:
    """The most TP ranks that divide the kv heads, so that none is held twice, and leave no rank over."""
    return gcd(kv_heads, ranks)


def _chosen(shape: DecodeShape, ranks: int) -> DecodeSharding:
    tp = tensor_parallel_size(shape.kv_heads, ranks)
    rest = ranks // tp
    kvdp = max(divisor for divisor in _divisors(rest) if divisor <= shape.batch)
    return DecodeSharding(tp, kvdp, rest // kvdp)


def _others(chosen: DecodeSharding, kv_heads: int) -> list[DecodeSharding]:
    """The rest divided in all other ways, and plain tensor parallelism where it fits."""
    rest = chosen.kvdp * chosen.cp
    others = [DecodeSharding(chosen.tp, kvdp, rest // kvdp) for kvdp in reversed(_divisors(rest))]
    if chosen.ranks % kv_heads == 0 or kv_heads % chosen.ranks == 0:
        others.append(DecodeSharding(chosen.ranks))
    return [sharding for sharding in others if sharding != chosen]


def _option(
    sharding: DecodeSharding, shape: DecodeShape, context: int | None, kv_bytes: int, reasons: Sequence[str]
) -> ShardingOption:
    ranks = range(sharding.ranks)
    heads = max(len(sharding.kv_heads(rank, shape.kv_heads)) for rank in ranks)
    sequences = max(len(sharding.sequences(rank, shape.batch)) for rank in ranks)
    positions = "all positions" if sharding.cp == 1 else f"1/{sharding.cp} of the positions"
    kept = None if context is None else max(cache_bytes(sharding, shape, rank, context, kv_bytes) for rank in ranks)
    return ShardingOption(
        sharding=sharding,
        holds=f"{heads} of {shape.kv_heads} kv heads, {sequences} of {shape.batch} sequences, {positions}",
        kv_bytes=kept,
        copies=weight_copies(sharding, shape.kv_heads),
        x="[B, S, H]",  # all of it: every rank projects some heads of all sequences
        sent=max((bytes_sent(sharding, shape, rank) for rank in ranks), key=lambda sent: sum(sent.values())),
        reason="; ".join(reasons),
    )


def _timed(sharding: DecodeSharding, costs: dict[DecodeSharding, Cost], cluster: Cluster) -> list[str]:
    """What was counted, of the fastest; what it loses by, of the others."""
    best, mine = min(costs.values(), key=lambda found: found.seconds), costs[sharding]
    trading, of_best = (found.seconds - found.computed for found in (mine, best))
    if mine is best:
        spent = f"{readable_seconds(mine.computed)} in kernels and {readable_seconds(trading)} in exchanges"
        return [f"the fastest of {len(costs)} on {cluster.device.name} with {cluster.intra_node.name}: {spent}"]
    more = {"in kernels": mine.computed - best.computed, "in exchanges": trading - of_best}
    where = max(more, key=lambda part: more[part])
    return [f"{mine.seconds / best.seconds:.2f} times as slow: {readable_seconds(more[where])} more {where}"]


def _reasons(sharding: DecodeSharding, chosen: DecodeSharding, shape: DecodeShape) -> list[str]:
    return _why(sharding, shape) if sharding == chosen else _why_not(sharding, chosen, shape)


def _warnings(sharding: DecodeSharding, shape: DecodeShape, context: int | None) -> list[str]:
    """Ranks that have less to do than others."""
    kvdp, cp, said = sharding.kvdp, sharding.cp, []
    if kvdp > shape.batch:
        said.append(f"{kvdp - shape.batch} of {kvdp} KVDP ranks hold no sequence")
    elif shape.batch % kvdp:
        fewest = shape.batch // kvdp
        said.append(f"{shape.batch} sequences over KVDP{kvdp} are {fewest} on some ranks and {fewest + 1} on others")
    if context is not None and context < cp:
        said.append(f"a context of {context} is too short for CP{cp}: {cp - context} of {cp} CP ranks hold no position")
    return said


def _why(sharding: DecodeSharding, shape: DecodeShape) -> list[str]:
    tp, kvdp, cp = sharding.tp, sharding.kvdp, sharding.cp
    if tp == shape.kv_heads:
        said = [f"TP{tp} gives every rank one kv head"]
    else:
        said = [f"TP{tp} is the most that divides both {shape.kv_heads} kv heads and {sharding.ranks} ranks"]
    if kvdp * cp == 1:
        said.append("no rank is left to divide more")
    if kvdp > 1:
        said.append(f"a batch of {shape.batch} has sequences for KVDP{kvdp}")
    if cp > 1:
        said.append(f"a batch of {shape.batch} is less than the {kvdp * cp} ranks left: CP{cp} divides positions")
    return said


def _why_not(sharding: DecodeSharding, chosen: DecodeSharding, shape: DecodeShape) -> list[str]:
    if sharding.tp > shape.kv_heads:
        return [f"every kv head is held {sharding.tp // shape.kv_heads} times"]
    if sharding.cp > chosen.cp:
        fewer = f"where {chosen.cp} would do" if chosen.cp > 1 else "where none need be"
        return [f"results are merged over {sharding.cp} ranks {fewer}"]
    return []


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class Compared:
    """One way, in words."""

    name: str
    w_kv: str
    w_q: str
    w_out: str
    x: str
    kv_cache: str


def compare_shardings(q_heads: int, kv_heads: int, ranks: int) -> list[Compared]:
    """Plain tensor parallelism (where it fits), KVDP, CP and DP attention over the same ranks."""
    check_positive(q_heads=q_heads, kv_heads=kv_heads, ranks=ranks)
    tp = tensor_parallel_size(kv_heads, ranks)
    rest = ranks // tp
    DecodeSharding(tp, kvdp=rest).check_heads(q_heads, kv_heads)
    rows = []
    if ranks % kv_heads == 0 or kv_heads % ranks == 0:
        rows.append(_row(f"Vanilla TP{ranks}", DecodeSharding(ranks), kv_heads))
    if rest > 1:
        rows.append(_row(f"KVDP (TP{ranks} KVDP{rest})", DecodeSharding(tp, kvdp=rest), kv_heads))
        rows.append(_row(f"CP (TP{ranks} CP{rest})", DecodeSharding(tp, cp=rest), kv_heads))
        copies = _times(rest, "DP")
        part = f"B/{rest}"
        rows.append(
            Compared(f"DP Attention (TP{tp} DP{rest})", copies, copies, copies, f"[{part}, S, H]", f"{part} batches")
        )
    return rows


def _row(name: str, sharding: DecodeSharding, kv_heads: int) -> Compared:
    copies = weight_copies(sharding, kv_heads)
    batches = f"B/{sharding.kvdp} batches" if sharding.kvdp > 1 else "B batches"
    positions = f", s_prior/{sharding.cp}" if sharding.cp > 1 else ""
    return Compared(
        name, _times(copies.w_kv, "GQA"), _times(copies.w_q), _times(copies.w_out), "[B, S, H]", batches + positions
    )


def _times(copies: int, cause: str = "") -> str:
    return f"{copies}x ({cause})" if copies > 1 and cause else f"{copies}x"
