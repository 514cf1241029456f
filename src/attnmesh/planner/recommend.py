"""Recommends a decode sharding, with its cost per rank and the alternatives.

TP    as large as divides the kv heads: beyond that, ranks would replicate parts of the KV cache
KVDP  as much of the rest as there are sequences for: they are independent, so only queries and results are exchanged
CP    what is left: positions are not independent, so results also have to be merged

This rule divides the KV cache as far as possible. Where a cluster and a context are given, the choice is the fastest of
the same shardings by estimate: a short KV cache may be read several times in less time than an exchange of queries
takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from attnmesh.plan.decode import DecodeShape, DecodeSharding
from attnmesh.planner.cost import Copies, Cost, bytes_sent, cache_bytes, cost, is_tie, weight_copies
from attnmesh.planner.decode import DecodeLayer, decode_program
from attnmesh.planner.hardware import Cluster
from attnmesh.utils.progress import reported
from attnmesh.utils.sizes import check_sizes, divisors
from attnmesh.utils.text import counted, readable_bytes, readable_seconds
from attnmesh.utils.validation import check_count, check_type


@dataclass(frozen=True)
class ShardingOption:
    """One sharding, and what it costs the busiest rank.

    Attributes:
        sharding: TP x KVDP x CP.
        shard: the part of the KV cache per rank, in words.
        kv_bytes: of the shard; None if the context is not known.
        copies: of the weights.
        x: the part of the input activations that a rank projects.
        sent: bytes per step and layer, by collective.
        reason: for and against it.
        seconds: of a layer's attention with its exchanges; None without a cluster.

    Examples:
        >>> option = am.recommend_sharding(batch=1, q_heads=64, kv_heads=8, ranks=64).choice
        >>> option.shard
        '1 of 8 kv heads, 1 of 1 sequences, 1/8 of the positions'
        >>> option.kv_bytes, option.seconds  # no context and no cluster were given
        (None, None)
    """

    sharding: DecodeSharding
    shard: str
    kv_bytes: int | None
    copies: Copies
    x: str
    sent: dict[str, int]
    reason: str
    seconds: float | None = None

    def row(self) -> dict[str, str]:
        """The option as a row of a table."""
        between = sum(nbytes for name, nbytes in self.sent.items() if name != "projection")
        timed = {} if self.seconds is None else {"time": readable_seconds(self.seconds)}
        return {
            "sharding": str(self.sharding),
            **timed,
            "per rank": self.shard,
            "KV cache": "?" if self.kv_bytes is None else readable_bytes(self.kv_bytes),
            "W_q": f"{self.copies.w_q}x",
            "W_kv": f"{self.copies.w_kv}x",
            "W_out": f"{self.copies.w_out}x",
            "X": self.x,
            "sent": readable_bytes(between),
            "output all-reduce": readable_bytes(self.sent["projection"]),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Recommendation:
    """The recommended sharding and the alternatives. `str()` prints them as a table.

    Examples:
        >>> result = am.recommend_sharding(batch=1, q_heads=64, kv_heads=8, ranks=64)
        >>> result.choice.sharding, len(result.alternatives)
        (DecodeSharding(tp=8, kvdp=1, cp=8, interleave=1), 4)
        >>> print(result.reason)
        TP8 gives every rank one kv head; batch=1 is less than the 8 ranks left, so CP8 divides positions
    """

    choice: ShardingOption
    alternatives: tuple[ShardingOption, ...]

    @property
    def reason(self) -> str:
        """Why this sharding was chosen."""
        return self.choice.reason

    def __str__(self) -> str:
        rows = [option.row() for option in (self.choice, *self.alternatives)]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([f"{self.choice.sharding} over {counted(self.choice.sharding.ranks, 'rank')}", *lines])


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

    `context` is the number of positions per sequence; without it, the size of the KV cache is not known. `hidden` is
    the hidden size of the model, q_heads x head_dim by default, and `itemsize` the bytes per activation. `kv_bytes` is
    the bytes of K and V per token and kv head, by default of one layer in the dtype of the activations; give the bytes
    of all layers and their number, `layers`, to count the KV cache of all of them.

    Without a `cluster` the choice follows the rule of this module. With a cluster and a context it is the fastest of
    the same shardings: `seconds` are the time of one layer's attention, its small kernels, its exchanges and the
    all-reduce of the projections, without reading weights, which takes the same time for all.

    Examples:
        >>> result = am.recommend_sharding(batch=2, q_heads=64, kv_heads=8, ranks=64, context=131072)
        >>> result.choice.sharding
        DecodeSharding(tp=8, kvdp=2, cp=4, interleave=1)
        >>> result.choice.kv_bytes  # per layer, on the rank that stores most
        16777216
    """
    check_sizes(q_heads=q_heads, head_dim=head_dim)
    check_sizes(
        ranks=ranks, layers=layers, batch=batch, context=1 if context is None else context, tokens=tokens,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
        hidden=1 if hidden is None else hidden,
    )  # fmt: skip
    check_count("itemsize", itemsize, least=1, most=64)
    if kv_bytes is not None:
        check_count("kv_bytes", kv_bytes, least=1, most=2**40)
    if cluster is not None:
        check_type("cluster", cluster, Cluster)
    if cluster is not None and context is None:
        raise ValueError("context must be given with a cluster, got context=None")
    hidden = q_heads * head_dim if hidden is None else hidden
    shape = DecodeShape(batch, tokens, q_heads, kv_heads, head_dim, hidden, itemsize)
    kv_bytes = 2 * head_dim * itemsize if kv_bytes is None else kv_bytes
    by_rule = _sharding_by_rule(shape, ranks)
    by_rule.check_heads(q_heads, kv_heads)
    shardings = [by_rule, *_others(by_rule, kv_heads)]
    if cluster is None or context is None:
        reasons = {each: _reasons(each, by_rule, shape) for each in shardings}
        seconds = dict.fromkeys(shardings, None)
    else:
        layer = DecodeLayer(shape, kv_bytes / layers, context)
        costs = {
            each: cost(decode_program(each, layer, cluster.intra_node), cluster)
            for each in reported(shardings, len(shardings))
        }
        shardings.sort(key=lambda each: costs[each].seconds)  # stable: the choice of the rule comes first among equals
        reasons = {each: _timed(each, costs, cluster) for each in shardings}
        seconds = {each: costs[each].seconds for each in shardings}
    choice, *others = (
        _option(each, shape, context, kv_bytes, [*reasons[each], *_warnings(each, shape, context)], seconds[each])
        for each in shardings
    )
    return Recommendation(choice, tuple(others))


