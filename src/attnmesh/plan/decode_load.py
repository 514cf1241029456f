"""What a rank sends in a step of token generation, and what it keeps: bytes and copies, without starting a process.

Uneven heads and sequences make ranks differ, so every figure is one rank's. Bytes sent are those of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from attnmesh.core.validation import check_positive
from attnmesh.plan.sharding import DecodeSharding

Trade = Literal["all_to_all", "all_gather"]
"""How KVDP ranks trade query heads for sequences and back: each its part, or all to all and slice."""

Combine = Literal["all_to_all", "reduce_scatter", "all_reduce"]
"""How CP ranks merge results: `(out, lse)` in one message, or the lse first and then a sum."""

TRADES: tuple[Trade, ...] = get_args(Trade)
COMBINES: tuple[Combine, ...] = get_args(Combine)

_STATE_ITEMSIZE = 4  # (out, lse) travel in float32 until they are merged


@dataclass(frozen=True)
class DecodeShape:
    """The attention of one layer in a step of `tokens` new tokens for each of `batch` sequences."""

    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of what the output projection returns
    itemsize: int = 2  # bytes an element of the activations

    def __post_init__(self) -> None:
        check_positive(**vars(self))


class Copies(NamedTuple):
    """On how many ranks every part of a weight is held."""

    w_q: int
    w_kv: int
    w_out: int


def bytes_sent(
    sharding: DecodeSharding,
    shape: DecodeShape,
    rank: int,
    *,
    trade: Trade = "all_to_all",
    combine: Combine = "all_to_all",
    replicate_q: bool = False,
) -> dict[str, int]:
    """Bytes that a rank sends in each collective of a step.

    With `replicate_q` a rank projects the queries of all its CP peers: they need not be gathered.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    _check_one_of("trade", trade, TRADES)
    _check_one_of("combine", combine, COMBINES)
    traded_in, traded_out = _traded(sharding, shape, rank, trade, replicate_q)
    lse, out = _combined(sharding, shape, rank, combine)
    gathered = 0 if replicate_q else (sharding.cp - 1) * _cp_heads(sharding, shape, rank) * _row(sharding, shape, rank)
    projected = shape.batch * shape.tokens * shape.hidden * shape.itemsize
    return {
        "kvdp in": traded_in,
        "cp in": gathered,
        "cp lse": lse,
        "cp out": out,
        "kvdp out": traded_out,
        "projection": _all_reduced(projected, sharding.ranks),
    }


def messages_sent(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, *, combine: Literal["all_to_all", "reduce_scatter"]
) -> dict[str, dict[int, int]]:
    """Bytes of each message between peers, by collective and by whom it goes to, where KVDP ranks trade all-to-all.

    They add up to `bytes_sent`. The projection is left out: an all-reduce goes to nobody in particular.
    """
    kvdp, cp = ([peer for peer in peers(rank) if peer != rank] for peers in (sharding.kvdp_peers, sharding.cp_peers))
    mine, lse_row = _row(sharding, shape, rank), _lse_row(sharding, shape, rank)
    projected, gathered = len(sharding.q_heads(rank, shape.q_heads)), _cp_heads(sharding, shape, rank)
    result_row = lse_row * (shape.head_dim + 1) if combine == "all_to_all" else lse_row * shape.head_dim
    lse = 0 if combine == "all_to_all" else len(sharding.group_heads(rank, shape.q_heads)) * lse_row
    return {
        "kvdp in": {peer: projected * _row(sharding, shape, peer) for peer in kvdp},
        "cp in": dict.fromkeys(cp, gathered * mine),
        "cp lse": dict.fromkeys(cp, lse),
        "cp out": {peer: _cp_heads(sharding, shape, peer) * result_row for peer in cp},
        "kvdp out": {peer: len(sharding.q_heads(peer, shape.q_heads)) * mine for peer in kvdp},
    }


def cache_bytes(sharding: DecodeSharding, shape: DecodeShape, rank: int, context: int, kv_bytes: int) -> int:
    """Bytes of keys and values that a rank keeps of `context` positions a sequence.

    `kv_bytes` is what K and V of one token and kv head take: of one layer, or of all of them together.
    """
    sharding.check_heads(shape.q_heads, shape.kv_heads)
    check_positive(context=context, kv_bytes=kv_bytes)
    heads, sequences = sharding.kv_heads(rank, shape.kv_heads), sharding.sequences(rank, shape.batch)
    return len(heads) * len(sequences) * sharding.position_shard(rank).length(context) * kv_bytes


def weight_copies(sharding: DecodeSharding, kv_heads: int, *, replicate_q: bool = False) -> Copies:
    """W_q and W_out are divided over all ranks; W_kv lies with the kv heads, on every rank that shares them."""
    shared = sharding.kvdp * sharding.cp * max(1, sharding.tp // kv_heads)
    return Copies(w_q=sharding.cp if replicate_q else 1, w_kv=shared, w_out=1)


def _traded(
    sharding: DecodeSharding, shape: DecodeShape, rank: int, trade: Trade, replicate_q: bool
) -> tuple[int, int]:
    """Between KVDP peers: query heads of all sequences on the way in, results of all query heads on the way out."""
    peers, others = sharding.kvdp_peers(rank), sharding.kvdp - 1
    projected = sharding.replicated_q_heads if replicate_q else sharding.q_heads
    heads = len(projected(rank, shape.q_heads))
    if trade == "all_gather":
        all_rows = shape.batch * shape.tokens * shape.head_dim * shape.itemsize
        return others * heads * all_rows, others * _cp_heads(sharding, shape, rank) * _row(sharding, shape, rank)
    there = sum(heads * _row(sharding, shape, peer) for peer in peers if peer != rank)
    back = sum(len(sharding.q_heads(peer, shape.q_heads)) for peer in peers if peer != rank)
    return there, back * _row(sharding, shape, rank)


def _combined(sharding: DecodeSharding, shape: DecodeShape, rank: int, combine: Combine) -> tuple[int, int]:
    """Between CP peers: the lse on its own, and out (with the lse, where one message holds both)."""
    lse_row = _lse_row(sharding, shape, rank)
    out_row = lse_row * shape.head_dim
    heads = len(sharding.group_heads(rank, shape.q_heads))
    theirs = heads - _cp_heads(sharding, shape, rank)
    if combine == "all_to_all":
        return 0, theirs * (out_row + lse_row)
    lse = (sharding.cp - 1) * heads * lse_row
    return lse, theirs * out_row if combine == "reduce_scatter" else _all_reduced(heads * out_row, sharding.cp)


def _row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * shape.head_dim * shape.itemsize


def _lse_row(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    """Bytes of the lse of one query head of all sequences that a rank holds."""
    return len(sharding.sequences(rank, shape.batch)) * shape.tokens * _STATE_ITEMSIZE


def _cp_heads(sharding: DecodeSharding, shape: DecodeShape, rank: int) -> int:
    return len(sharding.cp_heads(rank, shape.q_heads))


def _all_reduced(nbytes: int, ranks: int) -> int:
    """An all-reduce scatters sums and gathers them: everything but the own part, twice."""
    return round(2 * (ranks - 1) / ranks * nbytes)


def _check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