def _sharding_by_rule(shape: DecodeShape, ranks: int) -> DecodeSharding:
    tp = gcd(shape.kv_heads, ranks)
    rest = ranks // tp
    kvdp = max(divisor for divisor in divisors(rest) if divisor <= shape.batch)
    return DecodeSharding(tp, kvdp, rest // kvdp)


def _others(chosen: DecodeSharding, kv_heads: int) -> list[DecodeSharding]:
    """All other divisions of the remaining ranks, and plain tensor parallelism where it fits."""
    rest = chosen.kvdp * chosen.cp
    others = [DecodeSharding(chosen.tp, kvdp, rest // kvdp) for kvdp in reversed(divisors(rest))]
    if chosen.ranks % kv_heads == 0 or kv_heads % chosen.ranks == 0:
        others.append(DecodeSharding(chosen.ranks))
    return [sharding for sharding in others if sharding != chosen]


def _option(
    sharding: DecodeSharding, shape: DecodeShape, context: int | None, kv_bytes: int, reasons: Sequence[str],
    seconds: float | None,
) -> ShardingOption:  # fmt: skip
    ranks = range(sharding.ranks)
    heads = max(len(sharding.kv_heads(rank, shape.kv_heads)) for rank in ranks)
    sequences = max(len(sharding.sequences(rank, shape.batch)) for rank in ranks)
    positions = "all positions" if sharding.cp == 1 else f"1/{sharding.cp} of the positions"
    kept = None if context is None else max(cache_bytes(sharding, shape, rank, context, kv_bytes) for rank in ranks)
    return ShardingOption(
        sharding=sharding,
        shard=f"{heads} of {shape.kv_heads} kv heads, {sequences} of {shape.batch} sequences, {positions}",
        kv_bytes=kept,
        copies=weight_copies(sharding, shape.kv_heads),
        x="[B, S, H]",  # every rank projects some heads of all sequences
        sent=max((bytes_sent(sharding, shape, rank) for rank in ranks), key=lambda sent: sum(sent.values())),
        reason="; ".join(reasons),
        seconds=seconds,
    )


def _timed(sharding: DecodeSharding, costs: dict[DecodeSharding, Cost], cluster: Cluster) -> list[str]:
    """The time of the fastest sharding; of any other sharding, its main difference from the fastest."""
    best, mine = min(costs.values(), key=lambda option: option.seconds), costs[sharding]
    exchanges, of_best = (option.seconds - option.computed for option in (mine, best))
    if mine is best:
        spent = f"{readable_seconds(mine.computed)} compute and {readable_seconds(exchanges)} communication"
        return [f"fastest of {len(costs)} on {cluster.device.name} with {cluster.intra_node.name}: {spent}"]
    if is_tie(mine.seconds, best.seconds):
        return ["tie"]
    more = {"compute": mine.computed - best.computed, "communication": exchanges - of_best}
    where = max(more, key=lambda part: more[part])
    return [f"{mine.seconds / best.seconds:.2f}x slower: {readable_seconds(more[where])} more {where}"]


def _reasons(sharding: DecodeSharding, chosen: DecodeSharding, shape: DecodeShape) -> list[str]:
    return _advantages(sharding, shape) if sharding == chosen else _drawbacks(sharding, chosen, shape)


def _warnings(sharding: DecodeSharding, shape: DecodeShape, context: int | None) -> list[str]:
    """Ranks that have less work than others."""
    kvdp, cp, warnings = sharding.kvdp, sharding.cp, list[str]()
    if kvdp > shape.batch:
        warnings.append(f"{kvdp - shape.batch} of {kvdp} KVDP ranks hold no sequence")
    elif shape.batch % kvdp:
        fewest = shape.batch // kvdp
        warnings.append(f"KVDP{kvdp} gives some ranks {fewest} of {shape.batch} sequences and others {fewest + 1}")
    if context is not None and context < cp:
        warnings.append(f"context={context} is too short for CP{cp}: {cp - context} of {cp} CP ranks hold no position")
    return warnings


def _advantages(sharding: DecodeSharding, shape: DecodeShape) -> list[str]:
    tp, kvdp, cp = sharding.tp, sharding.kvdp, sharding.cp
    if tp == shape.kv_heads:
        reasons = [f"TP{tp} gives every rank one kv head"]
    else:
        reasons = [
            f"TP{tp} is the largest that divides {shape.kv_heads} kv heads and {counted(sharding.ranks, 'rank')}"
        ]
    if kvdp * cp == 1:
        reasons.append("no ranks are left for KVDP or CP")
    if kvdp > 1:
        reasons.append(f"batch={shape.batch} has sequences for KVDP{kvdp}")
    if cp > 1:
        reasons.append(f"batch={shape.batch} is less than the {kvdp * cp} ranks left, so CP{cp} divides positions")
    return reasons


def _drawbacks(sharding: DecodeSharding, chosen: DecodeSharding, shape: DecodeShape) -> list[str]:
    if sharding.tp > shape.kv_heads:
        return [f"every kv head is replicated {sharding.tp // shape.kv_heads} times"]
    if sharding.cp > chosen.cp:
        fewer = f"instead of {chosen.cp}" if chosen.cp > 1 else "instead of none"
        return [f"results are merged over {sharding.cp} ranks {fewer}"]
    return []


@dataclass(frozen=True)
class ShardingComparison:
    """How often weights, activations and the KV cache are replicated, as text."""

    name: str
    w_kv: str
    w_q: str
    w_out: str
    x: str
    kv_cache: str


def compare_shardings(q_heads: int, kv_heads: int, ranks: int) -> list[ShardingComparison]:
    """Plain tensor parallelism (where it fits), KVDP, CP and DP attention over the same ranks."""
    check_sizes(q_heads=q_heads, kv_heads=kv_heads, ranks=ranks)
    tp = gcd(kv_heads, ranks)
    rest = ranks // tp
    DecodeSharding(tp, kvdp=rest).check_heads(q_heads, kv_heads)
    rows = []
    if ranks % kv_heads == 0 or kv_heads % ranks == 0:
        rows.append(_row(f"Vanilla TP{ranks}", DecodeSharding(ranks), kv_heads))
    if rest > 1:
        rows.append(_row(f"KVDP (TP{ranks} KVDP{rest})", DecodeSharding(tp, kvdp=rest), kv_heads))
        rows.append(_row(f"CP (TP{ranks} CP{rest})", DecodeSharding(tp, cp=rest), kv_heads))
        copies = _copies(rest, "DP")
        part = f"B/{rest}"
        rows.append(
            ShardingComparison(
                f"DP Attention (TP{tp} DP{rest})", copies, copies, copies, f"[{part}, S, H]", f"{part} batches"
            )
        )
    return rows


def _row(name: str, sharding: DecodeSharding, kv_heads: int) -> ShardingComparison:
    copies = weight_copies(sharding, kv_heads)
    batches = f"B/{sharding.kvdp} batches" if sharding.kvdp > 1 else "B batches"
    positions = f", s_prior/{sharding.cp}" if sharding.cp > 1 else ""
    return ShardingComparison(
        name, _copies(copies.w_kv, "GQA"), _copies(copies.w_q), _copies(copies.w_out), "[B, S, H]", batches + positions
    )


def _copies(copies: int, cause: str = "") -> str:
    return f"{copies}x ({cause})" if copies > 1 and cause else f"{copies}x"
